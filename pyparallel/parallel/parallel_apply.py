"""parallel_apply: calls on several devices at once, each by a thread that stays."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain, count
from typing import Any, overload

import torch
from torch import nn

from ..core.devices import Target
from ..core.errors import BatchTypeError, BatchValueError, type_name
from ._calls import Call, run
from ._dealing import WHO, deal, items_of, place_of, places_of, resolve, send
from .replicate import replicate

_OF_ITEMS = ("inputs", "devices", "output_device", "dim", "module_kwargs")
_SEQUENCES = (Sequence, nn.ModuleList)
_OF_MODULES = ("inputs", "kwargs_tup", "devices")


@overload
def parallel_apply(
    fn: Callable[..., Any],
    inputs: torch.Tensor | Sequence[Any],
    devices: Target | Iterable[Target] | None = None,
    output_device: Target | None = None,
    dim: int = 0,
    module_kwargs: Mapping[str, Any] | None = None,
) -> list[Any]: ...
@overload
def parallel_apply(
    modules: Sequence[Callable[..., Any]] | nn.ModuleList,
    inputs: Sequence[Any],
    kwargs_tup: Sequence[Mapping[str, Any] | None] | None = None,
    devices: Sequence[Target | None] | None = None,
) -> list[Any]: ...
def parallel_apply(  # noqa: D417 - they are described form by form
    *args: Any, **kwargs: Any
) -> list[Any]:
    """Call one callable on many items, or each of several modules on its own input.

    ``parallel_apply(fn, inputs, devices=None, output_device=None, dim=0,
    module_kwargs=None)`` deals items to devices, each with a thread of its own:

    Args:
        fn: called once for each item, as ``fn(item, **module_kwargs)``. An
            ``nn.Module`` becomes one replica for each part, made anew by every call
            (see `replicate`): gradients come together in the module. What a forward
            pass writes to buffers stays as far as the first part is concerned.
        inputs: a tensor, whose items have size 1 along ``dim``, or a sequence of items
            of any kind. An item that is a plain ``tuple`` is a list of arguments.
        devices: where to compute, one or several, and any of them more than once;
            `scatter` tells how to name them. The n items are dealt in order into parts
            that differ in size by one at most. None: all accelerators; without one as
            many times the host as ``torch.get_num_threads()``.
        output_device: where the tensors of results go; the first device by default.
        dim: of a tensor ``inputs``, -dimensions to dimensions - 1.
        module_kwargs: keyword arguments of every call.

    ``parallel_apply(modules, inputs, kwargs_tup=None, devices=None)`` is torch's form.
    It is meant if, and only if, the first argument is a sequence (an ``nn.ModuleList``
    too) of callables. Each gets a thread, and nothing is moved:

    Args:
        modules: modules or other callables.
        inputs: one for each. A tuple or a list is a list of arguments.
        kwargs_tup: keyword arguments for each; None for none.
        devices: one for each: its current device, and what errors name. None: that of
            its input, or of its parameters.

    Returns:
        What the calls return, in the order of the items, in a list.

    Raises:
        TypeError: a first argument that is neither; an argument of the wrong kind.
        ValueError: sequences of different lengths; no devices; a tensor without
            dimensions; a ``dim`` that it has not.
        RuntimeError: a device that this machine does not have; a current stream under
            graph capture, with several parts.
        BaseException: what the first call raised that fails, by the order of the items:
            the very error, noted to be "in item i on device d". Calls that are under
            way are waited for; those behind it that have not begun are not made.

    Threads are kept, see Note [lent threads] in ``_thread_pool.py``: calls from
    several threads, and from inside of ``fn``, do not wait for each other. They have
    the caller's context variables and torch's modes of its thread (gradients,
    inference, autocast with dtypes and cache, default device), and keep theirs from it.
    On the host they share the caller's ``torch.get_num_threads()``. The caller's thread
    does one part on the host itself, and what is left of others when it is done; with
    modes in it that are not carried it waits only. A call with a single part runs
    there. Ctrl-C lets no further call begin and is raised when those under way are
    done; a second one does not wait for them.

    Random numbers of the host come from one generator, in the order in which threads
    ask for them: with dropout two runs differ.

    Stream: what goes to an accelerator is packed and sent as by `scatter`. Each thread
    has a stream, which waits for what is queued on the device's current stream; that
    one waits for the results. The host does not wait.

    From ``torch.nn.parallel.parallel_apply``, which starts new threads for every call,
    carries less, and needs accelerators; the first form is new.

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
        _check_names(kwargs, _OF_MODULES, "several modules")
        return _over_modules(first, *args, **kwargs)
    if not callable(first):
        raise BatchTypeError(
            f"{WHO}: the first argument must be a callable, or a sequence of modules, "
            f"but is of type {type_name(first)}."
        )
    _check_names(kwargs, _OF_ITEMS, "one callable")
    return _over_items(first, *args, **kwargs)


