"""A dry run of the GPU benchmark: every case agrees, and a killed run is kept."""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.support.repository.folders import ROOT

pytestmark = pytest.mark.peers

gpu = importlib.import_module("benchmarks.gpu.__main__")
gpu_case = importlib.import_module("benchmarks.gpu.case")


@pytest.mark.slow
def test_every_case_runs_dry_and_all_contenders_agree(
    capsys: pytest.CaptureFixture[str],
) -> None:
    results = ROOT / "benchmarks" / "results"
    before = sorted(results.iterdir())
    assert gpu.main(["--device", "cpu"]) == 0
    out = capsys.readouterr().out
    titles = [each.title for each in gpu.cases(True)]
    assert len(set(titles)) == len(titles) == 37
    assert [t for t in titles if f"**{t}, a dry run** (" not in out] == []
    assert "reached" not in out and "missed" not in out
    assert sorted(results.iterdir()) == before


def test_the_kernels_are_timed_on_a_gpu_alone(
    capsys: pytest.CaptureFixture[str],
) -> None:
    kernels = importlib.import_module("benchmarks.gpu.kernels")
    small = ["--device", "cpu", "--num", "2", "--side", "64"]
    assert kernels.main(["--time", *small]) == 0
    first, *lines = capsys.readouterr().out.splitlines()
    assert first == "A dry run: figures need a GPU."
    for name in kernels.TIMED:
        (line,) = [each for each in lines if each.startswith(f"{name}: ")]
        assert re.fullmatch(r".*: [\d.]+ MB read and written", line)
    assert kernels.main(small) == 0
    named = capsys.readouterr().out.splitlines()
    assert [each.partition(":")[0] for each in named] == list(kernels.PROFILED)


def test_a_killed_run_keeps_its_measurements(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def killed(where: Any) -> Any:
        raise KeyboardInterrupt

    path = tmp_path / "gpu.json"
    found = [gpu.cases(True)[0], gpu_case.GpuCase("second", "n", killed)]
    monkeypatch.setattr(gpu, "cases", lambda quick: found)
    with pytest.raises(KeyboardInterrupt):
        gpu.main(["--device", "cpu", "--json", str(path)])
    (kept,) = json.loads(path.read_text())["runs"]
    titles = [each["title"] for each in kept["cases"]]
    assert titles == [f"{found[0].title}, a dry run"]
    assert [each.name for each in tmp_path.iterdir()] == ["gpu.json"]
