"""The code of a worker that makes batches in a ring, run in this process."""

from __future__ import annotations

import pickle
from typing import Any

import torch

from pyparallel import backend
from pyparallel.batch import allocation
from pyparallel.shm.messages import (
    LazySlab,
    Message,
    Packed,
    SlabLocation,
    pack,
    unpack,
)
from pyparallel.shm.ring import Ring
from pyparallel.workers import descriptors

WORKER = 2


class Received:
    """A message, and its batch."""

    def __init__(self, packed: Packed) -> None:
        self.message = Message(*pickle.loads(packed.body))
        self.is_in_ring = isinstance(self.message.location, SlabLocation)
        self.miss = packed.miss
        self.batch, self.is_pinned = unpack(packed.body)


def send(held: list[Any], lazy: LazySlab) -> Received:
    """Pack a batch as a worker does, and receive it."""
    with descriptors.Sending() as sent:
        packed = pack(held, lazy)
    with descriptors.arriving(sent):
        return Received(packed)


class Worker:
    """Collate batches into a ring, like a worker."""

    def __init__(self, ring: Ring, collate_fn: Any) -> None:
        self.collate_fn = collate_fn
        self.ring, self.holder = ring, ring.new_holders(1)

    def make(self, samples: Any) -> Received:
        lazy = LazySlab(self.ring, self.holder, -1)
        try:
            with allocation.allocate_from(lazy):
                held = [self.collate_fn(samples)]
        except BaseException:
            lazy.release()
            raise
        return send(held, lazy)


def whole(tensor: torch.Tensor) -> bytes:
    """Return all bytes of the memory of a tensor."""
    return backend.memory_of(tensor).numpy().tobytes()
