"""What stacks are made of, for whoever listens: bytes, and how many are padding."""

from __future__ import annotations

import threading


class Stacked:
    """Counts what `collate` and `pad_stack` stack in this thread within a block.

    It is the context manager of the block. The counts are read after the block. An
    inner block counts for itself and the outer one.

    Attributes:
        stacked_nbytes: bytes of the stacked tensors.
        padding_nbytes: the part of these bytes that is padding.
    """

    __slots__ = ("_outer", "padding_nbytes", "stacked_nbytes")

    def __init__(self) -> None:
        self.padding_nbytes = 0
        self.stacked_nbytes = 0

    def __enter__(self) -> Stacked:
        self._outer = listener.stacked
        listener.stacked = self
        return self

    def __exit__(self, *error: object) -> None:
        listener.stacked = outer = self._outer
        if outer is not None:
            outer.add(self.stacked_nbytes, self.padding_nbytes)

    def add(self, nbytes: int, padding_nbytes: int = 0) -> None:
        """Count ``nbytes`` of a stacked tensor, of which some are padding."""
        self.stacked_nbytes += nbytes
        self.padding_nbytes += padding_nbytes


class _Listener(threading.local):
    stacked: Stacked | None = None


#: ``listener.stacked`` is what this thread's stacks are to be added to, or None.
listener = _Listener()
