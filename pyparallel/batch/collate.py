"""Collate the samples of one batch: batch the values at each path by their type."""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar, overload

import torch

from .. import backend
from ..core.errors import (
    BatchTypeError,
    BatchWarning,
    EmptyBatchError,
    Field,
    MissingKeyError,
    check_int,
    format_path,
    type_name,
    warn_once,
)
from ..core.tracing import span
from . import pytree, stack
from .columns import (
    NUMBER_DTYPES,
    Path,
    batch_containers,
    batch_registered,
    batch_tensors,
    batch_values,
    check_types,
    registered_collate,
    sample_path,
    sequence_columns,
)
from .container import DataContainer

_TEXT = (str, bytes)
_BUILTIN = (dict, list, tuple)

_Key = TypeVar("_Key")
_Value = TypeVar("_Value", torch.Tensor, DataContainer)

#: True if code for mmcv 1.x runs in this process.
_mmcv_mode = False


@overload
def collate(batch: Sequence[_Value], samples_per_gpu: int | None = None) -> _Value: ...
@overload
def collate(
    batch: Sequence[dict[_Key, _Value]], samples_per_gpu: int | None = None
) -> dict[_Key, _Value]: ...
@overload
def collate(
    batch: Sequence[dict[_Key, Any]], samples_per_gpu: int | None = None
) -> dict[_Key, Any]: ...
@overload
def collate(batch: Sequence[Any], samples_per_gpu: int | None = None) -> Any: ...
def collate(batch: Sequence[Any], samples_per_gpu: int | None = None) -> Any:
    """Return the samples of ``batch`` as one batch.

    The result has the structure of the first sample. The values at one place of all
    samples are batched by their type:

    * `DataContainer` with ``stack``: one padded tensor ``(chunk, *target)`` for every
      ``samples_per_gpu`` samples. By default, each sample is padded at the end of its
      trailing dimensions, with its own ``padding_value``, to the largest size in the
      chunk. A `Padding` changes this. With sizes or a mask the chunk is a `Padded`.
    * `DataContainer` with ``ragged``: one `Ragged` for every ``samples_per_gpu``
      samples, joined along dimension 0.
    * `DataContainer` with neither, or with ``cpu_only``: a list of chunks. Each chunk
      is the list of the values of its samples, which are not copied.
    * Tensors, numpy arrays and numbers: stacked over the whole batch, as torch's
      ``default_collate`` does. Subclasses of tensors become plain tensors, because the
      attributes of one sample are not those of the batch.
    * Strings and bytes: a list.
    * Classes registered in torch's ``default_collate_fn_map``, such as TensorDict and
      MONAI's MetaTensor: by the registered function.
    * Dicts, other mappings, namedtuples, dataclasses, attrs objects, pydantic models:
      the same type. Lists and tuples: a list. Objects with the methods ``keys`` and
      ``__getitem__``: a dict.

    Args:
        batch: the samples, at least one.
        samples_per_gpu: the number of samples in a chunk (one chunk goes to one
            device). The last chunk may be smaller. None: 1, as in mmcv, except in
            `DataLoader`, which then makes its whole batch one chunk. Reading ``data``
            of several chunks of this default emits a warning (PP104).

    Returns:
        The batch. A stacked tensor is contiguous, never aliases its samples, and has
        the dtype that ``torch.stack`` gives. Gradients flow through it in the main
        process. In a ``DataLoader`` worker it is written once, directly into shared
        memory.

    Raises:
        TypeError: samples of different types, a type that cannot be batched, or a
            container with ``stack`` that holds no tensor.
        ValueError: an empty batch, unequal lengths, a missing key, shapes that differ
            outside the padded dimensions, a sample too large for its `Padding`, a
            padding value that the dtype cannot hold, or containers that contain
            themselves. The message names the key and the sample.
        RuntimeError: a tensor that requires grad in a ``DataLoader`` worker.

    The behaviour is that of mmcv 1.x ``collate``, without three of its defects: silent
    truncation of ragged lists, endless recursion on strings, and loss of container
    types.

    Example:
        >>> ragged = [DataContainer(torch.ones(1, n), stack=True, pad_dims=1)
        ...           for n in (2, 3)]
        >>> (chunk,) = collate(ragged, samples_per_gpu=2).data
        >>> chunk.tolist()
        [[[1.0, 1.0, 0.0]], [[1.0, 1.0, 1.0]]]
    """
    check_is_batch(batch, "collate")
    if samples_per_gpu is not None:
        samples_per_gpu = check_int(samples_per_gpu, 1, "collate: samples_per_gpu")
    check_not_empty(batch, "collate")
    with span("pyparallel.collate"):
        return Walk(samples_per_gpu).column(list(batch), ())


