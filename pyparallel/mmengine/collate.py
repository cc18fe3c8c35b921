"""pseudo_collate, default_collate and stack_batch: samples to batches of mmengine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ..batch import pytree, stack, torch_stack
from ..batch.columns import (
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
from ..batch.container import DataContainer
from ..batch.padding import Padding
from ..core.errors import (
    BatchTypeError,
    BatchValueError,
    EmptyBatchError,
    MissingKeyError,
    check_whole,
    format_path,
    type_name,
)
from ..core.tracing import span
from ._cast_data import has_to_method
from ._upstream import provides

_TEXT = (str, bytes)

#: A function that batches the values of all samples at the path of a leaf.
_LeafCollate = Callable[[Any, Path], Any]


@provides("FUNCTIONS")
def pseudo_collate(data_batch: Sequence[Any]) -> Any:
    """Return samples as one container of lists, without stacking their values.

    The result has the structure of the first sample. Each leaf becomes the sequence of
    the values of all samples: a list if its path ends in a key, a tuple if the path
    ends in an index. A batch of samples without structure is returned unchanged.

    Args:
        data_batch: the samples, at least one.

    Returns:
        The batch. Mappings, namedtuples, lists and other sequences keep their types;
        tuples become lists. Keys that the first sample lacks are dropped. A
        `DataContainer` is batched according to its flags, as one chunk.

    Raises:
        TypeError: samples have different structures.
        ValueError: no samples, a missing key (also a ``KeyError``), sequences of
            unequal length (also a ``RuntimeError``). The message names sample and key.

    mmengine's function raises for mappings whose class takes no dict, such as
    ``defaultdict``, and splits a string beside a list into its characters.

    Example:
        >>> pseudo_collate([{"img": 1, "box": (2, "a")}, {"img": 3, "box": (4, "b")}])
        {'img': [1, 3], 'box': [(2, 4), ('a', 'b')]}
    """
    return _collate(data_batch, "pseudo_collate", lambda column, _: column)


@provides("FUNCTIONS")
def default_collate(data_batch: Sequence[Any]) -> Any:
    """Return samples as one container of stacked tensors.

    Tensors, arrays and numbers are stacked as in torch's ``default_collate``, in a
    ``DataLoader`` worker directly into shared memory. Strings, bytes, mmengine's data
    elements and other objects with a method ``to`` are not stacked; the result is that
    of `pseudo_collate`.

    Args:
        data_batch: the samples, at least one.

    Returns:
        The batch; see `pseudo_collate`. Tensors are ``(n, *shape)``.

    Raises:
        TypeError: samples have different structures, or values cannot be stacked, such
            as ``None``.
        ValueError: as `pseudo_collate`; tensors of unequal shapes (also a
            ``RuntimeError``). The message names sample and key.

    Equivalent to mmengine's function.

    Example:
        >>> default_collate([{"img": 1, "name": "a"}, {"img": 3, "name": "b"}])
        {'img': tensor([1, 3]), 'name': ['a', 'b']}
    """
    return _collate(data_batch, "default_collate", _stack_leaf)


def stack_batch(
    tensor_list: Sequence[torch.Tensor],
    pad_size_divisor: int = 1,
    pad_value: float = 0,
) -> torch.Tensor:
    """Return tensors as one, padded at the end of every dimension except the first.

    Args:
        tensor_list: at least one tensor ``(C, *sizes)``, all with the same C and the
            same number of dimensions.
        pad_size_divisor: padded sizes are rounded up to multiples of it.
        pad_value: the number in the padding, converted as by
            ``torch.nn.functional.pad``, but exact in integers.

    Returns:
        The tensor ``(n, C, *target)``, contiguous. Gradients flow through it.

    Raises:
        TypeError: ``tensor_list`` is not a list or tuple of tensors (also an
            ``AssertionError``).
        ValueError: no tensors, different C or numbers of dimensions, a
            ``pad_size_divisor`` below 1. The message names the tensor.

    Stream: on a GPU the work is queued on the current stream.

    mmengine's function rounds sizes above 2**24, and integers in the padding above
    2**53.

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
    """Stack tensors as `stack_batch`; ``name`` returns the name of one in messages."""
    if not isinstance(tensors, list | tuple):
        raise BatchTypeError(
            f"stack_batch: tensor_list must be a list of tensors, but is "
            f"{type_name(tensors)}."
        )
    if not tensors:
        raise BatchValueError(
            "stack_batch: tensor_list must have at least one tensor, but is empty."
        )
    torch_stack.check_layouts(tensors, name)
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
    divisor = check_whole(pad_size_divisor, 1, "stack_batch: pad_size_divisor")
    pad_dims = max(tensors[0].dim() - 1, 0)
    values = [pad_value] * len(tensors)
    stacked: Any = stack.stack_padded(
        list(tensors), pad_dims, values, name, Padding(size_divisor=divisor)
    )
    return stacked  # type: ignore[no-any-return]  # a Padded only with sizes or a mask


def _collate(batch: Any, where: str, collate_leaf: _LeafCollate) -> Any:
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
        return _collate_column(batch, (), collate_leaf)


def _collate_column(
    column: Sequence[Any], path: Path, collate_leaf: _LeafCollate
) -> Any:
    """Batch the values of all samples at ``path``, by the type of the first."""
    first = column[0]
    if isinstance(first, _TEXT):
        return column
    if isinstance(first, DataContainer):
        return batch_containers(list(column), path, len(column))
    is_mapping = isinstance(first, Mapping)
    if not is_mapping and not isinstance(first, Sequence):
        return collate_leaf(column, path)
    if len(path) >= pytree.MAX_DEPTH:
        raise pytree.nesting_error(format_path("data_batch[0]", path[:3]) + "...")
    if is_mapping:
        check_types(list(column), Mapping, "a mapping", path)
        batched = {
            key: _collate_column(
                _key_values(key, column, path), (*path, key), collate_leaf
            )
            for key in first
        }
        return pytree.rebuild_mapping(first, batched)
    advice = "Convert it to a tensor or an array, which is one value."
    columns = [
        _collate_column(items, (*path, step), collate_leaf)
        for step, items in sequence_columns(list(column), path, advice)
    ]
    if isinstance(first, tuple) and not pytree.is_namedtuple(first):
        return columns
    return pytree.rebuild_sequence(first, columns)


def _key_values(key: Any, column: Sequence[Any], path: Path) -> list[Any]:
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


def _stack_leaf(column: Sequence[Any], path: Path) -> Any:
    first = column[0]
    if isinstance(first, torch.Tensor):
        if registered := registered_collate(first):
            return batch_registered(list(column), path, *registered)
        return batch_tensors(list(column), path)
    if has_to_method(first):
        return column
    return batch_values(list(column), path)