def _over_items(
    fn: Any,
    inputs: Any,
    devices: Any = None,
    output_device: Any = None,
    dim: int = 0,
    module_kwargs: Any = None,
) -> list[Any]:
    kwargs = _options(module_kwargs, "module_kwargs")
    dealt = items_of(inputs, dim)
    places = places_of(devices)
    target = places[0] if output_device is None else resolve(output_device)
    if not dealt:
        return []
    parts = deal(dealt, len(places))
    places = places[: len(parts)]
    functions = _replicas(fn, places)
    sent = send([(part, kwargs) for part in parts], places)
    number = count()
    calls = [
        [
            Call(next(number), each, item if type(item) is tuple else (item,), named)
            for item in part
        ]
        for each, (part, named) in zip(functions, sent, strict=True)
    ]
    results: list[Any]
    (results,) = send([run(places, calls, len(dealt))], [target])
    return results


def _replicas(fn: Any, places: Sequence[torch.device]) -> Sequence[Any]:
    """Return what to call on every device."""
    if not isinstance(fn, nn.Module):
        return [fn] * len(places)
    if len(places) == 1 and _is_on(fn, places[0]):
        return [fn]
    return replicate(fn, places)


def _is_on(module: nn.Module, place: torch.device) -> bool:
    tensors = chain(module.parameters(), module.buffers())
    return all(tensor.device == place for tensor in tensors)


def _over_modules(
    modules: Any,
    inputs: Any,
    kwargs_tup: Any = None,
    devices: Any = None,
) -> list[Any]:
    modules = _same_length(modules, "modules", modules)
    for i, module in enumerate(modules):
        if not callable(module):
            raise BatchTypeError(
                f"{WHO}: modules[{i}] must be a module or another callable, but is "
                f"of type {type_name(module)}."
            )
    inputs = _same_length(inputs, "inputs", modules)
    options: list[Mapping[str, Any]] = [{}] * len(modules)
    if kwargs_tup is not None:
        kwargs_tup = _same_length(kwargs_tup, "kwargs_tup", modules)
        options = [_options(o, f"kwargs_tup[{i}]") for i, o in enumerate(kwargs_tup)]
    if devices is None:
        devices = [None] * len(modules)
    places = [
        resolve(device) if device is not None else place_of((args, module))
        for device, args, module in zip(
            _same_length(devices, "devices", modules), inputs, modules, strict=True
        )
    ]
    calls = [
        Call(i, module, args if isinstance(args, list | tuple) else (args,), options[i])
        for i, (module, args) in enumerate(zip(modules, inputs, strict=True))
    ]
    return run(places, [[call] for call in calls], len(calls))


def _check_names(found: Iterable[str], known: Sequence[str], what: str) -> None:
    for name in found:
        if name not in known:
            raise BatchTypeError(
                f"{WHO}: the arguments beside {what} must be {', '.join(known)}, but "
                f"one is {name}."
            )


def _is_sequence(value: Any) -> bool:
    """Tell whether torch's form is meant: by several modules."""
    if type(value) in (list, tuple):  # abstract classes take their time
        return True
    return isinstance(value, _SEQUENCES) and not isinstance(value, str)


def _same_length(value: Any, name: str, modules: Sequence[Any]) -> list[Any]:
    """Return a sequence as a list, as long as ``modules``."""
    if not _is_sequence(value) and not isinstance(value, torch.Tensor):
        raise BatchTypeError(
            f"{WHO}: {name} must be a sequence with one entry for each module, but is "
            f"of type {type_name(value)}."
        )
    if len(value) != len(modules):
        raise BatchValueError(
            f"{WHO}: {name} must have one entry for each of {len(modules)} modules, "
            f"but has {len(value)}."
        )
    return list(value)


def _options(value: Any, name: str) -> Mapping[str, Any]:
    """Return keyword arguments; None stands for none."""
    if value is None:
        return {}
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return value
    raise BatchTypeError(
        f"{WHO}: {name} must be keyword arguments by name, but is {value!r}."
    )
