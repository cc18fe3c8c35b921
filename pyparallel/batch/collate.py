"""collate: samples of one batch become one batch, ready to be scattered."""

from __future__ import annotations

import operator
import sys
from collections.abc import Mapping, Sequence
from typing import Any

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
from ..core.torch_private import data_collate
from ..core.tracing import span
from . import pytree, stack
from .columns import (
    NUMBERS,
    Path,
    batch_containers,
    batch_tensors,
    batch_values,
    sequence_columns,
)
from .columns import check_kind as _check_kind
from .columns import name_of as _name
from .container import DataContainer
from .padding_stats import listener

_TEXT = (str, bytes)
_BUILTIN = (dict, list, tuple)
_KNOWN = ("builtins", "numpy", "torch")  # their classes have a rule of ours

#: Whether code for mmcv 1.x runs here.
_serves_mmcv = False


def collate(batch: Sequence[Any], samples_per_gpu: int | None = None) -> Any:
    """Return the samples of ``batch`` as one batch.

    Containers are taken apart together: the result has the structure of the first
    sample. What stands in it is batched by kind:

    * `DataContainer` with ``stack``: one padded tensor ``(chunk, *target)`` for every
      ``samples_per_gpu`` samples. Only trailing ends are padded, each sample with its
      own ``padding_value``, up to the largest size in the chunk, unless its `Padding`
      says otherwise; with sizes or a mask the chunk is a `Padded`;
    * `DataContainer` with ``ragged``: one `Ragged` for every ``samples_per_gpu``
      samples, joined along dimension 0;
    * `DataContainer` with none of these, or with ``cpu_only``: a list of chunks, each
      the list of its samples' values, not copied;
    * tensors, numpy arrays and numbers: stacked over the whole batch as torch's
      ``default_collate`` does;
    * strings and bytes: a list;
    * classes registered in torch's ``default_collate_fn_map``, such as TensorDict: as
      registered there;
    * dicts, other mappings, namedtuples and dataclasses: the same type; lists and
      tuples: a list.

    Args:
        batch: the samples, at least one.
        samples_per_gpu: how many samples make a chunk (one chunk goes to one device).
            The last chunk may be smaller. None: 1, as in mmcv; `DataLoader` makes its
            whole batch one chunk then. Code that reads ``data`` of several chunks that
            were made by this default is warned (PP104).

    Returns:
        The batch. A stacked tensor is contiguous, never aliases its samples, and has
        the dtype that ``torch.stack`` gives. Gradients flow through it in the main
        process. In a ``DataLoader`` worker it is written once, straight into shared
        memory.

    Raises:
        TypeError: samples of different kinds, a kind that cannot be batched, a
            container to stack that holds no tensor.
        ValueError: an empty batch, unequal lengths, a missing key, shapes that differ
            outside the padded dimensions, a sample too large for its `Padding`, a
            padding value that the dtype cannot hold, containers that hold themselves.
            The message names key and sample.
        RuntimeError: a tensor that requires grad in a ``DataLoader`` worker.

    The behaviour is that of mmcv 1.x ``collate``; its silent truncation of ragged
    lists, endless recursion on strings and loss of container types are fixed.

    Example:
        >>> ragged = [DataContainer(torch.ones(1, n), stack=True, pad_dims=1)
        ...           for n in (2, 3)]
        >>> (chunk,) = collate(ragged, samples_per_gpu=2).data
        >>> chunk.tolist()
        [[[1.0, 1.0, 0.0]], [[1.0, 1.0, 1.0]]]
    """
    if type(batch) is not list and (
        not isinstance(batch, Sequence) or isinstance(batch, _TEXT)
    ):
        raise BatchTypeError(
            f"collate: batch must be a sequence of samples, but is {type_name(batch)}."
        )
    if samples_per_gpu is not None:
        samples_per_gpu = check_int(samples_per_gpu, 1, "collate: samples_per_gpu")
    if not batch:
        raise EmptyBatchError(
            "collate: batch must have at least one sample, but is empty."
        )
    with span("pyparallel.collate"):
        return _column(list(batch), (), samples_per_gpu)


def collate_whole(batch: Sequence[Any]) -> Any:
    """Return the samples of ``batch`` as one batch whose containers have one chunk."""
    return collate(batch, sys.maxsize)


