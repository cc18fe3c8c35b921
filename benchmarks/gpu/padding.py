"""Cases of padding only: ragged tensors on the device become one padded batch."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

import pyparallel

from .. import data, peers
from .._harness import Contender
from .case import Goal, GpuCase, Made, Rotation
from .images import drawn
from .target import DryRun

PAD = "F.pad of each, torch.stack"
FILL = "new_full, copy_ of each"
NESTED = "torch.nested to_padded_tensor, already nested"
COPY = "device copy of the same size"


def cases(quick: bool) -> list[GpuCase]:
    """Return the cases; ``quick`` shrinks them."""
    num, scale = (4, 16) if quick else (16, 1)
    height, wide, narrow = 800 // scale, 1333 // scale, 667 // scale
    odd = [(3, height, narrow if i % 2 else wide) for i in range(num)]
    coco = data.coco_shapes(num, height, wide)
    found = []
    for title, shapes in (("widths 1333 and 667", odd), ("COCO's sizes", coco)):
        for dtype, share in ((torch.uint8, 0.65), (torch.float32, 0.85)):
            goals = [Goal(COPY, share, of="device"), Goal(PAD, 2, of="device")]
            if dtype is torch.float32:
                goals.append(Goal(NESTED, 2.5, of="device"))
            goals.append(Goal(count="launches", most=1))
            name = str(dtype).removeprefix("torch.")
            found.append(
                GpuCase(
                    f"padding alone, {name}, {title}",
                    f"synthetic: {num} images on the device, padded to the largest",
                    partial(_pad, shapes, dtype),
                    goals,
                )
            )
    return found


def _pad(shapes: Sequence[data.Shape], dtype: torch.dtype, where: DryRun) -> Made:
    """Compare ways to pad and stack images that are on the device."""
    # Three batches and their results are larger than a cache.
    batches = Rotation([_batch(shapes, i, dtype, where) for i in range(3)])
    target = [max(sizes) for sizes in zip(*shapes, strict=True)]

    def of(function: Callable[..., Tensor]) -> Callable[[], Tensor]:
        return lambda: function(batches.now[0], target, 0)

    contenders = [
        Contender("ours", lambda: pyparallel.pad_stack(batches.now[0]), "ours"),
        Contender(PAD, of(peers.pad_then_stack)),
        Contender(FILL, of(peers.full_then_copy)),
    ]
    if dtype.is_floating_point:
        size = (len(shapes), *target)

        def of_nested() -> Any:
            return torch.nested.to_padded_tensor(batches.now[1], 0.0, size)

        contenders.append(Contender(NESTED, of_nested))
    num_elements = sum(image.numel() for image in batches.now[0])
    num_elements += len(shapes) * torch.Size(target).numel()
    source = torch.ones(num_elements // 2, dtype=dtype, device=where.device)
    copy = torch.empty_like(source)
    contenders.append(Contender(COPY, lambda: copy.copy_(source), "limit"))
    return Made(contenders, batches)


def _batch(
    shapes: Sequence[data.Shape], seed: int, dtype: torch.dtype, where: DryRun
) -> tuple[list[Tensor], Any]:
    """Return images, also as a nested tensor if their dtype allows it."""
    images = [x.to(where.device).to(dtype) for x in drawn(tuple(shapes), seed)]
    if not dtype.is_floating_point:
        return images, None
    with warnings.catch_warnings():  # that the API is a prototype
        warnings.simplefilter("ignore")
        return images, torch.nested.nested_tensor(images)
