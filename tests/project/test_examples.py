"""The digit example: its scenes, its scores, and a real run of a few seconds."""

from __future__ import annotations

import json
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

pytest.importorskip("sklearn", reason="the example needs scikit-learn")
pytest.importorskip("matplotlib", reason="the example needs matplotlib")
pytest.importorskip("tqdm", reason="the example needs tqdm")

# The run must import the package that is tested, wherever that is.
PACKAGE = str(Path(pyparallel.__file__).resolve().parent.parent)
EXAMPLES = ROOT / "examples"


@pytest.fixture
def digits(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import _digits

    return _digits


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    paths = [PACKAGE, os.environ.get("PYTHONPATH", "")]
    return subprocess.run(
        [sys.executable, str(EXAMPLES / "ragged_digits.py"), *arguments],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "OMP_NUM_THREADS": "1",
            **environment,
        },
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_no_digit_is_both_trained_on_and_held_out(digits: ModuleType) -> None:
    train, held_out = digits.split(1797)
    assert not set(train.tolist()) & set(held_out.tolist())
    assert len(train) + len(held_out) == 1797
    assert len(digits.digits(held_out=True)[1]) == len(held_out) == 360


def test_peaks_of_a_perfect_heatmap_find_every_digit(digits: ModuleType) -> None:
    for index in range(20):
        scene = digits.compose(index, held_out=False)
        heatmap = digits.draw_heatmap(scene)
        # Room that padding added: nothing may be found there.
        padded = torch.nn.functional.pad(heatmap, (0, 9, 0, 5), value=0.99)
        (peaks,) = digits.find_peaks(padded[None], [tuple(scene.img.shape[1:])])
        counts = digits.count_matches(peaks, scene.boxes, scene.labels)
        assert counts.tolist() == [len(scene.boxes), 0, 0]


@pytest.mark.slow
def test_a_short_run_trains_and_leaves_its_report(tmp_path: Path) -> None:
    sizes = ["--scenes", "64", "--val-scenes", "10", "--epochs", "1", "--workers", "1"]
    done = run(*sizes, "--min-f1", "0", "--out", str(tmp_path / "new" / "out"))
    assert done.returncode == 0, done.stderr
    summary = json.loads((tmp_path / "new" / "out" / "summary.json").read_text())
    assert 0 <= summary["f1"] <= 1 and summary["processes"] == 1
    for picture in ("training.png", "predictions.png"):
        head = (tmp_path / "new" / "out" / picture).read_bytes()[:8]
        assert head == b"\x89PNG\r\n\x1a\n"
    assert "layout is composed" in done.stdout
    assert "Warning" not in done.stderr


@pytest.mark.slow
def test_a_detector_that_is_not_good_enough_fails_the_run(tmp_path: Path) -> None:
    sizes = ["--scenes", "32", "--val-scenes", "4", "--epochs", "1"]
    done = run(*sizes, "--min-f1", "1.1", "--out", str(tmp_path))
    assert done.returncode == 1
    assert "below --min-f1 1.1" in done.stderr


@pytest.mark.slow
def test_missing_packages_are_named_with_the_command_that_installs_them(
    tmp_path: Path,
) -> None:
    (tmp_path / "sklearn.py").write_text("raise ImportError('no module sklearn')\n")
    done = run("--help", PYTHONPATH=f"{tmp_path}{os.pathsep}{PACKAGE}")
    assert done.returncode == 1
    assert "pip install 'pyparallel-torch[demo]'" in done.stderr
    assert "Traceback" not in done.stderr
