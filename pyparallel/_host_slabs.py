"""Page-locked memory that results come to: no more of it than a limit."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from . import _advice

_LARGEST_DEFAULT = 1 << 30


class HostSlabs:
    """Hands out slabs on the host, page-locked until those that are alive fill a limit.

    Note: [alive results]. A slab lives as long as any tensor of it, wherever that is.
    So its storage is asked, weakly, by what torch has for its own graphs; nothing is
    wrapped around the storage, by which torch's allocator knows the block. What is
    being allocated is counted before it is there: page-locking takes its time, and
    other threads need not wait for it.

    Attributes:
        limit: the most bytes of page-locked slabs that are alive.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._lock = threading.Lock()
        self._alive: list[tuple[StorageWeakRef, int]] = []
        self._begun = 0

    def take(
        self, nbytes: int, pinned: Callable[[int], torch.Tensor]
    ) -> tuple[torch.Tensor, bool]:
        """Return a slab of bytes, and whether it is page-locked; the first use warns.

        Args:
            nbytes: its size.
            pinned: makes it, page-locked.
        """
        with self._lock:
            in_use = self._count()
            fits = in_use + nbytes <= self.limit
            if fits:
                self._begun += nbytes
        if not fits:
            _advice.of_results(in_use, nbytes, self.limit)
            return torch.empty(nbytes, dtype=torch.uint8), False
        made: list[tuple[StorageWeakRef, int]] = []
        try:
            slab = pinned(nbytes)
            made.append((StorageWeakRef(slab.untyped_storage()), nbytes))
        finally:
            with self._lock:
                self._begun -= nbytes
                self._alive += made
        return slab, True

    def in_use(self) -> int:
        """Return the bytes of page-locked slabs that are alive."""
        with self._lock:
            return self._count()

    def forget(self) -> None:
        """Begin anew in a forked child: what is page-locked is so for its parent."""
        self._lock = threading.Lock()  # that of the parent may be held
        self._alive, self._begun = [], 0

    def _count(self) -> int:
        self._alive = [each for each in self._alive if not each[0].expired()]
        return self._begun + sum(nbytes for _, nbytes in self._alive)


def _default_limit() -> int:
    """Return what blocks on the way to a device may take by default, too."""
    pages, size = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGESIZE")
    return min(_LARGEST_DEFAULT, pages // 8 * size)


#: Those of this process.
host_slabs = HostSlabs(_default_limit())
os.register_at_fork(after_in_child=host_slabs.forget)
