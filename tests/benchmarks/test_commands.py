"""Every command runs all cases, keeps its records, and refuses unequal results."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = [pytest.mark.peers, pytest.mark.slow]

_harness = importlib.import_module("benchmarks._harness")
backends = importlib.import_module("benchmarks.backends")
loader = importlib.import_module("benchmarks.loader")
loader_cases = importlib.import_module("benchmarks.loader_cases")
loader_epochs = importlib.import_module("benchmarks.loader_epochs")
loader_overlap = importlib.import_module("benchmarks.loader_overlap")
parallel_cases = importlib.import_module("benchmarks.parallel_cases")
sampler_ways = importlib.import_module("benchmarks.sampler_ways")
QUICK = importlib.import_module("benchmarks.case").QUICK


def command(name: str) -> Any:
    return importlib.import_module(f"benchmarks.{name}")


#: Options of a quick run by command, the end of its file's name, and its titles.
RUNS: dict[str, tuple[str, str, set[str]]] = {
    "__main__": (
        "--threads 1 --no-charts",
        "cpu",
        {case.title for case in command("cases").cases(True)},
    ),
    "loader": (
        "--workers 1",
        "loader-cpu",
        {case.title for case in loader.cases(True, [1])},
    ),
    "parallel_apply": (
        "",
        "parallel-cpu",
        {case.title for case in parallel_cases.cases(quick=True)},
    ),
    "sampler": (
        "",
        "sampler-cpu",
        {"COCO", "demo", "sentences", "audio", "audio stream"},
    ),
}


@pytest.mark.parametrize("name", RUNS)
def test_a_command_measures_all_cases_and_makes_its_page_of_the_records(
    name: str, tmp_path: Path
) -> None:
    if name == "sampler":
        pytest.importorskip("sklearn", reason="the training needs scikit-learn")
    options, end, titles = RUNS[name]
    threads, out = torch.get_num_threads(), ["--out", str(tmp_path)]
    command(name).main(["--quick", *options.split(), *out])
    assert torch.get_num_threads() == threads
    (path,) = (tmp_path / "results").glob(f"*-{end}.json")
    records = json.loads(path.read_text())
    page = path.with_suffix(".md")
    text = page.read_text()
    for run in records["runs"]:
        assert {case["title"] for case in run["cases"]} == titles
        for case in run["cases"]:
            assert case["title"] in text
            installed = [row for row in case["rows"] if row["installed"]]
            kinds = {row["kind"] for row in installed}
            assert "ours" in kinds and ("peer" in kinds or name == "sampler")
            assert all(len(row["seconds"]) == 2 for row in installed)
    page.unlink()
    arguments = ["--from", str(path), *out]
    command(name).main([*arguments, *(["--no-charts"] if name == "__main__" else [])])
    assert page.read_text() == text
    if name == "__main__":
        assert len(records["runs"]) == 2, "a run for each allocator"
        assert {each["x"] for each in records["growth"]} == {
            *("samples", "leaves", "threads")
        }
        charts = importlib.import_module("benchmarks.charts")  # needs matplotlib
        drawn = [charts.draw(records, tmp_path / folder) for folder in "ab"]
        assert drawn[0] == drawn[1] and len(drawn[0]) == 4
        for svg in drawn[0]:
            assert (tmp_path / "a" / svg).read_bytes().count(b"<svg") == 1
    elif name == "sampler":
        assert (tmp_path / "charts" / "padding_by_window.svg").exists()


# -------------------------------------------------------------- results before times
def spoil(samples: list[torch.Tensor]) -> torch.Tensor:
    batch = torch.stack(samples)
    batch[-1, -1, -1, -1] += 1
    return batch


def unequal_batches(monkeypatch: pytest.MonkeyPatch, **options: Any) -> None:
    images = [torch.full((3, 40, 40), i, dtype=torch.uint8) for i in range(5)]
    items = loader_epochs.Items(images, 6)

    def contenders(clock: Any) -> list[Any]:
        run = loader_epochs.per_batch(loader_epochs.touch_pages)
        made = [
            lambda more=more: torch.utils.data.DataLoader(
                items, 2, num_workers=1, persistent_workers=True, **more
            )
            for more in ({}, options)
        ]
        return [
            loader_epochs.peer(
                kind, loader_epochs.Epochs(make, run, clock), kind.split()[0]
            )
            for kind, make in zip(("ours", "peer"), made, strict=True)
        ]

    loader.measure_case(
        loader_cases.Comparison("case", "images", "note", contenders), QUICK
    )


def wrong_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel_cases, "parallel_apply", lambda fn, items, *_: items)
    command("parallel_apply").measure(QUICK, "numpy: sort", quick=True)


def missing_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler_ways, "length_grouped", lambda lengths: [[0]])
    command("sampler").measure(QUICK, ["cases"], quick=True)


@pytest.mark.parametrize(
    "measure",
    [
        lambda patch: unequal_batches(patch, collate_fn=spoil),
        lambda patch: unequal_batches(patch, sampler=range(4)),
        wrong_calls,
        missing_samples,
    ],
    ids=["other values", "fewer batches", "wrong calls", "missing samples"],
)
def test_unequal_results_are_never_timed(
    measure: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    try:
        with pytest.raises(_harness.Disagreement, match="must give equal results"):
            measure(monkeypatch)
    finally:
        backends.use_backend(backends.AS_LOADED)


# ------------------------------------------------------------------------- figures
def record(**medians: float) -> dict[str, Any]:
    """Return a record in which each contender takes this long in every round."""
    rows = []
    for name, seconds in medians.items():
        times = [seconds] * 3
        over = {"ours": _harness.ratio(times, [medians["ours"]] * 3)}
        rows.append(
            {"name": name, "kind": "ours" if name == "ours" else "peer"}
            | {"installed": True, "seconds": times, **_harness.summarise(times)}
            | {"over": {} if name == "ours" else over}
        )
    case = {"title": "case", "note": "n", "rounds": 3, "nbytes": 8, "rows": rows}
    goals = [loader_cases.Goal("peer", 4)._asdict()]
    return {**case, "kind": "images", "batches": 4, "goals": goals}


def test_times_above_the_floor_are_compared_with_ours() -> None:
    case = record(ours=2.0, peer=31.0, floor=1.0)
    loader.add_net(case, {"ours": "floor", "peer": "floor", "absent": "floor"})
    rows = {row["name"]: row for row in case["rows"]}
    assert rows["ours"]["net"]["median"] == 1
    assert rows["peer"]["net"]["over"]["ours"]["of_medians"] == 30
    assert "net" not in rows["floor"]


def test_hidden_is_the_share_of_loading_beside_the_step() -> None:
    names = {loader_overlap.COMPUTE: 1.0, loader_overlap.FETCH: 0.8}
    case = record(ours=1.04, plain=1.8, **names)
    for row in case["rows"]:
        row["kind"] = "limit" if row["name"] in names else row["kind"]
    loader_overlap.add_hidden(case)
    hidden = {r["name"]: r["hidden"] for r in case["rows"] if "hidden" in r}
    assert hidden["ours"]["of_medians"] == pytest.approx(0.95)
    assert hidden["plain"]["q1"] == pytest.approx(0)


@pytest.mark.parametrize(
    ("peer", "expected"),
    [
        (8.0, []),
        (6.0, ["case: peer must take 4 times as long as ours, and takes 3 (3 - 3)"]),
    ],
)
def test_a_missed_goal_is_a_complaint(peer: float, expected: list[str]) -> None:
    machine = {"cpu": "fake", "threads": "1", "malloc": "default"}
    case = record(ours=2.0, peer=peer)
    results = {"date": "d", "runs": [{"machine": machine, "cases": [case]}]}
    report = importlib.import_module("benchmarks.loader_report")
    assert report.complaints(results) == expected


def test_padding_and_balance_are_those_of_the_batches() -> None:
    np = pytest.importorskip("numpy")
    sizes = np.array([[2, 3], [4, 1], [1, 1], [5, 5]] * 4)
    batches = [[i] for i in range(8)] + [[8, 9], [10], [11], [12], [13], [14], [15]]
    found = sampler_ways.figures(sizes, batches)
    costs = [6, 4, 1, 25] * 2 + [24, 1, 25, 6, 4, 1, 25]
    assert found["padding"] == pytest.approx(1 - 4 * 36 / sum(costs))
    assert found["balance_mean"] == pytest.approx(25 / 9)
    assert (found["num_batches"], found["largest"]) == (15, 25)
