"""Digit scenes: real digits in random layouts, and the scores of detections.

This uses numpy and torch only; ``ragged_digits.py`` makes batches of the scenes.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

SIDE = 8  # pixels of a digit; every box is 8 x 8, so a detector only finds centres
STRIDE = 2  # pixels of a heat-map cell
NUM_CLASSES = 10
NUM_HELD_OUT = 360
OUTSIDE = -1.0  # heat-map cells in the padding, which the loss must ignore


@dataclass(frozen=True)
class Scene:
    """One picture with its digits.

    Attributes:
        img: ``(1, height, width)`` in [0, 1].
        boxes: ``(n, 4)`` as x, y of the top left and of the bottom right corner.
        labels: ``(n,)`` classes.
    """

    img: Tensor
    boxes: Tensor
    labels: Tensor


@functools.cache
def digits(held_out: bool) -> tuple[Tensor, Tensor]:
    """Return images ``(n, 8, 8)`` and labels of one part of scikit-learn's digits."""
    data = load_digits()
    order = split(len(data.target))[held_out]
    images = torch.from_numpy(data.images[order]).float() / 16
    return images, torch.from_numpy(data.target[order]).long()


def split(num_digits: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the indices of the digits for training and for validation."""
    order = np.random.default_rng(0).permutation(num_digits)
    return order[NUM_HELD_OUT:], order[:NUM_HELD_OUT]


def compose(index: int, held_out: bool) -> Scene:
    """Make scene ``index``, with a fixed seed and its own size."""
    images, labels = digits(held_out)
    rng, (height, width) = draw_size(index, held_out)
    corners = place(rng, height, width, wanted=int(rng.integers(1, 9)))
    chosen = torch.from_numpy(rng.integers(0, len(labels), len(corners)))
    img = torch.zeros(1, height, width)
    for (x, y), digit in zip(corners, images[chosen], strict=True):
        img[0, y : y + SIDE, x : x + SIDE] = digit
    boxes = torch.tensor([(x, y, x + SIDE, y + SIDE) for x, y in corners])
    return Scene(img, boxes.float(), labels[chosen])


def draw_size(
    index: int, held_out: bool
) -> tuple[np.random.Generator, tuple[int, int]]:
    """Return the random generator of a scene, and its height and width."""
    rng = np.random.default_rng((int(held_out), index))
    return rng, (int(rng.integers(16, 49)), int(rng.integers(24, 129)))


def place(
    rng: np.random.Generator, height: int, width: int, wanted: int
) -> list[tuple[int, int]]:
    """Return the top left corners of up to ``wanted`` digits that do not overlap."""
    corners: list[tuple[int, int]] = []
    for _ in range(10 * wanted):
        x = int(rng.integers(0, width - SIDE + 1))
        y = int(rng.integers(0, height - SIDE + 1))
        if all(max(abs(x - a), abs(y - b)) >= SIDE for a, b in corners):
            corners.append((x, y))
        if len(corners) == wanted:
            break
    return corners


def draw_heatmap(scene: Scene) -> Tensor:
    """Return one map for each class, with a bell of height 1 on every digit's centre.

    The shape is ``(10, ceil(height / 2), ceil(width / 2))``.
    """
    height, width = scene.img.shape[1:]
    heatmap = torch.zeros(NUM_CLASSES, -(-height // STRIDE), -(-width // STRIDE))
    rows, columns = torch.arange(heatmap.shape[1]), torch.arange(heatmap.shape[2])
    centres = (scene.boxes[:, :2] + SIDE / 2).long() // STRIDE
    for (x, y), label in zip(centres.tolist(), scene.labels.tolist(), strict=True):
        bell = torch.exp(-((rows[:, None] - y) ** 2 + (columns - x) ** 2) / 1.5)
        heatmap[label] = torch.maximum(heatmap[label], bell)
    return heatmap


class ChannelNorm(nn.Module):
    """Divide by the root mean square over the channels of each cell.

    Norms over the whole map, such as GroupNorm, would depend on its padding.
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels, 1, 1))
        self.bias = nn.Parameter(torch.zeros(channels, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        """Normalise ``(n, channels, h, w)``."""
        scale = (x.square().mean(1, keepdim=True) + 1e-4).rsqrt()
        return x * scale * self.weight + self.bias


def network(channels: int = 24) -> nn.Sequential:
    """Return six convolutions from ``(n, 1, h, w)`` to the scores of all cells."""
    layers: list[nn.Module] = []
    for i in range(5):
        inputs, stride = (1 if i == 0 else channels), (STRIDE if i == 1 else 1)
        layers.append(nn.Conv2d(inputs, channels, 3, stride, 1, bias=False))
        layers += [ChannelNorm(channels), nn.ReLU()]
    head = nn.Conv2d(channels, NUM_CLASSES, 3, padding=1)
    # 1 % of cells. For mypy, a bias may be None.
    nn.init.constant_(head.bias, -4.6)  # type: ignore[arg-type]
    return nn.Sequential(*layers, head)


def focal_loss(scores: Tensor, target: Tensor) -> Tensor:
    """Return the penalty-reduced focal loss of CornerNet over cells of the scenes."""
    centre, inside = target == 1, target != OUTSIDE
    hit = (1 - scores) ** 2 * scores.log()
    miss = (1 - target) ** 4 * scores**2 * (1 - scores).log()
    return -torch.where(centre, hit, miss)[inside].sum() / centre.sum().clamp(min=1)


def find_peaks(
    scores: Tensor, shapes: list[tuple[int, int]]
) -> list[dict[str, Tensor]]:
    """Return ``boxes``, ``labels`` and ``scores`` for each scene."""
    best, labels = scores.max(dim=1)
    is_peak = (best == F.max_pool2d(best, 3, 1, padding=1)) & (best > 0.35)
    found = []
    for i, (height, width) in enumerate(shapes):
        y, x = is_peak[i, : -(-height // STRIDE), : -(-width // STRIDE)].nonzero().T
        # The position of a cell is its centre.
        corner = torch.stack([x, y], 1) * STRIDE + (STRIDE - 1 - SIDE) / 2
        boxes = torch.cat([corner, corner + SIDE], 1)
        found.append(
            {"boxes": boxes, "labels": labels[i, y, x], "scores": best[i, y, x]}
        )
    return found


def count_matches(found: dict[str, Tensor], boxes: Tensor, labels: Tensor) -> Tensor:
    """Return true positives, false positives and false negatives of one scene.

    A detection is true if its class is right and it covers half of the union with a
    digit (IoU 0.5) that no detection of a higher score has taken.

    Args:
        found: ``boxes``, ``labels`` and ``scores`` of the detections.
        boxes: the boxes of the digits in the scene.
        labels: the labels of the digits in the scene.
    """
    free = torch.ones(len(boxes), dtype=torch.bool)
    for i in found["scores"].argsort(descending=True).tolist():
        overlap = iou(found["boxes"][i], boxes) * (labels == found["labels"][i]) * free
        if len(boxes) and overlap.max() >= 0.5:
            free[overlap.argmax()] = False
    hits = int((~free).sum())
    return torch.tensor([hits, len(found["boxes"]) - hits, len(boxes) - hits])


def iou(box: Tensor, boxes: Tensor) -> Tensor:
    """Return the intersection over union of one box with many."""
    low = torch.maximum(box[:2], boxes[:, :2])
    high = torch.minimum(box[2:], boxes[:, 2:])
    shared = (high - low).clamp(min=0).prod(1)
    area = (box[2:] - box[:2]).prod() + (boxes[:, 2:] - boxes[:, :2]).prod(1)
    return shared / (area - shared)


def quality(counts: Tensor) -> dict[str, float]:
    """Return F1, precision and recall from the three counts."""
    hits, extra, missed = counts.tolist()
    return {
        "f1": 2 * hits / max(2 * hits + extra + missed, 1),
        "precision": hits / max(hits + extra, 1),
        "recall": hits / max(hits + missed, 1),
    }
