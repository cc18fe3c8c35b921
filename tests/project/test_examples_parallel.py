"""The examples of parallel_apply: real runs, and results of the filters."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from repository import ROOT

import pyparallel

pytestmark = pytest.mark.one_backend

# The run must import the package that is tested, wherever that is.
PACKAGE = str(Path(pyparallel.__file__).resolve().parent.parent)
EXAMPLES = ROOT / "examples"


def run(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    paths = [PACKAGE, os.environ.get("PYTHONPATH", "")]
    return subprocess.run(
        [sys.executable, "-W", "error", str(EXAMPLES / name), *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.fixture
def photos(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    pytest.importorskip("PIL", reason="the example needs pillow")
    pytest.importorskip("sklearn", reason="the example needs scikit-learn")
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import filter_photos

    return filter_photos


@pytest.mark.slow
@pytest.mark.parametrize("devices", [["cpu"], ["cpu", "cpu", "cpu"]], ids=len)
def test_eight_images_become_eight_rows_of_scores(devices: list[str]) -> None:
    done = run("parallel_apply.py", "--devices", *devices)
    assert done.stderr == "" and done.returncode == 0
    assert done.stdout.splitlines() == [
        "(8, 3, 32, 32) -> (8, 10) on cpu",
        "equal to one call on the whole batch; 4 of 4 gradients",
    ]


@pytest.mark.slow
def test_photographs_are_filtered_on_any_number_of_threads(
    photos: ModuleType, tmp_path: Path
) -> None:
    for threads in ("1", "2"):
        out = tmp_path / threads
        done = run("filter_photos.py", "edges", "--out", str(out), "--threads", threads)
        assert done.stderr == "" and done.returncode == 0
        assert done.stdout.splitlines() == [
            str(out / "china-edges.png"),
            str(out / "flower-edges.png"),
        ]
    one, two = (photos.read(tmp_path / n / "china-edges.png") for n in "12")
    assert one.shape == (3, 427, 640) and torch.equal(one, two)
    assert 0.02 < one.mean() < 0.9
