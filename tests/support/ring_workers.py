"""The code of a worker that makes batches in a ring, run in this process."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import _utils

from pyparallel import backend
from pyparallel.loader._worker import WorkerCollate
from pyparallel.shm.ring import Ring
from pyparallel.shm.serialization import ReceivedBatch

WORKER = 2


class Worker:
    """Collate batches into a ring, like a worker."""

    def __init__(self, ring: Ring, collate_fn: Any) -> None:
        self.collate = WorkerCollate(
            collate_fn, ring, ring.new_holders(1), lambda: None
        )

    def make(self, samples: Any) -> ReceivedBatch:
        _utils.worker._worker_info = _utils.worker.WorkerInfo(
            id=0, num_workers=1, seed=0, dataset=None
        )
        try:
            message = self.collate(samples).message
        finally:
            _utils.worker._worker_info = None
        return ReceivedBatch(*message)


def whole(tensor: torch.Tensor) -> bytes:
    """Return all bytes of the memory of a tensor."""
    return backend.memory_of(tensor).numpy().tobytes()
