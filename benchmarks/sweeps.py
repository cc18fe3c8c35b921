"""Sweeps: the same comparison at many sizes of the batch."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from . import data
from ._harness import Contender, Curves, Effort, Record, compare
from .cases_images import stacks

#: The contenders of `stacks` that the charts show.
_BY_BYTES = ("ours", "mmcv", "new_full", "memcpy", "non-temporal")
_BY_IMAGES = ("ours", "mmcv", "new_full", "F.pad", "mmengine", "torch.nested")


def sweeps(quick: bool) -> list[Curves]:
    """Return all sweeps; with ``quick``, short ones."""
    powers = range(16, 19) if quick else range(16, 30)
    images = [1, 2, 4] if quick else [1, 2, 4, 8, 16, 32, 64]
    return [
        Curves(
            "throughput by bytes",
            "synthetic: 8 ragged float32 images, up to a quarter of each padded",
            "output bytes",
            [2**power for power in powers],
            _of_bytes,
        ),
        _of_images("small float32", images, 320, 640, torch.float32, quick),
        _of_images("detection uint8", images, 800, 1333, torch.uint8, quick),
    ]


def _of_images(
    name: str, sizes: list[int], short: int, long: int, dtype: torch.dtype, quick: bool
) -> Curves:
    scale = 16 if quick else 1

    def contenders(num: int) -> list[Contender]:
        shapes = data.coco_shapes(num, short // scale, long // scale)
        return _only(_BY_IMAGES, stacks(data.random_tensors(shapes, dtype), 2))

    note = f"synthetic: sizes drawn from COCO's, resized to {long}x{short}"
    return Curves(f"ratio by batch size: {name}", note, "images", sizes, contenders)


def _of_bytes(nbytes: int) -> list[Contender]:
    return _only(
        _BY_BYTES, stacks(data.random_tensors(_shapes(nbytes), torch.float32), 2)
    )


def _shapes(nbytes: int) -> list[data.Shape]:
    """Return 8 ragged shapes; padded as float32 they have about ``nbytes`` bytes."""
    side = max(8, round(math.sqrt(nbytes / (8 * 3 * 4))))
    short = side - side // 8
    return [(3, side, side), *[(3, short + i % 3, side - i % 4) for i in range(7)]]


def _only(starts: tuple[str, ...], contenders: list[Contender]) -> list[Contender]:
    return [each for each in contenders if each.name.startswith(starts)]


def measure(sweep: Curves, effort: Effort) -> Record:
    """Compare at every size; return the record of the sweep."""

    def points() -> Iterator[Record]:
        for size in sweep.sizes:
            title = f"{sweep.title}: {size}"
            contenders = sweep.contenders(size)
            case = compare(title, contenders, **effort.part(1 / 3)._asdict())
            yield {**case, "size": size}

    record: Record = {"title": sweep.title, "note": sweep.note, "x": sweep.x}
    return {**record, "points": list(points())}