def check_is_batch(batch: Any, where: str) -> None:
    """Raise TypeError unless ``batch`` is a sequence other than text."""
    if type(batch) is not list and (
        not isinstance(batch, Sequence) or isinstance(batch, _TEXT)
    ):
        raise BatchTypeError(
            f"{where}: batch must be a sequence of samples, but is {type_name(batch)}."
        )


def check_not_empty(batch: Sequence[Any], where: str) -> None:
    """Raise ValueError for a batch without samples."""
    if not batch:
        raise EmptyBatchError(
            f"{where}: batch must have at least one sample, but is empty."
        )


def collate_one_chunk(batch: Sequence[Any]) -> Any:
    """Collate ``batch`` into one chunk for each container."""
    return collate(batch, sys.maxsize)


class Walk:
    """One pass over the samples: it makes the columns and batches them.

    Args:
        chunk: the number of samples in a chunk of a `DataContainer`; None: 1.
    """

    #: Drop keys that the first sample lacks, as mmcv does.
    drops_keys = True

    def __init__(self, chunk: int | None) -> None:
        self.chunk = chunk

    def column(self, column: list[Any], path: Path) -> Any:
        """Batch the values at ``path`` of every sample; the first selects the rule."""
        first = column[0]
        cls = type(first)  # isinstance is slow when its answer is False, so ask first
        if cls is torch.Tensor:
            return batch_tensors(column, path)
        if isinstance(first, DataContainer):
            return batch_containers(column, path, self.chunk)
        if cls in NUMBER_DTYPES:
            return batch_values(column, path)
        if cls in _TEXT:
            return _collate_text(column, path)
        if cls not in _BUILTIN and (registered := self.registered(first, path)):
            return batch_registered(column, path, *registered)
        if isinstance(first, _TEXT):
            return _collate_text(column, path)
        if cls is not dict and isinstance(first, torch.Tensor):  # a subclass
            return batch_tensors(column, path)
        return self._nested(column, path)

    def registered(self, first: Any, path: Path) -> Any:
        """Return the class and function by which a library batches a value, or None."""
        return registered_collate(first)

    def may_stack_equal(self, path: Path) -> bool:
        """Return True if the backend may stack the fields of the dicts at ``path``."""
        return stack.may_stack_equal()

    def _nested(self, column: list[Any], path: Path) -> Any:
        """Batch the containers at ``path`` item by item; batch other values whole."""
        if len(path) >= pytree.MAX_DEPTH:
            raise pytree.nesting_error(format_path("batch[0]", path[:3]) + "...")
        advice = "Wrap the field in a DataContainer to keep lists of any length."
        opened = open_columns(
            column, path, advice, self.drops_keys, self.may_stack_equal(path)
        )
        if opened is None:
            return batch_values(column, path)
        columns, rebuild = opened
        return rebuild(
            [
                self.column(items, (*path, step))
                if type(items) is list
                else stack.count_padding(items)
                for step, items in columns.items()
            ]
        )


#: The columns of the items of containers by path step, and the function that builds a
#: container of batched items.
Columns = tuple[dict[Any, Any], Callable[[list[Any]], Any]]


