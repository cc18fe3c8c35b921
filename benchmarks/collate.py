"""How long do `collate`, `scatter` and `ImagePreprocessor` take in one process?"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from functools import partial

import torch

from . import cases_images, cases_leaves, data
from ._harness import Case, Contender, Effort, Record
from .command import Question
from .growth import Curves, measure, table


def cases(args: argparse.Namespace) -> list[Case]:
    """Return all cases; with ``quick``, small versions only, to prove that they run."""
    return [*cases_images.cases(args.quick), *cases_leaves.cases(args.quick)]


# ----------------------------------------------------------------------------- growth
def growth(args: argparse.Namespace, effort: Effort) -> list[Record]:
    """Measure the growth of the time with samples and leaves."""
    return [measure(each, effort) for each in curves(args.quick)]


def curves(quick: bool) -> Iterator[Curves]:
    """Yield all curves; with ``quick``, short ones."""
    samples = [2**i for i in range(5 if quick else 11)]
    leaves = [1, 3, 10, 33, 100, 330, 1000, 3300, 10000][: 5 if quick else 9]
    crops = partial(_crops, 1, 17, 24, torch.uint8)
    thumbs = partial(_crops, 3, 57, 64, torch.float32)
    dicts = "dicts of five fields, images (3, 17 to 24, 17 to 24)"
    for title, note, x, make in (
        ("collate, crops", "(1, 17 to 24, 17 to 24) uint8", "samples", crops),
        ("collate, thumbnails", "(3, 57 to 64, 57 to 64) float32", "samples", thumbs),
        ("collate, detection samples", dicts, "samples", _detection),
        ("scatter to [-1]", "nested", "leaves", cases_leaves.scattered),
        ("pack and rebuild", "nested", "leaves", cases_leaves.packed),
    ):
        sizes = samples if x == "samples" else leaves
        yield Curves(title, f"synthetic: {note}", x, sizes, partial(_packages, make))


def _packages(make: partial[list[Contender]], size: int) -> list[Contender]:
    return [each for each in make(size) if "hand" not in each.name]


def _ragged(channels: int, low: int, high: int, num: int) -> list[data.Shape]:
    """Return shapes whose distribution does not depend on their number."""
    steps = high - low + 1
    return [(channels, high - i % steps, high - i * 3 % steps) for i in range(num)]


def _crops(
    channels: int, low: int, high: int, dtype: torch.dtype, num: int
) -> list[Contender]:
    shapes = _ragged(channels, low, high, num)
    return cases_images.collates(data.random_tensors(shapes, dtype), 2)


def _detection(num: int) -> list[Contender]:
    samples = data.detection_samples(_ragged(3, 17, 24, num))
    return cases_leaves.collate_samples(samples)


QUESTION = Question(
    "collate",
    "pyparallel and its peers",
    cases,
    Effort(max_seconds=6.0),
    parts={"growth": growth},
    malloc=("default", "warm"),
    threaded=True,
    page={
        "shown": ("mmcv", "new_full", "memcpy", "non-temporal"),
        "sections": lambda run: table(run.get("growth", ())),
    },
)