def _column(column: list[Any], path: Path, chunk: int | None) -> Any:
    """Batch what stands at ``path`` in every sample; the first decides the kind."""
    first = column[0]
    cls = type(first)  # asked first: isinstance takes long to say no
    if cls is torch.Tensor:
        return batch_tensors(column, path)
    if isinstance(first, DataContainer):
        return batch_containers(column, path, chunk)
    if cls in NUMBERS:
        return batch_values(column, path)
    if isinstance(first, _TEXT):
        text = str if isinstance(first, str) else bytes
        _check_kind(column, text, text.__name__, path)
        if text is bytes:
            _warn_about_bytes(format_path("batch[0]", path), len(column))
        return column
    if cls is not dict and isinstance(first, torch.Tensor):
        return batch_tensors(column, path)
    if cls not in _BUILTIN and (registered := _registered_class(first)):
        _check_kind(column, registered, f"a {type_name(first)}", path)
        return batch_values(column, path)
    if len(path) >= pytree.MAX_DEPTH:
        raise pytree.too_deep(format_path("batch[0]", path[:3]) + "...")
    if cls is dict or isinstance(first, Mapping):
        return _mappings(column, path, chunk)
    if pytree.is_dataclass(first):
        return _dataclasses(column, path, chunk)
    if isinstance(first, Sequence):
        return _sequences(column, path, chunk)
    return batch_values(column, path)


def _registered_class(value: Any) -> Any:
    """Return the class of ``value`` that another library registered with torch."""
    for cls in data_collate.default_collate_fn_map:
        known = isinstance(cls, tuple) or cls.__module__.split(".")[0] in _KNOWN
        if not known and isinstance(value, cls):
            return cls
    return None


def _mappings(column: list[Mapping[Any, Any]], path: Path, chunk: int | None) -> Any:
    first = column[0]
    columns = backend.columns(column, stack.may_stack_equal())
    if columns is None:
        columns = _gather(column, path)
    elif listener.stacked is not None:  # those that the backend has stacked by itself
        for items in columns.values():
            if isinstance(items, torch.Tensor):
                listener.stacked.add(items.nbytes)
    batched = {
        key: _column(items, (*path, key), chunk) if type(items) is list else items
        for key, items in columns.items()
    }
    return pytree.rebuild_mapping(first, batched)


def _gather(column: list[Mapping[Any, Any]], path: Path) -> dict[Any, Any]:
    """Return the values of every key of the first sample."""
    plain = list(map(type, column)).count(dict) == len(column)
    if not plain:
        _check_kind(column, Mapping, "a mapping", path)
    # Dicts of one length have the same keys if each has those of the first.
    if not plain or list(map(len, column)).count(len(column[0])) < len(column):
        _check_keys(column, path)
    keys = tuple(column[0])
    try:
        if len(keys) < 2:  # of one key itemgetter returns no tuple
            return {key: [item[key] for item in column] for key in keys}
        rows = map(operator.itemgetter(*keys), column)
        return dict(zip(keys, map(list, zip(*rows, strict=True)), strict=True))
    except KeyError:
        _check_keys(column, path)
        raise


def _check_keys(column: list[Mapping[Any, Any]], path: Path) -> None:
    first = column[0]
    for i, item in enumerate(column):
        # A mapping with __missing__, as a defaultdict or a Counter, has every key.
        if not hasattr(type(item), "__missing__"):
            missing = [repr(key) for key in first if key not in item]
            if missing:
                raise MissingKeyError(
                    f"{_name(path, i)} must have the keys of {_name(path, 0)}, but "
                    f"lacks {', '.join(missing)}. Give every sample the same keys."
                )
        extra = [repr(key) for key in item if key not in first]
        if extra:
            warn_once(
                "PP101",
                f"{_name(path, i)} should have the keys of {_name(path, 0)}, but also "
                f"has {', '.join(extra)}: dropped, as mmcv does. Give every sample the "
                "same keys.",
                place=str(path),
            )


def _dataclasses(column: list[Any], path: Path, chunk: int | None) -> Any:
    first = column[0]
    _check_kind(column, type(first), f"a {type_name(first)}", path)
    return pytree.rebuild_dataclass(
        first,
        [
            _column([getattr(item, key) for item in column], (*path, Field(key)), chunk)
            for key in pytree.field_values(first)
        ],
    )


def _sequences(column: list[Any], path: Path, chunk: int | None) -> Any:
    first = column[0]
    advice = "Wrap the field in a DataContainer to keep lists of any length."
    columns = [
        _column(list(items), (*path, step), chunk)
        for step, items in sequence_columns(column, path, advice)
    ]
    named = pytree.is_namedtuple(first)
    return pytree.rebuild_sequence(first, columns) if named else columns


def set_for_mmcv(value: bool) -> None:
    """Set whether code for mmcv 1.x runs here, which expects tensors of bytes."""
    global _serves_mmcv
    _serves_mmcv = value


def _warn_about_bytes(where: str, num_samples: int) -> None:
    """Warn if code for mmcv 1.x collates bytes: mmcv made tensors of them."""
    if _serves_mmcv:
        warn_once(
            "PP102",
            f"collate: {where} should not be bytes in code for mmcv 1.x, but is, in "
            f"{num_samples} samples: here they become a list, there they became "
            "tensors of their values, cut to the shortest. If the model needs tensors, "
            "make them in the dataset.",
            BatchWarning,
            where,
        )
