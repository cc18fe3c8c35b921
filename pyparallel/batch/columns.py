"""Batch one column: the values at one place of every sample."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.utils.data import default_collate

from ..core.errors import (
    BatchTypeError,
    BatchValueError,
    format_path,
    type_name,
    with_advice,
)
from ..core.torch_private import data_collate
from . import pytree, stack
from .container import DataContainer
from .padding import Padded
from .ragged import Ragged, join_samples
from .stack import as_tensor, is_array, is_numeric_array

#: The keys and indices that lead to a value in a sample.
Path = tuple[Any, ...]

_TEXT = (str, bytes)

_CONTAINER_ONLY = {DataContainer}
_get_own_data = operator.attrgetter("_data")
_get_data = operator.attrgetter("data")  # a subclass may override the property
_get_padding = operator.attrgetter("_padding")


def batch_containers(
    column: list[DataContainer], path: Path, chunk: int | None
) -> DataContainer:
    """Return the containers at ``path`` as one, in chunks of ``chunk`` samples.

    None is the default of `collate`: chunks of one sample.
    """
    data_of = _get_own_data
    if set(map(type, column)) != _CONTAINER_ONLY:
        check_types(column, DataContainer, "a DataContainer", path)
        data_of = _get_data
    first = column[0]
    if any(map(_get_padding, column)):
        _check_paddings(column, path)
    values = list(map(data_of, column))
    is_default, chunk = chunk is None, chunk or 1
    starts = range(0, len(column), chunk)
    data: list[Any]
    if first.stack and not first.cpu_only:
        data = [_stack_chunk(column, values[i : i + chunk], path, i) for i in starts]
    elif first.ragged:
        data = [_join_chunk(values[i : i + chunk], path, i) for i in starts]
    else:
        data = [values[i : i + chunk] for i in starts]
    return first._with_chunks(data, is_default=is_default)


def _check_paddings(column: list[DataContainer], path: Path) -> None:
    expected = column[0].padding
    for i, item in enumerate(column):
        if item.padding != expected:
            raise BatchValueError(
                f"{sample_path(path, i)} must have the padding of "
                f"{sample_path(path, 0)}, but has {item.padding} where {expected} was "
                "expected. Give every sample the same padding."
            )


def _stack_chunk(
    column: list[DataContainer], samples: Sequence[Any], path: Path, start: int
) -> torch.Tensor | Padded:
    samples = _as_tensors(samples, path, start, "stack")
    first = column[start]
    pad_dims, padding = first.pad_dims, first._padding
    if padding is None:
        stacked = stack.stack_equal(samples, pad_dims)
        if stacked is not None:
            return stacked
    values = [item.padding_value for item in column[start : start + len(samples)]]

    def name(i: int) -> str:
        return sample_path(path, start + i)

    if padding is None or pad_dims is None:
        return stack.stack(samples, pad_dims, values, name)
    num_dims = operator.index(pad_dims)
    return stack.stack_padded(samples, num_dims, values, name, padding)


def _join_chunk(samples: Sequence[Any], path: Path, start: int) -> Ragged:
    samples = _as_tensors(samples, path, start, "ragged")
    return join_samples(samples, lambda i: sample_path(path, start + i))


def _as_tensors(
    samples: Sequence[Any], path: Path, start: int, flag: str
) -> Sequence[torch.Tensor]:
    if set(map(type, samples)) == {torch.Tensor}:
        return samples
    stack.check_masks(samples, lambda i: sample_path(path, start + i))
    samples = stack.as_tensors(samples)
    for i, sample in enumerate(samples, start):
        if not isinstance(sample, torch.Tensor):
            raise BatchTypeError(
                f"{sample_path(path, i)} must hold a tensor or a numeric array because "
                f"{flag}=True, but holds {type_name(sample)}. Convert it with "
                f"torch.as_tensor, or use {flag}=False."
            )
    return samples


def sequence_columns(
    column: list[Any], path: Path, advice: str
) -> list[tuple[Any, tuple[Any, ...]]]:
    """Return each item of the sequences at ``path`` as a path step and its column.

    Args:
        column: the values at ``path`` of every sample; the first is a sequence.
        path: the path of the column.
        advice: the fix for sequences of unequal length, for the error.

    Raises:
        TypeError: a value is not a sequence, or is text.
        ValueError: unequal lengths.
    """
    first = column[0]
    check_types(column, Sequence, "a sequence", path)
    for i, item in enumerate(column):
        if len(item) != len(first):
            raise with_advice(
                BatchValueError,
                f"{sample_path(path, i)} must have {len(first)} items like "
                f"{sample_path(path, 0)}, but has {len(item)}.",
                advice,
            )
    columns = zip(*column, strict=True)
    return list(zip(pytree.sequence_steps(first), columns, strict=True))


def sample_path(path: Path, i: int) -> str:
    """Return the name of the value at ``path`` of sample ``i``: ``batch[3]['img']``."""
    return format_path(f"batch[{i}]", path)


def check_types(column: list[Any], cls: Any, expected: str, path: Path) -> None:
    """Raise if a value of a column is not an instance of ``cls``; name the first one.

    Args:
        column: the values at ``path`` of every sample.
        cls: the expected class.
        expected: the name of the class with its article, for the error.
        path: the path of the column.
    """
    found = set(map(type, column))
    if len(found) == 1 and cls in found:
        return
    wrong = {each for each in found if not _has_type(each, cls)}
    if wrong:
        i = next(i for i, item in enumerate(column) if type(item) in wrong)
        raise with_advice(
            BatchTypeError,
            f"{sample_path(path, i)} must be {expected} like {sample_path(path, 0)}, "
            f"but is {type_name(column[i])}.",
        )


def _has_type(found: type, cls: type) -> bool:
    return issubclass(found, cls) and not (cls is Sequence and issubclass(found, _TEXT))


# --- Columns of plain values: tensors, arrays and numbers.


#: The dtypes that default_collate gives to numbers; None: inferred from the column.
NUMBER_DTYPES: dict[type, torch.dtype | None] = {
    bool: None,
    int: None,
    float: torch.float64,
}


def batch_tensors(
    column: list[torch.Tensor], path: Path, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Stack the tensors at ``path`` of every sample, which must have equal shapes.

    Floating-point tensors are cast to ``dtype``.
    """
    stacked = stack.stack_equal(column, dtype=dtype)
    if stacked is not None:
        return stacked
    check_types(column, torch.Tensor, "a tensor", path)
    values = [0] * len(column)
    return stack.stack(column, None, values, lambda i: sample_path(path, i), dtype)


