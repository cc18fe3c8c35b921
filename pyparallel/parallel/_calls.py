"""Calls on threads of devices: their results in order, and the first error."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from threading import Lock, get_ident
from typing import Any, NamedTuple

import torch
from torch import nn

from ._device_threads import threads


class Call(NamedTuple):
    """One call: of the item or the replica of this number."""

    number: int
    fn: Callable[..., Any]
    args: Sequence[Any]
    kwargs: Mapping[str, Any]


def run(
    devices: Sequence[torch.device], parts: Sequence[Sequence[Call]], num_calls: int
) -> list[Any]:
    """Do every part on its device, and return the results of all calls in order.

    Raises:
        BaseException: what the first call raised that raises, as if they had been done
            one after the other: those behind it that have not begun are left out.
    """
    if not parts:
        return []
    failure, caller = _Failure(num_calls), get_ident()

    def job(part: Sequence[Call], device: torch.device) -> Callable[[], list[Any]]:
        def do() -> list[Any]:
            results = []
            for call in part:
                if call.number >= failure.first:
                    break
                try:
                    results.append(call.fn(*call.args, **call.kwargs))
                except BaseException as error:
                    failure.add(call.number, error, device)
                    # A signal's: what is not begun is not, wherever it stands.
                    if isinstance(error, KeyboardInterrupt) and get_ident() == caller:
                        raise
            return results

        return do

    jobs = [job(part, device) for part, device in zip(parts, devices, strict=True)]

    def uses(i: int) -> Any:
        return [(call.args, call.kwargs, tensors_of(call.fn)) for call in parts[i]]

    try:
        done = threads.run(devices, jobs, failure.stop, uses)
        if failure.error is not None:
            raise failure.error
    finally:
        failure.error = None  # its traceback holds this frame
    return [result for part in done for result in part]


def tensors_of(fn: Any) -> list[torch.Tensor]:
    """Return what a module, a replica too, or a method of one computes with."""
    module = fn if isinstance(fn, nn.Module) else getattr(fn, "__self__", None)
    if not isinstance(module, nn.Module):
        return []
    tensors = [*module.parameters(), *module.buffers()]
    for each in module.modules():  # a replica's parameters are plain tensors
        tensors += each.__dict__.get("_former_parameters", {}).values()
    return tensors


class _Failure:
    """The first call, by number, that failed."""

    def __init__(self, num_calls: int) -> None:
        self.first = num_calls
        self.error: BaseException | None = None
        self._lock = Lock()

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
