"""parallel_apply: run calls on several devices at once, on reused threads."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import accumulate, chain, count, pairwise
from typing import Any, TypeVar, overload

import torch
from torch import nn

from ..batch.container import TensorSkeleton
from ..core.devices import HOST, Target, resolve_target
from ..core.errors import BatchTypeError, BatchValueError, type_name
from ..scatter_gather.move import start_copy
from ._device_threads import Call, run_calls
from .replicate import replicate

#: The start of all messages.
_NAME = "parallel_apply"
#: Without an accelerator no tensor can be on another device.
_HOST_ONLY = torch.accelerator.current_accelerator() is None
_ITEM_OPTIONS = ("inputs", "devices", "output_device", "dim", "module_kwargs")
_Result = TypeVar("_Result")
_SEQUENCES = (Sequence, nn.ModuleList)
_MODULE_OPTIONS = ("inputs", "kwargs_tup", "devices")


@overload
def parallel_apply(
    fn: Callable[..., _Result],
    inputs: torch.Tensor | Sequence[Any],
    devices: Target | Iterable[Target] | None = None,
    output_device: Target | None = None,
    dim: int = 0,
    module_kwargs: Mapping[str, Any] | None = None,
) -> list[_Result]: ...
@overload
def parallel_apply(
    modules: Sequence[Callable[..., Any]] | nn.ModuleList,
    inputs: Sequence[Any],
    kwargs_tup: Sequence[Mapping[str, Any] | None] | None = None,
    devices: Sequence[Target | None] | None = None,
) -> list[Any]: ...
def parallel_apply(  # noqa: D417 - the arguments depend on the form
    *args: Any, **kwargs: Any
) -> list[Any]:
    """Call one callable on many items, or each of several modules on its own input.

    ``parallel_apply(fn, inputs, devices=None, output_device=None, dim=0,
    module_kwargs=None)`` splits the items over devices, each with its own thread:

    Args:
        fn: called once for each item, as ``fn(item, **module_kwargs)``. An
            ``nn.Module`` is replicated for each part, anew in each call (see
            `replicate`), and gradients are summed in the module. Only the replica of
            the first part updates the module's buffers.
        inputs: a tensor, whose items have size 1 along ``dim``, or a sequence of items
            of any type. An item that is a plain ``tuple`` is a list of arguments.
        devices: one or several devices for the calls, named as for `scatter`. A device
            may be named several times. The items are split in order into parts whose
            sizes differ by at most one. None: all accelerators, or, without one,
            ``torch.get_num_threads()`` times the host.
        output_device: the device for the tensors of the results; by default the first
            device.
        dim: the dimension of a tensor ``inputs``; negative values count from the end.
        module_kwargs: keyword arguments of each call.

    ``parallel_apply(modules, inputs, kwargs_tup=None, devices=None)`` is torch's form.
    It applies if the first argument is a sequence of callables or an ``nn.ModuleList``.
    Each callable gets a thread, and no tensor is moved:

    Args:
        modules: modules or other callables.
        inputs: the input of each module. A tuple or a list is a list of arguments.
        kwargs_tup: keyword arguments of each module; None for no arguments.
        devices: the current device of each call, which its errors name. None: the
            device of the input or, without tensors there, of the parameters.

    Returns:
        A list of the results, in the order of the items.

    Raises:
        TypeError: the first argument is neither of the two, or an argument has the
            wrong type.
        ValueError: sequences of different lengths; no devices; a tensor without
            dimensions; a ``dim`` that the tensor does not have.
        RuntimeError: this machine does not have a device; or, with several parts, a
            current stream is under graph capture.
        BaseException: the error of the first call, by the order of the items, that
            raised, with the note "in item i on device d". Calls that are running are
            waited for. Later calls that have not begun are skipped.

    Threads are reused, see Note [checked out threads] in ``_thread_pool.py``. Calls
    from several threads, and calls inside ``fn``, do not wait for each other. Calls run
    with the caller's context variables and its modes of torch (gradients, inference,
    autocast with dtypes and cache, default device). Their changes to these stay in
    their thread. On the host they share the caller's ``torch.get_num_threads()``.

    The caller's thread runs one part on the host itself, and then parts that no thread
    has begun. If it has modes that other threads do not get, it only waits. A call with
    a single part runs in the caller's thread. After Ctrl-C no further call begins, and
    KeyboardInterrupt is raised when the running calls are done; a second Ctrl-C does
    not wait for them.

    On the host, threads draw random numbers from one generator in no fixed order: with
    dropout, two runs differ.

    Stream: tensors for an accelerator are packed and copied as by `scatter`. Each
    thread has a stream, which waits for the work on the device's current stream. The
    current stream waits for the results. The host does not wait.

    From ``torch.nn.parallel.parallel_apply``, which starts new threads in each call,
    passes on fewer modes, and needs accelerators. The first form is new.

    Example:
        >>> parallel_apply(torch.square, torch.arange(3), ["cpu", "cpu"])
        [tensor([0]), tensor([1]), tensor([4])]
    """
    if args:
        first, args = args[0], args[1:]
    else:
        name = "modules" if "modules" in kwargs else "fn"
        first = kwargs.pop(name, None)
    if _is_sequence(first):
        _check_names(kwargs, _MODULE_OPTIONS, "several modules")
        return _apply_modules(first, *args, **kwargs)
    if not callable(first):
        raise BatchTypeError(
            f"{_NAME}: the first argument must be a callable, or a sequence of "
            f"modules, but is of type {type_name(first)}."
        )
    _check_names(kwargs, _ITEM_OPTIONS, "one callable")
    return _apply_to_items(first, *args, **kwargs)


def _apply_to_items(
    fn: Any,
    inputs: Any,
    devices: Any = None,
    output_device: Any = None,
    dim: int = 0,
    module_kwargs: Any = None,
) -> list[Any]:
    kwargs = _options(module_kwargs, "module_kwargs")
    items = split_items(inputs, dim)
    targets = resolve_devices(devices)
    output = targets[0] if output_device is None else resolve_device(output_device)
    if not items:
        return []
    parts = split_evenly(items, len(targets))
    targets = targets[: len(parts)]
    functions = _replicas(fn, targets)
    moved = move_to_devices([(part, kwargs) for part in parts], targets)
    number = count()
    calls = [
        [
            Call(next(number), each, item if type(item) is tuple else (item,), named)
            for item in part
        ]
        for each, (part, named) in zip(functions, moved, strict=True)
    ]
    results: list[Any]
    (results,) = move_to_devices([run_calls(targets, calls, len(items))], [output])
    return results


def _replicas(fn: Any, targets: Sequence[torch.device]) -> Sequence[Any]:
    """Return the function to call on each device."""
    if not isinstance(fn, nn.Module):
        return [fn] * len(targets)
    if len(targets) == 1 and _is_on_device(fn, targets[0]):
        return [fn]
    return replicate(fn, targets)


def _is_on_device(module: nn.Module, target: torch.device) -> bool:
    tensors = chain(module.parameters(), module.buffers())
    return all(tensor.device == target for tensor in tensors)


def _apply_modules(
    modules: Any,
    inputs: Any,
    kwargs_tup: Any = None,
    devices: Any = None,
) -> list[Any]:
    modules = _same_length(modules, "modules", modules)
    for i, module in enumerate(modules):
        if not callable(module):
            raise BatchTypeError(
                f"{_NAME}: modules[{i}] must be a module or another callable, but is "
                f"of type {type_name(module)}."
            )
    inputs = _same_length(inputs, "inputs", modules)
    options: list[Mapping[str, Any]] = [{}] * len(modules)
    if kwargs_tup is not None:
        kwargs_tup = _same_length(kwargs_tup, "kwargs_tup", modules)
        options = [_options(o, f"kwargs_tup[{i}]") for i, o in enumerate(kwargs_tup)]
    if devices is None:
        devices = [None] * len(modules)
    targets = [
        resolve_device(device) if device is not None else infer_device((args, module))
        for device, args, module in zip(
            _same_length(devices, "devices", modules), inputs, modules, strict=True
        )
    ]
    calls = [
        Call(i, module, args if isinstance(args, list | tuple) else (args,), options[i])
        for i, (module, args) in enumerate(zip(modules, inputs, strict=True))
    ]
    return run_calls(targets, [[call] for call in calls], len(calls))


def _check_names(found: Iterable[str], known: Sequence[str], what: str) -> None:
    for name in found:
        if name not in known:
            raise BatchTypeError(
                f"{_NAME}: the arguments with {what} must be {', '.join(known)}, but "
                f"one is {name}."
            )


def _is_sequence(value: Any) -> bool:
    """Return True for a sequence, which selects torch's form."""
    if type(value) in (list, tuple):  # faster than checks by abstract classes
        return True
    return isinstance(value, _SEQUENCES) and not isinstance(value, str)


