"""Copy torch's thread-local modes from one thread to another.

Note: [thread state]. A call behaves the same on every thread. Its gradient mode,
inference mode, autocast state (dtypes and cache included), default device and current
device are those of the caller's thread. Callers copy Python's context variables
separately, with ``contextvars``. The default dtype is global to the process.

If the default device is the current device of its type, its index is not copied. In the
thread of another device it then means that device, as ``torch.device('cuda')`` does.

Modes that a call changes and does not restore stay in its thread. The next call there
compares the modes of the thread with those of its caller, so it does not see them.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Generator
from contextlib import ExitStack
from functools import partial
from operator import methodcaller
from typing import Any, NamedTuple

import torch

from .devices import HOST
from .errors import restoring
from .torch_private import (
    any_autocast,
    innermost_transform,
    is_tracing,
    num_dispatch_modes,
    num_function_modes,
    saved_tensor_hooks,
)

#: For each device type: its name, whether autocast is enabled, and its dtype.
Casts = tuple[tuple[str, bool, torch.dtype], ...]


def _autocast_types() -> tuple[str, ...]:
    """Return the device types with autocast in this torch."""
    names = ("cpu", "cuda", "xpu", "mps", "hpu", "ipu", "xla", "mtia", "maia")
    known = []
    for name in (*names, "privateuseone"):
        try:
            torch.is_autocast_enabled(name)
        except RuntimeError:
            continue
        known.append(name)
    return tuple(known)


_TYPES = _autocast_types()
_accelerator = torch.accelerator.current_accelerator()
#: The types that this torch can compute on. Their dtypes may be set while autocast is
#: disabled.
_USABLE = tuple(t for t in _TYPES if t in ("cpu", _accelerator and _accelerator.type))
# A look at every type, or at the default device, takes longer than a handover of a call
# to a thread. Hence the cheap checks of torch that nothing is set, which is usual.


class ThreadState(NamedTuple):
    """The modes of one thread."""

    grad: bool
    inference: bool
    casts: Casts
    cache: bool
    default_device: torch.device | None
    current_device: int | None


def capture() -> ThreadState:
    """Return the modes of this thread."""
    return ThreadState(
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        _casts(),
        torch.is_autocast_cache_enabled(),
        _default_device() if num_function_modes() else None,
        _current_device(),
    )


def is_capturable() -> bool:
    """Return True if `capture` copies every mode of this thread.

    It does not copy function modes, dispatch modes and hooks of saved tensors. A block
    ``with torch.device(...)`` is a function mode, which a call must not restore.
    """
    return not (
        num_function_modes() or num_dispatch_modes() or saved_tensor_hooks(True)
    )


def is_transformed() -> bool:
    """Return True in a transform of ``torch.func`` or a trace of ``torch.jit``.

    Both are bound to this thread and change the values that calls compute.
    """
    return innermost_transform() is not None or bool(is_tracing())


def plain_modes() -> list[Any] | None:
    """Return `modes`, or None if they say too little to compare two threads.

    That is so in autocast, and with a mode that `capture` does not copy.
    """
    found = modes()
    return None if any(found[: len(_BLOCKS)]) else found


def modes() -> list[Any]:
    """Return the modes of this thread for a comparison, in less time than `capture`."""
    return [*map(_call, _MODES)]


@restoring
def applied(state: ThreadState) -> Generator[None, None, None]:
    """Apply the state of another thread to this thread for the length of a block."""
    before = capture()
    with ExitStack() as stack:
        if state.current_device not in (None, before.current_device):
            stack.enter_context(_module().device(state.current_device))
        if state.inference != before.inference:
            stack.enter_context(torch.inference_mode(state.inference))
        _apply(state)
        yield


@restoring
def preserved(state: ThreadState) -> Generator[None, None, None]:
    """Restore ``state``, that of this thread, after a block that may change it."""
    try:
        yield
    finally:
        if capture() != state:
            _apply(state)


def _apply(state: ThreadState) -> None:
    """Set the modes that need no context manager."""
    # The exit of `torch.autocast` would clear the cache of casts. That cache is global
    # to the process, and the caller's autocast region may still use it.
    now = capture()
    for name, _, _ in now.casts:
        torch.set_autocast_enabled(name, False)
    for name, is_on, dtype in state.casts:
        torch.set_autocast_enabled(name, is_on)
        torch.set_autocast_dtype(name, dtype)
    torch.set_autocast_cache_enabled(state.cache)
    torch.set_grad_enabled(state.grad)
    if now.default_device != state.default_device:
        torch.set_default_device(state.default_device)


def _casts() -> Casts:
    return tuple(
        [
            (name, torch.is_autocast_enabled(name), torch.get_autocast_dtype(name))
            for name in (_USABLE if any_autocast and not any_autocast() else _TYPES)
        ]
    )


def _default_device() -> torch.device | None:
    try:
        device = torch.get_default_device()
    except AttributeError:  # of torch 2.8, after `torch.set_default_device(None)`
        return None
    if device.index is not None and device.type != "cpu":
        module = torch.get_device_module(device)
        if module.current_device() == device.index:
            return torch.device(device.type)
    return None if device == HOST else device


def _current_device() -> int | None:
    """Return the current accelerator, or None if that would initialize the device."""
    if _accelerator is None or not getattr(_module(), "is_initialized", bool)():
        return None
    return int(_module().current_device())


def _module() -> Any:
    return torch.get_device_module(_accelerator)


_call: Any = getattr(operator, "call", methodcaller("__call__"))  # Python 3.10 has none
#: Each returns a false value outside of such a block.
_BLOCKS: tuple[Callable[[], Any], ...] = (
    num_function_modes,
    num_dispatch_modes,
    partial(saved_tensor_hooks, True),
    innermost_transform,
    is_tracing,
    any_autocast or (lambda: True),
)
_MODES = (
    *_BLOCKS,
    torch.is_grad_enabled,
    torch.is_inference_mode_enabled,
    _current_device,
)
