"""Describe workers that died, and read the stacks of workers that hang.

A forked worker inherits the locks that other threads of its parent held, of any
library. It may therefore hang before its first line of Python. On a signal, a worker
writes its stacks to a file of the parent. ``faulthandler`` does this without the
interpreter, so it works while the worker waits for a lock.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import tempfile
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection

#: Signals that end a process after a fault in native code.
_CRASHES = {signal.SIGABRT, signal.SIGFPE, signal.SIGILL, signal.SIGSEGV}
#: Programs rarely use this signal, and a process that has no handler ignores it.
_SIGNAL = signal.SIGURG
#: Seconds for which the parent waits for a stack, and between two looks at its size.
_TIMEOUT = 2.0
_POLL_SECONDS = 0.02

#: A file for the stacks of workers. This class pickles the descriptor, and closes it.
Stacks = Connection
#: The files for the stacks of this process, if it is a worker.
_entered: list[Stacks] = []


def exit_text(code: int | None) -> str:
    """Return an exit code as text, with the name of the signal."""
    if code is None:
        return "exit code unknown"
    name = ""
    if code < 0:
        with contextlib.suppress(ValueError):
            name = f", {signal.Signals(-code).name}"
    return f"exit code {code}{name}"


def advice(code: int | None) -> str:
    """Return what to do about a worker that ended with this exit code."""
    if code is None and signal.getsignal(signal.SIGCHLD) == signal.SIG_IGN:
        return (
            "The program ignores SIGCHLD, so the system keeps no exit codes. To learn "
            "it, call signal.signal(signal.SIGCHLD, signal.SIG_DFL) before iter()."
        )
    if code == -signal.SIGKILL:
        return (
            "Look for an out-of-memory kill in the system's log (dmesg). Use fewer "
            "workers, smaller batches or a smaller prefetch_factor."
        )
    if code == -signal.SIGBUS:
        return (
            "A page of a mapped file was missing: /dev/shm or another file system is "
            "full, or the file became shorter while it was mapped. Free space there "
            "(docker run --shm-size), and do not write to files of np.memmap or "
            "torch.load(mmap=True) during the epoch."
        )
    if code is not None and -code in _CRASHES:
        return (
            "Native code crashed. To see the line, run the loader with num_workers=0 "
            "under python -X faulthandler."
        )
    return "Look for its traceback above, or for code in the dataset that exits."


def new_stacks() -> Stacks:
    """Return an empty file. Its descriptor is the only one that stays open."""
    if hasattr(os, "memfd_create"):
        return Stacks(os.memfd_create("pyparallel-stacks", os.MFD_CLOEXEC))
    with tempfile.TemporaryFile() as file:
        return Stacks(os.dup(file.fileno()))


def enter(stacks: Stacks) -> None:
    """Let this process, a worker, write its stacks on a signal."""
    _entered[:] = [stacks]
    faulthandler.register(_SIGNAL, file=stacks.fileno())


@contextlib.contextmanager
def inherited(stacks: Stacks) -> Iterator[None]:
    """Let processes that are forked in the block write theirs from their start."""
    faulthandler.register(_SIGNAL, file=stacks.fileno())
    try:
        yield
    finally:
        if _entered:
            enter(*_entered)
        else:
            faulthandler.unregister(_SIGNAL)


def read(fd: int, pid: int) -> str:
    """Return the stacks of a worker that has entered. Empty without an answer."""
    os.ftruncate(fd, 0)
    os.lseek(fd, 0, os.SEEK_SET)  # the workers share this position
    try:
        os.kill(pid, _SIGNAL)
    except ProcessLookupError:  # it has ended just now
        return ""
    end, size = time.monotonic() + _TIMEOUT, 0
    while time.monotonic() < end:
        time.sleep(_POLL_SECONDS)
        before, size = size, os.fstat(fd).st_size
        if size == before > 0:
            break
    return os.pread(fd, size, 0).decode(errors="replace").strip()
