"""Allocate pinned memory for results on the host, up to a limit."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from .. import backend
from ..core.errors import LoaderWarning, warn_once
from ..core.process import on_fork
from ..core.text import nbytes_text

#: How many slabs may be checked for each new slab, at the limit and below it.
_CHECKS_AT_LIMIT, _CHECKS_BELOW = 64, 8


class HostSlabs:
    """An allocator of slabs on the host: pinned while the live ones are below a limit.

    Note: [alive results]. A slab lives as long as any tensor on it, in any thread. So a
    weak reference to its storage is checked, of the type that torch has for its own
    graphs. The storage itself is not wrapped, because torch's allocator identifies the
    block by it. With many slabs, all are checked only now and then, so that one more
    slab costs the same however many are alive. Slabs that died since then still count.
    A slab counts before it is allocated: pinning takes long, and other threads do not
    wait for it.

    Attributes:
        limit: the most bytes of pinned slabs that are alive.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._lock = threading.RLock()  # a handler of a signal may run while it is held
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self._numbers = itertools.count()
        self._nbytes = 0  # of those, and of slabs that are being allocated
        self._takes = 0  # since all slabs were checked

    def take(
        self, nbytes: int, pinned: Callable[[int], torch.Tensor]
    ) -> tuple[torch.Tensor, bool]:
        """Return a slab, and whether it is pinned; warn once if it is not.

        Args:
            nbytes: the size of the slab.
            pinned: allocates that many pinned bytes.
        """
        with self._lock:
            self._takes += 1
            is_full = self._nbytes + nbytes > self.limit
            num_checks = _CHECKS_AT_LIMIT if is_full else _CHECKS_BELOW
            if self._takes * num_checks >= len(self._alive):
                self._remove_dead()
            in_use = self._nbytes
            fits = in_use + nbytes <= self.limit
            if fits:
                self._nbytes += nbytes
        if not fits:
            warn_about_results(in_use, nbytes, self.limit)
            return torch.empty(nbytes, dtype=torch.uint8, device="cpu"), False
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
        """Return the bytes of pinned slabs that are alive."""
        with self._lock:
            self._remove_dead()
            return self._nbytes

    def forget(self) -> None:
        """Forget all slabs in a forked child: they are pinned for the parent alone."""
        self._lock = threading.RLock()  # a thread of the parent may hold the old one
        self._alive, self._nbytes, self._takes = {}, 0, 0

    def _remove_dead(self) -> None:
        self._takes = 0
        # Not `list`: a destructor may run in it, and need a slab.
        for number, (storage, nbytes) in self._alive.copy().items():
            # A signal handler may have removed this entry in the meantime.
            if storage.expired() and self._alive.pop(number, None) is not None:
                self._nbytes -= nbytes


#: The slabs of this process; their limit is that of staging blocks.
host_slabs: HostSlabs = HostSlabs(backend.pinned_info()[2])
on_fork(host_slabs.forget)


def warn_about_results(in_use: int, nbytes: int, limit: int) -> None:
    """Warn that results are copied to memory that is not pinned.

    Args:
        in_use: bytes of the pinned results that are alive.
        nbytes: bytes of the new result.
        limit: the limit that both together exceed.
    """
    warn_once(
        "PP213",
        f"to_host: {nbytes_text(in_use)} of results are alive in pinned memory, and "
        f"{nbytes_text(nbytes)} more exceed the limit of {nbytes_text(limit)}. This "
        "result uses ordinary memory, so the host waits for its copy. clone() results "
        "that you keep, or raise memory.set_pinned_limit.",
        LoaderWarning,
    )
