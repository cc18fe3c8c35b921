"""Memory for results: where their consumer gets them without another copy."""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch
from torch.utils.data import get_worker_info

from .. import backend
from ..core.torch_private import new_shared

#: Results up to this size are better copied into a slab than written there one by one.
SMALL_NBYTES = 64 * 1024


class Slab(Protocol):
    """Memory that will be sent as a whole."""

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor | None:
        """Return a tensor on the next bytes; None if they do not fit."""


class _Local(threading.local):
    """What this thread writes to: a worker may have other threads besides."""

    slab: Slab | None = None


_local = _Local()


@contextlib.contextmanager
def allocate_from(slab: Slab | None) -> Iterator[None]:
    """Let `empty` take memory from a slab, in this thread."""
    _local.slab = slab
    try:
        yield
    finally:
        _local.slab = None


def is_packed_later() -> bool:
    """Tell whether this thread's results will be copied into a slab anyway."""
    return _local.slab is not None


def in_worker() -> bool:
    """Tell whether this process is a ``DataLoader`` worker."""
    return get_worker_info() is not None


def empty(
    shape: Sequence[int], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Return an uninitialised contiguous tensor that its consumer gets without a copy.

    In a worker of `pyparallel.DataLoader` it lies in a slab of the ring. In a worker of
    torch's it lies in shared memory, so that the parent maps the very bytes written
    here; torch's ``default_collate`` does the same. Elsewhere a large one on the host
    lies in recycled memory (`pyparallel.memory`).
    """
    if device.type != "cpu":
        return torch.empty(shape, dtype=dtype, device=device)
    if _local.slab is not None:
        made = _local.slab.empty(shape, dtype)
        # What does not fit is copied into other memory later.
        return backend.empty(shape, dtype) if made is None else made
    if not in_worker():
        return backend.empty(shape, dtype)
    nbytes = math.prod(shape) * dtype.itemsize
    storage = new_shared(nbytes)
    untyped: Any = torch.empty(
        0, dtype=dtype, device=device
    )  # torch's stub: no storage
    result: torch.Tensor = untyped.set_(storage, 0, shape)
    return result
