"""pseudo_collate and default_collate: samples become a batch as mmengine has it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ..batch import pytree, stack
from ..batch.columns import (
    Path,
    batch_containers,
    batch_tensors,
    batch_values,
    check_types,
    sample_path,
    sequence_columns,
)
from ..batch.container import DataContainer
from ..batch.padding import Padding
from ..core.errors import (
    BatchTypeError,
    BatchValueError,
    EmptyBatchError,
    MissingKeyError,
    check_int,
    format_path,
    type_name,
)
from ..core.tracing import span
from ._cast_data import is_element
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


def stack_batch(
    tensor_list: Sequence[torch.Tensor],
    pad_size_divisor: int = 1,
    pad_value: float = 0,
) -> torch.Tensor:
    """Return tensors as one, padded at the ends of all dimensions but their first.

    Args:
        tensor_list: tensors ``(C, *sizes)`` of one number of dimensions and one C, at
            least one.
        pad_size_divisor: padded sizes are rounded up to multiples of it.
        pad_value: number written into the padding, converted as
            ``torch.nn.functional.pad`` does it.

    Returns:
        The tensor ``(n, C, *target)``, contiguous. Gradients flow through it.

    Raises:
        TypeError: anything but a list or tuple of tensors (an ``AssertionError`` too).
        ValueError: no tensors, different C or numbers of dimensions, a
            ``pad_size_divisor`` below 1. The tensor is named.

    Stream: on a GPU the work is queued on the current stream.

    From mmengine, where sizes above 2**24 were rounded.

    Example:
        >>> stack_batch([torch.ones(1, 2), torch.ones(1, 1)], 3).tolist()
        [[[1.0, 1.0, 0.0]], [[1.0, 0.0, 0.0]]]
    """
    return pad_to_batch(
        tensor_list, pad_size_divisor, pad_value, lambda i: f"tensor_list[{i}]"
    )


def pad_to_batch(
    tensors: Any, pad_size_divisor: int, pad_value: float, name: Callable[[int], str]
) -> torch.Tensor:
    """Do what `stack_batch` does; ``name`` names a tensor in messages."""
    if not isinstance(tensors, list | tuple):
        raise BatchTypeError(
            f"stack_batch: tensor_list must be a list of tensors, but is "
            f"{type_name(tensors)}."
        )
    if not tensors:
        raise BatchValueError(
            "stack_batch: tensor_list must have at least one tensor, but is empty."
        )
    for i, tensor in enumerate(tensors):
        if not isinstance(tensor, torch.Tensor):
            raise BatchTypeError(
                f"{name(i)} must be a tensor, but is {type_name(tensor)}."
            )
        if tensor.dim() != tensors[0].dim():
            raise BatchValueError(
                f"{name(i)} must have {tensors[0].dim()} dimensions like {name(0)}, "
                f"but has shape {tuple(tensor.shape)}."
            )
        if tensor.shape[:1] != tensors[0].shape[:1]:
            raise BatchValueError(
                f"{name(i)} must have size {tensors[0].shape[0]} in dimension 0 like "
                f"{name(0)}, but has shape {tuple(tensor.shape)}. Convert the images "
                "to one number of channels."
            )
    divisor = check_int(pad_size_divisor, 1, "stack_batch: pad_size_divisor")
    pad_dims = max(tensors[0].dim() - 1, 0)
    values = [pad_value] * len(tensors)
    stacked: Any = stack.stack_padded(
        list(tensors), pad_dims, values, name, Padding(size_divisor=divisor)
    )
    return stacked  # type: ignore[no-any-return]  # a Padded only with sizes or a mask


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
        raise pytree.nesting_error(format_path("data_batch[0]", path[:3]) + "...")
    return (_mappings if is_mapping else _sequences)(column, path, leaves)


def _mappings(column: Sequence[Any], path: Path, leaves: _Leaves) -> Any:
    check_types(list(column), Mapping, "a mapping", path)
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
            f"{sample_path(path, len(values))} must have the keys of "
            f"{sample_path(path, 0)}, but lacks {key!r}. Give every sample the same "
            "keys."
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
