"""The operator ``torch.ops.pyparallel.pad_stack``.

A graph of torch.compile contains it as one node. It is functional. The shapes of its
results are computed from the sizes of the samples, so graphs may have dynamic shapes.
Eager code does not call it, because torch's dispatch of a list of tensors takes longer
than padding a few small ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from ..core.errors import BatchValueError
from . import stack, torch_stack
from .padding import Padded, Padding, start_offsets, target_sizes
from .padding_values import exact_number, padding_value_as_double
from .plan import sample_name, size_columns

_PAD_STACK = (
    "(Tensor[] samples, int pad_dims, Scalar padding_value, int high_word, "
    "int[] size_divisor, int[]? shape, int[]? buckets, str[] side, bool sizes, "
    "bool mask, ScalarType? dtype) -> (Tensor, Tensor, Tensor)"
)


def pad_stack(
    samples: Sequence[Tensor],
    pad_dims: int,
    padding_value: Any,
    padding: Padding,
) -> Tensor | Padded:
    """Run `stack.stack_padded` as one node of a graph."""
    buckets = [size for bucket in padding.buckets for size in bucket]
    data: Tensor
    data, sizes, mask = _pad_stack(
        list(samples),
        pad_dims,
        *_as_words(padding_value),
        one_per_dim(padding.size_divisor, pad_dims),
        padding.shape,
        buckets or None,
        one_per_dim(padding.side, pad_dims),
        padding.sizes,
        padding.mask,
        padding.dtype,
    )
    if not (padding.sizes or padding.mask):
        return data
    return Padded(
        data, sizes if padding.sizes else None, mask if padding.mask else None
    )


@torch.library.custom_op("pyparallel::pad_stack", mutates_args=(), schema=_PAD_STACK)
def _pad_stack(
    samples: Sequence[Tensor],
    pad_dims: int,
    padding_value: float,
    high_word: int,
    *options: Any,
) -> tuple[Tensor, ...]:
    value = padding_value + high_word * 2**64 if high_word else padding_value
    padding, values = _padding(pad_dims, *options), [value] * len(samples)
    found = stack.stack_padded(samples, pad_dims, values, sample_name, padding)
    padded = found if isinstance(found, Padded) else Padded(found)
    data, sizes, mask = padded.fields()
    return (
        data,
        empty_if_none(sizes, data, torch.int64),
        empty_if_none(mask, data, torch.bool),
    )


@_pad_stack.register_fake
def _fake_pad_stack(
    samples: Sequence[Tensor],
    pad_dims: int,
    padding_value: float,
    high_word: int,
    *options: Any,
) -> tuple[Tensor, ...]:
    padding, first = _padding(pad_dims, *options), samples[0]
    shapes = [tuple(sample.shape) for sample in samples]
    size_columns(shapes, pad_dims, sample_name, padding)
    target = padded_sizes(padding, samples, pad_dims)
    shape = (len(samples), *first.shape[: first.dim() - pad_dims], *target)
    dtype = torch_stack.promoted_dtype(samples, dtype=padding.dtype)
    data = first.new_empty(shape, dtype=dtype)
    size = (len(samples), pad_dims) if padding.sizes else (0,)
    sizes = first.new_empty(size, dtype=torch.int64)
    marks = (len(samples), *target) if padding.mask else (0,)
    return data, sizes, first.new_empty(marks, dtype=torch.bool)


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    samples, ctx.pad_dims, _, _, *options = inputs
    ctx.padding = _padding(ctx.pad_dims, *options)
    ctx.forms = [(sample.shape, sample.dtype) for sample in samples]
    ctx.num_others = len(inputs) - 1


def _pad_stack_backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Any, ...]:
    pad_dims, grads = ctx.pad_dims, []
    for row, (shape, dtype) in zip(grad, ctx.forms, strict=True):
        fixed = len(shape) - pad_dims
        target = tuple(row.shape[fixed:])
        starts = start_offsets(ctx.padding, shape[fixed:], target)
        for dim, start in enumerate(starts, fixed):
            row = row.narrow(dim, start, shape[dim])
        if row.is_complex() and not dtype.is_complex:  # the sample was promoted
            row = row.real
        differentiable = dtype.is_floating_point or dtype.is_complex
        grads.append(row.to(dtype) if differentiable else None)
    return grads, *(None,) * ctx.num_others


_pad_stack.register_autograd(_pad_stack_backward, setup_context=_save_for_backward)


def _as_words(padding_value: Any) -> tuple[int | float, int]:
    """Return a padding value as a Scalar and its higher word, in units of 2**64.

    A Scalar in a graph is a double, or an integer of 64 bits with a sign.
    """
    number = exact_number(padding_value, sample_name, 0)
    if isinstance(number, Fraction):
        raise BatchValueError(
            "pad_stack: padding_value must be an integer or a double in a graph of "
            f"torch.compile, but is {padding_value!r}. Convert it first."
        )
    if isinstance(number, float) or -(2**63) <= number < 2**63:
        return number, 0
    if not -(2**126) <= number < 2**126:
        return padding_value_as_double(number, sample_name, 0), 0
    low = (number + 2**63) % 2**64 - 2**63
    return low, (number - low) // 2**64


def one_per_dim(value: Any, num_dims: int) -> list[Any]:
    """Return one value for each dimension, as a list."""
    # Never empty, because torch's autograd treats an empty list as a list of tensors.
    return list(value) if isinstance(value, tuple) else [value] * max(num_dims, 1)


def _padding(
    pad_dims: int,
    size_divisor: Sequence[int],
    shape: Sequence[int] | None,
    buckets: Sequence[int] | None,
    side: Sequence[str],
    sizes: bool,
    mask: bool,
    dtype: torch.dtype | None,
) -> Padding:
    if not pad_dims:
        return Padding(sizes=sizes, mask=mask, dtype=dtype)
    flat = buckets or ()
    starts = range(0, len(flat), pad_dims)
    return Padding(
        size_divisor=tuple(size_divisor),
        shape=None if shape is None else tuple(shape),
        buckets=tuple(tuple(flat[i : i + pad_dims]) for i in starts),
        side=tuple(side),
        sizes=sizes,
        mask=mask,
        dtype=dtype,
    )


def padded_sizes(padding: Padding, samples: Sequence[Tensor], pad_dims: int) -> Any:
    """Return the padded sizes, without reading the values of symbolic sizes."""
    sizes = [tuple(sample.shape[sample.dim() - pad_dims :]) for sample in samples]
    largest = tuple(
        reduce(torch.sym_max, column) for column in zip(*sizes, strict=True)
    )
    return target_sizes(padding, sizes, largest, sample_name)


def empty_if_none(part: Tensor | None, data: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``part``, or an empty tensor, since an operator cannot return None."""
    return data.new_empty((0,), dtype=dtype) if part is None else part
