"""Batches as messages over the channel of a worker.

The tensors of a small batch travel in the message: a slab would cost more than the
copy. A slab is claimed at the first larger allocation, so that collate functions write
into it. A batch without a slab gets new shared memory. Its descriptor is pickled as by
`multiprocessing`.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from .. import backend
from .ring import RingMemory, Slab
from .serialization import (
    Message,
    RingMiss,
    collect,
    move_out_of_ring,
    place,
    receive,
)

#: The most bytes of tensors that travel in a message.
INLINE_NBYTES = 16 * 1024


class LazySlab:
    """The slab of one batch, which is claimed when it is needed.

    Args:
        ring: the ring of the loader, None without one.
        holder: the number of this worker in the ring.
        limit: the most bytes of tensors that travel in a message.
    """

    def __init__(self, ring: RingMemory | None, holder: int, limit: int) -> None:
        self.slab: Slab | None = None
        self.ring: RingMemory | None = ring
        self.limit: int = limit
        self._holder = holder

    def claim(self) -> Slab | None:
        """Return the slab, None if no slab is free."""
        if self.slab is None and self.ring is not None:
            self.slab = self.ring.claim(self._holder)
        return self.slab

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor | None:
        """Allocate a tensor in the slab, None if it is small or does not fit."""
        if self.slab is None and math.prod(shape) * dtype.itemsize <= self.limit:
            return None
        slab = self.claim()
        return None if slab is None else slab.empty(shape, dtype)

    def release(self) -> None:
        """Free the slab of a batch that is not sent."""
        slab, self.slab = self.slab, None
        if slab is not None:
            slab.release()


class Packed(NamedTuple):
    """A batch as bytes.

    Attributes:
        body: the bytes.
        nbytes: the bytes of its tensors; in a slab, with the gaps between them.
        miss: the reason why they are neither in a slab nor in the message, or None.
        was_shared: a large tensor was in shared memory of torch.
    """

    body: bytes
    nbytes: int
    miss: RingMiss | None = None
    was_shared: bool = False


def pack_small(held: list[Any], lazy: LazySlab) -> Packed | None:
    """Return a batch without a slab as a message, None if only `pack` can.

    Args:
        held: a list with the batch, which stays in it.
        lazy: the slab that the batch was allocated from.
    """
    encoded = backend.encode(held[0], lazy.limit) if lazy.slab is None else None
    return None if encoded is None else Packed(*encoded)


def pack(held: list[Any], lazy: LazySlab) -> Packed:
    """Return a batch as a message, and free the slab unless the batch is in it.

    Note: [references to a batch]. A tensor in the slab that lives on after this call
    may change, so the batch is then copied out of the ring. An argument stays on the
    stack of the caller in Python 3.10, so the batch is popped from a list.

    Args:
        held: a list with the batch. No other variable of a frame may refer to it.
        lazy: the slab that the batch was allocated from.

    Raises:
        ValueError: a tensor has an autograd graph.
        RuntimeError: the system has no memory or no file descriptor left.
        Exception: any error of pickling.
    """
    try:
        batch = held.pop()
        try:
            found = _write(batch, lazy, trust=True)
        except (TypeError, ValueError):  # for example, a tensor is a conjugate view
            found = _write(batch, lazy, trust=False)
        message, nbytes, was_shared = found
        del batch
        slab = lazy.slab
        if slab is not None and not slab.finish() and message.is_in_ring:
            message = move_out_of_ring(message, slab)
    except BaseException:
        lazy.release()
        raise
    if message.is_in_ring:
        lazy.slab = None  # the parent frees it
    lazy.release()
    miss = message.miss
    if miss is None and message.unsupported is not None:
        miss = RingMiss("unsupported", 0)
    body = pickle.dumps(tuple(message), pickle.HIGHEST_PROTOCOL)
    return Packed(body, nbytes, miss, was_shared)


def _write(batch: Any, lazy: LazySlab, *, trust: bool) -> tuple[Message, int, bool]:
    """Return the message of a batch, `Packed.nbytes` and `Packed.was_shared`."""
    body, leaves = collect(batch, trust=trust)
    tensors = leaves.packed
    small = lazy.slab is None and sum([leaf.nbytes for leaf in tensors]) <= lazy.limit
    if small:
        inline = backend.encode(list(map(_contiguous, tensors)), lazy.limit)
        if inline is not None:
            return leaves.message(inline[0], body, None, None, None), inline[1], False
    message = place(body, leaves, lazy.claim(), lazy.ring is not None)
    nbytes = 0 if message.plan is None else message.plan.nbytes
    return message, nbytes, any(map(_was_shared, tensors))


def _was_shared(leaf: torch.Tensor) -> bool:
    return leaf.nbytes > INLINE_NBYTES and leaf.is_shared()


def _contiguous(leaf: torch.Tensor) -> torch.Tensor:
    if leaf.is_contiguous():
        return leaf
    if leaf.itemsize == 1:  # torch cannot copy integers of fewer bits
        return leaf.view(torch.uint8).contiguous().view(leaf.dtype)
    return leaf.contiguous()


def unpack(body: Any) -> tuple[Any, bool]:
    """Return a batch, and whether all its tensors are in pinned memory.

    Args:
        body: the bytes of `pack`, of any bytes-like class. They may change afterwards.

    Raises:
        OSError: no file descriptor or no memory is left.
        RuntimeError: the ring is not in this process, or was damaged.
        Exception: any error of unpickling.
    """
    if body[:1] != pickle.PROTO:
        return backend.decode(body), False
    return receive(Message(*pickle.loads(body)))
