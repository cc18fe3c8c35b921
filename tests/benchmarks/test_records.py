"""Published pages, tables and charts are made of the records beside them."""

from __future__ import annotations

import importlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.support.repository.folders import ROOT

pytestmark = pytest.mark.peers

report = importlib.import_module("benchmarks.report")
summary = importlib.import_module("benchmarks.summary")
commands = importlib.import_module("benchmarks.__main__")
gpu = importlib.import_module("benchmarks.gpu.__main__")

FOLDER = ROOT / "benchmarks"
RESULTS = FOLDER / "results"
#: The commands with the page of a kind of record.
PAGES = {each: each for each in commands.QUESTIONS} | {"overlap": "loader"}


def page_of(name: str, record: Any) -> str:
    if name == "gpu":
        return str(gpu.page(record))
    module = importlib.import_module(f"benchmarks.{commands.QUESTIONS[name]}")
    return str(module.QUESTION.page_of(record))


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.json")), ids=lambda p: p.stem)
def test_the_page_of_each_record_is_made_of_it(path: Path) -> None:
    name = next((PAGES[kind] for kind in PAGES if kind in path.stem), "gpu")
    shown = path.with_suffix(".md").read_text(encoding="utf-8")
    assert shown == page_of(name, json.loads(path.read_text(encoding="utf-8")))


def test_tables_and_figures_of_the_pages_are_those_of_the_records(
    tmp_path: Path,
) -> None:
    pages = ["README.md", "docs/index.md", "docs/how-much.md", "benchmarks/README.md"]
    pages.append("docs/threads.md")
    for page in pages:
        (tmp_path / page).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / page, tmp_path / page)
    summary.main(tmp_path)
    for page in pages:
        assert (tmp_path / page).read_text("utf-8") == (ROOT / page).read_text("utf-8")


def test_the_page_of_goals_has_those_of_all_cases(tmp_path: Path) -> None:
    assert gpu.main(["--goals", "--out", str(tmp_path)]) == 0
    path = Path("results", "gpu-goals.md")
    shown = (FOLDER / path).read_text(encoding="utf-8")
    assert (tmp_path / path).read_text(encoding="utf-8") == shown


def test_a_loss_is_in_the_table_and_a_complaint() -> None:
    record = summary.read("collate")
    run: Any = record["runs"][0]
    run["cases"] = run["cases"][:1]
    (case,) = run["cases"]
    ours = next(r for r in case["rows"] if r["kind"] == "ours")
    peer = next(r for r in case["rows"] if r["kind"] == "peer" and r["installed"])
    peer["over"][ours["name"]] = {"of_medians": 0.5, "q1": 0.4, "q3": 0.6}
    case["title"] = "unexplained"
    page = page_of("collate", {"runs": [run]})
    row = f"| unexplained | {peer['name']} | {ours['name']} | 0.5 (0.4 - 0.6) | "
    assert f"{row}reason unknown |" in page.splitlines()
    assert f"{row}reason unknown |" in report.complaints(page)
