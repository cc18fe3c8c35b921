"""What stacks are made of, for whoever listens: bytes, and how many are padding."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Stacked:
    """How many bytes were stacked while somebody listened, and how many are padding."""

    __slots__ = ("padding_nbytes", "stacked_nbytes")

    def __init__(self) -> None:
        self.padding_nbytes = 0
        self.stacked_nbytes = 0

    def add(self, nbytes: int, padding_nbytes: int = 0) -> None:
        """Count ``nbytes`` of a stacked tensor, of which some are padding."""
        self.stacked_nbytes += nbytes
        self.padding_nbytes += padding_nbytes


class _Listener(threading.local):
    stacked: Stacked | None = None


#: ``listener.stacked`` is what this thread's stacks are to be added to, or None.
listener = _Listener()


@contextmanager
def recording() -> Iterator[Stacked]:
    """Count what `collate` and `pad_stack` stack in this thread within the block.

    Yields:
        The counts; they are read after the block. An inner block counts for itself
        and the outer one.
    """
    outer = listener.stacked
    listener.stacked = inner = Stacked()
    try:
        yield inner
    finally:
        listener.stacked = outer
        if outer is not None:
            outer.add(inner.stacked_nbytes, inner.padding_nbytes)