def _same_length(value: Any, name: str, modules: Sequence[Any]) -> list[Any]:
    """Return a sequence as a list with one entry for each module."""
    if not _is_sequence(value) and not isinstance(value, torch.Tensor):
        raise BatchTypeError(
            f"{_NAME}: {name} must be a sequence with one entry for each module, but "
            f"is of type {type_name(value)}."
        )
    if len(value) != len(modules):
        raise BatchValueError(
            f"{_NAME}: {name} must have one entry for each of {len(modules)} modules, "
            f"but has {len(value)}."
        )
    return list(value)


def _options(value: Any, name: str) -> Mapping[str, Any]:
    """Return keyword arguments; None becomes an empty mapping."""
    if value is None:
        return {}
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return value
    raise BatchTypeError(
        f"{_NAME}: {name} must be keyword arguments by name, but is {value!r}."
    )


def split_items(inputs: Any, dim: int) -> Sequence[Any]:
    """Return the items of ``inputs``."""
    if isinstance(inputs, torch.Tensor):
        if isinstance(dim, bool) or not isinstance(dim, int):
            raise BatchTypeError(
                f"{_NAME}: dim must be an integer, but is {dim!r} ({type_name(dim)})."
            )
        if not -inputs.dim() <= dim < inputs.dim():
            raise BatchValueError(
                f"{_NAME}: dim must be a dimension of inputs, but is {dim!r} for shape "
                f"{tuple(inputs.shape)}."
            )
        return inputs.split(1, dim) if inputs.shape[dim] else ()
    if isinstance(inputs, Sequence) and not isinstance(inputs, str | bytes):
        return list(inputs)
    raise BatchTypeError(
        f"{_NAME}: inputs must be a tensor or a sequence of items, but is of type "
        f"{type_name(inputs)}. Make a list of them."
    )


