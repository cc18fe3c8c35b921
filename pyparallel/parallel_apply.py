"""parallel_apply: calls on several devices at once, each by a thread that stays."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, overload

import torch
from torch import nn

from ._device_threads import threads
from ._errors import BatchTypeError, BatchValueError, kind
from ._frame import Frame
from ._targets import Target, resolve_target

_WHO = "parallel_apply"


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
def parallel_apply(*args: Any, **kwargs: Any) -> list[Any]:
    """Call one callable over many inputs, or several modules on one input each.

    Args:
        args: see the two forms.
        kwargs: see the two forms.
    """
    first = args[0] if args else kwargs.get("fn", kwargs.get("modules"))
    form = _over_modules if _is_sequence(first) else _over_items
    return form(*args, **kwargs)


def _over_items(
    fn: Any,
    inputs: Any,
    devices: Any = None,
    output_device: Any = None,
    dim: int = 0,
    module_kwargs: Any = None,
) -> list[Any]:
    raise NotImplementedError


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
                f"{_WHO}: modules[{i}] must be a module or another callable, but is "
                f"of type {kind(module)}."
            )
    inputs = _same_length(inputs, "inputs", modules)
    options: list[Mapping[str, Any]] = [{}] * len(modules)
    if kwargs_tup is not None:
        kwargs_tup = _same_length(kwargs_tup, "kwargs_tup", modules)
        options = [_options(o, f"kwargs_tup[{i}]") for i, o in enumerate(kwargs_tup)]
    if devices is None:
        devices = [None] * len(modules)
    places = [
        _device_of(args, module) if device is None else _resolve(device)
        for device, args, module in zip(
            _same_length(devices, "devices", modules), inputs, modules, strict=True
        )
    ]
    calls = [
        _Call(
            i, module, args if isinstance(args, list | tuple) else (args,), options[i]
        )
        for i, (module, args) in enumerate(zip(modules, inputs, strict=True))
    ]
    return _run(places, [[call] for call in calls], len(calls))


class _Call(NamedTuple):
    """One call: of the item or the replica of this number."""

    number: int
    fn: Callable[..., Any]
    args: Sequence[Any]
    kwargs: Mapping[str, Any]


def _run(
    devices: Sequence[torch.device], parts: Sequence[Sequence[_Call]], num_calls: int
) -> list[Any]:
    """Do every part on its device, and return the results of all calls in order.

    Raises:
        BaseException: what the first call raised that raises, as if they had been done
            one after the other: those behind it that have not begun are left out.
    """
    if not parts:
        return []
    failure = _Failure(num_calls)

    def job(part: Sequence[_Call], device: torch.device) -> Callable[[], list[Any]]:
        def do() -> list[Any]:
            results = []
            for call in part:
                if call.number >= failure.first:
                    break
                try:
                    results.append(call.fn(*call.args, **call.kwargs))
                except BaseException as error:
                    failure.add(call.number, error, device)
            return results

        return do

    jobs = [job(part, device) for part, device in zip(parts, devices, strict=True)]
    done = threads.run(devices, jobs, lambda error: failure.stop())
    try:
        if failure.error is not None:
            raise failure.error
    finally:
        failure.error = None  # its traceback holds this frame
    return [result for part in done for result in part]


class _Failure:
    """The first call, by number, that failed."""

    def __init__(self, num_calls: int) -> None:
        self.first = num_calls
        self.error: BaseException | None = None
        self._lock = threading.Lock()

    def add(self, number: int, error: BaseException, device: torch.device) -> None:
        with self._lock:
            if number < self.first:
                self.first, self.error = number, error
                _add_note(error, f"in item {number} on device {device}")

    def stop(self) -> None:
        """Let no further call begin."""
        with self._lock:
            self.first = -1


def _add_note(error: BaseException, note: str) -> None:
    """Add a line to what is printed of an error, as ``add_note`` of Python 3.11 does.

    The error stays what it is: its class, its attributes and its traceback, however its
    class is made.
    """
    if hasattr(error, "add_note"):
        error.add_note(note)
        return
    noted: Any = error
    noted.__notes__ = [*getattr(error, "__notes__", ()), note]
    if error.__cause__ is None:  # Python 3.10 prints causes, and no notes
        error.__cause__ = error.__context__ or RuntimeError(note)


def _is_sequence(value: Any) -> bool:
    """Tell whether torch's form is meant: by several modules."""
    return isinstance(value, Sequence | nn.ModuleList) and not isinstance(value, str)


def _same_length(value: Any, name: str, modules: Sequence[Any]) -> list[Any]:
    """Return a sequence as a list, as long as ``modules``."""
    if not _is_sequence(value) and not isinstance(value, torch.Tensor):
        raise BatchTypeError(
            f"{_WHO}: {name} must be a sequence with one entry for each module, but is "
            f"of type {kind(value)}."
        )
    if len(value) != len(modules):
        raise BatchValueError(
            f"{_WHO}: {name} must have one entry for each of {len(modules)} modules, "
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
        f"{_WHO}: {name} must be keyword arguments by name, but is {value!r}."
    )


def _resolve(device: Any) -> torch.device:
    return resolve_target(device, _WHO, "device") or torch.device("cpu")


def _device_of(args: Any, module: Any) -> torch.device:
    """Return where a module computes that nobody has named a device for."""
    tensors = Frame(args, lambda tensor: True).tensors
    if isinstance(module, nn.Module):
        tensors += module.parameters()
    return tensors[0].device if tensors else torch.device("cpu")
