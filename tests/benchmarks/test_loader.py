"""The benchmark of loaders: it rejects unequal batches, and reports its figures."""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils.data

from pyparallel import DataLoader

pytestmark = [pytest.mark.peers, pytest.mark.slow]

_harness = importlib.import_module("benchmarks._harness")
backends = importlib.import_module("benchmarks.backends")
loader = importlib.import_module("benchmarks.loader")
loader_cases = importlib.import_module("benchmarks.loader_cases")
loader_epochs = importlib.import_module("benchmarks.loader_epochs")
loader_fields = importlib.import_module("benchmarks.loader_fields")
loader_overlap = importlib.import_module("benchmarks.loader_overlap")
loader_report = importlib.import_module("benchmarks.loader_report")
report = importlib.import_module("benchmarks.report")
QUICK = importlib.import_module("benchmarks.case").QUICK

Epochs, Items, peer = loader_epochs.Epochs, loader_epochs.Items, loader_epochs.peer
TORCH = torch.utils.data.DataLoader


@pytest.fixture(autouse=True)
def backend_as_loaded() -> Iterator[None]:
    """Contenders leave the backend behind that they ran on."""
    yield
    backends.use_backend(backends.AS_LOADED)


def make(kind: Any, collate_fn: Any = None, **options: Any) -> Any:
    """Return a loader of three batches of two images."""
    items = Items([torch.full((3, 40, 40), i, dtype=torch.uint8) for i in range(5)], 6)
    options = {"num_workers": 1, "persistent_workers": True, **options}
    return kind(items, 2, collate_fn=collate_fn, **options)


def spoil(samples: list[torch.Tensor]) -> torch.Tensor:
    batch = torch.stack(samples)
    batch[-1, -1, -1, -1] += 1
    return batch


def comparison(*loaders: Callable[[], Any]) -> Any:
    """Return a comparison of loaders; the first is ours."""

    def contenders(clock: Any) -> list[Any]:
        run = loader_epochs.per_batch(loader_epochs.touch_pages)
        return [
            peer(f"{i}", Epochs(each, run, clock), "peer" if i else "ours")
            for i, each in enumerate(loaders)
        ]

    return loader_cases.Comparison("case", "images", "note", contenders)


def test_a_peer_whose_batches_differ_is_never_timed() -> None:
    case = comparison(partial(make, DataLoader), partial(make, TORCH, spoil))
    expected = r"case: 0 and 1 must give equal results, but differ at \[0\]: values"
    with pytest.raises(_harness.Disagreement, match=expected):
        loader.measure_case(case, QUICK)


def test_a_peer_that_leaves_batches_out_is_never_timed() -> None:
    short = partial(make, TORCH, drop_last=False, sampler=range(4))
    with pytest.raises(_harness.Disagreement, match="must give equal results"):
        loader.measure_case(comparison(partial(make, DataLoader), short), QUICK)


def test_a_record_has_times_and_other_costs_of_a_batch() -> None:
    case = comparison(partial(make, DataLoader), partial(make, TORCH))
    record = loader.measure_case(case, QUICK)
    assert record["batches"] == 3
    assert record["nbytes"] == 6 * 3 * 40 * 40
    ours, torchs = record["rows"]
    assert len(ours["seconds"]) == record["rounds"] == 2
    assert ours["facts"]["held"] == {"descriptors": 0, "mappings": 0}
    assert ours["facts"]["ring"]["misses"] == 0
    assert ours["facts"]["ring"]["hits"] > 0
    assert torchs["facts"]["held"] == {"descriptors": 1, "mappings": 1}
    assert torchs["facts"]["ring"] == {}
    for row in record["rows"]:
        for what in ("faults", "cpu_seconds"):
            assert row["facts"][f"worker_{what}"] >= 0
            assert row["facts"][f"parent_{what}"] >= 0
    json.dumps(record)


def test_workers_stay_between_epochs_and_end_after_the_comparison() -> None:
    epochs = Epochs(partial(make, DataLoader), lambda loader: len(list(loader)), _at(0))
    epochs()
    before = loader_epochs.pids(epochs.loader)
    epochs()
    assert loader_epochs.pids(epochs.loader) == before
    epochs.close()
    for pid in before:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_workers_that_were_compared_are_not_timed() -> None:
    """They run with the junk in new memory that the comparison asks torch for."""
    epochs = Epochs(partial(make, DataLoader), lambda loader: len(list(loader)), _at(0))
    epochs()
    (compared,) = loader_epochs.pids(epochs.loader)
    assert len(epochs.batches()) == 3
    epochs()
    (timed,) = loader_epochs.pids(epochs.loader)
    epochs.close()
    assert timed != compared


def test_the_budget_is_wall_time_and_contenders_measure_their_times() -> None:
    counted, wall = _at(0), _at(0)

    def call() -> None:
        counted.now += 0.25
        wall.now += 10

    contenders = [_harness.Contender("ours", call, "ours")]
    record = _harness.compare(
        "case", contenders, rounds=50, clock=counted, max_seconds=65, watch=wall
    )
    assert record["rounds"] == 7
    assert record["rows"][0]["median"] == 0.25


def _at(now: float) -> Any:
    clock = loader_epochs.Counted()
    clock.now = now
    return clock


def test_a_batch_of_fields_has_112_tensors() -> None:
    batch = loader_fields.Remaking(True, 0)(loader_fields.targets())
    assert sum(len(sample) for sample in batch["fields"]) == 112
    assert loader_fields.Remaking(False, 0)(loader_fields.targets())["fields"] is None


