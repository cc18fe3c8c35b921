"""What torch keeps for every thread, taken down in one and entered in another.

Note: [thread state]. A call behaves the same on whatever thread it runs: gradient mode,
inference mode, autocast with its dtypes and its cache, the default device and the
current device are the caller's. Python's context variables are carried beside it, by a
copied context. The default dtype belongs to the process, so a thread has it anyway.

A default device that is the current one of its type goes along without its index: in
a thread of another device it means that one, as ``torch.device('cuda')`` does.

What a call changes and does not put back stays in its thread, where nobody looks: the
next call compares what it finds with what its caller has.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch

from .devices import HOST
from .torch_private import (
    any_autocast,
    num_dispatch_modes,
    num_function_modes,
    saved_tensor_hooks,
)

#: Of device types their names, whether autocast is on, and its dtype.
Casts = tuple[tuple[str, bool, torch.dtype], ...]


def _autocast_types() -> tuple[str, ...]:
    """Return the device types that this torch has autocast for."""
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
#: Those that this torch can compute with; a dtype may be set while autocast is off.
_HERE = tuple(t for t in _TYPES if t in ("cpu", _accelerator and _accelerator.type))
# Looking at every type, or for a default device, takes longer than handing a call to a
# thread; nearly always there is nothing to find, which torch can tell at once.


class ThreadState(NamedTuple):
    """The modes of one thread, a value."""

    grad: bool
    inference: bool
    casts: Casts
    cache: bool
    default_device: torch.device | None
    current_device: int | None


def take() -> ThreadState:
    """Return the state of this thread."""
    return ThreadState(
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        _casts(),
        torch.is_autocast_cache_enabled(),
        _default_device() if num_function_modes() else None,
        _current_device(),
    )


def is_plain() -> bool:
    """Tell whether this thread is one for calls: nothing in it that is not carried.

    That is any function or dispatch mode (a block of a default device is one, which no
    call may put back), and hooks of saved tensors.
    """
    return not (
        num_function_modes() or num_dispatch_modes() or saved_tensor_hooks(True)
    )


@contextmanager
def entered(state: ThreadState) -> Iterator[None]:
    """Give a thread of ours the state of another for a block."""
    before = take()
    with ExitStack() as stack:
        if state.current_device not in (None, before.current_device):
            stack.enter_context(_module().device(state.current_device))
        if state.inference != before.inference:
            stack.enter_context(torch.inference_mode(state.inference))
        _set(state)
        yield


@contextmanager
def kept(state: ThreadState) -> Iterator[None]:
    """Keep the state of this thread through a block, whatever the block does."""
    try:
        yield
    finally:
        if take() != state:
            _set(state)


def _set(state: ThreadState) -> None:
    """Set what is set and not entered: modes without a guard."""
    # Entering `torch.autocast` would clear the casts that the caller has in the cache,
    # when it is left: the cache is the process's, and the caller's region goes on.
    now = take()
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
            for name in (_HERE if any_autocast and not any_autocast() else _TYPES)
        ]
    )


def _default_device() -> torch.device | None:
    device = torch.get_default_device()
    if device.index is not None and device.type != "cpu":
        module = torch.get_device_module(device)
        if module.current_device() == device.index:
            return torch.device(device.type)
    return None if device == HOST else device


def _current_device() -> int | None:
    """Return the current accelerator, unless asking would be the first use of one."""
    if _accelerator is None or not getattr(_module(), "is_initialized", bool)():
        return None
    return int(_module().current_device())


def _module() -> Any:
    return torch.get_device_module(_accelerator)
