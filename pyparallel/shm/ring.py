"""The ring: recycled slabs in shared memory, written by workers, read by the parent.

Note: [ring lifetime]. A slab has one holder at a time, whose number stands in the
shared header: nobody (0), the parent (1), or one worker (a number that is never used
again). A worker claims a free slab, writes, and sends the slab's index; the parent
adopts it: from then on it is the parent's, until the last tensor on it dies. Whoever
holds a slab may die at any time: a dead worker's slabs are freed by the parent, the
parent's die with it. So no process ever waits for another one here. Memory is reserved
before it is written, so that a machine without any left answers with an error and not
with SIGBUS; a slab grows only while one process holds it and no view of it exists.
"""

from __future__ import annotations

import contextlib
import os
import uuid
import weakref
from typing import Protocol

import torch

from .. import backend
from ..transfer import to_device
from ..transfer.device import Fence
from ..transfer.engine import keep_alive
from . import memfd
from .ring_memory import FREE, PARENT, RingMemory, total_nbytes

_LINE = 64

#: The rings that this process made, by name: what an arriving batch looks up.
_made: weakref.WeakValueDictionary[str, Ring] = weakref.WeakValueDictionary()


class PageLock(Protocol):
    """What a ring asks of a device; tests put a fake in its place."""

    def lock(self, address: int, nbytes: int) -> bool:
        """Page-lock memory; False if the system refuses."""

    def unlock(self, address: int) -> None:
        """Undo `lock`, before the memory is unmapped or locked anew."""

    def fence(self) -> Fence:
        """Return a fence behind the current streams of this thread."""


