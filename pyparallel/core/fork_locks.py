"""Free the locks of a forked process that threads of its parent held.

A lock that another thread holds during ``fork`` stays locked in the child for ever,
because that thread does not exist there. Every worker of a loader seeds torch and
NumPy, and so acquires the locks of their random states. If a thread of the parent drew
random numbers at that moment, for dropout or for a sampler, the worker would hang
before its first batch. The forking thread therefore acquires these locks first, with a
timeout.

It holds the locks of Python here. The extension acquires the mutex of torch's generator
inside ``fork`` (``csrc/ops/generator.cpp``). Acquiring it here could deadlock with a
thread that waits for that mutex and holds the GIL.
"""

from __future__ import annotations

import sys
import threading
from typing import Any

from .process import on_fork
from .torch_private import seed_locks

#: The longest wait for a lock before a fork, in seconds.
_SECONDS = 1.0
_locks: list[Any] = []


def free_in_children(lock: Any) -> Any:
    """Let every forked child find this lock free. Return the lock."""
    _locks.append(lock)
    return lock


def _locks_of_children() -> list[Any]:
    """Return the locks that children acquire, in the order of acquisition."""
    locks = [*_locks, *seed_locks()]
    numpy = sys.modules.get("numpy")
    if numpy is not None and hasattr(numpy.random, "get_bit_generator"):  # since 1.24
        locks.append(numpy.random.get_bit_generator().lock)
    return locks


class _Held(threading.local):
    """The locks that this thread acquired for a fork."""

    def __init__(self) -> None:
        self.locks: list[Any] = []


_held = _Held()


def _acquire() -> None:
    for lock in _locks_of_children():
        if lock.acquire(True, _SECONDS):
            _held.locks.append(lock)


def _release() -> None:
    while _held.locks:
        _held.locks.pop().release()


on_fork(_release, before=_acquire, in_parent=_release)
