"""Images of different sizes become one normalised, padded batch."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import torch

from .. import backend
from ..backend.image_checks import MOST_CHANNELS, is_packed
from ..batch import allocation, stack, torch_stack
from ..batch.plan import StackPlan, plan_stack
from ..core.errors import BatchTypeError, BatchValueError, EmptyBatchError, type_name
from ._plan import Channels, ImageForm

_AS_THEY_ARE = ({torch.uint8}, {torch.float32})
_dtype_of = attrgetter("dtype")
_shape_of = attrgetter("shape")


def name(i: int) -> str:
    """Name image ``i`` in an error."""
    return f"images[{i}]"


def check(images: Sequence[Any]) -> None:
    """Raise unless these are images that can stand in one batch.

    Raises:
        TypeError: one is no dense tensor of real numbers.
        ValueError: there is none, or the first at fault has another number of
            dimensions or channels than it must.
    """
    if not images:
        raise EmptyBatchError(
            "ImagePreprocessor: images must have at least one image, but is empty."
        )
    for i, image in enumerate(images):
        where = f"ImagePreprocessor: {name(i)}"
        if not isinstance(image, torch.Tensor):
            raise BatchTypeError(
                f"{where} must be a tensor or a numeric array (C, h, w), or a PIL "
                f"image, but is {type_name(image)}. Convert it with torch.as_tensor."
            )
        if image.is_complex() or image.is_quantized:
            raise BatchTypeError(
                f"{where} must have a dtype of real numbers, but has {image.dtype}."
            )
        if image.dim() != 3 or not 1 <= image.shape[0] <= MOST_CHANNELS:
            raise BatchValueError(
                f"{where} must have shape (C, h, w) with 1 to {MOST_CHANNELS} "
                f"channels, but has shape {tuple(image.shape)}."
            )
        if image.shape[0] != images[0].shape[0]:
            raise BatchValueError(
                f"{where} must have {images[0].shape[0]} channels like images[0], but "
                f"has shape {tuple(image.shape)}."
            )


def batch(
    images: Sequence[torch.Tensor], form: ImageForm
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the batch, and the mask if the form has one.

    Plain images go by the backend, in one pass; those that need gradients, or that the
    backend does not take, by torch's operators.

    Args:
        images: that `check` has passed; all on one device.
        form: of the batch.
    """
    torch_stack.check_layouts(images, name)
    channels = form.channels(images[0].shape[0])
    shapes = [tuple(image.shape) for image in images]
    plan = plan_stack(shapes, 2, name, form.padding)
    if set(map(_dtype_of, images)) not in _AS_THEY_ARE:
        images = [image.float() for image in images]
    if stack.are_plain(images):
        try:
            data, mask = _by_backend(images, form, plan, channels)
        except (TypeError, ValueError):  # and nothing is written; see are_plain
            data, mask = _differentiably(images, form, plan, channels)
    else:
        data, mask = _differentiably(images, form, plan, channels)
    return stack.counted(data, images), mask


def _by_backend(
    images: Sequence[torch.Tensor], form: ImageForm, plan: StackPlan, channels: Channels
) -> tuple[torch.Tensor, torch.Tensor | None]:
    device, mask = images[0].device, None
    packed = [each if is_packed(each) else each.contiguous() for each in images]
    num, depth, *sides = plan.shape
    if form.channels_last:
        data = allocation.empty((num, *sides, depth), form.dtype, device)
        data = data.permute(0, 3, 1, 2)
    else:
        data = allocation.empty(plan.shape, form.dtype, device)
    if form.padding.mask:
        mask = allocation.empty((num, *sides), torch.bool, device)
    backend.image_batch(data, packed, mask, *channels, form.swap_channels, form.exact)
    return data, mask


def _differentiably(
    images: Sequence[torch.Tensor], form: ImageForm, plan: StackPlan, channels: Channels
) -> tuple[torch.Tensor, torch.Tensor | None]:
    first = images[0]
    mean, std, fill = (
        torch.tensor(row, dtype=torch.float32, device=first.device).view(-1, 1, 1)
        for row in channels
    )
    done = []
    marks = []
    for i, image in enumerate(images):
        torch_stack.check_sample(images, name, i)
        pixels = (image.flip(0) if form.swap_channels else image).float()
        if form.exact:
            pixels = (pixels - mean) / std
        else:
            pixels = pixels * (1 / std.double()).float()
            pixels = pixels - (mean.double() / std.double()).float()
        sides = torch_stack.margins(plan, image.shape[1:], i)
        inside = torch.ones(image.shape[1:], dtype=torch.bool, device=first.device)
        inside = torch_stack.pad(inside, sides)
        padded = torch_stack.pad(pixels, sides)
        done.append(torch.where(inside, padded, fill).to(form.dtype))
        marks.append(inside)
    data = torch.stack(done).contiguous()
    if form.channels_last:
        data = data.contiguous(memory_format=torch.channels_last)
    return data, torch.stack(marks) if form.padding.mask else None