class Ring(RingMemory):
    """The ring of the process that made it: it opens what workers send.

    Args:
        num_slabs: how many slabs there are.
        slab_nbytes: the most bytes that one batch may take.

    Raises:
        OSError: no descriptor or no memory is left.
    """

    def __init__(self, num_slabs: int, slab_nbytes: int) -> None:
        slab_nbytes = slab_nbytes // _LINE * _LINE
        fd = memfd.create(total_nbytes(num_slabs, slab_nbytes))
        super().__init__(fd, uuid.uuid4().hex, num_slabs, slab_nbytes)
        memfd.reserve(fd, 0, self.start(0))
        backend.ring_format(self.header, num_slabs)
        self._pid = os.getpid()
        self._next_holder = PARENT + 1
        self._lock: PageLock | None = None
        self._locked: dict[int, int] = {}  # bytes that are page-locked; -1: refused
        self._num_lockers = 0
        self._damage: RuntimeError | None = None
        _made[self.name] = self

    @property
    def is_mine(self) -> bool:
        """Tell whether this process made the ring, and was not forked from the one."""
        return self._pid == os.getpid()

    def page_lock(self, lock: PageLock) -> None:
        """Page-lock a slab when a batch arrives in it, until `page_unlock`.

        Each iterator that asks for it calls `page_unlock` once.
        """
        self._num_lockers += 1
        if self._lock is None:
            self._lock = lock
            addresses = [self.address(slab) for slab in range(self.num_slabs)]
            end = weakref.finalize(
                self, _unlock, self._pid, lock, self._locked, addresses
            )
            end.atexit = False

    def page_unlock(self) -> None:
        """Unlock the slabs when no iterator needs them: free ones now, others later.

        A slab that a batch or a copy uses is unlocked as soon as it is free.
        """
        self._num_lockers -= 1
        to_device.release_done()
        if not self._num_lockers:
            for slab, holder in enumerate(self.holders()):
                if holder == FREE:
                    self._page_unlock(slab)

    def new_holders(self, count: int) -> int:
        """Return the first of ``count`` numbers that no worker had before."""
        first = self._next_holder
        self._next_holder += count
        return first

    def adopt(self, slab: int, holder: int, nbytes: int) -> torch.Tensor:
        """Take a slab over from the worker that sent it.

        Args:
            slab: its index.
            holder: number of the worker.
            nbytes: how many bytes were written.

        Returns:
            ``torch.uint8`` ``(nbytes,)``. When its storage dies, the slab is free.

        Raises:
            RuntimeError: the slab is not the worker's, or (with poison) somebody wrote
                beyond its edges.
        """
        to_device.release_done()  # copies that were the last to read some slab
        if self._damage is not None:
            raise self._damage
        # It comes first: whatever is raised from here on, the slab is free again.
        owner = self.owner(slab)
        end = weakref.finalize(owner, self._dropped, slab, nbytes)
        end.atexit = False
        if not backend.ring_pass(self.header, slab, holder, PARENT):
            end.detach()
            raise RuntimeError(
                f"slab {slab} of the DataLoader's ring must be held by worker {holder} "
                "when its batch arrives, but is not. Was the loader's process forked?"
            )
        if self._lock is not None and self._num_lockers:
            self._page_lock(slab, self._lock)
        if self.poison_enabled:
            self.check_edges(slab, nbytes)
        return self.payload(owner, nbytes)

    def reclaim(self, holder: int) -> None:
        """Free the slabs of a worker that has ended, however it did."""
        if self.poison_enabled:  # while nobody can claim them yet
            for slab, whose in enumerate(self.holders()):
                if whose == holder:
                    self.poison(slab)
        backend.ring_reclaim(self.header, holder)

    def is_locked(self, slab: int) -> bool:
        """Tell whether the device can read this slab in place."""
        return self._locked.get(slab, 0) > 0

    def holders(self) -> list[int]:
        """Return the holder of every slab."""
        return backend.ring_holders(self.header)

    def _dropped(self, slab: int, nbytes: int) -> None:
        """The last tensor on a slab has died, in whatever thread."""
        if not self.is_mine:
            return  # a forked copy died
        if self.is_locked(slab) and self._lock is not None:
            read = self.owner(slab)  # by copies that the fence stands behind
            weakref.finalize(read, self._free, slab, nbytes).atexit = False
            ticket = keep_alive.hold(read)
            del read
            # A failed device raises at the next call of the program. It may read the
            # slab forever, so the slab stays held.
            with contextlib.suppress(RuntimeError):
                keep_alive.release_when(ticket, self._lock.fence().is_done)
                keep_alive.release_done()
            return
        self._free(slab, nbytes)

    def _free(self, slab: int, nbytes: int) -> None:
        try:
            if self.poison_enabled:
                try:
                    self.check_edges(slab, nbytes)
                except RuntimeError as error:  # nobody catches what a finalizer raises
                    self._damage = error
                    return
            if not self._num_lockers:
                self._page_unlock(slab)
            self.release(slab, PARENT)
        except BaseException:
            # The handler of a signal raised, as torch's does for a dead worker. What a
            # finalizer raises is only printed, and nobody else would free the slab.
            if self.holders()[slab] == PARENT:
                self.release(slab, PARENT)  # its edges may be overwritten already
            raise

    def _page_lock(self, slab: int, lock: PageLock) -> None:
        nbytes, before = self.committed(slab), self._locked.get(slab, 0)
        if before in (nbytes, -1):
            return
        if before:  # the slab was free until a moment ago: nothing reads it
            lock.unlock(self.address(slab))
        self._locked[slab] = nbytes if lock.lock(self.address(slab), nbytes) else -1

    def _page_unlock(self, slab: int) -> None:
        if self._lock is not None and self.is_locked(slab):
            if self._locked.pop(slab, 0):  # another thread may have been faster
                self._lock.unlock(self.address(slab))


def find(name: str) -> Ring:
    """Return a ring that this process made.

    Raises:
        RuntimeError: it is no more.
    """
    ring = _made.get(name)
    if ring is None or not ring.is_mine:
        raise RuntimeError(
            "a batch must arrive in the process whose DataLoader sent for it, while "
            "that DataLoader exists, but its ring is not here."
        )
    return ring


def _unlock(
    pid: int,
    lock: PageLock,
    locked: dict[int, int],
    addresses: list[int],
) -> None:
    """Unlock the pages of a ring that dies: while a device reads them, it lives."""
    if pid != os.getpid():  # a forked copy dies, which has no device
        return
    for slab, nbytes in locked.items():
        if nbytes > 0:
            # A failed device raises at the next call of the program, not here.
            with contextlib.suppress(RuntimeError):
                lock.unlock(addresses[slab])
