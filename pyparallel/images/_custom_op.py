"""The operator ``torch.ops.pyparallel.image_batch``.

A graph of torch.compile contains it as one node. It is functional. The shapes of its
results are computed from the sizes of the images, so graphs may have dynamic shapes.
Eager code does not call it, because torch's dispatch of a list of tensors takes longer
than the work on a few small ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..batch.custom_op import empty_if_none, one_per_dim, padded_sizes
from ..batch.padding import Padding
from . import _batch
from ._batch import ImageOptions

_IMAGE_BATCH = (
    "(Tensor[] images, float[]? mean, float[]? std, float[] pad_value, "
    "bool pad_before_normalize, bool swap_channels, bool exact, int[] size_divisor, "
    "ScalarType dtype, bool channels_last, bool return_mask) -> (Tensor, Tensor)"
)


def image_batch(
    images: Sequence[Tensor], options: ImageOptions
) -> tuple[Tensor, Tensor]:
    """Run `_batch.image_batch` as one node; without a mask it returns an empty one."""
    data: Tensor
    data, mask = _image_batch(
        list(images),
        options.mean,
        options.std,
        options.pad_value,
        options.pad_first,
        options.swap_channels,
        options.exact,
        one_per_dim(options.padding.size_divisor, 2),
        options.dtype,
        options.channels_last,
        options.padding.mask,
    )
    return data, mask


@torch.library.custom_op(
    "pyparallel::image_batch", mutates_args=(), schema=_IMAGE_BATCH
)
def _image_batch(images: Sequence[Tensor], *arguments: Any) -> tuple[Tensor, Tensor]:
    data, mask = _batch.image_batch(images, _image_options(*arguments))
    return data, empty_if_none(mask, data, torch.bool)


@_image_batch.register_fake
def _(images: Sequence[Tensor], *arguments: Any) -> tuple[Tensor, Tensor]:
    options, first = _image_options(*arguments), images[0]
    height, width = padded_sizes(options.padding, images, 2)
    num, depth = len(images), first.shape[0]
    shape = (num, depth, height, width)
    if options.channels_last:
        data = first.new_empty((num, height, width, depth), dtype=options.dtype)
        data = data.permute(0, 3, 1, 2)
    else:
        data = first.new_empty(shape, dtype=options.dtype)
    marks = (num, height, width) if options.padding.mask else (0,)
    return data, first.new_empty(marks, dtype=torch.bool)


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    images, *arguments = inputs
    ctx.image_options = _image_options(*arguments)
    ctx.forms = [(image.shape, image.dtype) for image in images]
    ctx.num_others = len(arguments)


def _image_batch_backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Any, ...]:
    options, grads = ctx.image_options, []
    std = torch.tensor(options.std or [1.0], dtype=torch.float32, device=grad.device)
    divisor = std.view(-1, 1, 1)
    for row, (shape, dtype) in zip(grad, ctx.forms, strict=True):
        row = row.narrow(1, 0, shape[1]).narrow(2, 0, shape[2]).float()
        row = row / divisor if options.exact else row * (1 / divisor.double()).float()
        row = row.flip(0) if options.swap_channels else row
        grads.append(row.to(dtype) if dtype.is_floating_point else None)
    return grads, *(None,) * ctx.num_others


_image_batch.register_autograd(_image_batch_backward, setup_context=_save_for_backward)


def _image_options(
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
) -> ImageOptions:
    return ImageOptions(
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
