"""CPU time beside wall time: computing, and waiting for a core."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable


def cpu_seconds() -> float:
    """Return the CPU time of this process and of its children that have ended."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


class CoreWait:
    """The time for which the thread that made this could run, but had no core.

    Linux counts it for each thread. Elsewhere it is always 0.
    """

    def __init__(self) -> None:
        try:
            self._file = os.open(
                "/proc/thread-self/schedstat", os.O_RDONLY | os.O_CLOEXEC
            )
        except OSError:
            self._file = -1

    def seconds(self) -> float:
        """Return the seconds since the thread began."""
        try:
            return int(os.pread(self._file, 64, 0).split()[1]) / 1e9
        except (OSError, IndexError, ValueError):
            return 0.0

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        if self._file >= 0:
            close(self._file)  # at the exit of Python `os` may be gone
