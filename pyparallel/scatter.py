"""scatter: a batch is split over devices, and each part sent in one copy."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from . import _slab, _tree
from ._errors import BatchTypeError, BatchValueError
from ._split import Options, split
from ._targets import Targets, resolve_targets
from .container import DataContainer


def scatter(
    inputs: Any,
    target_gpus: Targets,
    dim: int = 0,
    chunk_sizes: Sequence[int] | None = None,
    max_size: int | None = None,
    dtype: torch.dtype | None = None,
) -> Any:
    """Split ``inputs`` over devices; return one object for each device used.

    Args:
        inputs: a tensor, a DataContainer, or any nest of containers around them.
            Tensors are split along ``dim``, collated DataContainers by their chunks,
            everything else is given to every device by reference (numpy arrays too,
            unless there are several targets: then they are split, and stay arrays).
        target_gpus: one target or several: a CUDA index, ``'cuda:0'``, ``'cpu'``, a
            `torch.device`; -1 is the host without any move. A device may stand there
            more than once.
        dim: the dimension along which plain tensors are split. Chunks of
            DataContainers lie along dimension 0.
        chunk_sizes: number of samples for each target; they sum to the size of every
            tensor along ``dim``. None: tensors beside a DataContainer are split by its
            chunks; without one, into equal parts (ceiling, as ``torch.chunk``). A
            tensor without samples goes to every target.
        max_size: the most samples that one target gets; the excess is cut off.
        dtype: floating-point dtype to which floating-point tensors are cast. Metadata
            (``cpu_only``) is not touched.

    Returns:
        A list with one entry for each device used (a tuple for a bare tensor or
        DataContainer). It is shorter than ``target_gpus`` when there are fewer chunks.
        Containers keep their types; DataContainers are replaced by what they hold. On
        the host contiguous tensors are not copied.

    Raises:
        TypeError: a target or an option of the wrong kind; a DataContainer that holds
            anything but (lists of) tensors, `Padded` and `Ragged` without ``cpu_only``.
        ValueError: no targets; more chunks than targets; leaves with different numbers
            of chunks; sizes that do not sum up. The message names the key.
        RuntimeError: a target device that this machine does not have.

    Stream: for every device the CPU tensors go in one packed copy on the device's copy
    stream; the stream that is current on the device waits for it, the host does not.
    Tensors that require grad are sent one by one so that gradients flow back.

    The behaviour is that of mmcv 1.x ``scatter``; silently dropped chunks, lost
    container types and labels misaligned with images are fixed. ``chunk_sizes``,
    ``max_size`` and ``dtype`` are additions.

    Example:
        >>> scatter({"x": torch.arange(5)}, ["cpu", "cpu"])
        [{'x': tensor([0, 1, 2])}, {'x': tensor([3, 4])}]
    """
    targets = resolve_targets(target_gpus)
    options = _options(targets, dim, chunk_sizes, max_size, dtype)
    if isinstance(inputs, DataContainer) and inputs.cpu_only:
        if chunk_sizes is None and max_size is None:
            return inputs.data
    parts = _scatter(inputs, targets, options, ("inputs",))
    return tuple(parts) if isinstance(inputs, torch.Tensor | DataContainer) else parts


def scatter_kwargs(
    inputs: Any,
    kwargs: Any,
    target_gpus: Targets,
    dim: int = 0,
    chunk_sizes: Sequence[int] | None = None,
    max_size: int | None = None,
    dtype: torch.dtype | None = None,
) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Scatter positional and keyword arguments of a module together.

    Args:
        inputs: positional arguments, usually a tuple; None or empty if there are none.
        kwargs: keyword arguments; None or empty if there are none.
        target_gpus: see `scatter`, as for the other arguments.
        dim: see `scatter`.
        chunk_sizes: see `scatter`.
        max_size: see `scatter`.
        dtype: see `scatter`.

    Returns:
        Two tuples with one entry for each device used: the positional arguments
        (``()`` if there were none) and the keyword arguments (``{}``). Both are empty
        when there are no arguments at all.

    Raises:
        TypeError: as `scatter`.
        ValueError: as `scatter`.
        RuntimeError: as `scatter`.

    Both are split by one partition, so that a tensor in one follows the DataContainers
    of the other. From mmcv 1.x ``scatter_kwargs``.
    """
    targets = resolve_targets(target_gpus)
    options = _options(targets, dim, chunk_sizes, max_size, dtype)
    no_inputs, no_kwargs = _is_empty(inputs), _is_empty(kwargs)
    if no_inputs and no_kwargs:
        return (), ()
    tree = (() if no_inputs else inputs, {} if no_kwargs else kwargs)
    both = _scatter(tree, targets, options, ("inputs", "kwargs"))
    return tuple(part[0] for part in both), tuple(part[1] for part in both)


def first_arguments(
    scattered: tuple[Sequence[Any], Sequence[Any]],
) -> tuple[Any, Any]:
    """Return the first device's arguments from what `scatter_kwargs` returned."""
    inputs, kwargs = scattered
    return (inputs[0] if inputs else ()), (kwargs[0] if kwargs else {})


