"""Tables and charts are made from records alone, and are complete."""

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
parallel_cases = importlib.import_module("benchmarks.parallel_cases")
_harness = importlib.import_module("benchmarks._harness")
parallel_apply = importlib.import_module("benchmarks.parallel_apply")
loader_report = importlib.import_module("benchmarks.loader_report")
gpu_report = importlib.import_module("benchmarks.gpu_report")
sampler = importlib.import_module("benchmarks.sampler")

BEGIN, END = "<!-- begin -->", "<!-- end -->"
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
    assert str(loss) == "case: faster takes 0.5 (0.5 - 0.5) of the time of ours"
    text = report.table(record)
    assert "| absent | not installed |" in text
    times = "1.00 s | 1.00 s | 1.00 s - 1.00 s"
    assert f"| faster | {times} | 0.5 (0.5 - 0.5) |" in text
    page = report.page({"runs": [record]})
    row = "| case | faster | ours | 0.5 (0.5 - 0.5) | reason unknown |"
    assert page.splitlines().count(row) == 1
    assert page.endswith(text)


def test_a_reason_holds_for_its_case_peer_and_backend_only() -> None:
    assert "It checks no containers" in losses.reason(
        "tiny", "F.pad + stack", "ours, Python"
    )
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
    titles |= {case.title for case in parallel_cases.cases(True)}
    titles |= {"glyph crops", "photos uint8"}  # where their packages are installed
    for each in losses.REASONS:
        assert any(losses.fnmatchcase(title, each.case) for title in titles), each


def test_a_run_ends_with_the_losses_without_a_reason() -> None:
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
    assert first == (
        "1 thread, default malloc: case: faster takes 0.5 (0.5 - 0.5) of the time of "
        "ours: reason unknown"
    )
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


def test_only_text_between_the_markers_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "README.md"
    path.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    for _ in range(2):  # and the second time gives the same
        report.write_block(path, "new", BEGIN, END)
        expected = f"before\n{BEGIN}\n\nnew\n{END}\nafter\n"
        assert path.read_text() == expected


@pytest.mark.parametrize(
    "text",
    [
        "none",
        f"{BEGIN}\n",
        f"{END}\n{BEGIN}\n",
        f"{BEGIN}\n{END}\n{BEGIN}\n{END}\n",
    ],
)
def test_a_file_without_the_two_markers_is_left_alone(
    text: str, tmp_path: Path
) -> None:
    path = tmp_path / "README.md"
    path.write_text(text)
    with pytest.raises(ValueError, match="must have the lines"):
        report.write_block(path, "new", BEGIN, END)
    assert path.read_text() == text


RESULTS = ROOT / "benchmarks" / "results"
PAGES = {"parallel": parallel_apply.page, "loader": loader_report.page}
PAGES |= {
    "overlap": loader_report.page,
    "gpu": gpu_report.page,
    "sampler": sampler.page,
}


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.json")), ids=lambda p: p.stem)
def test_the_page_of_each_record_is_made_of_it(path: Path) -> None:
    (page,) = [PAGES[k] for k in PAGES if k in path.stem] or [report.page]
    shown = path.with_suffix(".md").read_text(encoding="utf-8")
    assert shown == page(json.loads(path.read_text(encoding="utf-8")))


def test_the_readme_shows_all_charts_and_links_all_results() -> None:
    folder = ROOT / "benchmarks"
    readme = (folder / "README.md").read_text(encoding="utf-8")
    charts = {f"charts/{path.name}" for path in folder.glob("charts/*.svg")}
    assert set(re.findall(r"!\[.*\]\((.*)\)", readme)) == charts
    linked = set(re.findall(r"\(results/([^)]*)\)", readme))
    unlinked = {path.name for path in RESULTS.iterdir()} - linked
    assert unlinked == {"2026-11-20-cpu.json", "2026-11-20-cpu.md"}, "older ones"


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
    text = path.with_suffix(".md").read_text()
    summary, _, table = text.partition(report.ALL)
    assert summary.count("\n| tiny | ") >= 2
    rows = sum(len(c["rows"]) for each in results["runs"] for c in each["cases"])
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
    before = path.with_suffix(".md").read_text()
    path.with_suffix(".md").unlink()
    run.main(["--from", str(path), "--no-charts", "--out", str(quick)])
    assert path.with_suffix(".md").read_text() == before


def test_equal_records_make_equal_charts(quick: Path, tmp_path: Path) -> None:
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


def test_charts_show_the_records() -> None:
    pytest.importorskip("matplotlib")
    charts = importlib.import_module("benchmarks.charts")
    figure = charts.ratio_by_case([a_run(case(ours=2.0, faster=1.0, mmcv=6.0))])
    (axes,) = figure.axes
    dots = {line.get_label(): line.get_xdata()[0] for line in axes.lines}
    assert dots["mmcv 1.x"] == 3.0
    assert dots["others"] == 0.5
