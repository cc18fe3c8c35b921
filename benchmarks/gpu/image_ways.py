"""Ways to normalise and pad images: ours, mmengine's, and chains of torch's."""

from __future__ import annotations

import functools
import importlib
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

import pyparallel

from .. import peers
from .target import DryRun

MEAN, STD = (123.675, 116.28, 103.53), (58.395, 57.12, 57.375)
DIVISOR = 32


class Form(NamedTuple):
    """The form of results: dtype, memory layout, and whether channels are swapped."""

    dtype: torch.dtype
    layout: torch.memory_format
    swap: bool = False
    mask: bool = False

    def __str__(self) -> str:
        names = {torch.contiguous_format: "NCHW", torch.channels_last: "channels_last"}
        more = ", RGB from BGR" * self.swap + ", with mask" * self.mask
        return f"{str(self.dtype).removeprefix('torch.')} {names[self.layout]}{more}"


Numbers = tuple[Tensor, Tensor]


def numbers(device: torch.device) -> Numbers:
    """Return mean and std in a shape that broadcasts over an image."""
    mean, std = (torch.tensor(n, device=device).view(3, 1, 1) for n in (MEAN, STD))
    return mean, std


def normalised(image: Tensor) -> Tensor:
    """Return an image as float32, normalised."""
    mean, std = numbers(image.device)
    return (image.float() - mean) / std


def ours(
    form: Form, device: torch.device | None, exact: bool = True
) -> Callable[[Sequence[Tensor]], Any] | None:
    """Return our preprocessor, which first sends images to a device, or None."""
    kind: Any = getattr(pyparallel, "ImagePreprocessor", None)
    if kind is None:
        return None
    made: Callable[[Sequence[Tensor]], Any] = kind(
        MEAN,
        STD,
        size_divisor=DIVISOR,
        dtype=form.dtype,
        memory_format=form.layout,
        return_mask=form.mask,
        swap_channels=form.swap,
        exact=exact,
        device=device,
    )
    return made


@functools.cache
def mmengine_class() -> tuple[Any, str]:
    """Return mmengine's preprocessor, or None and the reason."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return importlib.import_module("mmengine.model").ImgDataPreprocessor, ""
    except ImportError as error:
        return None, f"not installed: {error}"
    except Exception as error:  # any failure with this version of torch
        return None, f"fails: {type(error).__name__}: {error}"


def mmengine(form: Form, where: DryRun) -> Callable[[Sequence[Tensor]], Tensor] | None:
    """Return mmengine's preprocessor; None if mmengine is not installed."""
    kind, _ = mmengine_class()
    if kind is None:
        return None
    made = kind(MEAN, STD, DIVISOR, bgr_to_rgb=form.swap).to(where.device)
    return lambda images: _as(made({"inputs": list(images)})["inputs"], form)


def _as(batch: Tensor, form: Form) -> Tensor:
    return batch.to(form.dtype, memory_format=form.layout)


def style(
    images: Sequence[Tensor], form: Form, target: Sequence[int], numbers: Numbers
) -> Tensor:
    """Use mmengine's sequence of torch operators: for each image, then for all."""
    mean, std = numbers
    if form.swap:
        images = [image[[2, 1, 0]] for image in images]
    floats = [(image.float() - mean) / std for image in images]
    return _as(peers.pad_then_stack(floats, target, 0), form)


def timm(padded: Tensor, form: Form, numbers: Numbers) -> Tensor:
    """Normalise a padded batch as timm's loader does, in as few passes as possible."""
    mean, std = numbers
    batch = padded.to(torch.float32, memory_format=form.layout, copy=True)
    return batch.sub_(mean).div_(std).to(form.dtype)


def compiled(
    form: Form, numbers: Numbers, **options: Any
) -> Callable[[Tensor], Tensor]:
    """Return a chain for padded batches that torch.compile fuses into one kernel."""
    mean, std = numbers

    def chain(padded: Tensor) -> Tensor:
        padded = padded.flip(1) if form.swap else padded
        batch = ((padded.float() - mean) / std).to(form.dtype)
        return batch.contiguous(memory_format=form.layout)

    made: Callable[[Tensor], Tensor] = torch.compile(chain, dynamic=False, **options)
    return made
