"""Locks that a forked worker takes: they are free in the child.

A lock that another thread of the parent holds during ``fork`` stays locked in the child
for ever, because that thread does not exist there. Every worker seeds torch and NumPy,
so it takes the locks of their random states. A thread of the parent that draws random
numbers meanwhile, for dropout or for a sampler, would stop the worker before its first
batch. The forking thread therefore takes these locks first, as long as that is soon.

The locks of Python are held here. The extension holds the mutex of torch's generator
(``csrc/ops/generator.cpp``) inside of ``fork``. Held here it would meet a thread that
waits for that mutex while it holds the interpreter's lock.
"""

from __future__ import annotations

import os
import sys
import threading
from typing import Any

from ..batch import pytree
from ..core.torch_private import seed_locks

#: The longest wait for a lock, in seconds. After that the process forks without it.
_TIMEOUT = 1.0


def _locks() -> list[Any]:
    """Return the locks, in the order of their acquisition."""
    locks: list[Any] = [pytree.registration_lock, *seed_locks()]
    numpy = sys.modules.get("numpy")
    if numpy is not None and hasattr(numpy.random, "get_bit_generator"):  # 1.24
        locks.append(numpy.random.get_bit_generator().lock)
    return locks


class _Held(threading.local):
    """The locks that the forking thread took."""

    def __init__(self) -> None:
        self.locks: list[Any] = []


_held = _Held()


def _acquire() -> None:
    for lock in _locks():
        if lock.acquire(True, _TIMEOUT):
            _held.locks.append(lock)


def _release() -> None:
    while _held.locks:
        _held.locks.pop().release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_acquire, after_in_parent=_release, after_in_child=_release
    )
