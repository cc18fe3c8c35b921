"""Tables and charts are made from the records alone, and leave nothing out."""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path
from typing import Any

import pytest
from repository import ROOT

pytestmark = [pytest.mark.peers, pytest.mark.slow]

report = importlib.import_module("benchmarks.report")
losses = importlib.import_module("benchmarks.losses")
run = importlib.import_module("benchmarks.__main__")
cases = importlib.import_module("benchmarks.cases")
_harness = importlib.import_module("benchmarks._harness")

MACHINE = {"cpu": "fake", "threads": "1", "malloc": "default"}


def case(title: str = "case", **medians: float) -> dict[str, Any]:
    """Return a record in which a contender takes this long in every round."""
    kinds, rows = {"ours": "ours", "limit": "limit"}, []
    for name, seconds in medians.items():
        times = [seconds] * 3
        ours = {"ours": _harness.ratio(times, [medians["ours"]] * 3)}
        rows.append(
            {"name": name, "kind": kinds.get(name, "peer"), "installed": True}
            | {"seconds": times, **_harness.summarise(times)}
            | {"over": {} if name == "ours" else ours}
        )
    rows.append({"name": "absent", "kind": "peer", "installed": False})
    return {"title": title, "note": "n", "rounds": 3, "nbytes": 1000, "rows": rows}


def a_run(*cases: dict[str, Any], **machine: str) -> dict[str, Any]:
    return {"machine": MACHINE | machine, "cases": list(cases)}


def test_losses_stay_in_the_table_and_are_listed_with_a_reason() -> None:
    record = a_run(case(ours=2.0, faster=1.0, slower=3.0, limit=0.5))
    (loss,) = report.losses(record)
    expected = "case: faster takes 0.5 of ours (0.5 - 0.5): reason unknown"
    assert str(loss) == expected
    text = report.table(record)
    assert "| absent | not installed |" in text
    times = "1.00 s | 1.00 s | 1.00 s - 1.00 s"
    assert f"| faster | {times} | 0.5 (0.5 - 0.5) |" in text
    assert f"- {expected}" in text
    block = report.block({"runs": [record]}, "results/x")
    assert "- reason unknown:\n  - case: faster takes 0.5" in block


def test_a_reason_holds_for_its_case_peer_and_backend_only() -> None:
    assert "looks at nothing" in losses.reason("tiny", "F.pad + stack", "ours, Python")
    assert losses.reason("tiny", "F.pad + stack", "ours, native") == losses.UNKNOWN
    assert losses.reason("new case", "F.pad + stack", "ours, Python") == losses.UNKNOWN


def test_a_loss_to_mmcv_is_only_explained_where_both_do_the_same() -> None:
    titles = "tiny", "ragged labels", "many small", "glyph crops", "one big"
    titles += "small uint8", "equal shapes", "many small fields", "scatter 528 leaves"
    explained = {
        title
        for title in titles
        for ours in ("ours, native", "ours, Python")
        for peer in ("mmcv 1.x collate", "mmcv 1.x scatter")
        if losses.reason(title, peer, ours) != losses.UNKNOWN
    }
    assert explained == {"many small fields"}


def test_every_reason_is_used_by_a_case_that_exists() -> None:
    titles = {case.title for case in cases.cases(True)}
    titles |= {"glyph crops", "photos uint8"}  # where their packages are installed
    for each in losses.REASONS:
        assert any(losses.fnmatchcase(title, each.case) for title in titles), each


def test_a_run_ends_by_naming_what_nobody_has_explained() -> None:
    fits = [
        {"exponent": e, "as_measured": e, "fixed": 0.0, "each": 1.0} for e in (1, 2)
    ]
    series = [
        {"name": f"ours {i}", "kind": "ours", "installed": True, "fit": each}
        for i, each in enumerate(fits)
    ]
    results = {
        "runs": [a_run(case(ours=2.0, faster=1.0)), a_run(case(ours=1.0, slower=2.0))],
        "growth": [{"title": "curve", "series": series}],
    }
    first, second = report.complaints(results)
    assert first.startswith("1 thread, default malloc: case: faster takes 0.5")
    assert second.startswith(
        "curve: ours 1 must grow as n^1.0 +- 0.1, but grows as n^2"
    )


def test_a_draw_is_called_one() -> None:
    record = a_run(case(ours=2.0, peer=1.9))
    over = record["cases"][0]["rows"][1]["over"]["ours"]
    over["q3"] = 1.1
    assert "(0.95 - 1.1, a draw)" in str(report.losses(record)[0])


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(2.5, "2.50 s"), (0.0123, "12.3 ms"), (45.6e-6, "45.6 us"), (3e-7, "0.30 us")],
)
def test_durations_are_for_people(seconds: float, text: str) -> None:
    assert report.duration(seconds) == text


