"""The operators of ``torch.ops.pyparallel``: what a graph of torch.compile has of us.

They are functional and run the code of `pad_stack` and `ImagePreprocessor`. Shapes of
their results come from the sizes alone, so that graphs may be of dynamic shapes. Eager
code does not go through them: torch's dispatch of a list of tensors takes longer than
to pad a few small ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from . import _images, _stack
from ._image_plan import ImageForm
from .padding import Padded, Padding, start_of, target_sizes

_dtype_of = attrgetter("dtype")

_PAD_STACK = (
    "(Tensor[] samples, int pad_dims, float padding_value, int[] size_divisor, "
    "int[]? shape, int[]? buckets, str[] side, bool sizes, bool mask) "
    "-> (Tensor, Tensor, Tensor)"
)
_IMAGE_BATCH = (
    "(Tensor[] images, float[]? mean, float[]? std, float[] pad_value, "
    "bool pad_before_normalize, bool swap_channels, bool exact, int[] size_divisor, "
    "ScalarType dtype, bool channels_last, bool return_mask) -> (Tensor, Tensor)"
)


def pad_stack(
    samples: Sequence[Tensor],
    pad_dims: int,
    padding_value: float | None,
    padding: Padding,
) -> Tensor | Padded:
    """Return what `_stack.stack_padded` does, as one node of a graph."""
    buckets = [size for bucket in padding.buckets for size in bucket]
    data: Tensor
    data, sizes, mask = _pad_stack(
        list(samples),
        pad_dims,
        0.0 if padding_value is None else padding_value,
        _spread(padding.size_divisor, pad_dims),
        padding.shape,
        buckets or None,
        _spread(padding.side, pad_dims),
        padding.sizes,
        padding.mask,
    )
    if not (padding.sizes or padding.mask):
        return data
    return Padded(
        data, sizes if padding.sizes else None, mask if padding.mask else None
    )


def image_batch(images: Sequence[Tensor], form: ImageForm) -> tuple[Tensor, Tensor]:
    """Return what `_images.batch` does, as one node; an empty mask stands for none."""
    data: Tensor
    data, mask = _image_batch(
        list(images),
        form.mean,
        form.std,
        form.pad_value,
        form.pad_first,
        form.swap_channels,
        form.exact,
        _spread(form.padding.size_divisor, 2),
        form.dtype,
        form.channels_last,
        form.padding.mask,
    )
    return data, mask


# ------------------------------------------------------------------------ pad_stack
@torch.library.custom_op("pyparallel::pad_stack", mutates_args=(), schema=_PAD_STACK)
def _pad_stack(
    samples: Sequence[Tensor], pad_dims: int, padding_value: float, *options: Any
) -> tuple[Tensor, ...]:
    padding, values = _padding(pad_dims, *options), [padding_value] * len(samples)
    found = _stack.stack_padded(samples, pad_dims, values, _sample, padding)
    padded = found if isinstance(found, Padded) else Padded(found)
    data, sizes, mask = padded.fields()
    return data, _or_empty(sizes, data, torch.int64), _or_empty(mask, data, torch.bool)


@_pad_stack.register_fake
def _(
    samples: Sequence[Tensor], pad_dims: int, padding_value: float, *options: Any
) -> tuple[Tensor, ...]:
    padding, first = _padding(pad_dims, *options), samples[0]
    target = _target(padding, samples, pad_dims)
    shape = (len(samples), *first.shape[: first.dim() - pad_dims], *target)
    data = first.new_empty(shape, dtype=_promoted(samples))
    size = (len(samples), pad_dims) if padding.sizes else (0,)
    sizes = first.new_empty(size, dtype=torch.int64)
    marks = (len(samples), *target) if padding.mask else (0,)
    return data, sizes, first.new_empty(marks, dtype=torch.bool)


def _keep_pad_stack(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    samples, ctx.pad_dims, _, *options = inputs
    ctx.padding = _padding(ctx.pad_dims, *options)
    ctx.forms = [(sample.shape, sample.dtype) for sample in samples]
    ctx.num_others = len(inputs) - 1


def _differentiate_pad_stack(ctx: Any, grad: Tensor, *_: Any) -> tuple[Any, ...]:
    pad_dims, grads = ctx.pad_dims, []
    for row, (shape, dtype) in zip(grad, ctx.forms, strict=True):
        fixed = len(shape) - pad_dims
        target = tuple(row.shape[fixed:])
        starts = start_of(ctx.padding, shape[fixed:], target)
        for dim, start in enumerate(starts, fixed):
            row = row.narrow(dim, start, shape[dim])
        grads.append(row.to(dtype) if dtype.is_floating_point else None)
    return grads, *(None,) * ctx.num_others


_pad_stack.register_autograd(_differentiate_pad_stack, setup_context=_keep_pad_stack)


# ---------------------------------------------------------------------- image_batch
@torch.library.custom_op(
    "pyparallel::image_batch", mutates_args=(), schema=_IMAGE_BATCH
)
def _image_batch(images: Sequence[Tensor], *options: Any) -> tuple[Tensor, Tensor]:
    data, mask = _images.batch(images, _form(*options))
    return data, _or_empty(mask, data, torch.bool)


@_image_batch.register_fake
def _(images: Sequence[Tensor], *options: Any) -> tuple[Tensor, Tensor]:
    form, first = _form(*options), images[0]
    height, width = _target(form.padding, images, 2)
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


# ---------------------------------------------------------------------------- both
def _sample(i: int) -> str:
    return f"samples[{i}]"


def _spread(value: Any, num_dims: int) -> list[Any]:
    # Of no dimensions one stands there all the same: torch's autograd of operators
    # takes an empty list for one of tensors.
    return list(value) if isinstance(value, tuple) else [value] * max(num_dims, 1)


def _padding(
    pad_dims: int,
    size_divisor: Sequence[int],
    shape: Sequence[int] | None,
    buckets: Sequence[int] | None,
    side: Sequence[str],
    sizes: bool,
    mask: bool,
) -> Padding:
    if not pad_dims:
        return Padding(sizes=sizes, mask=mask)
    flat = buckets or ()
    starts = range(0, len(flat), pad_dims)
    return Padding(
        size_divisor=tuple(size_divisor),
        shape=None if shape is None else tuple(shape),
        buckets=tuple(tuple(flat[i : i + pad_dims]) for i in starts),
        side=tuple(side),
        sizes=sizes,
        mask=mask,
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


def _target(padding: Padding, samples: Sequence[Tensor], pad_dims: int) -> Any:
    """Return the padded sizes; where these are symbols, without a look at them."""
    sizes = [tuple(sample.shape[sample.dim() - pad_dims :]) for sample in samples]
    largest = tuple(
        reduce(torch.sym_max, column) for column in zip(*sizes, strict=True)
    )
    return target_sizes(padding, sizes, largest, _sample)


def _promoted(samples: Sequence[Tensor]) -> torch.dtype:
    dtype: torch.dtype = reduce(torch.promote_types, map(_dtype_of, samples))
    return dtype


def _or_empty(part: Tensor | None, data: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a part of the result; operators have no such thing as none."""
    return data.new_empty((0,), dtype=dtype) if part is None else part
