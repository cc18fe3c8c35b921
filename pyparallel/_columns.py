"""Columns of DataContainers: what stands at one place of every sample, batched."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from . import _stack
from ._errors import BatchTypeError, at, kind
from .container import DataContainer

#: The keys and indices that lead to a place in a sample.
Path = tuple[Any, ...]

_TEXT = (str, bytes)


def batch_containers(
    column: list[DataContainer], path: Path, chunk: int
) -> DataContainer:
    """Return the containers at ``path`` as one, in chunks of ``chunk`` samples."""
    check_kind(column, DataContainer, "a DataContainer", path)
    first = column[0]
    starts = range(0, len(column), chunk)
    data: list[Any]
    if first.stack and not first.cpu_only:
        data = [_stack_chunk(column, start, path, chunk) for start in starts]
    else:
        data = [[item.data for item in column[i : i + chunk]] for i in starts]
    # The result keeps the default pad_dims, as in mmcv: its tensors are padded already.
    return DataContainer(data, first.stack, first.padding_value, first.cpu_only)


def _stack_chunk(
    column: list[DataContainer], start: int, path: Path, chunk: int
) -> torch.Tensor:
    items = column[start : start + chunk]
    samples = [item.data for item in items]
    if set(map(type, samples)) != {torch.Tensor}:
        for i, sample in enumerate(samples, start):
            if not isinstance(sample, torch.Tensor):
                raise BatchTypeError(
                    f"{name_of(path, i)} must hold a tensor because stack=True, but "
                    f"holds {kind(sample)}. Convert it with torch.as_tensor, or use "
                    "stack=False."
                )
    pad_dims = items[0].pad_dims
    stacked = _stack.stack_equal(samples, pad_dims)
    if stacked is not None:
        return stacked
    values = [item.padding_value for item in items]
    return _stack.stack(samples, pad_dims, values, lambda i: name_of(path, start + i))


def name_of(path: Path, i: int) -> str:
    """Name what stands at ``path`` of sample ``i``: ``batch[3]['img']``."""
    return at(f"batch[{i}]", path)


def check_kind(column: list[Any], cls: Any, article: str, path: Path) -> None:
    """Raise if not all of a column are of a class; the first at fault is named."""
    strange = {found for found in set(map(type, column)) if not _is_kind(found, cls)}
    if strange:
        i = next(i for i, item in enumerate(column) if type(item) in strange)
        raise BatchTypeError(
            f"{name_of(path, i)} must be {article} like {name_of(path, 0)}, but is "
            f"{kind(column[i])}."
        )


def _is_kind(found: type, cls: type) -> bool:
    return issubclass(found, cls) and not (cls is Sequence and issubclass(found, _TEXT))
