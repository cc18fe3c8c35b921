"""Cases of loaders: batches of images, from samples in memory to a consumer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.utils.data
from torch import Tensor
from torch.utils.data import default_collate

from pyparallel import DataContainer, DataLoader, collate

from .. import data, peers
from .._harness import Contender
from .epochs import (
    CopyWhole,
    Counted,
    Epochs,
    Items,
    contenders,
    in_our_loader,
    peer,
    per_batch,
    touch_pages,
)

MMCV = "mmcv 1.x collate, torch's loader"
ONE_PASS = "ours collate, torch's loader"
FILL = "new_full + copy_, torch's loader"
TORCH = "default_collate, torch's loader"
TORCH_IN_OURS = "default_collate, our loader"


class Goal(NamedTuple):
    """A goal: the least time of a peer relative to pyparallel.

    Attributes:
        peer: The name of the peer.
        factor: The least ratio.
        of: The figure to compare: ``"seconds"``, or ``"net"`` of the floor.
    """

    peer: str
    factor: float
    of: str = "seconds"


class Comparison(NamedTuple):
    """One comparison of loaders.

    Attributes:
        title: the title in its table.
        kind: its table: ``images``, ``fields`` or ``overlap``.
        note: a description of the data and of the work in each process.
        contenders: creates the contenders, with their epochs, for a clock.
        goals: the goals of the first contender.
        floors: by contender, another one that lacks only the work in question.
    """

    title: str
    kind: str
    note: str
    contenders: Callable[[Counted], list[tuple[Contender, Epochs | None]]]
    goals: Sequence[Goal] = ()
    floors: Mapping[str, str] | None = None


#: The goals of the loader for image batches of 40 MB and more.
GOALS = (Goal(MMCV, 4), Goal(ONE_PASS, 3))


def cases(quick: bool, workers: Sequence[int]) -> list[Comparison]:
    """Return the cases for each number of workers; ``quick`` shrinks them."""
    found = []
    for num in workers:
        for title, (note, samples, batch_size, use) in _data(quick).items():
            found.append(
                Comparison(
                    f"{title}, {num} worker{'s' * (num != 1)}",
                    "images",
                    f"{note}, {batch_size} in a batch",
                    partial(_images, samples, batch_size, num, use, quick),
                    GOALS,
                )
            )
    return found


def _data(quick: bool) -> dict[str, tuple[str, Callable[[], list[Tensor]], int, Any]]:
    """Return the samples to batch: batches have 40 MB and more."""
    size = (50, 83) if quick else (800, 1333)
    num_photos = len(data.photos(*size))
    note = f"{num_photos} real photos, resized to {size[1]}x{size[0]}"
    draw = f"synthetic: sizes drawn from COCO's, resized to {size[1]}x{size[0]}"
    shapes = data.coco_shapes(24, *size)
    equal = [(3, *size)] * 12
    one = f"synthetic: all {size[1]}x{size[0]}"
    u8, f32 = torch.uint8, torch.float32
    drawn = data.random_tensors
    photos = partial(data.photos, *size)
    copied = "; the consumer copies all"
    found: dict[str, Any] = {}
    if num_photos:
        found["photos uint8"] = (note, photos, 18, touch_pages)
        found["photos uint8, read whole"] = (note + copied, photos, 18, CopyWhole())
        found["photos float32"] = (note, lambda: _floats(photos()), 5, touch_pages)
    found["detection uint8"] = (draw, partial(drawn, shapes, u8), 16, touch_pages)
    found["detection float32"] = (draw, partial(drawn, shapes, f32), 4, touch_pages)
    found["equal uint8"] = (one, partial(drawn, equal, u8), 16, touch_pages)
    return found


def _floats(images: Sequence[Tensor]) -> list[Tensor]:
    return [image.float() for image in images]


def _images(
    make: Callable[[], list[Tensor]],
    batch_size: int,
    workers: int,
    use: Callable[[Any], None],
    quick: bool,
    clock: Counted,
) -> list[tuple[Contender, Epochs | None]]:
    samples = make()
    num = (3 if quick else 8) * batch_size
    equal = len({sample.shape for sample in samples}) == 1

    def loader(kind: Any, items: Sequence[Any], collate_fn: Any) -> Callable[[], Any]:
        return partial(
            kind,
            Items(items, num),
            batch_size,
            num_workers=workers,
            collate_fn=collate_fn,
            persistent_workers=True,
            multiprocessing_context="fork",
        )

    def epochs(make: Callable[[], Any], batch: Any = _same) -> Epochs:
        run = per_batch(lambda got: use(batch(got)))
        return Epochs(make, run, clock, batch)

    torchs: Any = torch.utils.data.DataLoader
    options: Any = {"stack": True, "pad_dims": 2}
    mine = [DataContainer(sample, **options) for sample in samples]
    ours = partial(collate, samples_per_gpu=batch_size)
    mmcv = None
    if peers.mmcv_collate is not None:
        theirs = [peers.MmcvContainer(sample, **options) for sample in samples]
        function = partial(peers.mmcv_collate, samples_per_gpu=batch_size)
        mmcv = epochs(loader(torchs, theirs, function), _chunk)
    found: list[tuple[Contender, Epochs | None]] = [
        *contenders(lambda make: epochs(make, _chunk), loader(DataLoader, mine, ours)),
        peer(MMCV, mmcv),
        peer(ONE_PASS, epochs(loader(torchs, mine, ours), _chunk)),
        peer(FILL, epochs(loader(torchs, samples, _fill))),
    ]
    if equal:
        in_torchs = loader(torchs, samples, default_collate)
        in_ours = loader(DataLoader, samples, default_collate)
        found += [
            peer(TORCH, epochs(in_torchs)),
            in_our_loader(TORCH_IN_OURS, epochs(in_ours)),
        ]
    return found


def _same(batch: Any) -> Any:
    return batch


def _chunk(batch: Any) -> Any:
    return batch.data[0]


def _fill(samples: Sequence[Tensor]) -> Tensor:
    """Make a batch as detectron2's ImageList does."""
    shapes = [sample.shape for sample in samples]
    target = [max(sizes) for sizes in zip(*shapes, strict=True)]
    return peers.full_then_copy(samples, target, 0)
