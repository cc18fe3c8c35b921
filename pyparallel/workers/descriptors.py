"""Pickle objects that own file descriptors, and send these with the message.

`multiprocessing` pickles a descriptor, of a tensor in shared memory or of a pipe, as a
one-time reference to a server thread in the sending process. Inside `Sending` it is the
number of a descriptor that travels with the message. So there is no thread, and the
sender may end before the message is received.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import threading
from collections.abc import Generator, Iterable, Sequence
from multiprocessing import context
from multiprocessing.reduction import ForkingPickler
from typing import Any

from ..core.errors import restoring
from ..core.standard_streams import moved

#: Of each thread: `descriptors`, those of the message that it unpickles.
_arrived = threading.local()


class _Sent:
    """A descriptor inside a pickle."""

    def __init__(self, number: int) -> None:
        self._number = number

    def detach(self) -> int:
        """Return the descriptor, which the caller closes."""
        found: list[int] = _arrived.descriptors
        fd, found[self._number] = found[self._number], -1
        if fd < 0:
            raise RuntimeError("a descriptor can be detached only once")
        return fd


class Sending(list[int]):
    """The descriptors of all objects that this thread pickles in a block.

    It takes the place of a process that is being started, which may get descriptors.
    """

    DupFd = _Sent

    def __enter__(self) -> Sending:
        """Collect in this thread. The caller closes the descriptors, or sends them."""
        self._before: Any = context.get_spawning_popen()
        found: Any = self
        context.set_spawning_popen(found)
        return self

    def __exit__(self, kind: object, *error: object) -> None:
        """Collect no more. After an error, close the descriptors."""
        context.set_spawning_popen(self._before)
        if kind is not None:
            close(self)

    def duplicate_for_child(self, fd: int) -> int:
        """Keep a copy of a descriptor, and return its number in the message."""
        self.append(moved(os.dup(fd)))
        return len(self) - 1


@restoring
def arriving(descriptors: Sequence[int]) -> Generator[None, None, None]:
    """Give the objects that this thread unpickles in the block their descriptors.

    Those that no object has taken are closed at the end of the block.
    """
    before = getattr(_arrived, "descriptors", [])
    _arrived.descriptors = left = list(descriptors)
    try:
        yield
    finally:
        _arrived.descriptors = before
        close(left)


def dump(value: Any) -> tuple[bytes, list[int]]:
    """Return a value as bytes and descriptors."""
    with Sending() as descriptors:
        data = bytes(ForkingPickler.dumps(value, pickle.HIGHEST_PROTOCOL))
    return data, descriptors


def load(data: Any, descriptors: Sequence[int]) -> Any:
    """Return the value of bytes and descriptors, which this function closes."""
    if not descriptors:
        return pickle.loads(data)
    with arriving(descriptors):
        return pickle.loads(data)


def close(descriptors: Iterable[int]) -> None:
    """Close descriptors; negative numbers are closed already."""
    for fd in descriptors:
        if fd >= 0:
            with contextlib.suppress(OSError):
                os.close(fd)
