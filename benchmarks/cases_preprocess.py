"""Cases of uint8 images that become one normalised batch."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pyparallel import ImagePreprocessor

from . import data, limits, peers
from ._harness import Case, Contender
from .backends import ours

with warnings.catch_warnings():  # deprecations of its own dependencies
    warnings.simplefilter("ignore")
    try:
        from mmengine.model import ImgDataPreprocessor
    except ImportError:
        ImgDataPreprocessor = None

MEAN, STD, DIVISOR = (123.675, 116.28, 103.53), (58.395, 57.12, 57.375), 32


def cases(quick: bool) -> list[Case]:
    """Return the cases; ``quick`` shrinks them."""
    size = (50, 83) if quick else (800, 1333)
    shapes = data.coco_shapes(16, *size)
    note = f"16 images, uint8, sizes drawn from COCO's, resized to {size[1]}x{size[0]}"
    found = [_case("normalise and pad", f"synthetic: {note}", shapes)]
    num_photos = len(data.photos(50, 83))
    if num_photos:
        note = f"{num_photos} real photos, resized to {size[1]}x{size[0]}"
        found.append(
            Case("normalise and pad photos", note, lambda: _ways(data.photos(*size)))
        )
    return found


def _case(title: str, note: str, shapes: Sequence[data.Shape]) -> Case:
    drawn = partial(data.random_tensors, shapes, torch.uint8)
    return Case(title, note, lambda: _ways(drawn()))


def _ways(images: Sequence[Tensor]) -> list[Contender]:
    """Compare ways to turn ragged uint8 images, BGR, into a batch of floats, RGB."""
    images = list(images)
    preprocess = ImagePreprocessor(MEAN, STD, size_divisor=DIVISOR, swap_channels=True)
    theirs: Callable[[], Any] | None = None
    if ImgDataPreprocessor is not None:
        module = ImgDataPreprocessor(
            MEAN, STD, pad_size_divisor=DIVISOR, bgr_to_rgb=True
        )
        theirs = partial(_inputs, module, images)
    return [
        *ours(partial(preprocess, images)),
        Contender("mmengine ImgDataPreprocessor", theirs),
        Contender("normalise each, pad, stack", partial(_each, images)),
        Contender("pad as bytes, normalise in place", partial(_whole, images)),
        *limits.copies(preprocess(images)),
    ]


def _inputs(module: Any, images: list[Tensor]) -> Tensor:
    result: Tensor = module({"inputs": images})["inputs"]
    return result


def _target(images: Sequence[Tensor]) -> list[int]:
    sides = zip(*(image.shape[1:] for image in images), strict=True)
    return [3, *(-(-max(each) // DIVISOR) * DIVISOR for each in sides)]


def _numbers() -> list[Tensor]:
    return [torch.tensor(each).view(-1, 1, 1) for each in (MEAN, STD)]


def _each(images: Sequence[Tensor]) -> Tensor:
    """Flip, convert and normalise each image, as torchvision's transforms do."""
    mean, std = _numbers()
    done = [image.flip(0).float().sub_(mean).div_(std) for image in images]
    return peers.pad_then_stack(done, _target(images), 0)


def _whole(images: Sequence[Tensor]) -> Tensor:
    """Batch bytes first, and normalise them together, as timm's loader does.

    This also normalises the padding, so the padding is written again.
    """
    mean, std = _numbers()
    batch = peers.full_then_copy(images, _target(images), 0)
    batch = batch.flip(1).float().sub_(mean).div_(std)
    for row, image in zip(batch, images, strict=True):
        row[:, image.shape[1] :] = 0
        row[:, :, image.shape[2] :] = 0
    return batch
