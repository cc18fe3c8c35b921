"""Allocate results in memory that their consumer can use without copying."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch.utils.data import get_worker_info

from .. import backend
from ..core.torch_private import in_worker_thread, new_shared
from ..transfer import gpu_record
from ..transfer.device import relaxed_here

#: Several results up to this size are cheaper to copy into a slab together than to
#: write into it one by one.
SMALL_NBYTES = 64 * 1024


class Slab(Protocol):
    """Memory that a worker sends to the parent as a whole."""

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor | None:
        """Return a tensor on the next free bytes; None if they are too few."""


class _Local(threading.local):
    """The slab of this thread; other threads of the worker do not write into it."""

    slab: Slab | None = None
    is_packed_later = False


_local = _Local()


class allocate_from:
    """Let `empty` allocate from a slab in this thread, within a ``with`` block.

    Args:
        slab: the slab. None: allocate ordinary memory.
        packs: all results are packed into one shared memory after the block. If not,
            and without a slab, each result needs shared memory of its own.
    """

    def __init__(self, slab: Slab | None, *, packs: bool = True) -> None:
        self._state = slab, packs or slab is not None

    def __enter__(self) -> None:
        _local.slab, _local.is_packed_later = self._state

    def __exit__(self, *error: object) -> None:
        _local.slab, _local.is_packed_later = None, False


def is_packed_later() -> bool:
    """Return True if all results of this thread end up in one shared memory."""
    return _local.is_packed_later


def in_worker() -> bool:
    """Return True in a ``DataLoader`` worker process, not in a thread as a worker."""
    return get_worker_info() is not None and not in_worker_thread()


def empty(
    shape: Sequence[int], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Return an uninitialised contiguous tensor that its consumer can use in place.

    The memory depends on the process:

    * worker of `pyparallel.DataLoader`: a slab of the ring. Without a free slab,
      ordinary memory, as the whole batch is packed into one shared memory later;
    * worker of torch's ``DataLoader``: shared memory, which the parent maps without a
      copy, as for the results of torch's ``default_collate``;
    * any other process: for large host tensors, recycled memory (`pyparallel.memory`).
    """
    if device.type != "cpu":
        gpu_record.warn_if_untested(device)
        with relaxed_here(device):  # it may need more memory
            return torch.empty(shape, dtype=dtype, device=device)
    if _local.slab is not None:
        result = _local.slab.empty(shape, dtype)
        # A result that does not fit into the slab is copied into other memory later.
        return backend.empty(shape, dtype) if result is None else result
    if _local.is_packed_later or not in_worker():
        return backend.empty(shape, dtype)
    nbytes = math.prod(shape) * dtype.itemsize
    storage = new_shared(nbytes)
    # torch's stub does not know this signature of set_.
    untyped: Any = torch.empty(0, dtype=dtype, device=device)
    shared: torch.Tensor = untyped.set_(storage, 0, shape)
    return shared
