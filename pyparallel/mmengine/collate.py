"""pseudo_collate and default_collate: samples become a batch as mmengine has it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ..batch import pytree
from ..batch.columns import (
    Path,
    batch_containers,
    batch_tensors,
    batch_values,
    check_kind,
    name_of,
    sequence_columns,
)
from ..batch.container import DataContainer
from ..core.errors import (
    BatchTypeError,
    EmptyBatchError,
    MissingKeyError,
    format_path,
    type_name,
)
from ..core.tracing import span
from ._cast import is_element
from ._upstream import provides

_TEXT = (str, bytes)

#: What becomes of a column that is no container: the values of all samples at a path.
_Leaves = Callable[[Any, Path], Any]


@provides("FUNCTIONS")
def pseudo_collate(data_batch: Sequence[Any]) -> Any:
    """Return the samples with their containers turned inside out; nothing is stacked.

    The result has the structure of the first sample. In the place of every leaf stand
    the values of all samples: a list where the path to it ends in a key, a tuple where
    it ends in an index, and the batch itself where samples have no structure.

    Args:
        data_batch: the samples, at least one.

    Returns:
        The batch. Mappings and namedtuples keep their types, as do lists and other
        sequences; tuples become lists. Keys that the first sample lacks are dropped. A
        `DataContainer` is batched as its flags say, in one chunk.

    Raises:
        TypeError: samples of different kinds.
        ValueError: no samples, a missing key (a ``KeyError`` too), sequences of unequal
            length (a ``RuntimeError`` too). The message names sample and key.

    From mmengine, where mappings that are not made from a dict (``defaultdict``) raised
    and a string beside a list was taken apart.

    Example:
        >>> pseudo_collate([{"img": 1, "box": (2, "a")}, {"img": 3, "box": (4, "b")}])
        {'img': [1, 3], 'box': [(2, 4), ('a', 'b')]}
    """
    return _batch(data_batch, "pseudo_collate", lambda column, _: column)


@provides("FUNCTIONS")
def default_collate(data_batch: Sequence[Any]) -> Any:
    """Return what `pseudo_collate` does, with what can be stacked stacked.

    Tensors, arrays and numbers are batched as torch's ``default_collate`` does it, in a
    ``DataLoader`` worker straight into shared memory. Strings, bytes, mmengine's data
    elements and other objects with a method ``to`` are kept as `pseudo_collate` keeps
    them.

    Args:
        data_batch: the samples, at least one.

    Returns:
        The batch; see `pseudo_collate`. Tensors are ``(n, *shape)``.

    Raises:
        TypeError: samples of different kinds; values that cannot be stacked, ``None``
            for one.
        ValueError: as `pseudo_collate`; tensors of unequal shapes (a ``RuntimeError``
            too). The message names sample and key.

    From mmengine.

    Example:
        >>> default_collate([{"img": 1, "name": "a"}, {"img": 3, "name": "b"}])
        {'img': tensor([1, 3]), 'name': ['a', 'b']}
    """
    return _batch(data_batch, "default_collate", _stacked)


def _batch(batch: Any, where: str, leaves: _Leaves) -> Any:
    if not isinstance(batch, Sequence) or isinstance(batch, _TEXT):
        raise BatchTypeError(
            f"{where}: data_batch must be a sequence of samples, but is "
            f"{type_name(batch)}."
        )
    if not batch:
        raise EmptyBatchError(
            f"{where}: data_batch must have at least one sample, but is empty."
        )
    with span("pyparallel.collate"):
        return _column(batch, (), leaves)


def _column(column: Sequence[Any], path: Path, leaves: _Leaves) -> Any:
    """Batch what stands at ``path`` in every sample; the first decides the kind."""
    first = column[0]
    if isinstance(first, _TEXT):
        return column
    if isinstance(first, DataContainer):
        return batch_containers(list(column), path, len(column))
    is_mapping = isinstance(first, Mapping)
    if not is_mapping and not isinstance(first, Sequence):
        return leaves(column, path)
    if len(path) >= pytree.MAX_DEPTH:
        raise pytree.too_deep(format_path("data_batch[0]", path[:3]) + "...")
    return (_mappings if is_mapping else _sequences)(column, path, leaves)


def _mappings(column: Sequence[Any], path: Path, leaves: _Leaves) -> Any:
    check_kind(list(column), Mapping, "a mapping", path)
    batched = {
        key: _column(_values_of(key, column, path), (*path, key), leaves)
        for key in column[0]
    }
    return pytree.rebuild_mapping(column[0], batched)


def _values_of(key: Any, column: Sequence[Any], path: Path) -> list[Any]:
    values: list[Any] = []
    try:
        values.extend(item[key] for item in column)
    except KeyError as error:
        raise MissingKeyError(
            f"{name_of(path, len(values))} must have the keys of {name_of(path, 0)}, "
            f"but lacks {key!r}. Give every sample the same keys."
        ) from error
    return values


def _sequences(column: Sequence[Any], path: Path, leaves: _Leaves) -> Any:
    first = column[0]
    advice = "Make it a tensor or an array, which is not taken apart."
    columns = [
        _column(items, (*path, step), leaves)
        for step, items in sequence_columns(list(column), path, advice)
    ]
    if isinstance(first, tuple) and not pytree.is_namedtuple(first):
        return columns
    return pytree.rebuild_sequence(first, columns)


def _stacked(column: Sequence[Any], path: Path) -> Any:
    first = column[0]
    if isinstance(first, torch.Tensor):
        return batch_tensors(list(column), path)
    if is_element(first):
        return column
    return batch_values(list(column), path)