def resolve_devices(devices: Any) -> list[torch.device]:
    """Return the devices of an argument ``devices``."""
    if devices is None:
        if not torch.accelerator.is_available():
            return [HOST] * torch.get_num_threads()
        found = torch.accelerator.current_accelerator()
        number = torch.accelerator.device_count()
        return [torch.device((found or HOST).type, i) for i in range(number)]
    if isinstance(devices, int | str | torch.device):
        devices = [devices]
    if not isinstance(devices, Iterable):
        raise BatchTypeError(
            f"{_NAME}: devices must be a device, an index or a list of them, but is of "
            f"type {type_name(devices)}."
        )
    targets = [resolve_device(device) for device in devices]
    if not targets:
        raise BatchValueError(f"{_NAME}: devices must name at least one, but is empty.")
    return targets


def split_evenly(items: Sequence[Any], max_parts: int) -> list[Sequence[Any]]:
    """Split items in order into at most ``max_parts`` parts of nearly equal size."""
    num_parts = min(max_parts, len(items))
    size, num_longer = divmod(len(items), num_parts)
    ends = accumulate(size + (i < num_longer) for i in range(num_parts))
    return [items[start:end] for start, end in pairwise((0, *ends))]


def move_to_devices(
    batches: Sequence[Any], targets: Sequence[torch.device]
) -> Sequence[Any]:
    """Return each batch with its tensors on its device."""
    if _HOST_ONLY:
        return batches
    skeletons = [
        TensorSkeleton(batch, partial(_is_on_other_device, target))
        for batch, target in zip(batches, targets, strict=True)
    ]
    # All copies are queued before the first wait.
    waits = []
    for skeleton, target in zip(skeletons, targets, strict=True):
        tensors = skeleton.take_tensors()
        waits.append(start_copy(tensors, tensors, target, None) if tensors else None)
    return [
        skeleton.restore(wait()) if wait else batch
        for skeleton, wait, batch in zip(skeletons, waits, batches, strict=True)
    ]


def _is_on_other_device(target: torch.device, tensor: torch.Tensor) -> bool:
    return tensor.device != target and not tensor.is_meta  # meta tensors have no data


def resolve_device(device: Any) -> torch.device:
    """Return a device; -1 is the host."""
    if type(device) is str and device == "cpu":  # the most common device
        return HOST
    return resolve_target(device, _NAME, "device") or HOST


def infer_device(call: tuple[Any, Any]) -> torch.device:
    """Return the device of the arguments or, without tensors there, of the module."""
    if _HOST_ONLY:
        return HOST
    args, module = call
    tensors = TensorSkeleton(args, lambda tensor: True).tensors
    if isinstance(module, nn.Module):
        tensors += module.parameters()
    return tensors[0].device if tensors else HOST