def test_only_what_is_between_the_markers_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "README.md"
    path.write_text(f"before\n{report.BEGIN}\nold\n{report.END}\nafter\n")
    for _ in range(2):  # and the second time gives the same
        report.write_block(path, "new")
        expected = f"before\n{report.BEGIN}\n\nnew\n{report.END}\nafter\n"
        assert path.read_text() == expected


@pytest.mark.parametrize(
    "text",
    [
        "none",
        f"{report.BEGIN}\n",
        f"{report.END}\n{report.BEGIN}\n",
        f"{report.BEGIN}\n{report.END}\n{report.BEGIN}\n{report.END}\n",
    ],
)
def test_a_file_without_the_two_markers_is_left_alone(
    text: str, tmp_path: Path
) -> None:
    path = tmp_path / "README.md"
    path.write_text(text)
    with pytest.raises(ValueError, match="must have the lines"):
        report.write_block(path, "new")
    assert path.read_text() == text


def test_the_table_of_the_readme_is_that_of_its_records() -> None:
    readme = (ROOT / "benchmarks" / "README.md").read_text(encoding="utf-8")
    begin, end = readme.index(report.BEGIN), readme.index(report.END)
    shown = readme[begin + len(report.BEGIN) : end].strip()
    (name,) = re.findall(r"\[all numbers\]\((.*)\.json\)", shown)
    path = ROOT / "benchmarks" / f"{name}.json"
    results = json.loads(path.read_text(encoding="utf-8"))
    charts = re.findall(r"!\[.*\]\((.*)\)", shown)
    assert shown == report.block(results, name, charts).strip()
    assert path.with_suffix(".md").read_text(encoding="utf-8") == report.details(
        results
    )
    for chart in charts:
        assert (ROOT / "benchmarks" / chart).exists()


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a quick run of everything, in its two processes."""
    folder = tmp_path_factory.mktemp("benchmark")
    run.main(["--quick", "--no-charts", "--threads", "1", "--out", str(folder)])
    return folder


def test_one_command_measures_with_both_allocators(quick: Path) -> None:
    (path,) = (quick / "results").glob("*-cpu.json")
    results = json.loads(path.read_text())
    labels = [report.run_label(each) for each in results["runs"]]
    assert labels == ["1 thread, default malloc", "1 thread, warm malloc"]
    for each in results["runs"]:
        for comparison in each["cases"]:
            for row in comparison["rows"]:
                assert not row["installed"] or len(row["seconds"]) == 2
    assert [each["malloc"] for each in results["sweeps"]] == ["default"] * 3 + [
        "warm"
    ] * 3
    assert {each["x"] for each in results["growth"]} == {"samples", "leaves", "threads"}
    text = (quick / "README.md").read_text()
    assert text.count("\n| tiny |") == 2
    rows = sum(len(c["rows"]) for each in results["runs"] for c in each["cases"])
    table = path.with_suffix(".md").read_text()
    assert len(re.findall(r"^\| (?!---)(?! ).*\|$", table, re.MULTILINE)) == rows


def test_a_case_that_does_not_exist_is_said_so(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        run.main(["--quick", "--only", "no such case", "--out", str(tmp_path)])
    assert "must be part of a case's title" in capfd.readouterr().err
    assert not list(tmp_path.iterdir())


def test_reports_can_be_made_again(quick: Path, tmp_path: Path) -> None:
    (path,) = (quick / "results").glob("*-cpu.json")
    before = (quick / "README.md").read_text()
    run.main(["--from", str(path), "--no-charts", "--out", str(quick)])
    assert (quick / "README.md").read_text() == before


def test_the_same_records_give_the_same_charts(quick: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    charts = importlib.import_module("benchmarks.charts")
    (path,) = (quick / "results").glob("*-cpu.json")
    results = json.loads(path.read_text())
    names = charts.draw(results, tmp_path / "a")
    assert names == charts.draw(results, tmp_path / "b")
    assert len(names) == 4
    for name in names:
        svg = (tmp_path / "a" / name).read_bytes()
        assert svg == (tmp_path / "b" / name).read_bytes()
        assert b"<svg" in svg and b"<dc:date>" not in svg
        png = (tmp_path / "a" / name).with_suffix(".png").read_bytes()
        assert png.startswith(b"\x89PNG")


def test_charts_draw_what_the_records_say() -> None:
    pytest.importorskip("matplotlib")
    charts = importlib.import_module("benchmarks.charts")
    figure = charts.ratio_by_case([a_run(case(ours=2.0, faster=1.0, mmcv=6.0))])
    (axes,) = figure.axes
    dots = {line.get_label(): line.get_xdata()[0] for line in axes.lines}
    assert dots["mmcv 1.x"] == 3.0
    assert dots["others"] == 0.5
