"""The operator ``torch.ops.pyparallel.image_batch``.

A graph of torch.compile contains it as one node. It is functional. Shapes of its
results follow from the sizes of the images, so that graphs may have dynamic shapes.
Eager code does not call it: torch's dispatch of a list of tensors takes longer than
the work on a few small ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..batch.custom_op import or_empty, padded_sizes, spread
from ..batch.padding import Padding
from . import _batch
from ._plan import ImageForm

_IMAGE_BATCH = (
    "(Tensor[] images, float[]? mean, float[]? std, float[] pad_value, "
    "bool pad_before_normalize, bool swap_channels, bool exact, int[] size_divisor, "
    "ScalarType dtype, bool channels_last, bool return_mask) -> (Tensor, Tensor)"
)


def image_batch(images: Sequence[Tensor], form: ImageForm) -> tuple[Tensor, Tensor]:
    """Return what `_batch.batch` does, as one node; an empty mask stands for none."""
    data: Tensor
    data, mask = _image_batch(
        list(images),
        form.mean,
        form.std,
        form.pad_value,
        form.pad_first,
        form.swap_channels,
        form.exact,
        spread(form.padding.size_divisor, 2),
        form.dtype,
        form.channels_last,
        form.padding.mask,
    )
    return data, mask


@torch.library.custom_op(
    "pyparallel::image_batch", mutates_args=(), schema=_IMAGE_BATCH
)
def _image_batch(images: Sequence[Tensor], *options: Any) -> tuple[Tensor, Tensor]:
    data, mask = _batch.batch(images, _form(*options))
    return data, or_empty(mask, data, torch.bool)


@_image_batch.register_fake
def _(images: Sequence[Tensor], *options: Any) -> tuple[Tensor, Tensor]:
    form, first = _form(*options), images[0]
    height, width = padded_sizes(form.padding, images, 2)
    num, depth = len(images), first.shape[0]
    shape = (num, depth, height, width)
    if form.channels_last:
        data = first.new_empty((num, height, width, depth), dtype=form.dtype)
        data = data.permute(0, 3, 1, 2)
    else:
        data = first.new_empty(shape, dtype=form.dtype)
    marks = (num, height, width) if form.padding.mask else (0,)
    return data, first.new_empty(marks, dtype=torch.bool)


def _keep_image_batch(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    images, *options = inputs
    ctx.image_form = _form(*options)
    ctx.forms = [(image.shape, image.dtype) for image in images]
    ctx.num_others = len(options)


def _differentiate_image_batch(ctx: Any, grad: Tensor, _: Any) -> tuple[Any, ...]:
    form, grads = ctx.image_form, []
    std = torch.tensor(form.std or [1.0], dtype=torch.float32, device=grad.device)
    divisor = std.view(-1, 1, 1)
    for row, (shape, dtype) in zip(grad, ctx.forms, strict=True):
        row = row.narrow(1, 0, shape[1]).narrow(2, 0, shape[2]).float()
        row = row / divisor if form.exact else row * (1 / divisor.double()).float()
        row = row.flip(0) if form.swap_channels else row
        grads.append(row.to(dtype) if dtype.is_floating_point else None)
    return grads, *(None,) * ctx.num_others


_image_batch.register_autograd(
    _differentiate_image_batch, setup_context=_keep_image_batch
)


def _form(
    mean: Sequence[float] | None,
    std: Sequence[float] | None,
    pad_value: Sequence[float],
    pad_first: bool,
    swap_channels: bool,
    exact: bool,
    size_divisor: Sequence[int],
    dtype: torch.dtype,
    channels_last: bool,
    return_mask: bool,
) -> ImageForm:
    return ImageForm(
        None if mean is None else tuple(mean),
        None if std is None else tuple(std),
        tuple(pad_value),
        pad_first,
        swap_channels,
        exact,
        Padding(size_divisor=tuple(size_divisor), mask=return_mask),
        dtype,
        channels_last,
    )
