"""Whether a worker makes a batch now, and the stack of one that does not begin.

A worker may hang before its first line of Python: it inherits the locks that other
threads of its parent held, of any library. It is alive then, and its batch never comes.
The parent therefore sees in shared memory whether a worker makes a batch. A worker
writes its stack to the same memory when a signal asks for it, also while it waits for a
lock, because ``faulthandler`` does that without Python.
"""

from __future__ import annotations

import contextlib
import faulthandler
import mmap
import os
import signal
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any

from ..shm import memfd

#: Where the stack begins; before it there is a byte for each worker.
_STACK = 1 << 16
_ABSENT, _IDLE, _BUSY = 0, 1, 2
#: How long the parent waits for a stack, in seconds.
_TIMEOUT = 2.0
_SLICE = 0.02
#: A signal that programs rarely use. Python knows no such signals on other systems.
_SIGNAL = getattr(signal, "SIGRTMAX", 0) - 5


class WorkerStatus:
    """The states of the workers of one iterator, in shared memory.

    Raises:
        OSError: no descriptor or no memory is left.
    """

    def __init__(self) -> None:
        self._attach(memfd.create(_STACK))

    def _attach(self, fd: int) -> None:
        self._fd = fd
        weakref.finalize(self, os.close, fd).atexit = False
        self._memory = mmap.mmap(fd, _STACK)
        #: Workers that were forked.
        self._num_forked = 0

    def __reduce__(self) -> Any:
        # Only while a worker is started: the descriptor travels with its arguments.
        return _attach, (memfd.picklable_descriptor(self._fd),)

    # ------------------------------------------------------------- in the worker

    def enter(self, worker: int) -> None:
        """Let this process write its stack when the parent asks for it."""
        if self._memory[worker] == _ABSENT:
            faulthandler.register(_SIGNAL, file=self._fd)
            self._memory[worker] = _IDLE

    def mark(self, worker: int, busy: bool) -> None:
        """Note whether the worker makes a batch."""
        self._memory[worker] = _BUSY if busy else _IDLE

    # ------------------------------------------------------------- in the parent

    def is_busy(self, worker: int) -> bool:
        """Return whether the worker makes a batch now."""
        return self._memory[worker] == _BUSY

    def stack(self, worker: int, pid: int) -> str:
        """Return the stacks of the threads of a worker; empty if there is none to get.

        Args:
            worker: its number in the loader.
            pid: of its process.
        """
        if self._memory[worker] == _ABSENT:  # the signal would end the process
            return ""
        os.ftruncate(self._fd, _STACK)
        os.lseek(self._fd, _STACK, os.SEEK_SET)  # the worker has the same file offset
        os.kill(pid, _SIGNAL)
        end, size = time.monotonic() + _TIMEOUT, -1
        while time.monotonic() < end:
            time.sleep(_SLICE)
            before, size = size, os.fstat(self._fd).st_size
            if size == before > _STACK:
                break
        text = os.pread(self._fd, max(size - _STACK, 0), _STACK)
        return text.decode(errors="replace").strip()


def _attach(sent: Any) -> WorkerStatus:
    states = WorkerStatus.__new__(WorkerStatus)
    states._attach(sent.detach())
    return states


class _Starting(threading.local):
    """The states of the iterator whose workers this thread starts now."""

    states: WorkerStatus | None = None


_here = _Starting()


@contextlib.contextmanager
def starting_workers(states: WorkerStatus | None) -> Iterator[None]:
    """Take the processes that this thread forks as the workers of one iterator."""
    _here.states = states
    try:
        yield
    finally:
        _here.states = None


def _enter_child() -> None:
    states, _here.states = _here.states, None  # not for the children of this process
    if states is not None:
        states.enter(states._num_forked)


def _count() -> None:
    if _here.states is not None:
        _here.states._num_forked += 1


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_enter_child, after_in_parent=_count)
