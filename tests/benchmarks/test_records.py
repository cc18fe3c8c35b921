"""Published pages, tables and charts are made of the records beside them."""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path

import pytest
from repository import ROOT

pytestmark = pytest.mark.peers

summary = importlib.import_module("benchmarks.summary")

FOLDER = ROOT / "benchmarks"
RESULTS = FOLDER / "results"
#: The modules with the page of a kind of record.
PAGES = {"parallel": "parallel_apply", "loader": "loader_report", "gpu": "gpu_report"}
PAGES |= {"overlap": "loader_report", "sampler": "sampler", "": "report"}


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.json")), ids=lambda p: p.stem)
def test_the_page_of_each_record_is_made_of_it(path: Path) -> None:
    name = next(PAGES[kind] for kind in PAGES if kind in path.stem)
    page = importlib.import_module(f"benchmarks.{name}").page
    shown = path.with_suffix(".md").read_text(encoding="utf-8")
    assert shown == page(json.loads(path.read_text(encoding="utf-8")))


def test_tables_of_the_readmes_are_those_of_the_newest_records() -> None:
    records = [summary.read(summary.newest(kind)) for kind in ("cpu", "loader-cpu")]
    parallel = summary.read(summary.newest("parallel-cpu"))
    readme, page = (
        (folder / "README.md").read_text("utf-8") for folder in (ROOT, FOLDER)
    )
    for text, begin, end, expected in (
        (readme, summary.BEGIN, summary.END, summary.block(*records)),
        (readme, summary.HEAD_BEGIN, summary.HEAD_END, summary.figures(*records)),
        (page, summary.LOST_BEGIN, summary.LOST_END, summary.lost(*records, parallel)),
    ):
        assert text.partition(begin)[2].partition(end)[0].strip() == expected.strip()


def test_charts_and_results_are_linked() -> None:
    readme = (FOLDER / "README.md").read_text(encoding="utf-8")
    charts = {f"charts/{path.name}" for path in FOLDER.glob("charts/*.svg")}
    assert set(re.findall(r"!\[.*\]\((.*)\)", readme)) == charts
    linked = set(re.findall(r"\(results/([^)]*)\)", readme))
    unlinked = {path.name for path in RESULTS.iterdir()} - linked
    assert unlinked == {"2026-11-20-cpu.json", "2026-11-20-cpu.md"}, "older ones"
    without = "No GPU has run these benchmarks yet." in readme
    assert without == (not list(RESULTS.glob("*-gpu.json")))
