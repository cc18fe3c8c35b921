"""Every command runs all cases, keeps its records, and refuses unequal results."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = [pytest.mark.peers, pytest.mark.slow]

loader = importlib.import_module("benchmarks.loader.__main__")
parallel_apply = importlib.import_module("benchmarks.parallel_apply")


def command(name: str) -> Any:
    return importlib.import_module(f"benchmarks.{name}")


#: Options of a quick run by command, the name of its file, and its titles.
RUNS: dict[str, tuple[str, str, set[str]]] = {
    "__main__": (
        "--threads 1 --no-charts",
        "collate",
        {case.title for case in command("collate").cases(True)},
    ),
    "loader.__main__": (
        "--workers 1",
        "loader",
        {case.title for case in loader.cases(True, [1])},
    ),
    "parallel_apply": (
        "",
        "parallel",
        {case.title for case in parallel_apply.cases(quick=True)},
    ),
    "training.__main__": (
        "--only photographs",
        "training",
        {"photographs of different sizes"},
    ),
    "sampler": (
        "",
        "sampler",
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
    (path,) = (tmp_path / "results").glob(f"{end}.json")
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
        assert drawn[0] == drawn[1] and len(drawn[0]) == 2
        for svg in drawn[0]:
            assert (tmp_path / "a" / svg).read_bytes().count(b"<svg") == 1
    elif name == "sampler":
        assert (tmp_path / "charts" / "padding_by_window.svg").exists()
