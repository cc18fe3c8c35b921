"""scatter: split a batch over devices, and copy each part in one copy."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar, overload

import torch
from torch.nn.utils.rnn import PackedSequence

from .. import backend
from ..batch import pytree
from ..batch.container import DataContainer, are_only_tensors
from ..batch.ragged import Ragged
from ..core.devices import Targets, resolve_targets
from ..core.errors import BatchTypeError, BatchValueError, plain_number, type_name
from ..core.tracing import span
from ..transfer.static import StaticBatches, StaticTarget
from .checks import check_dim
from .move import move, send_flat, start_copy
from .split import Options, split, whole_parts

_T = TypeVar("_T")
_Key = TypeVar("_Key")


@overload
def scatter(  # type: ignore[overload-overlap]
    inputs: torch.Tensor,
    target_gpus: Targets,
    dim: int = 0,
    chunk_sizes: Sequence[int] | None = None,
    max_size: int | None = None,
    dtype: torch.dtype | None = None,
    stream: torch.Stream | None = None,
    out: StaticBatches | None = None,
) -> tuple[torch.Tensor, ...]: ...
@overload
def scatter(  # type: ignore[overload-overlap]
    inputs: DataContainer,
    target_gpus: Targets,
    dim: int = 0,
    chunk_sizes: Sequence[int] | None = None,
    max_size: int | None = None,
    dtype: torch.dtype | None = None,
    stream: torch.Stream | None = None,
    out: StaticBatches | None = None,
) -> Sequence[Any]: ...
@overload
def scatter(
    inputs: dict[_Key, DataContainer],
    target_gpus: Targets,
    dim: int = 0,
    chunk_sizes: Sequence[int] | None = None,
    max_size: int | None = None,
    dtype: torch.dtype | None = None,
    stream: torch.Stream | None = None,
    out: StaticBatches | None = None,
) -> list[dict[_Key, Any]]: ...
@overload
def scatter(
    inputs: _T,
    target_gpus: Targets,
    dim: int = 0,
    chunk_sizes: Sequence[int] | None = None,
    max_size: int | None = None,
    dtype: torch.dtype | None = None,
    stream: torch.Stream | None = None,
    out: StaticBatches | None = None,
) -> list[_T]: ...
def scatter(
    inputs: Any,
    target_gpus: Targets,
    dim: int = 0,
    chunk_sizes: Sequence[int] | None = None,
    max_size: int | None = None,
    dtype: torch.dtype | None = None,
    stream: torch.Stream | None = None,
    out: StaticBatches | None = None,
) -> Any:
    """Split ``inputs`` over devices; return one object for each device used.

    Args:
        inputs: a tensor, a DataContainer, or any nest of containers around them.
            Tensors are split along ``dim``, collated DataContainers by their chunks,
            all other values go to every target by reference. So do empty containers
            that are ``inputs``, its items or, unless it is a list, values of dicts
            among these. With several targets numpy arrays are split too, and stay
            arrays.
        target_gpus: one target or several: a CUDA index, ``'cuda:0'``, ``'cpu'``, a
            `torch.device`; -1 is the host, and tensors are not moved. A device may be
            named more than once.
        dim: the dimension along which plain tensors are split. Chunks of
            DataContainers are always split along dimension 0.
        chunk_sizes: number of samples for each target; they sum to the size of every
            tensor along ``dim``. None: tensors beside a DataContainer are split by its
            chunks; without one, into equal parts (ceiling, as ``torch.chunk``). A
            tensor without samples goes to every target.
        max_size: the most samples for one target; further samples are dropped.
        dtype: floating-point dtype to which floating-point tensors are cast. Metadata
            (``cpu_only``) is not touched.
        stream: the stream of one of the targets on which the copy to it is queued.
        out: fixed memory that the tensors are copied into, in place of new memory.

    Returns:
        A list with one entry for each device used (a tuple for a bare tensor or
        DataContainer). It is shorter than ``target_gpus`` when there are fewer chunks.
        Containers keep their types and attributes; DataContainers are replaced by their
        content. On the host contiguous tensors are not copied.

    Raises:
        TypeError: a target or an option of the wrong type; a DataContainer without
            ``cpu_only`` that holds other values than (lists of) tensors, `Padded` and
            `Ragged`; with ``out``, a tensor that is not a dense one of the host.
        ValueError: no targets; more chunks than targets; leaves with different numbers
            of chunks; sizes that do not sum up. The message names the key. Or ``out``
            has the most plans already.
        RuntimeError: this machine does not have a target device; a stream of the copy
            is under graph capture.

    Stream: the CPU tensors of each device are in one packed copy on the device's copy
    stream, or on ``stream``. It waits for no work of other streams. All copies are
    queued before the first one is waited for. The stream that is current on the device
    waits for its copy, the host does not. Pinned tensors of 1 MiB and more are read in
    place: do not change them before the copy is done. Tensors that require grad are
    copied one by one so that gradients flow back. With ``out`` the copy waits for
    the work that is queued on the current stream, and on the one that received the
    batch before.

    The behaviour is that of mmcv 1.x ``scatter``, without its defects: dropped chunks,
    lost container types, and labels misaligned with images. ``chunk_sizes``,
    ``max_size``, ``dtype``, ``stream`` and ``out`` are additions.

    Example:
        >>> scatter({"x": torch.arange(5)}, ["cpu", "cpu"])
        [{'x': tensor([0, 1, 2])}, {'x': tensor([3, 4])}]
    """
    targets = resolve_targets(target_gpus)
    options = _options(targets, dim, chunk_sizes, max_size, dtype)
    if stream is not None:
        _check_stream(stream, targets)
    if out is not None and not isinstance(out, StaticBatches):
        raise BatchTypeError(
            f"scatter: out must be a StaticBatches, but is of type {type_name(out)}."
        )
    if isinstance(inputs, DataContainer) and inputs.cpu_only:
        if chunk_sizes is None and max_size is None:
            return inputs.data
    if pytree.is_empty(inputs):
        return [inputs] * len(targets)
    with span("pyparallel.scatter"):
        parts = _untraced()(inputs, targets, options, ("inputs",), stream, out)
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
        inputs: positional arguments, usually a tuple; may be None or empty.
        kwargs: keyword arguments; may be None or empty.
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
    of the other. The behaviour is that of mmcv 1.x ``scatter_kwargs``.
    """
    targets = resolve_targets(target_gpus)
    options = _options(targets, dim, chunk_sizes, max_size, dtype)
    no_inputs, no_kwargs = _is_empty(inputs), _is_empty(kwargs)
    if no_inputs and no_kwargs:
        return (), ()
    tree = (() if no_inputs else inputs, {} if no_kwargs else kwargs)
    with span("pyparallel.scatter"):
        both = _untraced()(tree, targets, options, ("inputs", "kwargs"))
    return tuple(part[0] for part in both), tuple(part[1] for part in both)


