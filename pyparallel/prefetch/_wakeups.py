"""The lock of a pass over a loader, and waits that a signal handler may end."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Wakeups:
    """A lock, and waits for what other threads do while they hold it.

    Note: [interrupted waits]. Python calls signal handlers between two instructions of
    Python code. One that raises inside a `threading.Condition` leaves its lock held
    forever, or released too early. Here each step on a lock is one call of C.

    Attributes:
        lock: reentrant, because garbage collection in a thread that holds it may stop a
            pass.
    """

    def __init__(self) -> None:
        self.lock: threading.RLock = threading.RLock()
        self._waiters: set[threading.Lock] = set()

    def wait_until(
        self,
        is_over: Callable[[], bool],
        seconds: Callable[[], float] = lambda: threading.TIMEOUT_MAX,
    ) -> None:
        """Wait until a function returns True.

        Args:
            is_over: called with the lock, and again after `wake` and after a timeout.
            seconds: called before each wait. Returns its timeout.
        """
        waiter = None
        while True:
            with self.lock:
                if is_over():
                    return
                if waiter is None:
                    waiter = threading.Lock()
                    waiter.acquire()
                self._waiters.add(waiter)
            waiter.acquire(timeout=seconds())

    def wake(self) -> None:
        """Let all waits call their functions again."""
        if not self._waiters:
            return
        with self.lock:
            for waiter in list(self._waiters):
                if waiter.locked():
                    waiter.release()
            self._waiters.clear()
