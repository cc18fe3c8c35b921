"""The tables in the project's README match the newest records."""

from __future__ import annotations

import copy
import importlib
from pathlib import Path
from typing import Any

import pytest
from repository import ROOT

pytestmark = pytest.mark.peers

summary = importlib.import_module("benchmarks.summary")


@pytest.fixture(scope="module")
def records() -> tuple[Any, Any]:
    kinds = "cpu", "loader-cpu"
    cpu, loader = (summary.read(summary.newest(kind)) for kind in kinds)
    return cpu, loader


def test_the_tables_of_the_readme_are_those_of_the_newest_records(
    records: tuple[Any, Any],
) -> None:
    readme = (ROOT / "README.md").read_text("utf-8")
    shown = readme.partition(summary.BEGIN)[2].partition(summary.END)[0]
    assert shown.strip() == summary.block(*records).strip()
    shown = readme.partition(summary.HEAD_BEGIN)[2].partition(summary.HEAD_END)[0]
    assert shown.strip() == summary.figures(*records).strip()
    page = (ROOT / "benchmarks" / "README.md").read_text("utf-8")
    shown = page.partition(summary.LOST_BEGIN)[2].partition(summary.LOST_END)[0]
    parallel = summary.read(summary.newest("parallel-cpu"))
    assert shown.strip() == summary.lost(*records, parallel).strip()


def test_each_case_has_its_largest_loss_once(records: tuple[Any, Any]) -> None:
    report = importlib.import_module("benchmarks.report")
    everything = [loss for run in records[0]["runs"] for loss in report.losses(run)]
    rows = summary.lost(*records).splitlines()[2:]
    for row in rows:
        case, _, ours, ratio = row.strip("| ").split(" | ")[:4]
        same = [e for e in everything if (e.case, e.ours) == (case, ours)]
        assert ratio == min(same, key=lambda each: each.over["of_medians"]).ratio
    assert len(rows) == len({(each.case, each.ours) for each in everything}) > 0


def test_another_figure_is_another_table(records: tuple[Any, Any]) -> None:
    other = copy.deepcopy(records[0])
    run = next(r for r in other["runs"] if r["machine"]["threads"] == "1")
    case = next(c for c in run["cases"] if c["title"] == "photos uint8")
    row = next(r for r in case["rows"] if r["name"] == "mmcv 1.x collate")
    row["over"]["ours, native"]["of_medians"] = 34.56
    before, after = summary.block(*records), summary.block(other, records[1])
    (new,) = set(after.splitlines()) - set(before.splitlines())
    assert new.startswith("| the same in uint8, 41 MB | 35 / ")


@pytest.mark.parametrize(
    ("ratio", "shown"),
    [(0.572, "0.57"), (1.0, "1.00"), (2.0, "2.0"), (13.86, "13.9"), (46.9, "47")],
)
def test_ratios_have_two_or_three_digits(ratio: float, shown: str) -> None:
    over = {"ours, native": {"of_medians": ratio}}
    assert summary.times({"over": over}) == shown
    assert summary.times({}) == summary.times(None) == ""


def test_the_command_writes_between_its_marks_only(tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    head = f"{summary.HEAD_BEGIN}\n{summary.HEAD_END}\n"
    readme.write_text(f"{head}above\n{summary.BEGIN}\nold\n{summary.END}\nbelow\n")
    page = tmp_path / "page.md"
    page.write_text(f"above\n{summary.LOST_BEGIN}\nold\n{summary.LOST_END}\nbelow\n")
    command = ["--readme", str(readme), "--page", str(page)]
    summary.main(command)
    losses = page.read_text()
    assert losses.startswith(f"above\n{summary.LOST_BEGIN}\n\n| case | peer |")
    assert losses.endswith(f"|\n\n{summary.LOST_END}\nbelow\n")
    text = readme.read_text()
    assert text.startswith(f"{summary.HEAD_BEGIN}\n\n- Batches of photographs")
    assert f"above\n{summary.BEGIN}\n\nTime relative to pyparallel" in text
    assert text.endswith(f"of mmcv's time.\n\n{summary.END}\nbelow\n")
    assert "\nold\n" not in text
    summary.main(command)
    assert readme.read_text() == text and page.read_text() == losses


def test_records_of_other_kinds_are_not_taken() -> None:
    assert summary.newest("cpu").name.count("-") == 3
    assert summary.newest("loader-cpu").name.endswith("-loader-cpu.json")