def first_arguments(
    scattered: tuple[Sequence[Any], Sequence[Any]],
) -> tuple[Any, Any]:
    """Return the first device's arguments from a result of `scatter_kwargs`."""
    inputs, kwargs = scattered
    return (inputs[0] if inputs else ()), (kwargs[0] if kwargs else {})


def _is_empty(arguments: Any) -> bool:
    """Return True if there are no arguments; a tensor always is one."""
    return arguments is None or (
        isinstance(arguments, list | tuple | dict) and not arguments
    )


def _scatter(
    tree: Any,
    targets: list[torch.device | None],
    options: Options,
    roots: tuple[str, ...],
    stream: torch.Stream | None = None,
    out: StaticBatches | None = None,
) -> list[Any]:
    kept = None if out else _keep(tree, targets[0], options, len(roots))
    if kept is not None:
        return kept
    flat = pytree.flatten_arguments(tree, len(roots))
    leaves, structure, classes = flat
    sent = None if out else _send(flat, targets[0], options, stream)
    if sent is not None:
        return [sent.wait()]

    def name(i: int) -> str:
        path = pytree.accessors(structure)[i]
        if len(roots) == 1:
            return path.codify(roots[0])
        # With two roots, the first step of the path is the number of the root.
        return path[1:].codify(roots[path[0].entry])

    statics: list[StaticTarget | None] = [None] * len(targets)
    if out is not None:
        key = pytree.key_of(structure)
        statics = [StaticTarget(out, key, place) for place in range(len(targets))]
    if not options.divides:
        (target,) = targets
        parts = whole_parts(leaves, options, name, classes)
        moved = move(
            leaves, parts, target, options.dtype, stream, name, classes, statics[0]
        )
        return [pytree.unflatten(structure, moved)]
    bare = pytree.find_container(structure, Ragged)
    if bare is not None:
        raise BatchTypeError(
            f"{name(bare).removesuffix('.values')} must be the chunk of a "
            "DataContainer to be split, but is a bare Ragged. Collate it with "
            "DataContainer(..., ragged=True), or give it to one target without "
            "chunk_sizes and max_size."
        )
    packed = pytree.find_container(structure, PackedSequence)
    if packed is not None:
        raise BatchTypeError(
            f"{name(packed).removesuffix('.data')} must be padded to be split, but is "
            "a PackedSequence. Use pad_packed_sequence, or give it to one target."
        )
    columns: list[tuple[Any, ...]] = [()] * len(targets)
    if leaves:
        columns = list(zip(*split(leaves, options, name), strict=True))
    # All copies are started before the first one is waited for: the wait may block the
    # host for tensors that torch copies. No slab changes before all parts are checked.
    waits = [
        start_copy(leaves, column, target, options.dtype, stream, name, classes, static)
        for column, target, static in zip(columns, targets, statics, strict=False)
    ]
    return [pytree.unflatten(structure, wait()) for wait in waits]


