"""Cores and CPU time of a process, and the waits of a thread for a core and the GIL."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable

from .standard_streams import moved

#: A thread that was blocked for this time measures the delay of the GIL once.
_BLOCKED_SECONDS = 0.02
#: The measurement: a sleep, which other threads use to take the GIL, and the time by
#: which a system without a load ends it late.
_SLEEP_SECONDS, _LATE_SECONDS = 1e-4, 2e-4


def cores_allowed() -> int:
    """Return the number of cores on which this process may run."""
    ask = getattr(os, "sched_getaffinity", None)
    return len(ask(0)) if ask else os.cpu_count() or 1


def cpu_seconds() -> float:
    """Return the CPU time of this process and of its finished children, in seconds."""
    if sys.platform == "win32":
        return time.process_time()
    import resource

    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def busy_seconds(thread: threading.Thread) -> float:
    """Return the time in which a thread had a core or waited for one, 0 at its end.

    On systems other than Linux it is the CPU time of the process.
    """
    if sys.platform != "linux":
        return time.process_time()
    try:
        with open(f"/proc/self/task/{thread.native_id}/schedstat") as file:
            return sum(map(int, file.read().split()[:2])) / 1e9
    except (OSError, ValueError):
        return 0.0


class CoreWait:
    """Measure the time that the creating thread was ready to run but had no core.

    Linux counts this time for each thread. On other systems it is always 0.
    """

    def __init__(self) -> None:
        self._file = -1
        if sys.platform == "linux":
            with contextlib.suppress(OSError):
                flags = os.O_RDONLY | os.O_CLOEXEC
                self._file = moved(os.open("/proc/thread-self/schedstat", flags))

    def seconds(self) -> float:
        """Return the waiting time since the thread started."""
        if self._file < 0:
            return 0.0
        try:
            return int(os.pread(self._file, 64, 0).split()[1]) / 1e9
        except (OSError, IndexError, ValueError):
            return 0.0

    def close(self) -> None:
        """Close the file of the counter. Later waits are 0."""
        file, self._file = self._file, -1
        if file >= 0:
            os.close(file)

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        if self._file >= 0:
            close(self._file)  # a default argument: `os` may be cleared at exit


def is_gil_enabled() -> bool:
    """Return False if the GIL is off; imports and PYTHON_GIL=1 can enable it."""
    enabled: Callable[[], bool] = getattr(sys, "_is_gil_enabled", lambda: True)
    return enabled()


class GilWait:
    """Estimate the time that the creating thread waited for the GIL.

    Python does not measure it. The thread knows how long it was blocked, and how often:
    Linux counts its voluntary switches. Now and then, a short sleep measures the delay
    with which the thread gets the GIL back. A blocking call is one switch, and a wait
    for the GIL after it is one switch for each switch interval, and one more. So the
    number of switches and the delay give the estimate. It is at most the time in which
    the thread was blocked.

    Without contention the delay is 0, as for a dataset that waits for a disk. Other
    systems do not count the switches of a thread. There, and in a Python without the
    GIL, the estimate is always 0.
    """

    def __init__(self) -> None:
        self._core_wait = CoreWait()
        self._num_switches = self._before = 0
        self._blocked = 0.0
        self._delay: float | None = None

    def close(self) -> None:
        """See `CoreWait.close`."""
        self._core_wait.close()

    def begin(self) -> None:
        """Begin a period."""
        self._before = _num_switches()

    def end(self, blocked: float) -> float:
        """End the period, and return the wait that was not returned before.

        Args:
            blocked: the seconds of the period in which the thread used no core, and
                waited for none.
        """
        self._num_switches += _num_switches() - self._before
        self._blocked += max(0.0, blocked)
        if self._blocked < _BLOCKED_SECONDS or not self._num_switches:
            return 0.0
        if not is_gil_enabled():  # an import can enable it later
            return 0.0
        measured = self.delay()
        # One measurement is noisy.
        delay = measured if self._delay is None else (measured + self._delay) / 2
        num_waits = self._num_switches / (2 + delay / sys.getswitchinterval())
        found = min(self._blocked, num_waits * delay)
        self._delay = delay
        self._num_switches, self._blocked = 0, 0.0
        return found

    def delay(self) -> float:
        """Sleep for a moment; return the time by which the thread got the GIL late."""
        start, waited = time.perf_counter(), self._core_wait.seconds()
        time.sleep(_SLEEP_SECONDS)
        slept = time.perf_counter() - start - (self._core_wait.seconds() - waited)
        return max(0.0, slept - _SLEEP_SECONDS - _LATE_SECONDS)


def _num_switches() -> int:
    """Return the number of times that this thread has blocked; 0 if not counted."""
    if sys.platform != "linux":
        return 0
    import resource

    return resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw
