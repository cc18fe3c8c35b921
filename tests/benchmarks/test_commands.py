"""Every command runs all cases, keeps its records, and refuses unequal results."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest
import torch

pytestmark = [pytest.mark.peers, pytest.mark.slow]

commands = importlib.import_module("benchmarks.__main__")

#: Options of a quick run by command.
RUNS = {
    "collate": "--threads 1",
    "loader": "--workers 1",
    "parallel": "",
    "training": "--only photographs",
    "sampler": "",
}


@pytest.mark.parametrize("name", RUNS)
def test_a_command_measures_all_cases_and_makes_its_page_of_the_records(
    name: str, tmp_path: Path
) -> None:
    threads, out = torch.get_num_threads(), ["--out", str(tmp_path)]
    options = [name, "--quick", *RUNS[name].split(), *out]
    commands.main(options)
    assert torch.get_num_threads() == threads
    module = importlib.import_module(f"benchmarks.{commands.QUESTIONS[name]}")
    cases = module.QUESTION.cases(commands.parser().parse_args(options))
    titles = {case.title for case in cases}
    if name == "training":
        titles = {"photographs of different sizes"}
    (path,) = (tmp_path / "results").glob(f"{name}.json")
    records = json.loads(path.read_text())
    page = path.with_suffix(".md")
    text = page.read_text()
    for run in records["runs"]:
        found = (case["title"].removesuffix(", memory kept") for case in run["cases"])
        assert {*found} == titles
        for case in run["cases"]:
            assert case["title"] in text
            installed = [row for row in case["rows"] if row["installed"]]
            kinds = {row["kind"] for row in installed}
            assert "ours" in kinds and ("peer" in kinds or name == "sampler")
            assert all(len(row["seconds"]) == 2 for row in installed)
    parts = records["runs"][-1].keys() & module.QUESTION.parts
    assert parts == (set() if "--only" in RUNS[name] else set(module.QUESTION.parts))
    page.unlink()
    commands.main([name, "--from", str(path), "--no-charts", *out])
    assert page.read_text() == text
    assert len(records["runs"]) == len(module.QUESTION.malloc)
    charts = importlib.import_module("benchmarks.charts")  # needs matplotlib
    drawn = [charts.draw(name, records, tmp_path / folder) for folder in "ab"]
    expected = {"collate": 2, "sampler": 1, "training": 1}.get(name, 0)
    assert drawn[0] == drawn[1] and len(drawn[0]) == expected
    for svg in drawn[0]:
        assert (tmp_path / "charts" / svg).exists()
        assert (tmp_path / "a" / svg).read_bytes().count(b"<svg") == 1
    if name == "collate":
        growth = records["runs"][-1]["growth"]
        assert {each["x"] for each in growth} == {"samples", "leaves"}
    elif name == "loader":
        rows = [
            row
            for case in records["runs"][0]["cases"]
            if case["title"].startswith("threads: ragged")
            for row in case["rows"]
            if row["installed"] and "Python" not in row["name"]
        ]
        assert all(row["facts"]["memory"] > 1e7 for row in rows)