def test_every_batch_of_fields_is_new() -> None:
    samples, remake = loader_fields.targets(), loader_fields.Remaking(True, 0)
    first, second = (remake(samples)["fields"][0]["ids"] for _ in range(2))
    assert len({first.data_ptr(), second.data_ptr(), samples[0]["ids"].data_ptr()}) == 3


def test_times_above_the_floor_are_compared_with_ours() -> None:
    record = images(ours=2.0, peer=31.0, floor=1.0)
    loader.add_net(record, {"ours": "floor", "peer": "floor", "absent": "floor"})
    rows = {row["name"]: row for row in record["rows"]}
    assert rows["ours"]["net"]["median"] == 1
    assert rows["peer"]["net"]["over"]["ours"]["of_medians"] == 30
    assert "net" not in rows["floor"]


def test_hidden_is_the_share_of_loading_beside_the_step() -> None:
    names = {loader_overlap.COMPUTE: 1.0, loader_overlap.FETCH: 0.8}
    record = images(ours=1.04, plain=1.8, **names)
    for row in record["rows"]:
        row["kind"] = "limit" if row["name"] in names else row["kind"]
    loader_overlap.add_hidden(record)
    hidden = {r["name"]: r["hidden"] for r in record["rows"] if "hidden" in r}
    assert hidden["ours"]["of_medians"] == pytest.approx(0.95)
    assert hidden["plain"]["q1"] == pytest.approx(0)


def images(**medians: float) -> dict[str, Any]:
    """Return a record in which a contender takes this long in every round."""
    rows = []
    for name, seconds in medians.items():
        times = [seconds] * 3
        over = {"ours": _harness.ratio(times, [medians["ours"]] * 3)}
        rows.append(
            {"name": name, "kind": "ours" if name == "ours" else "peer"}
            | {"installed": True, "seconds": times, **_harness.summarise(times)}
            | {"over": {} if name == "ours" else over}
        )
    rows.append({"name": "absent", "kind": "peer", "installed": False})
    case = {"title": "case", "note": "n", "rounds": 3, "nbytes": 8_000_000}
    goals = [loader_cases.Goal("peer", 4)._asdict()]
    return {**case, "kind": "images", "batches": 4, "goals": goals, "rows": rows}


def results(*cases: dict[str, Any]) -> dict[str, Any]:
    machine = {"cpu": "fake", "threads": "1", "malloc": "default"}
    return {"date": "d", "runs": [{"machine": machine, "cases": list(cases)}]}


FACTS = {
    **{"worker_faults": 12.25, "parent_faults": 0.5, "worker_rss": 5e7},
    **{"worker_cpu_seconds": 0.001, "parent_cpu_seconds": 2e-5},
    "held": {"descriptors": 0, "mappings": 0.0},
    "ring": {"slabs": 8, "nbytes": 4e6, "hits": 9, "misses": 0},
}


def test_the_report_has_times_costs_and_goals() -> None:
    case = images(ours=0.002, **{loader_cases.MMCV: 0.02, "peer": 0.006})
    case["rows"][0]["facts"] = FACTS
    block = loader_report.page(results(case))
    row = "| case | 2 | 2.00 ms | 1 |  | 10 (10 - 10) |  |  |  |  |"
    assert row in block.splitlines()
    costs = "| ours | 1.00 ms | 20.0 us | 12 | 0.50 | 0 | 0 | 50 MB | 8 slabs, 4 MB | "
    assert f"{costs}9 / 0 |" in block.splitlines()
    missed = "case: peer must take 4 times as long as ours, and takes 3 (3 - 3)"
    assert "0 of 1 goals are met.\nMissed:\n\n- " + missed in block
    assert loader_report.complaints(results(case)) == [missed]
    assert "| absent | not installed |" in block


def test_a_goal_that_is_met_is_no_complaint() -> None:
    case = images(ours=0.002, peer=0.008)
    assert loader_report.complaints(results(case)) == []
    assert "1 of 1 goals are met." in loader_report.page(results(case))


def test_a_loss_stays_in_the_report() -> None:
    case = images(ours=2.0, peer=1.0)
    text = "case: peer takes 0.5 (0.5 - 0.5) of the time of ours"
    row = "| case | peer | ours | 0.5 (0.5 - 0.5) | reason unknown |"
    assert row in loader_report.page(results(case)).splitlines()
    first, _ = loader_report.complaints(results(case))
    assert first == f"1 thread, default malloc: {text}: reason unknown"


def test_one_command_measures_images_fields_and_overlap(tmp_path: Path) -> None:
    loader.main(["--quick", "--workers", "1", "--out", str(tmp_path)])
    (path,) = (tmp_path / "results").glob("*-loader-cpu.json")
    (run,) = json.loads(path.read_text())["runs"]
    assert {case["kind"] for case in run["cases"]} == {"images", "fields", "overlap"}
    for case in run["cases"]:
        for row in case["rows"]:
            assert not row["installed"] or len(row["seconds"]) == 2
    page = path.with_suffix(".md")
    before = page.read_text()
    page.unlink()
    loader.main(["--from", str(path), "--out", str(tmp_path)])
    assert page.read_text() == before


def test_no_case_of_that_title_is_said_so(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        loader.main(["--quick", "--only", "no such case", "--out", str(tmp_path)])
    assert "must be part of a case's title" in capfd.readouterr().err
    assert not list(tmp_path.iterdir())