def _untraced() -> Callable[..., list[Any]]:
    """Return `_scatter`, or in code that torch.compile traces a call that it leaves.

    It cannot trace the walks of containers, by the backend and by optree.
    """
    compiling = torch.compiler.is_compiling()
    return torch.compiler.disable(_scatter) if compiling else _scatter


def _keep(
    tree: Any, target: torch.device | None, options: Options, roots: int
) -> list[Any] | None:
    """Return the one part of a batch that stays on the host as it is, or None."""
    on_host = target is None or target.type == "cpu"
    if not on_host or options.divides or options.dtype is not None:
        return None
    copied = pytree.copy_compact(tree, roots, on_cpu=target is not None)
    if copied is None or not are_only_tensors(copied[1]):
        return None
    return [copied[0]]


def _send(
    flat: pytree.Flat, target: torch.device | None, options: Options, stream: Any
) -> backend.BatchCopy | None:
    """Send a batch for one target by one compiled call, or return None."""
    if target is None or target.type == "cpu":
        return None
    if options.divides:
        return None
    return send_flat(flat, target, stream, options.dtype)


def _check_stream(stream: Any, targets: Sequence[torch.device | None]) -> None:
    device = getattr(stream, "device", None)
    if not isinstance(device, torch.device):
        raise BatchTypeError(
            "scatter: stream must be a torch.Stream, but is of type "
            f"{type_name(stream)}."
        )
    if device not in targets:
        names = ", ".join(str(target or "the host") for target in targets)
        raise BatchValueError(
            f"scatter: stream must be of a target ({names}), but is of {device}."
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
        chunk_sizes = plain_number(chunk_sizes)
        if not isinstance(chunk_sizes, Iterable):
            raise BatchTypeError(
                "scatter: chunk_sizes must be a sequence of integers, but is "
                f"{chunk_sizes!r} ({type_name(chunk_sizes)})."
            )
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
    return Options(len(targets), check_dim(dim, "scatter"), sizes, cap, dtype)


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
