"""Report whether a worker is making a batch, and the stack of a worker that hangs.

A forked worker inherits the locks that other threads of its parent held, of any
library. It may therefore hang before its first line of Python. It is alive then, but
its batch never comes. So each worker records in shared memory whether it makes a batch.
On a signal, it writes its stack to the same memory. ``faulthandler`` does this without
the interpreter, so it works while the worker waits for a lock.
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

#: Offset of the stack. The bytes before it are the states of the workers, one each.
_STACK = 1 << 16
_ABSENT, _IDLE, _BUSY = 0, 1, 2
#: Seconds for which the parent waits for a stack, and between two looks at its size.
_TIMEOUT = 2.0
_POLL_SECONDS = 0.02
#: A signal that programs rarely use. Python has no such signals on other systems.
_SIGNAL = getattr(signal, "SIGRTMAX", 0) - 5


class WorkerStatus:
    """The states of the workers of one iterator, in shared memory.

    Raises:
        OSError: no file descriptor or no memory is left.
    """

    def __init__(self) -> None:
        self._attach(memfd.create(_STACK))

    def _attach(self, fd: int) -> None:
        self._fd = fd
        weakref.finalize(self, os.close, fd).atexit = False
        self._memory = mmap.mmap(fd, _STACK)
        self._num_forked = 0  # workers

    def __reduce__(self) -> Any:
        # Only while a worker starts: its arguments include the descriptor.
        return _attach, (memfd.picklable_descriptor(self._fd),)

    # ------------------------------------------------------------- in the worker

    def enter(self, worker: int) -> None:
        """Register this process as a worker, which writes its stack on a signal."""
        if self._memory[worker] == _ABSENT:
            faulthandler.register(_SIGNAL, file=self._fd)
            self._memory[worker] = _IDLE

    def mark(self, worker: int, busy: bool) -> None:
        """Record whether the worker is making a batch."""
        self._memory[worker] = _BUSY if busy else _IDLE

    # ------------------------------------------------------------- in the parent

    def is_busy(self, worker: int) -> bool:
        """Return True if the worker is making a batch."""
        return self._memory[worker] == _BUSY

    def stack(self, worker: int, pid: int) -> str:
        """Return the stacks of a worker's threads. Empty if the worker does not answer.

        Args:
            worker: the number of the worker in its loader.
            pid: the process id of the worker.
        """
        if self._memory[worker] == _ABSENT:  # the signal would kill the process
            return ""
        os.ftruncate(self._fd, _STACK)
        os.lseek(self._fd, _STACK, os.SEEK_SET)  # the worker shares this file offset
        os.kill(pid, _SIGNAL)
        end, size = time.monotonic() + _TIMEOUT, -1
        while time.monotonic() < end:
            time.sleep(_POLL_SECONDS)
            before, size = size, os.fstat(self._fd).st_size
            if size == before > _STACK:
                break
        text = os.pread(self._fd, max(size - _STACK, 0), _STACK)
        return text.decode(errors="replace").strip()


def _attach(sent: Any) -> WorkerStatus:
    status = WorkerStatus.__new__(WorkerStatus)
    status._attach(sent.detach())
    return status


class _Starting(threading.local):
    """The status of the iterator whose workers this thread is starting."""

    status: WorkerStatus | None = None


_starting = _Starting()


@contextlib.contextmanager
def starting_workers(status: WorkerStatus | None) -> Iterator[None]:
    """Register processes that this thread forks in the block as workers."""
    _starting.status = status
    try:
        yield
    finally:
        _starting.status = None


def _enter_forked_worker() -> None:
    # Children of this process are no workers of this iterator.
    status, _starting.status = _starting.status, None
    if status is not None:
        status.enter(status._num_forked)


def _count_forked_worker() -> None:
    if _starting.status is not None:
        _starting.status._num_forked += 1


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        after_in_child=_enter_forked_worker, after_in_parent=_count_forked_worker
    )
