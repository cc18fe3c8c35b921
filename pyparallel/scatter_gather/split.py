"""Split the leaves of a batch over targets, all by one partition.

If the batch holds DataContainers, their chunks are the partition, and plain tensors
beside them follow it. Otherwise it is ``chunk_sizes``, or equal parts of each tensor
(ceiling, as ``torch.chunk``).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import torch

from ..backend.plain import check_storage, without_subclasses
from ..batch import pytree
from ..batch.container import DataContainer
from ..batch.padding import Padded
from ..batch.ragged import Ragged
from ..batch.stack import is_array
from ..batch.torch_stack import check_quantization
from ..core.errors import (
    BatchTypeError,
    BatchValueError,
    SplitError,
    format_path,
    type_name,
)
from ..core.torch_private import outside_autocast
from .move import LeafName

#: Returns the name of one leaf for a message; see `LeafName`.
Where = Callable[[], str]

_TENSOR = frozenset({torch.Tensor})


class Options(NamedTuple):
    """The checked options of a scatter."""

    num_targets: int
    dim: int = 0
    chunk_sizes: tuple[int, ...] | None = None
    max_size: int | None = None
    dtype: torch.dtype | None = None

    @property
    def divides(self) -> bool:
        """False if one target takes the whole batch, as it is."""
        return not (
            self.num_targets == 1 and self.chunk_sizes is None and self.max_size is None
        )


def whole_parts(
    leaves: list[Any], options: Options, name: LeafName, classes: Collection[type]
) -> list[Any]:
    """Return the one part of every leaf for the one target that takes all of it.

    Args:
        leaves: the leaves of the batch.
        options: of a scatter that does not divide.
        name: names leaf ``i`` in an error.
        classes: of the leaves.

    Raises:
        TypeError: as `split`.
        ValueError: a DataContainer that does not have exactly one chunk.
    """
    if not any(issubclass(cls, DataContainer) for cls in classes):
        return leaves
    return [
        leaf
        if type(leaf) is torch.Tensor or not isinstance(leaf, DataContainer)
        else _only_chunk(leaf, options, name, i)
        for i, leaf in enumerate(leaves)
    ]


def _only_chunk(
    container: DataContainer, options: Options, name: LeafName, i: int
) -> Any:
    data = container.data
    if type(data) is list and len(data) == 1:
        (chunk,) = data  # as collate makes it, which needs no further checks
        if container.cpu_only or type(chunk) is torch.Tensor:
            return chunk
        if type(chunk) is list and _TENSOR.issuperset(map(type, chunk)):
            return chunk
    return _chunks(container, options, partial(name, i))[0]


def split(leaves: Sequence[Any], options: Options, name: LeafName) -> list[list[Any]]:
    """Return for every leaf the list of its parts, one for each used target.

    A part is a tensor, the content of a DataContainer's chunk, or the leaf itself.

    Raises:
        TypeError: a DataContainer that does not hold chunks of tensors.
        ValueError: two leaves that cannot be split by one partition; both are named.
    """
    parts: dict[int, list[Any]] = {
        i: _chunks(leaf, options, partial(name, i))
        for i, leaf in enumerate(leaves)
        if isinstance(leaf, DataContainer)
    }
    plain = {
        i: leaf
        for i, leaf in enumerate(leaves)
        if (isinstance(leaf, torch.Tensor) or is_array(leaf))
        and not _has_no_samples(leaf, options, partial(name, i))
    }
    sizes = options.chunk_sizes
    if plain and parts and sizes is None and options.num_targets > 1:
        sizes = _container_sizes(parts, name)
    for i, leaf in plain.items():
        parts[i] = _split_tensor(leaf, sizes, options, partial(name, i))
    num_used = _num_used_targets(parts, options.num_targets, name)
    if options.max_size is not None:
        for i, part in parts.items():
            dim = options.dim if i in plain else 0
            parts[i] = [_truncate(chunk, dim, options.max_size) for chunk in part]
    return [
        parts[i] if i in parts else [leaf] * num_used for i, leaf in enumerate(leaves)
    ]


def _has_no_samples(leaf: Any, options: Options, where: Where) -> bool:
    """Return True if a leaf has no samples to split: every target gets all of it."""
    if isinstance(leaf, torch.Tensor) and (
        leaf.is_nested or leaf.layout is not torch.strided
    ):
        layout = "nested" if leaf.is_nested else leaf.layout
        raise BatchTypeError(
            f"{where()} must be a dense tensor to be split, but its layout is {layout}."
            " Give it to one target, or put it into DataContainer(..., cpu_only=True)."
        )
    dim, shape = options.dim, leaf.shape
    return (
        options.chunk_sizes is None
        and -len(shape) <= dim < len(shape)
        and shape[dim] == 0
    )


def _split_tensor(
    leaf: Any, sizes: Sequence[int] | None, options: Options, where: Where
) -> list[Any]:
    """Split a tensor or an array along ``dim``.

    Freed memory is reported here, because the parts have no names for a message.
    """
    check_storage(leaf, where)
    dim, shape = options.dim, tuple(leaf.shape)
    if not -len(shape) <= dim < len(shape):
        raise SplitError(
            f"{where()} must have a dimension {dim} to be split along, but has shape "
            f"{shape}. Put metadata into DataContainer(..., cpu_only=True)."
        )
    if sizes is None:
        sizes = partition(shape[dim], options.num_targets)
    elif sum(sizes) != shape[dim]:
        whose = "sum(chunk_sizes)" if options.chunk_sizes else "the containers' chunks"
        raise BatchValueError(
            f"{where()} must have size {sum(sizes)} along dimension {dim}, that of "
            f"{whose} {tuple(sizes)}, but has shape {shape}."
        )
    if len(sizes) == 1:
        return [leaf]
    ends = accumulate(sizes)
    return [
        leaf[_index(dim, len(shape), slice(end - size, end))]
        for size, end in zip(sizes, ends, strict=True)
    ]


def _index(dim: int, num_dims: int, part: slice) -> tuple[slice, ...]:
    index = [slice(None)] * num_dims
    index[dim] = part
    return tuple(index)


def _truncate(chunk: Any, dim: int, max_size: int) -> Any:
    """Return the first ``max_size`` samples of a chunk; all if it has no length."""
    if _length(chunk) is None and not is_array(chunk):
        return chunk
    if isinstance(chunk, Padded | Ragged):
        return chunk.part(0, max_size)
    if isinstance(chunk, list | tuple):
        return chunk[:max_size]
    return chunk[_index(dim, len(chunk.shape), slice(max_size))]


def _num_used_targets(
    parts: dict[int, list[Any]], num_targets: int, name: LeafName
) -> int:
    """Return the number of used targets: the number of parts of every leaf."""
    if not parts:
        return num_targets
    (first, expected), *others = parts.items()
    for i, part in others:
        if len(part) != len(expected):
            raise BatchValueError(
                f"{name(i)} must have the same number of chunks as {name(first)}, but "
                f"has {len(part)} where {len(expected)} was expected."
            )
    return len(expected)


def _chunks(container: DataContainer, options: Options, where: Where) -> list[Any]:
    """Return the chunks of a container, checked, and split again by the options."""
    data = container.data
    if isinstance(data, torch.Tensor | Padded | Ragged) and not container.cpu_only:
        data = [data]
    if not isinstance(data, list | tuple):
        raise BatchTypeError(
            f"{where()} must hold a list with one chunk for each target, as collate "
            f"makes it, but holds {type_name(data)}."
        )
    if not data:
        raise BatchValueError(f"{where()} must hold at least one chunk, but is empty.")
    chunks = list(data)
    if not container.cpu_only:
        _check_tensors(chunks, where)
    if options.chunk_sizes is not None:
        chunks = _rechunk(chunks, options.chunk_sizes, where)
    if len(chunks) > options.num_targets:
        raise BatchValueError(
            f"{where()} must have at most one chunk for each target "
            f"({options.num_targets}), but has {len(chunks)}. Collate with a larger "
            "samples_per_gpu, or name more targets."
        )
    return chunks


def _check_tensors(items: list[Any], where: Where, path: tuple[int, ...] = ()) -> None:
    """Raise if nested lists hold other values than tensors, `Padded` and `Ragged`."""
    for i, item in enumerate(items):
        if isinstance(item, torch.Tensor | Padded | Ragged):
            continue
        if not isinstance(item, list):
            raise BatchTypeError(
                f"{format_path(where() + '.data', (*path, i))} must be a tensor or a "
                f"list of tensors, but is {type_name(item)}. Use DataContainer(..., "
                "cpu_only=True) for data that stay on the host."
            )
        if len(path) > pytree.MAX_DEPTH:
            raise pytree.nesting_error(f"{where()}.data")
        _check_tensors(item, where, (*path, i))


def _length(chunk: Any) -> int | None:
    """Return the number of samples in a chunk, or None if it has no length."""
    if isinstance(chunk, torch.Tensor):
        # Nested tensors have no shape.
        return chunk.size(0) if chunk.dim() else None
    if isinstance(chunk, Padded | Ragged):
        return chunk.num_samples
    return len(chunk) if isinstance(chunk, list | tuple) else None


def _rechunk(chunks: list[Any], sizes: Sequence[int], where: Where) -> list[Any]:
    """Split the samples of all chunks, in order, into chunks of these sizes."""
    lengths = [_length(chunk) for chunk in chunks]
    total = sum(length or 0 for length in lengths)
    if None in lengths or total != sum(sizes):
        raise BatchValueError(
            f"{where()} must hold sum(chunk_sizes)={sum(sizes)} samples, but holds "
            f"{total}."
        )
    if tuple(lengths) == tuple(sizes):
        return chunks
    if all(isinstance(chunk, Padded) for chunk in chunks):
        fields = [
            [None] * len(sizes)
            if None in field
            else _rechunk(list(field), sizes, where)
            for field in zip(*(chunk.fields() for chunk in chunks), strict=True)
        ]
        return list(map(Padded, *fields))
    if all(isinstance(chunk, Ragged) for chunk in chunks):
        samples = [sample for chunk in chunks for sample in chunk.unbind()]
        return [Ragged.from_tensors(each) for each in _groups(samples, sizes)]
    if not all(isinstance(chunk, torch.Tensor) for chunk in chunks):
        samples = [sample for chunk in chunks for sample in chunk]
        return _groups(samples, sizes)
    shapes = {tuple(chunk.shape[1:]) for chunk in chunks}
    if len(shapes) > 1:
        raise BatchValueError(
            f"{where()} must have chunks of one padded shape to be split again, but "
            f"has {', '.join(map(str, sorted(shapes)))}. Collate with samples_per_gpu "
            "equal to the batch size."
        )
    for chunk in chunks:
        check_storage(chunk, where)
    if len(chunks) > 1:
        for i in range(len(chunks)):
            check_quantization(chunks, lambda _: where(), i)
        with outside_autocast():
            chunks = [torch.cat(list(without_subclasses(chunks)))]
    return list(chunks[0].split(list(sizes)))


def _groups(samples: list[Any], sizes: Sequence[int]) -> list[list[Any]]:
    ends = accumulate(sizes)
    return [samples[end - n : end] for n, end in zip(sizes, ends, strict=True)]


def _container_sizes(
    parts: dict[int, list[Any]], name: LeafName
) -> tuple[int, ...] | None:
    """Return the chunk sizes of the containers; None if unknown."""
    known: dict[tuple[int, ...], int] = {}
    for i, chunks in parts.items():
        lengths = tuple(_length(chunk) for chunk in chunks)
        sizes = tuple(length for length in lengths if length is not None)
        if len(sizes) == len(lengths):
            known.setdefault(sizes, i)
    if len(known) > 1:
        (sizes, i), (other, j), *_ = known.items()
        raise BatchValueError(
            f"{name(j)} must have the chunk sizes of {name(i)} so that the tensors "
            f"beside them can be split, but has {other} where {sizes} was expected."
        )
    return next(iter(known), None)


def partition(num_items: int, num_parts: int) -> list[int]:
    """Split items into at most ``num_parts`` ascending parts of ceiling size.

    This is the one partition of a batch: all code that copies or waits for parts uses
    it. The sizes are those of ``torch.chunk``; there may be fewer than ``num_parts``
    parts. Zero items make one empty part.

    Example:
        >>> partition(5, 2), partition(3, 4), partition(0, 2)
        ([3, 2], [1, 1, 1], [0])
    """
    if num_items == 0:
        return [0]
    size = -(-num_items // num_parts)
    return [min(size, num_items - start) for start in range(0, num_items, size)]
