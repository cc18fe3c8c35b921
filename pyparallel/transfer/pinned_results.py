"""Page-locked memory that results come to: no more of it than a limit."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from .. import backend
from ..core.errors import LoaderWarning, warn_once
from ..core.text import nbytes_text

#: How many slabs may be asked for each one that is handed out, at the limit and below.
_OFTEN, _SELDOM = 64, 8


class HostSlabs:
    """Hands out slabs on the host, page-locked until those that are alive fill a limit.

    Note: [alive results]. A slab lives as long as any tensor of it, wherever that is.
    So its storage is asked, weakly, by what torch has for its own graphs; nothing is
    wrapped around the storage, by which torch's allocator knows the block. Of many
    slabs all are asked now and then only, so that one more costs the same however many
    are kept; what has died since counts until then. What is being allocated is counted
    before it is there: page-locking takes its time, and other threads need not wait.

    Attributes:
        limit: the most bytes of page-locked slabs that are alive.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._lock = threading.RLock()  # a handler of a signal may run while it is held
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self._numbers = itertools.count()
        self._nbytes = 0  # of those, and of slabs that are being allocated
        self._takes = 0  # since all were asked

    def take(
        self, nbytes: int, pinned: Callable[[int], torch.Tensor]
    ) -> tuple[torch.Tensor, bool]:
        """Return a slab of bytes, and whether it is page-locked; else it warns once.

        Args:
            nbytes: its size.
            pinned: makes it, page-locked.
        """
        with self._lock:
            self._takes += 1
            is_full = self._nbytes + nbytes > self.limit
            if self._takes * (_OFTEN if is_full else _SELDOM) >= len(self._alive):
                self._ask()
            in_use = self._nbytes
            fits = in_use + nbytes <= self.limit
            if fits:
                self._nbytes += nbytes
        if not fits:
            warn_about_results(in_use, nbytes, self.limit)
            return torch.empty(nbytes, dtype=torch.uint8), False
        try:
            slab = pinned(nbytes)
            alive = StorageWeakRef(slab.untyped_storage())
        except BaseException:
            with self._lock:
                self._nbytes -= nbytes
            raise
        with self._lock:
            self._alive[next(self._numbers)] = alive, nbytes
        return slab, True

    def in_use(self) -> int:
        """Return the bytes of page-locked slabs that are alive."""
        with self._lock:
            self._ask()
            return self._nbytes

    def forget(self) -> None:
        """Begin anew in a forked child: what is page-locked is so for its parent."""
        self._lock = threading.RLock()  # that of the parent may be held
        self._alive, self._nbytes, self._takes = {}, 0, 0

    def _ask(self) -> None:
        self._takes = 0
        for number, (storage, nbytes) in list(self._alive.items()):
            # In the middle of this a handler may have asked, too.
            if storage.expired() and self._alive.pop(number, None) is not None:
                self._nbytes -= nbytes


#: Those of this process; they may take what blocks on the way to a device may.
host_slabs = HostSlabs(backend.pinned_info()[2])
os.register_at_fork(after_in_child=host_slabs.forget)


def warn_about_results(in_use: int, nbytes: int, limit: int) -> None:
    """Warn that results are copied to memory that is not pinned.

    Args:
        in_use: bytes of the page-locked results that are alive.
        nbytes: of those that come besides.
        limit: what both together exceed.
    """
    warn_once(
        "PP213",
        f"to_host: results that are alive should fit in {nbytes_text(limit)} of "
        f"page-locked memory, but {nbytes_text(in_use)} are alive and "
        f"{nbytes_text(nbytes)} come. clone() what you keep, or raise "
        "memory.set_pinned_limit. Until then such results come to ordinary memory, and "
        "the host waits for each copy.",
        LoaderWarning,
    )
