"""Check that the outputs of several replicas have one structure, for gather."""

from __future__ import annotations

import numbers
import operator
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from ..backend.plain import check_storage
from ..batch import pytree
from ..batch.container import DataContainer
from ..batch.stack import is_array
from ..batch.torch_stack import check_quantization
from ..core.errors import (
    BatchTypeError,
    BatchValueError,
    NoDataError,
    SplitError,
    format_path,
    type_name,
)

_Path = tuple[Any, ...]


def check_dim(value: Any, who: str) -> int:
    """Return a dimension as an integer; raise TypeError for other values."""
    try:
        return operator.index(value)
    except TypeError:
        raise BatchTypeError(
            f"{who}: dim must be an integer, but is {value!r} ({type_name(value)})."
        ) from None


def check_types(values: Sequence[Any], path: _Path) -> None:
    """Raise TypeError if the values at one place have different types."""
    first = values[0]
    for i, other in enumerate(values):
        if type(other) is type(first):
            continue
        if any(
            isinstance(first, cls) and isinstance(other, cls)
            for cls in (torch.Tensor, numbers.Number)
        ):
            continue
        raise BatchTypeError(
            f"gather: {_at(i, path)} must be of type {type_name(first)} like "
            f"{_at(0, path)}, but is {type_name(other)}. Return a value of the same "
            "type on every replica."
        )


def check_keys(values: Sequence[Mapping[Any, Any]], path: _Path) -> None:
    """Raise ValueError if a mapping has other keys than the first one."""
    first = values[0]
    for i, other in enumerate(values):
        missing = [key for key in first if key not in other]
        more = [key for key in other if key not in first]
        if missing or more:
            found = f"lacks {missing[0]!r}" if missing else f"has {more[0]!r} too"
            raise BatchValueError(
                f"gather: {_at(i, path)} must have the keys of {_at(0, path)}, but "
                f"{found}. Return the same keys on every replica."
            )


def check_lengths(values: Sequence[Any], path: _Path) -> None:
    """Raise ValueError if a sequence has another length than the first one."""
    expected = len(values[0])
    for i, other in enumerate(values):
        if len(other) != expected:
            raise BatchValueError(
                f"gather: {_at(i, path)} must have the same number of items as "
                f"{_at(0, path)}, but has {len(other)} where {expected} was expected. "
                "Put a list with one item for each sample into a DataContainer: such "
                "lists are joined."
            )


def check_joinable(values: Sequence[Any], path: _Path, dim: int) -> None:
    """Raise ValueError if tensors or arrays cannot be joined along ``dim``.

    torch reads tensors whose memory was freed without an error.
    """
    first = values[0]
    if len(values) == 1 and isinstance(first, torch.Tensor) and first.is_nested:
        return
    _check_layouts(values, path)
    expected = tuple(first.shape)
    if expected and not -len(expected) <= dim < len(expected):
        raise SplitError(
            f"gather: {_at(0, path)} must have a dimension {dim} to be joined along, "
            f"but has shape {expected}."
        )
    for i, other in enumerate(values):
        if other.dtype != first.dtype:
            raise BatchValueError(
                f"gather: {_at(i, path)} must be of the dtype of {_at(0, path)}, but "
                f"is {other.dtype} where {first.dtype} was expected."
            )
        shape = tuple(other.shape)
        if _outside(shape, dim) != _outside(expected, dim):
            raise BatchValueError(
                f"gather: {_at(i, path)} must match {_at(0, path)} outside dimension "
                f"{dim}, but has shape {shape} where {expected} was expected. Pad them "
                "to one shape, or put a list of them into a DataContainer."
            )
        check_storage(other, partial(_named, i, path))
        if isinstance(other, torch.Tensor) and len(values) > 1:
            check_quantization(values, partial(_at, path=path), i)


def check_data(
    parts: Sequence[Any], path: _Path, target: torch.device, cause: Exception
) -> None:
    """Raise ValueError if either a tensor or the target is on the meta device."""
    for i, part in enumerate(parts):
        if part.is_meta == (target.type == "meta"):
            continue
        rule = "be on the meta device like the first tensor"
        if part.is_meta:
            rule = f"have data to be copied to {target}"
        raise NoDataError(
            f"gather: {_at(i, path)} must {rule}, but is on {part.device}. Give all "
            "tensors data, or only gather meta tensors, with target_device=None."
        ) from cause


def check_equal(values: Sequence[Any], path: _Path) -> None:
    """Raise ValueError if a value other than a tensor differs between replicas."""
    first = values[0]
    for i, other in enumerate(values):
        if not _equal(first, other):
            raise BatchValueError(
                f"gather: {_at(i, path)} must equal {_at(0, path)}, but is {other!r} "
                f"where {first!r} was expected. Return a tensor, or a list with one "
                "entry for each sample."
            )


def contain_data(values: Sequence[Any]) -> bool:
    """Return True if these lists contain values that are gathered one by one.

    None counts as one: it takes the place of an optional tensor.
    """
    leaves = pytree.flatten(list(values))[0]
    return any(
        leaf is None or isinstance(leaf, torch.Tensor | DataContainer) or is_array(leaf)
        for leaf in leaves
    )


def _at(i: int, path: _Path) -> str:
    return format_path(f"outputs[{i}]", path)


def _check_layouts(values: Sequence[Any], path: _Path) -> None:
    """Raise TypeError for tensors that torch cannot concatenate."""
    if len(values) == 1 or not isinstance(values[0], torch.Tensor):
        return
    joinable = {torch.strided}
    if all(value.layout is torch.sparse_coo for value in values):
        joinable = {torch.sparse_coo}
    for i, value in enumerate(values):
        if value.is_nested:
            found, advice = "nested", "Return a Ragged, as Ragged.from_nested makes it"
        elif value.layout in joinable:
            continue
        else:
            found, advice = str(value.layout), "Convert it with to_dense()"
        raise BatchTypeError(
            f"gather: {_at(i, path)} must be a dense tensor to be joined, but its "
            f"layout is {found}. {advice}, or put it into a list in a DataContainer."
        )


def _named(i: int, path: _Path) -> str:
    return f"gather: {_at(i, path)}"


def _outside(shape: tuple[int, ...], dim: int) -> tuple[int, ...] | None:
    """Return the number of dimensions and the other sizes than ``dim``.

    None for a scalar, so that it differs from a vector.
    """
    if not shape:
        return None
    rest = list(shape)
    if -len(shape) <= dim < len(shape):
        del rest[dim]
    return (len(shape), *rest)


def _equal(one: Any, other: Any) -> bool:
    if one is other:
        return True
    try:
        # NaN equals NaN here.
        return bool(one == other or (one != one and other != other))
    except Exception:  # the comparison raised, or its result has no truth value
        return False
