"""Plan a stack from the shapes of its samples alone.

A plan is a frozen value. Equal batches have equal plans. A plan can be compared,
pickled and printed, and tests of plans need no data, device or extension.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..core.errors import BatchValueError, with_advice
from .padding import MOST_PAD_DIMS, Padding, start_offsets, target_sizes

_MAX_BYTES = 2**63 - 1

#: Returns the name of sample ``i`` for an error, such as ``batch[3]['img']``.
Name = Callable[[int], str]


def sample_name(i: int) -> str:
    """Return the name of sample ``i`` for functions with an argument ``samples``."""
    return f"samples[{i}]"


@dataclass(frozen=True, slots=True)
class StackPlan:
    """The layout of samples in one tensor.

    Attributes:
        shape: the shape of the result, ``(num_samples, *target)``.
        padded: for every sample, True if it is smaller than the target.
        starts: for every sample, its first index in the target, in each dimension;
            None if all samples start at index 0 in all dimensions.
    """

    shape: tuple[int, ...]
    padded: tuple[bool, ...]
    starts: tuple[tuple[int, ...], ...] | None = None


def plan_stack(
    shapes: Sequence[tuple[int, ...]],
    pad_dims: int | None,
    name: Name,
    padding: Padding | None = None,
) -> StackPlan:
    """Plan one tensor from samples whose last ``pad_dims`` dimensions may differ.

    Args:
        shapes: the shape of every sample, at least one.
        pad_dims: number of trailing dimensions to pad, or None if all must be equal.
        name: returns the name of sample ``i`` for an error.
        padding: the options for padding; None: at the end, to the largest size.

    Raises:
        ValueError: shapes that do not fit into one tensor. The message names the first
            wrong sample.
    """
    first = shapes[0]
    if pad_dims is not None and len(first) < pad_dims + (padding is None):
        least = f"more than pad_dims={int(pad_dims)}"
        if padding is not None:
            least = f"at least pad_dims={int(pad_dims)}"
        advice = (
            _advise_pad_dims(len(first), padding) or "Add a dimension, or do not pad."
        )
        raise with_advice(
            BatchValueError,
            f"{name(0)} must have {least} dimensions, but has shape {tuple(first)}.",
            advice,
        )
    starts = None
    if shapes.count(first) == len(shapes):
        target = tuple(first)
    else:
        target = tuple(map(max, size_columns(shapes, pad_dims, name, padding)))
    if padding is not None:
        target, starts = _apply_padding(padding, shapes, target, pad_dims or 0, name)
    padded = tuple(map(target.__ne__, shapes))
    shape = (len(shapes), *target)
    if math.prod(size for size in shape if size) > _MAX_BYTES:
        raise BatchValueError(
            f"{name(0)} and the samples stacked with it must need less than 2**63 "
            f"elements, but the padded shape is {shape}."
        )
    return StackPlan(shape, padded, starts)


def size_columns(
    shapes: Sequence[tuple[int, ...]],
    pad_dims: int | None,
    name: Name,
    padding: Padding | None,
) -> list[tuple[int, ...]]:
    """Return the sizes of all samples in each dimension.

    Raises:
        ValueError: the shapes differ outside their padded dimensions.
    """
    num_dims, num = len(shapes[0]), len(shapes)
    num_equal = num_dims - (pad_dims or 0)
    if list(map(len, shapes)).count(num_dims) == num:
        columns = list(zip(*shapes, strict=True))
        if all([column.count(column[0]) == num for column in columns[:num_equal]]):
            return columns
    fixed = [(len(shape), shape[:num_equal]) for shape in shapes]
    i = next(i for i, part in enumerate(fixed) if part != fixed[0])
    raise _shape_error(shapes, pad_dims, name, i, padding)


def _apply_padding(
    padding: Padding,
    shapes: Sequence[tuple[int, ...]],
    largest: tuple[int, ...],
    pad_dims: int,
    name: Name,
) -> tuple[tuple[int, ...], tuple[tuple[int, ...], ...] | None]:
    """Return the target and the starts for shapes with equal fixed dimensions."""
    fixed = len(largest) - pad_dims
    end = target_sizes(padding, shapes, largest[fixed:], name)
    target = (*largest[:fixed], *end)
    if padding.side == "right":
        return target, None
    starts = [
        (*(0,) * fixed, *start_offsets(padding, shape[fixed:], end)) for shape in shapes
    ]
    return target, tuple(starts) if any(map(any, starts)) else None


def _shape_error(
    shapes: Sequence[tuple[int, ...]],
    pad_dims: int | None,
    name: Name,
    i: int,
    padding: Padding | None,
) -> BatchValueError:
    first, shape = tuple(shapes[0]), tuple(shapes[i])
    where = ""
    if pad_dims is not None:
        dims = "dimension" if pad_dims == 1 else f"{int(pad_dims)} dimensions"
        where = f" outside its last {dims}"
    if any(len(each) != len(first) for each in shapes):
        where = where if len(shape) == len(first) else " in its number of dimensions"
        advice = "Reshape the samples to one number of dimensions, or keep a list."
    else:
        dim = min(
            next(d for d, (a, b) in enumerate(zip(first, each, strict=True)) if a != b)
            for each in shapes
            if tuple(each) != first
        )
        advice = _advise_padding(dim, len(first), pad_dims, padding)
    return with_advice(
        BatchValueError,
        f"{name(i)} must match {name(0)}{where}, but has shape {shape} where {first} "
        "was expected.",
        advice,
    )


def _advise_padding(
    dim: int, num_dims: int, pad_dims: int | None, padding: Padding | None
) -> str:
    """Return advice with the options that pad all dimensions from ``dim`` on."""
    num_padded = num_dims - dim
    options = f"pad_dims={num_padded}"
    if dim == 0 and padding is None:  # only a Padding can pad the first dimension
        options += ", padding=Padding()"
    if pad_dims is not None:
        other = f", or pad it too with {options}" if num_padded <= MOST_PAD_DIMS else ""
        return f"Make the samples equal in dimension {dim}{other}."
    if num_padded > MOST_PAD_DIMS:
        return "Keep a list with DataContainer(...)."
    return (
        f"Pad the field with DataContainer(..., stack=True, {options}), or keep a list "
        "with DataContainer(...)."
    )


def _advise_pad_dims(num_dims: int, padding: Padding | None) -> str:
    """Return advice for samples with fewer dimensions than pad_dims; "" if none."""
    if num_dims == 0:
        return "" if padding is not None else "Set pad_dims=None."
    if padding is not None:
        return f"Set pad_dims={num_dims}."
    return f"Set pad_dims={num_dims} and padding=Padding()."
