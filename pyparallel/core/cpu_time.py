"""CPU time of a process, and the time that a thread waits for a core."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable


def cpu_seconds() -> float:
    """Return the CPU time of this process and of its finished children, in seconds."""
    if sys.platform == "win32":
        return time.process_time()
    import resource

    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


class CoreWait:
    """Measure the time that the creating thread was ready to run but had no core.

    Linux counts this time for each thread. On other systems it is always 0.
    """

    def __init__(self) -> None:
        self._file = -1
        if sys.platform == "linux":
            with contextlib.suppress(OSError):
                flags = os.O_RDONLY | os.O_CLOEXEC
                self._file = os.open("/proc/thread-self/schedstat", flags)

    def seconds(self) -> float:
        """Return the waiting time since the thread started."""
        if self._file < 0:
            return 0.0
        try:
            return int(os.pread(self._file, 64, 0).split()[1]) / 1e9
        except (OSError, IndexError, ValueError):
            return 0.0

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        if self._file >= 0:
            close(self._file)  # a default argument: `os` may be cleared at exit
