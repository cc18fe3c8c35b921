"""Describe workers that died, and read the stacks of workers that hang.

A forked worker inherits the locks that other threads of its parent held, of any
library. It may therefore hang before its first line of Python. On a signal, a worker
writes its stacks to memory of the parent. ``faulthandler`` does this without the
interpreter, so it works while the worker waits for a lock.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import sys
import time
from collections.abc import Iterator
from multiprocessing import reduction
from typing import Any

#: Signals that end a process after a fault in native code.
_CRASHES = {
    *(signal.SIGABRT, signal.SIGBUS, signal.SIGFPE),
    *(signal.SIGILL, signal.SIGSEGV),
}
#: Programs rarely use this signal, and a process that has no handler ignores it.
_SIGNAL = signal.SIGURG
#: Seconds for which the parent waits for a stack, and between two looks at its size.
_TIMEOUT = 2.0
_POLL_SECONDS = 0.02


def exit_text(code: int | None) -> str:
    """Return an exit code as text, with the name of the signal."""
    name = ""
    if code is not None and code < 0:
        with contextlib.suppress(ValueError):
            name = f", {signal.Signals(-code).name}"
    return f"exit code {code}{name}"


def advice(code: int | None) -> str:
    """Return what to do about a worker that ended with this exit code."""
    if code == -signal.SIGKILL:
        return (
            "Look for an out-of-memory kill in the system's log (dmesg). Use fewer "
            "workers, smaller batches or a smaller prefetch_factor."
        )
    if code is not None and -code in _CRASHES:
        return (
            "Native code crashed. To see the line, run the loader with num_workers=0 "
            "under python -X faulthandler."
        )
    return "Look for its traceback above, or for code in the dataset that exits."


class Stacks:
    """Memory to which the workers of one parent write their stacks on a signal.

    Raises:
        OSError: no file descriptor is left.
    """

    #: Of the parent of this process, if this process is a worker.
    _of_parent: Stacks | None = None

    def __init__(self, fd: int | None = None) -> None:
        if fd is None and sys.platform == "linux":
            fd = os.memfd_create("pyparallel-stacks", os.MFD_CLOEXEC)
        self._fd = fd

    def __reduce__(self) -> Any:
        sent = None if self._fd is None else reduction.DupFd(self._fd)
        return _attach, (sent,)

    def enter(self) -> None:
        """Let this process, a worker, write its stacks on a signal."""
        Stacks._of_parent = self
        self._register()

    def _register(self) -> None:
        if self._fd is not None:
            faulthandler.register(_SIGNAL, file=self._fd)

    @contextlib.contextmanager
    def inherited(self) -> Iterator[None]:
        """Let processes that are forked in the block write theirs from their start."""
        self._register()
        try:
            yield
        finally:
            if self._of_parent is not None:
                self._of_parent._register()
            elif self._fd is not None:
                faulthandler.unregister(_SIGNAL)

    def read(self, pid: int) -> str:
        """Return the stacks of a worker that has entered. Empty without an answer."""
        if self._fd is None:
            return ""
        os.ftruncate(self._fd, 0)
        os.lseek(self._fd, 0, os.SEEK_SET)  # the workers share this position
        os.kill(pid, _SIGNAL)
        end, size = time.monotonic() + _TIMEOUT, 0
        while time.monotonic() < end:
            time.sleep(_POLL_SECONDS)
            before, size = size, os.fstat(self._fd).st_size
            if size == before > 0:
                break
        return os.pread(self._fd, size, 0).decode(errors="replace").strip()

    def close(self) -> None:
        """Free the memory."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def _attach(sent: Any) -> Stacks:
    return Stacks(None if sent is None else sent.detach())
