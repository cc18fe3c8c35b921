"""A queue between processes, read by one that outlives a writer killed in mid-message.

A message is a length and as many bytes. `multiprocessing` waits for the last of them
without limit, whatever timeout the caller gave, because that applies to the first. A
writer that is killed between them leaves its reader there: the end of the file never
comes, since other workers and the reader itself hold the pipe open for writing. Nor
does another message, since the lock of the writers died with it.
"""

from __future__ import annotations

import io
import os
import queue
import select
from collections.abc import Callable
from multiprocessing import connection
from typing import Any

#: How often a read in the middle of a message looks whether its writer lives.
_SLICE_MS = 100
#: How much is thrown away at a time.
_CHUNK = 1 << 16

_base: Any = connection.Connection  # it keeps the parts of a message to itself


class _Reader(_base):  # type: ignore[misc]  # of a class that is Any
    """The reading end of a pipe whose writers may die.

    Attributes:
        is_lost: tells whether a writer has died that may have been at a message.
        is_broken: a message was given up, so nobody knows where the next one begins.
    """

    is_lost: Callable[[], bool]
    is_broken = False

    def _recv(self, size: int) -> io.BytesIO:
        received: io.BytesIO = super()._recv(size, self._read)
        return received

    def _read(self, fd: int, size: int) -> bytes:
        """Return some bytes; as soon as none can come any more, say: no message."""
        ready = select.poll()
        ready.register(fd, select.POLLIN)
        timeout = 0
        while not self.is_broken:
            was_lost = timeout > 0 and self.is_lost()  # known before the last wait
            if ready.poll(timeout):
                return os.read(fd, size)
            self.is_broken, timeout = was_lost, _SLICE_MS
        while ready.poll(0) and os.read(fd, _CHUNK):
            pass  # or who asks again is told at once that something can be read
        raise queue.Empty


def outlive_writers(messages: Any, is_lost: Callable[[], bool]) -> None:
    """Let ``messages.get()`` raise `queue.Empty` for a message whose rest cannot come.

    Args:
        messages: a ``multiprocessing.Queue``; anything else is left as it is.
        is_lost: tells whether a writer has died; asked when a message has a pause.
    """
    reader = getattr(messages, "_reader", None)
    if type(reader) is connection.Connection and hasattr(select, "poll"):
        untyped: Any = reader
        untyped.__class__ = _Reader  # the queue has taken down its methods
        untyped.is_lost = is_lost
