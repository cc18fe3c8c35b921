"""Cases of loaders: batches of images, from samples in memory to a consumer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import default_collate

from pyparallel import DataContainer, DataLoader, collate

from .. import data, peers
from .._harness import Case, Contender, Goal
from .epochs import (
    CopyWhole,
    Items,
    Make,
    Ways,
    case,
    loader,
    per_batch,
    touch_pages,
)

MMCV = "mmcv 1.x collate, torch's loader"
ONE_PASS = "ours collate, torch's loader"
FILL = "new_full + copy_, torch's loader"
TORCH = "default_collate, torch's loader"
TORCH_IN_OURS = "default_collate, our loader"

#: The goals of the loader for image batches of 40 MB and more.
GOALS = (Goal(MMCV, 4), Goal(ONE_PASS, 3))


def cases(quick: bool, workers: Sequence[int]) -> Iterator[Case]:
    """Yield the cases for each number of workers; ``quick`` shrinks them."""
    num_batches = 3 if quick else 8
    for num in workers:
        for title, note, samples, batch_size, use in _data(quick):
            yield case(
                f"{title}, {num} worker{'s' * (num != 1)}",
                f"{note}, {batch_size} in a batch",
                partial(_contenders, samples, batch_size, num, use, num_batches),
                num_batches,
                GOALS,
            )


def _data(quick: bool) -> Iterator[tuple[str, str, Any, int, Any]]:
    """Yield the samples to batch: batches have 40 MB and more."""
    size = (50, 83) if quick else (800, 1333)
    photos = partial(data.photos, *size)
    note = f"{len(photos())} real photos, resized to {size[1]}x{size[0]}"
    draw = f"synthetic: sizes drawn from COCO's, resized to {size[1]}x{size[0]}"
    u8, f32, drawn = torch.uint8, torch.float32, data.random_tensors
    shapes, equal = data.coco_shapes(24, *size), [(3, *size)] * 12
    if photos():
        yield "photos uint8", note, photos, 18, touch_pages
        copied = f"{note}; the consumer copies all"
        yield "photos uint8, read whole", copied, photos, 18, CopyWhole()
        yield (
            "photos float32",
            note,
            lambda: [image.float() for image in photos()],
            *(5, touch_pages),
        )
    yield "detection uint8", draw, partial(drawn, shapes, u8), 16, touch_pages
    yield "detection float32", draw, partial(drawn, shapes, f32), 4, touch_pages
    one = f"synthetic: all {size[1]}x{size[0]}"
    yield "equal uint8", one, partial(drawn, equal, u8), 16, touch_pages


def _contenders(
    make: Callable[[], list[Tensor]],
    batch_size: int,
    workers: int,
    use: Callable[[Any], None],
    num_batches: int,
) -> list[Contender]:
    samples = make()

    def made(kind: Any, items: Sequence[Any], collate_fn: Any) -> Make:
        repeated = Items(items, num_batches * batch_size)
        return loader(kind, repeated, batch_size, workers, collate_fn=collate_fn)

    options: Any = {"stack": True, "pad_dims": 2}
    mine = [DataContainer(sample, **options) for sample in samples]
    ours = partial(collate, samples_per_gpu=batch_size)
    mmcv = None
    if peers.mmcv_collate is not None:
        theirs = [peers.MmcvContainer(sample, **options) for sample in samples]
        function = partial(peers.mmcv_collate, samples_per_gpu=batch_size)
        mmcv = made(TorchLoader, theirs, function)
    boxed = Ways(per_batch(lambda batch: use(batch.data[0])), lambda x: x.data[0])
    plain = Ways(per_batch(use))
    found = [
        *boxed.ours(made(DataLoader, mine, ours)),
        boxed.peer(MMCV, mmcv),
        boxed.peer(ONE_PASS, made(TorchLoader, mine, ours)),
        plain.peer(FILL, made(TorchLoader, samples, _fill)),
    ]
    if len({sample.shape for sample in samples}) == 1:
        in_ours = made(DataLoader, samples, default_collate)
        found += [
            plain.peer(TORCH, made(TorchLoader, samples, default_collate)),
            plain.peer(TORCH_IN_OURS, in_ours, "ours"),
        ]
    return found


def _fill(samples: Sequence[Tensor]) -> Tensor:
    """Make a batch as detectron2's ImageList does."""
    shapes = [sample.shape for sample in samples]
    target = [max(sizes) for sizes in zip(*shapes, strict=True)]
    return peers.full_then_copy(samples, target, 0)
