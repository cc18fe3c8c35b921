"""Memory of the host that a device reads in place, kept until it has read it."""

from __future__ import annotations

import atexit
import ctypes
import itertools
import os
import time
from collections.abc import Callable
from typing import Any

#: How long the end of the interpreter waits for copies, in seconds: they take less.
EXIT_SECONDS = 1.0
_PAUSE = 5e-4

_IsDone = Callable[[], bool]


class Keeper:
    """References to what queued copies read, given up when the copies are done.

    Note: [lent memory]. torch's host allocator does not reuse a block of its own while
    a copy reads it, but knows nothing of memory that others have page-locked: dropping
    the last reference of a tensor there gives the memory back at once, to a process
    that overwrites it. So a reference is held here from before the copy is queued until
    its event is done. Nothing waits: events are asked when the next batch is sent or
    lands, and whenever somebody calls `release_done`.

    References are taken and given up by single operations on a dict, without a lock: a
    destructor may run anywhere, and send or release something itself. Nothing else
    refers to them meanwhile, so that they die when they are given up.
    """

    def __init__(self) -> None:
        self._held: dict[int, Any] = {}
        self._checks: dict[int, _IsDone] = {}
        self._numbers = itertools.count()
        atexit.register(self._end)
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._begin_in_child)

    def hold(self, sources: Any) -> int:
        """Hold ``sources``, for ever if `release_when` is not called."""
        ticket = next(self._numbers)
        self._held[ticket] = sources
        return ticket

    def release_when(self, ticket: int, is_done: _IsDone) -> None:
        """Give up what was held as ``ticket`` when ``is_done`` says so."""
        self._checks[ticket] = is_done

    def release_done(self) -> int:
        """Give up what has been read; return how many flights are still being read."""
        for ticket, is_done in list(self._checks.items()):
            if is_done():
                self._held.pop(ticket, None)  # another thread may have been faster
                self._checks.pop(ticket, None)
        return len(self._held)

    def drain(self, seconds: float) -> bool:
        """Wait until all has been read and given up, at most ``seconds``."""
        deadline = time.monotonic() + seconds
        while self.release_done():
            if time.monotonic() > deadline:
                return False
            time.sleep(_PAUSE)
        return True

    def _end(self) -> None:
        try:
            drained = self.drain(EXIT_SECONDS)
        except Exception:  # the device failed: nobody knows what it still reads
            drained = False
        if not drained:
            _leak(self._held)

    def _begin_in_child(self) -> None:
        """Leave to the parent what the parent sent.

        Here no event can be asked, or destroyed: torch's ends the process.
        """
        _leak((self._held, self._checks))
        self._held, self._checks = {}, {}


def _leak(value: object) -> None:
    """Keep an object from destruction until the process ends."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))