_Function = Callable[[list[Any]], Any]
#: The errors of torch for values that it cannot convert, or cannot batch.
_REFUSALS = (TypeError, ValueError, RuntimeError, LookupError, OverflowError)

# `collate` has its own rules for the classes of these packages.
_HANDLED_PACKAGES = ("builtins", "numpy", "torch")


def registered_collate(value: Any) -> tuple[type, _Function] | None:
    """Return the class by which another library registered ``value`` with torch.

    Also return its function. The nearest base class is used. torch itself uses the
    function of tensors for a subclass of a registered subclass of ``Tensor``.
    """
    table = data_collate.default_collate_fn_map
    found = {
        cls: function
        for key, function in table.items()
        for cls in (key if isinstance(key, tuple) else (key,))
        if isinstance(value, cls)
        and cls.__module__.split(".")[0] not in _HANDLED_PACKAGES
    }
    if not found:
        return None
    bases = type(value).__mro__
    nearest = next((cls for cls in bases if cls in found), next(iter(found)))
    return nearest, partial(found[nearest], collate_fn_map=table)


def batch_registered(
    column: list[Any], path: Path, cls: type, function: _Function
) -> Any:
    """Batch values of a class by the function that another library registered."""
    if not all(isinstance(each, cls) for each in column):  # cls may be no base class
        check_types(column, cls, f"a {type_name(column[0])}", path)
    return batch_values(column, path, function)


def batch_values(
    column: list[Any], path: Path, function: _Function = default_collate
) -> Any:
    """Batch numbers and numpy arrays as torch's ``default_collate`` does."""
    stack.check_masks(column, lambda i: sample_path(path, i))
    try:
        if type(column[0]) in NUMBER_DTYPES:
            return torch.tensor(column, dtype=NUMBER_DTYPES[type(column[0])])
        if is_numeric_array(column[0]):
            return batch_tensors([stack.as_tensor(item) for item in column], path)
        return function(column)
    except (BatchTypeError, BatchValueError):
        raise
    except _REFUSALS as error:
        raise unsupported_value_error(column, path, function) from error


# --- The error for a column that torch refuses: the first wrong value and the reason.


def unsupported_value_error(
    column: list[Any], path: Path, function: _Function = default_collate
) -> Exception:
    """Return the error for values that torch refuses; it names the first of them."""

    def place(i: int) -> str:
        return sample_path(path, i)

    i = next((i for i, x in enumerate(column) if _is_unsupported(x, function)), None)
    if i is None:
        # torch accepts each value alone, so their combination is wrong.
        i = next((i for i, x in enumerate(column) if type(x) is not type(column[0])), 0)
        if i == 0:
            i, error = _mismatch(column, function)
            return with_advice(
                BatchValueError,
                f"{place(i)} must fit {place(0)}, but default_collate cannot join two "
                f"{type_name(column[0])} objects: {error}",
            )
        return with_advice(
            BatchTypeError,
            f"{place(i)} must be {type_name(column[0])} like {place(0)}, but is "
            f"{type_name(column[i])}.",
        )
    if isinstance(column[i], int | float):
        return with_advice(
            BatchValueError,
            f"{place(i)} must be a number that a tensor can hold, but is "
            f"{column[i]!r:.80}.",
        )
    found = type_name(column[i])
    if is_array(column[i]):
        found += f" of dtype {column[i].dtype}"
    return with_advice(
        BatchTypeError,
        f"{place(i)} must be a tensor, a numeric array, a number, a string or a "
        f"container of these, but is {found}.",
        "Wrap the field in a DataContainer with cpu_only=True to keep the values in a "
        "list.",
    )


def _mismatch(column: list[Any], function: _Function) -> tuple[int, Exception | None]:
    """Return the index of the first value that does not fit value 0, and the error."""
    for i, value in enumerate(column):
        try:
            function([column[0], value])
        except _REFUSALS as error:
            return i, error
    return 0, None


def _is_unsupported(value: Any, function: _Function) -> bool:
    try:
        function([as_tensor(value) if is_numeric_array(value) else value])
    except _REFUSALS:
        return True
    return False