def _is_empty(arguments: Any) -> bool:
    """Tell whether there are no arguments; a tensor is an argument, not a flag."""
    return arguments is None or (
        isinstance(arguments, list | tuple | dict) and not arguments
    )


def _scatter(
    tree: Any,
    targets: list[torch.device | None],
    options: Options,
    roots: tuple[str, ...],
) -> list[Any]:
    leaves, structure = _tree.flatten(tree)

    def name(i: int) -> str:
        path = _tree.accessors(structure)[i]
        if len(roots) == 1:
            return path.codify(roots[0])
        # Two roots: the first step of the path tells which of them it is.
        return path[1:].codify(roots[path[0].entry])

    columns: list[tuple[Any, ...]] = [()] * len(targets)
    if leaves:
        columns = list(zip(*split(leaves, options, name), strict=True))
    return [
        _tree.unflatten(structure, _move(leaves, column, target, options.dtype))
        for column, target in zip(columns, targets, strict=False)
    ]


def _move(
    leaves: Sequence[Any],
    parts: Sequence[Any],
    target: torch.device | None,
    dtype: torch.dtype | None,
) -> list[Any]:
    """Return the parts of one target, with all their tensors there."""
    # Lists are walked into only where they are the chunk of a container.
    moves = [
        isinstance(leaf, torch.Tensor)
        or (isinstance(leaf, DataContainer) and not leaf.cpu_only)
        for leaf in leaves
    ]
    flat: list[torch.Tensor] = []
    _collect([part for part, move in zip(parts, moves, strict=True) if move], flat)
    if dtype is not None:
        flat = [_cast(tensor, dtype) for tensor in flat]
    sent = iter(_send(flat, target))
    return [
        (next(sent) if isinstance(part, torch.Tensor) else _refill(part, sent))
        if move
        else part
        for part, move in zip(parts, moves, strict=True)
    ]


def _collect(items: Sequence[Any], into: list[torch.Tensor]) -> None:
    """Append the tensors of nested lists and namedtuples."""
    for item in items:
        if isinstance(item, torch.Tensor):
            into.append(item)
        elif item is not None:  # what a Padded has nothing for
            _collect(item, into)


def _refill(items: Any, tensors: Iterator[torch.Tensor]) -> Any:
    """Return the same nested lists and namedtuples with the next tensors in them."""
    if items is None:
        return None
    filled = [
        next(tensors) if isinstance(item, torch.Tensor) else _refill(item, tensors)
        for item in items
    ]
    return filled if isinstance(items, list) else _tree.rebuild_sequence(items, filled)


def _cast(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def _send(
    tensors: list[torch.Tensor], target: torch.device | None
) -> list[torch.Tensor]:
    """Return the tensors on ``target``, those that can be in one packed copy."""
    if target is None:
        return _contiguous(tensors)
    if target.type == "cpu":
        return [tensor.to(target) for tensor in _contiguous(tensors)]
    # A device without streams (MPS) gets its tensors one by one.
    streams = hasattr(torch.get_device_module(target), "Stream")
    packed = [i for i, tensor in enumerate(tensors) if streams and _packs(tensor)]
    landed: list[torch.Tensor] = []
    if packed:
        landed = _slab.send([tensors[i] for i in packed], target).land()
    result = dict(zip(packed, landed, strict=True))
    return [
        result[i] if i in result else tensor.to(target, non_blocking=streams)
        for i, tensor in enumerate(tensors)
    ]


def _contiguous(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    try:
        return [tensor.contiguous() for tensor in tensors]
    except RuntimeError:  # sparse tensors have no such thing
        return [
            tensor.contiguous() if tensor.layout is torch.strided else tensor
            for tensor in tensors
        ]


def _packs(tensor: torch.Tensor) -> bool:
    """Tell whether only the bytes of this tensor have to reach the device."""
    return (
        tensor.device.type == "cpu"
        and type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.layout is torch.strided
        and not (tensor.requires_grad and torch.is_grad_enabled())
        and not (tensor.is_quantized or tensor.is_nested or tensor._is_zerotensor())
        and not (tensor.is_conj() or tensor.is_neg())
    )


def _options(
    targets: list[torch.device | None],
    dim: int,
    chunk_sizes: Sequence[int] | None,
    max_size: int | None,
    dtype: torch.dtype | None,
) -> Options:
    sizes = None
    if chunk_sizes is not None:
        sizes = tuple(_positive(size, "chunk_sizes") for size in chunk_sizes)
        if len(sizes) != len(targets):
            raise BatchValueError(
                f"scatter: chunk_sizes must have one size for each of {len(targets)} "
                f"targets, but is {sizes}."
            )
    if dtype is not None and not (
        isinstance(dtype, torch.dtype) and dtype.is_floating_point
    ):
        raise BatchTypeError(
            f"scatter: dtype must be a floating-point torch.dtype, but is {dtype!r}."
        )
    cap = None if max_size is None else _positive(max_size, "max_size")
    return Options(len(targets), operator.index(dim), sizes, cap, dtype)


def _positive(value: Any, option: str) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        raise BatchTypeError(
            f"scatter: {option} must be made of integers, but has {value!r}."
        ) from None
    if number < 1:
        raise BatchValueError(
            f"scatter: {option} must be 1 or more, but has {value!r}."
        )
    return number
