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


def found(boxes: list[list[float]], labels: list[int]) -> dict[str, torch.Tensor]:
    scores = torch.linspace(0.9, 0.5, len(labels))
    boxes_ = torch.tensor(boxes).reshape(-1, 4)
    return {"boxes": boxes_, "labels": torch.tensor(labels), "scores": scores}


def test_digits_are_inside_their_scene_and_never_overlap(digits: ModuleType) -> None:
    sizes = set()
    for index in range(200):
        scene = digits.compose(index, held_out=bool(index % 2))
        height, width = scene.img.shape[1:]
        sizes.add((height, width))
        assert 16 <= height <= 48 and 24 <= width <= 128
        assert 1 <= len(scene.boxes) == len(scene.labels) <= 8
        assert (scene.boxes[:, :2] >= 0).all()
        assert (scene.boxes[:, 2] <= width).all() and (
            scene.boxes[:, 3] <= height
        ).all()
        covered = torch.zeros(height, width)
        for x, y, right, bottom in scene.boxes.int().tolist():
            covered[y:bottom, x:right] += 1
        assert covered.max() == 1
        assert (scene.img[0][covered == 0] == 0).all()
    assert len(sizes) > 150


def test_a_scene_is_the_same_every_time_and_its_pixels_are_digits(
    digits: ModuleType,
) -> None:
    scene, again = digits.compose(7, held_out=True), digits.compose(7, held_out=True)
    assert torch.equal(scene.img, again.img) and torch.equal(scene.labels, again.labels)
    images, labels = digits.digits(held_out=True)
    for (x, y, *_), label in zip(
        scene.boxes.int().tolist(), scene.labels.tolist(), strict=True
    ):
        patch = scene.img[0, y : y + 8, x : x + 8]
        same = (images == patch).flatten(1).all(1)
        assert label in labels[same].tolist()


def test_no_digit_is_both_trained_on_and_held_out(digits: ModuleType) -> None:
    train, held_out = digits.split(1797)
    assert not set(train.tolist()) & set(held_out.tolist())
    assert len(train) + len(held_out) == 1797
    assert len(digits.digits(held_out=True)[1]) == len(held_out) == 360


def test_the_heatmap_is_one_exactly_at_the_centres(digits: ModuleType) -> None:
    scene = digits.compose(3, held_out=False)
    heatmap = digits.draw_heatmap(scene)
    height, width = scene.img.shape[1:]
    assert heatmap.shape == (10, (height + 1) // 2, (width + 1) // 2)
    assert (heatmap == 1).sum() == len(scene.boxes)
    assert heatmap.min() == 0


def test_peaks_of_a_perfect_heatmap_find_every_digit(digits: ModuleType) -> None:
    for index in range(20):
        scene = digits.compose(index, held_out=False)
        heatmap = digits.draw_heatmap(scene)
        # Room that padding added: nothing may be found there.
        padded = torch.nn.functional.pad(heatmap, (0, 9, 0, 5), value=0.99)
        (peaks,) = digits.find_peaks(padded[None], [tuple(scene.img.shape[1:])])
        counts = digits.count_matches(peaks, scene.boxes, scene.labels)
        assert counts.tolist() == [len(scene.boxes), 0, 0]


@pytest.mark.parametrize(
    ("boxes", "labels", "expected"),
    [
        ([[0, 0, 8, 8], [20, 4, 28, 12]], [3, 5], [2, 0, 0]),
        ([[1, 1, 9, 9]], [3], [1, 0, 1]),  # one pixel off is near enough
        ([[3, 3, 11, 11]], [3], [0, 1, 2]),  # three are not
        ([[0, 0, 8, 8]], [4], [0, 1, 2]),  # right place, wrong class
        ([[0, 0, 8, 8], [1, 0, 9, 8]], [3, 3], [1, 1, 1]),  # one digit found twice
        ([], [], [0, 0, 2]),
    ],
)
def test_a_digit_counts_once_and_only_with_its_class(
    digits: ModuleType, boxes: list[list[float]], labels: list[int], expected: list[int]
) -> None:
    truth = torch.tensor([[0.0, 0, 8, 8], [20, 4, 28, 12]])
    counts = digits.count_matches(found(boxes, labels), truth, torch.tensor([3, 5]))
    assert counts.tolist() == expected


def test_detections_in_an_empty_scene_are_all_wrong(digits: ModuleType) -> None:
    nothing = torch.empty(0, 4), torch.empty(0, dtype=torch.long)
    counts = digits.count_matches(found([[0, 0, 8, 8]], [1]), *nothing)
    assert counts.tolist() == [0, 1, 0]


def test_f1_is_the_harmonic_mean_of_precision_and_recall(digits: ModuleType) -> None:
    score = digits.quality(torch.tensor([6, 2, 4]))
    assert score["precision"] == 0.75 and score["recall"] == 0.6
    assert score["f1"] == pytest.approx(2 * 0.75 * 0.6 / (0.75 + 0.6))
    assert digits.quality(torch.zeros(3)) == {"f1": 0, "precision": 0, "recall": 0}


def test_padding_of_the_heatmap_does_not_change_the_loss(digits: ModuleType) -> None:
    target = torch.zeros(1, 10, 6, 6)
    target[0, 2, 3, 3] = 1
    scores = torch.rand(1, 10, 6, 6).clamp(0.01, 0.99)
    pad = torch.nn.functional.pad
    wider = pad(scores, (0, 4), value=0.9), pad(target, (0, 4), value=digits.OUTSIDE)
    torch.testing.assert_close(
        digits.focal_loss(*wider), digits.focal_loss(scores, target)
    )


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