def open_columns(
    column: list[Any],
    path: Path,
    advice: str,
    drops_keys: bool = False,
    stacks: bool = False,
) -> Columns | None:
    """Return the columns of the containers at ``path``; None for other values.

    Args:
        column: the values at ``path`` of every sample; the first selects the type.
        path: the path of the column.
        advice: the fix for sequences of unequal length, for the error.
        drops_keys: drop the keys that the first mapping lacks, with a warning.
        stacks: the backend may stack columns; these are tensors in place of lists.

    Raises:
        TypeError, ValueError: the containers have different types, keys or lengths.
    """
    first = column[0]
    if type(first) is dict or isinstance(first, Mapping):
        columns = backend.columns(column, stacks)
        if columns is None:
            columns = _columns_by_key(column, path, drops_keys)
        keys = tuple(columns)

        def rebuild(items: list[Any]) -> Any:
            return pytree.rebuild_mapping(first, dict(zip(keys, items, strict=True)))

        return columns, rebuild
    if pytree.has_fields(first):
        check_types(column, type(first), f"a {type_name(first)}", path)
        rows: list[Any] = list(map(pytree.field_values, column))
        by_name = _columns_by_key(rows, path, drops_keys)
        fields = {Field(name): values for name, values in by_name.items()}
        return fields, partial(pytree.rebuild_fields, first)
    if isinstance(first, Sequence):
        pairs = sequence_columns(column, path, advice)
        found = {step: list(items) for step, items in pairs}
        named = pytree.is_namedtuple(first)
        return found, partial(pytree.rebuild_sequence, first) if named else list
    if pytree.is_keyed(first):
        check_types(column, type(first), f"a {type_name(first)}", path)
        dicts = list(map(pytree.as_dict, column))
        return open_columns(dicts, path, advice, drops_keys, stacks)
    return None


def _collate_text(column: list[Any], path: Path) -> list[Any]:
    """Check a column of strings or bytes and return it unchanged."""
    text = str if isinstance(column[0], str) else bytes
    check_types(column, text, text.__name__, path)
    if text is bytes:
        _warn_about_bytes(format_path("batch[0]", path), len(column))
    return column


def _columns_by_key(
    column: list[Mapping[Any, Any]], path: Path, drops_keys: bool
) -> dict[Any, Any]:
    """Return the column of every key of the first sample.

    Other keys are dropped with a warning, or are an error.
    """
    plain = list(map(type, column)).count(dict) == len(column)
    if not plain:
        check_types(column, Mapping, "a mapping", path)
    # Dicts of equal length have equal keys if each has the keys of the first one.
    if not plain or list(map(len, column)).count(len(column[0])) < len(column):
        _check_keys(column, path, drops_keys)
    keys = tuple(column[0])
    try:
        if len(keys) < 2:  # itemgetter returns a tuple only for two or more keys
            return {key: [item[key] for item in column] for key in keys}
        rows = map(operator.itemgetter(*keys), column)
        return dict(zip(keys, map(list, zip(*rows, strict=True)), strict=True))
    except KeyError:
        _check_keys(column, path, drops_keys)
        raise


def _check_keys(column: list[Mapping[Any, Any]], path: Path, drops_keys: bool) -> None:
    first = column[0]
    for i, item in enumerate(column):
        missing = [repr(key) for key in first if _lacks(item, key)]
        if missing:
            raise _missing_key_error(path, i, 0, missing)
        extra = [repr(key) for key in item if key not in first]
        if extra and not drops_keys:
            raise _missing_key_error(path, 0, i, extra)
        if extra:
            warn_once(
                "PP101",
                f"{sample_path(path, i)} should have the keys of "
                f"{sample_path(path, 0)}, but also has {', '.join(extra)}. The batch "
                "does not contain these keys, as in mmcv. Give every sample the same "
                "keys.",
                place=str(path),
            )


def _missing_key_error(path: Path, i: int, other: int, keys: list[str]) -> Exception:
    return MissingKeyError(
        f"{sample_path(path, i)} must have the keys of {sample_path(path, other)}, but "
        f"lacks {', '.join(keys)}. Give every sample the same keys."
    )


def _lacks(item: Mapping[Any, Any], key: Any) -> bool:
    if key in item or not hasattr(type(item), "__missing__"):
        return key not in item
    try:  # a defaultdict has every key, but other mappings may raise
        item[key]
    except KeyError:
        return True
    return False


def set_mmcv_mode(value: bool) -> None:
    """Set whether this process runs code for mmcv 1.x, which makes bytes tensors."""
    global _mmcv_mode
    _mmcv_mode = value


def _warn_about_bytes(where: str, num_samples: int) -> None:
    """Warn if code for mmcv 1.x collates bytes, which mmcv converts to tensors."""
    if _mmcv_mode:
        warn_once(
            "PP102",
            f"collate: {where} should not be bytes in code for mmcv 1.x, but is, in "
            f"{num_samples} samples. pyparallel returns a list of bytes. mmcv returned "
            "tensors of their values, cut to the shortest. If the model needs tensors, "
            "create them in the dataset.",
            BatchWarning,
            where,
        )
