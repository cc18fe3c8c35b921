"""The ring: recycled slabs in shared memory, which workers write and the parent reads.

Note: [ring lifetime]. A slab has one holder at a time. The shared header stores the
number of the holder: 0 (free), 1 (the parent), or the number of a worker, which is
never used again. A worker claims a free slab, writes into it, and sends its index. The
parent adopts the slab and holds it until its last tensor is freed.

A process may die while it holds a slab. The parent frees the slabs of a dead worker;
the slabs of the parent end with it. So no process waits for another one here.

The memory consists of a header, with one line of 64 bytes for each slab, and of the
slabs, which have one size. A slab takes memory (``memfd``) when it is first written, as
far as it is written, and keeps it. It grows only while one process holds it and no view
of it exists.

With ``PYPARALLEL_DEBUG=1`` or ``=poison``, free slabs are overwritten. Writes to a free
slab, and writes to bytes of a slab that no tensor covers, are then errors. A worker
checks the bytes behind the tensors that it created there. Then it fills the edges and
all gaps with one value, which the parent compares.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import math
import mmap
import os
import uuid
import weakref
from collections.abc import Sequence
from multiprocessing import reduction
from typing import Any

import torch

from .. import backend
from ..core import standard_streams
from ..transfer import debug
from ..transfer.engine import keep_alive
from . import memfd
from .pinning import Pinner, unpin_all

#: Holders in the header: of a free slab, and of one that the parent holds.
FREE, PARENT = 0, 1

_LINE = 64  # bytes of a slab's line in the header, and of each edge of a slab
_GROW = 1 << 21  # bytes; slabs grow by multiples of this
_POISON = 0xDB
_EDGE = 0xC5

#: The first byte of a slab, and the byte after the last one. 0: behind the first edge.
Range = tuple[int, int]


class RingMemory:
    """Slabs of one size in shared memory, claimed by atomic operations on its header.

    Args:
        fd: descriptor of the memory. It is closed when this object is freed.
        name: a name that no other ring of the machine has.
        num_slabs: number of slabs.
        slab_nbytes: largest size of a batch in bytes, a multiple of 64.
        poison: whether free slabs are overwritten. The same in all of its processes.
    """

    def __init__(
        self, fd: int, name: str, num_slabs: int, slab_nbytes: int, poison: bool
    ) -> None:
        self.fd: int = fd
        self.name: str = name
        self.num_slabs: int = num_slabs
        self.slab_nbytes: int = slab_nbytes
        self._pid = os.getpid()
        weakref.finalize(self, os.close, fd).atexit = False
        with standard_streams.opened():  # the map has a descriptor of its own
            self._memory = mmap.mmap(fd, total_nbytes(num_slabs, slab_nbytes))
        self._all_bytes = torch.frombuffer(self._memory, dtype=torch.uint8)
        self.header: torch.Tensor = self._all_bytes[: _LINE * (1 + num_slabs)]
        lines = memoryview(self._memory)[: self.header.numel()]
        self._committed = lines.cast("q")[9::8]  # the second word of every slab's line
        self._stride = _stride(slab_nbytes)
        # One type for all slabs: ctypes never frees the types that it creates.
        self._slab_type: Any = ctypes.c_uint8 * self._stride
        self.poison_enabled: bool = poison

    def __reduce__(self) -> Any:
        # Called only while a worker is started: its arguments carry the descriptor.
        return _attach, (reduction.DupFd(self.fd), *self._layout())

    def mapped_here(self) -> RingMemory:
        """Return the memory as mapped by this process; map it in a forked worker.

        The parent may have pinned slabs. Drivers may keep such pages from children, as
        those of network adapters do by ``MADV_DONTFORK``.
        """
        if self._pid == os.getpid():
            return self
        return RingMemory(os.dup(self.fd), *self._layout())

    def _layout(self) -> tuple[str, int, int, bool]:
        return self.name, self.num_slabs, self.slab_nbytes, self.poison_enabled

    def claim(self, holder: int) -> Slab | None:
        """Claim a free slab for a worker; return None if no slab is free.

        Raises:
            RuntimeError: the slab was written while it was free. This is checked with
                poison enabled.
        """
        slab = backend.ring_claim(self.header, holder, self.fd)
        if slab < 0:
            return None
        if self.poison_enabled and not self._is_filled(
            slab, 0, self._committed[slab], _POISON
        ):
            raise RuntimeError(
                f"slab {slab} of the DataLoader's ring must not change while it is "
                "free, but it was written. Look for code that uses the memory of a "
                "batch after its last tensor was freed."
            )
        return Slab(self, slab, holder)

    def release(self, slab: int, holder: int) -> None:
        """Free a slab."""
        if self.poison_enabled:
            self.poison(slab)
        backend.ring_pass(self.header, slab, holder, FREE)

    def commit(self, slab: int, nbytes: int) -> bool:
        """Reserve memory for ``nbytes`` in a slab; return False if none is left."""
        have, need = self._committed[slab], nbytes + 2 * _LINE
        if need <= have:
            return True
        # Batches differ in size: reserve more than requested, to grow less often.
        size = min(-(-(need + need // 8) // _GROW) * _GROW, self._stride)
        try:
            memfd.reserve(self.fd, self.slab_offset(slab), size)
        except OSError:
            return False
        if self.poison_enabled:
            self._fill(slab, have, size, _POISON)
        self._committed[slab] = size
        return True

    def committed(self, slab: int) -> int:
        """Return the bytes that are reserved for a slab, including its edges."""
        return self._committed[slab]

    def owner(self, slab: int) -> Any:
        """Return a new owner of a slab's memory, which is freed with its last user."""
        return self._slab_type.from_buffer(self._memory, self.slab_offset(slab))

    def payload(self, owner: Any, nbytes: int) -> torch.Tensor:
        """Return bytes of a slab behind its first edge, which keep `owner` alive."""
        return torch.frombuffer(owner, dtype=torch.uint8, count=nbytes, offset=_LINE)

    def slab_offset(self, slab: int) -> int:
        """Return the offset of a slab in the shared memory, in bytes."""
        return _header_nbytes(self.num_slabs) + slab * self._stride

    def slab_address(self, slab: int) -> int:
        """Return the address of a slab in this process."""
        return self._all_bytes.data_ptr() + self.slab_offset(slab)

    def leading_bytes(self, slab: int, nbytes: int) -> torch.Tensor:
        """Return the first bytes of a slab without a reference to its owner."""
        start = self.slab_offset(slab) + _LINE
        return self._all_bytes[start : start + nbytes]

    def poison(self, slab: int) -> None:
        """Overwrite all reserved bytes of a slab."""
        self._fill(slab, 0, self._committed[slab], _POISON)

    # Without torch's operators: in a forked process they may wait for threads of the
    # parent forever.

    def _fill(self, slab: int, first: int, last: int, value: int) -> None:
        ctypes.memset(self.slab_address(slab) + first, value, last - first)

    def _is_filled(self, slab: int, first: int, last: int, value: int) -> bool:
        if first >= last:
            return True
        start, rest = self.slab_address(slab) + first, last - first - 1
        begins = ctypes.c_uint8.from_address(start).value == value
        return begins and _memcmp()(start, start + 1, rest) == 0

    def mark_gaps(self, slab: int, nbytes: int, gaps: Sequence[Range]) -> None:
        """Write the bytes around the tensors of a batch that `check_gaps` compares."""
        for first, last in (*gaps, *_edges(nbytes)):
            self._fill(slab, _LINE + first, _LINE + last, _EDGE)

    def check_gaps(
        self, slab: int, nbytes: int, gaps: Sequence[Range], value: int = _EDGE
    ) -> None:
        """Raise RuntimeError if bytes around the tensors of a batch were written.

        Args:
            slab: index of the slab.
            nbytes: number of bytes of the batch.
            gaps: ranges within them that no tensor covers.
            value: the value that each byte must have.
        """
        for first, last in (*gaps, *_edges(nbytes)):
            if self._is_filled(slab, _LINE + first, _LINE + last, value):
                continue
            where = f"{first} to {last - 1}, behind the end of a tensor,"
            if first < 0 or first >= nbytes:
                where = "before them" if first < 0 else "after them"
            raise RuntimeError(
                f"slab {slab} of the DataLoader's ring must be written within the "
                f"tensors of its {nbytes} bytes, but bytes {where} were written. Look "
                "for code that writes out of the bounds of a tensor."
            )


def _edges(nbytes: int) -> tuple[Range, Range]:
    """Return the bytes right before and right after a batch in its slab."""
    return (-_LINE, 0), (nbytes, nbytes + _LINE)


@functools.cache
def _memcmp() -> Any:
    function: Any = ctypes.CDLL(None).memcmp
    function.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
    return function


class Slab:
    """A slab that this worker holds. Its memory is allocated from the start on."""

    def __init__(self, ring: RingMemory, index: int, holder: int) -> None:
        self.ring: RingMemory = ring
        self.index: int = index
        self.holder: int = holder
        self.used: int = 0
        #: Bytes of the slab that the latest `take` needed, also if it failed.
        self.requested: int = 0
        #: Ranges that no tensor of the batch covers, and that have no zeros yet.
        self.gaps: list[Range] = []
        self._ends: list[Range] = []  # between two allocations
        owner = ring.owner(index)
        self._owner = weakref.ref(owner)
        self._memory: torch.Tensor | None = ring.payload(owner, ring.slab_nbytes)
        self._address = ring.slab_address(index) + _LINE

    @property
    def next_start(self) -> int:
        """The offset of the next allocation: a multiple of 64."""
        return -(-self.used // _LINE) * _LINE

    def take(self, nbytes: int) -> torch.Tensor | None:
        """Allocate bytes; return None if they do not fit or no memory is left."""
        start = self.next_start
        self.requested = start + nbytes
        if self._memory is None or self.requested > self.ring.slab_nbytes:
            return None
        if not self.ring.commit(self.index, self.requested):
            return None
        if self.ring.poison_enabled:
            self._ends.append((self.used, start))
        self.used = self.requested
        return self._memory[start : self.used]

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor | None:
        """Allocate a tensor; return None as `take` does, or if it has no elements."""
        numel = math.prod(shape)
        memory = self.take(numel * dtype.itemsize)
        if memory is None or numel == 0:
            return None
        start = _LINE + self.used - memory.numel()
        # Each tensor has its own storage, so that none can be resized into the next.
        flat = torch.frombuffer(self._owner(), dtype=dtype, count=numel, offset=start)
        return flat.view(tuple(shape))

    def offset(self, tensor: torch.Tensor) -> int | None:
        """Return the offset of a tensor in this slab; None if it is not in it."""
        offset = tensor.data_ptr() - self._address
        return offset if 0 <= offset < self.used else None

    def copy_to(self, memory: torch.Tensor) -> None:
        """Copy the first bytes to other memory, with zeros in the gaps."""
        memory.copy_(self.ring.leading_bytes(self.index, memory.numel()))
        self._clear_gaps(memory)

    def finish(self) -> bool:
        """Release the memory; return False if this process still has a tensor on it.

        Raises:
            RuntimeError: bytes behind the end of a tensor were written. They are
                checked with poison enabled.
        """
        is_checked = self._check_ends()
        if self._owner() is not None:  # a tensor is alive, perhaps in a gap
            return False
        if is_checked:
            self.ring.mark_gaps(self.index, self.used, self.gaps)
        else:
            self._clear_gaps(self.ring.leading_bytes(self.index, self.used))
        return True

    def _check_ends(self) -> bool:
        """Check the bytes between allocations. Return False if they are not checked."""
        self._memory = None
        if not self.ring.poison_enabled or not self.ring.committed(self.index):
            return False
        self.ring.check_gaps(self.index, self.used, self._ends, _POISON)
        return True

    def close(self) -> tuple[Any, list[Range]]:
        """Return the owner of the memory, None without one, and the marked gaps.

        Raises:
            RuntimeError: as `finish`.
        """
        try:
            if not self._check_ends():
                return self._owner(), []
        except BaseException:
            self.release()
            raise
        self.ring.mark_gaps(self.index, self.used, self._ends)
        return self._owner(), self._ends

    def _clear_gaps(self, memory: torch.Tensor) -> None:
        """Write zeros into the gaps: of the slab's bytes, or of a copy of them."""
        for first, last in self.gaps:
            if first < last:
                memory[first:last].zero_()

    def release(self) -> None:
        """Free the slab when this process has no tensor on it any more."""
        self._memory = None
        owner = self._owner()
        if owner is None:
            self.ring.release(self.index, self.holder)
            return
        end = weakref.finalize(owner, self.ring.release, self.index, self.holder)
        end.atexit = False


#: The rings that this process created, by name. Received batches look them up.
_rings: weakref.WeakValueDictionary[str, Ring] = weakref.WeakValueDictionary()


class Ring(RingMemory):
    """A ring in the process that created it, which receives the slabs of its workers.

    Args:
        num_slabs: number of slabs.
        slab_nbytes: largest size of a batch in bytes.

    Raises:
        OSError: no file descriptor or no memory is left.
    """

    def __init__(self, num_slabs: int, slab_nbytes: int) -> None:
        slab_nbytes = slab_nbytes // _LINE * _LINE
        fd = memfd.create(total_nbytes(num_slabs, slab_nbytes))
        name, poison = uuid.uuid4().hex, debug.poison_enabled
        super().__init__(fd, name, num_slabs, slab_nbytes, poison)
        memfd.reserve(fd, 0, self.slab_offset(0))
        backend.ring_format(self.header, num_slabs)
        self._next_holder = PARENT + 1
        self._pinner: Pinner | None = None
        #: Bytes of each slab that are pinned; -1: the system refused.
        self._pinned_nbytes: dict[int, int] = {}
        self._damage = ""
        self._unraised: list[str] = []
        weakref.finalize(self, _print_damage, os.getpid(), self._unraised)
        _rings[self.name] = self

    @property
    def created_here(self) -> bool:
        """Return True if this process created the ring; False in a forked copy."""
        return self._pid == os.getpid()

    def pin(self, pinner: Pinner) -> None:
        """Pin each slab when a batch first arrives in it, until the ring is freed."""
        if self._pinner is None:
            self._pinner = pinner
            addresses = [self.slab_address(slab) for slab in range(self.num_slabs)]
            state = self._pinned_nbytes, addresses, self._memory
            end = weakref.finalize(self, unpin_all, self._pid, pinner, *state)
            end.atexit = False

    def new_holders(self, count: int) -> int:
        """Return the first of ``count`` consecutive numbers that no worker has used."""
        first = self._next_holder
        self._next_holder += count
        return first

    def adopt(
        self, slab: int, holder: int, nbytes: int, gaps: Sequence[Range] = ()
    ) -> torch.Tensor:
        """Take a slab over from the worker that sent it.

        Args:
            slab: index of the slab.
            holder: number of the worker.
            nbytes: number of bytes that the worker wrote.
            gaps: ranges within them that no tensor covers, if these are checked.

        Returns:
            ``torch.uint8`` ``(nbytes,)``. The slab is free when its storage is freed.

        Raises:
            RuntimeError: the worker does not hold the slab, or a write outside of the
                tensors of a slab was found. This is checked with poison enabled.
        """
        owner = self.owner(slab)
        self._hold(owner, slab, holder, nbytes, gaps)
        return self.payload(owner, nbytes)

    def keep(self, slab: Slab) -> None:
        """Take a slab over from a thread of this process. Its tensors stay valid.

        Raises:
            RuntimeError: as `adopt`.
        """
        owner, gaps = slab.close()
        if owner is None:  # no tensor is left
            self.release(slab.index, slab.holder)
            return
        try:
            self._hold(owner, slab.index, slab.holder, slab.used, gaps)
        except BaseException:
            if self.holders()[slab.index] == slab.holder:
                slab.release()
            raise

    def _hold(
        self, owner: Any, slab: int, holder: int, nbytes: int, gaps: Sequence[Range]
    ) -> None:
        """Become the holder of a slab until its owner is freed. See `adopt`."""
        if self._damage:
            self._unraised.clear()
            raise RuntimeError(self._damage)
        # The finalizer comes first, so that any error below frees the slab.
        end = weakref.finalize(owner, self._on_unused, slab, nbytes, gaps)
        end.atexit = False
        if not backend.ring_pass(self.header, slab, holder, PARENT):
            end.detach()
            raise RuntimeError(
                f"slab {slab} of the DataLoader's ring must be held by worker {holder} "
                "when its batch arrives, but is not. Was the loader's process forked?"
            )
        if self._pinner is not None:
            self._pin_slab(slab, self._pinner)
        if self.poison_enabled:
            try:
                self.check_gaps(slab, nbytes, gaps)
            except RuntimeError as error:
                self._damage = str(error)
                end.detach()
                self.release(slab, PARENT)
                raise

    def reclaim(self, holder: int) -> None:
        """Free the slabs of a worker that has ended, normally or not."""
        if self.poison_enabled:  # before another worker can claim them
            for slab, slab_holder in enumerate(self.holders()):
                if slab_holder == holder:
                    self.poison(slab)
        backend.ring_reclaim(self.header, holder)

    def is_pinned(self, slab: int) -> bool:
        """Return True if this slab is pinned, so that copies read it in place."""
        return self._pinned_nbytes.get(slab, 0) > 0

    def holders(self) -> list[int]:
        """Return the holder of every slab."""
        return backend.ring_holders(self.header)

    def _on_unused(self, slab: int, nbytes: int, gaps: Sequence[Range]) -> None:
        """Free a slab after its last tensor; runs in any thread, as a finalizer."""
        if not self.created_here:
            return  # the tensor was of a forked copy
        if self.is_pinned(slab) and self._pinner is not None:
            read = self.owner(slab)  # copies before the fence may read it
            weakref.finalize(read, self._free, slab, nbytes, gaps).atexit = False
            ticket = keep_alive.hold(read)
            del read
            # A failed device raises an error at the next call of the program. It may
            # still read the slab, so the slab is not freed.
            with contextlib.suppress(RuntimeError):
                fence = self._pinner.fence(self.slab_address(slab))
                if fence is None:
                    keep_alive.leak(ticket)
                    return
                keep_alive.release_when(ticket, fence.is_done)
                keep_alive.release_done()
            return
        self._free(slab, nbytes, gaps)

    def _free(self, slab: int, nbytes: int, gaps: Sequence[Range]) -> None:
        try:
            if self.poison_enabled:
                try:
                    self.check_gaps(slab, nbytes, gaps)
                except RuntimeError as error:  # of a finalizer it is only printed
                    self._damage = str(error)
                    self._unraised.append(self._damage)
            self.release(slab, PARENT)
        except BaseException:
            # A signal handler raised, as torch's does for a dead worker. Errors of a
            # finalizer are only printed, and no other code would free the slab.
            if self.holders()[slab] == PARENT:
                self.release(slab, PARENT)  # its edges may be overwritten already
            raise

    def _pin_slab(self, slab: int, pinner: Pinner) -> None:
        nbytes, before = self.committed(slab), self._pinned_nbytes.get(slab, 0)
        if before in (nbytes, -1):
            return
        address = self.slab_address(slab)
        try:
            if before:  # the slab was free, so no copy reads it
                pinner.unpin(address)
            is_pinned = pinner.pin(address, nbytes)
            self._pinned_nbytes[slab] = nbytes if is_pinned else -1
        except BaseException:
            # A signal handler may have raised after the slab was pinned. Pages that are
            # pinned, but not recorded, would be unmapped while the device knows them.
            self._pinned_nbytes[slab] = 0
            unpin_all(self._pid, pinner, {0: nbytes}, [address], self._memory)
            raise


def find(name: str) -> Ring:
    """Return the ring of this name, which this process created.

    Raises:
        RuntimeError: the ring does not exist in this process.
    """
    ring = _rings.get(name)
    if ring is None or not ring.created_here:
        raise RuntimeError(
            "a batch must be received in the process of its DataLoader while the "
            "DataLoader exists, but its ring is not in this process. Keep the "
            "DataLoader, and iterate over it in the process that created it."
        )
    return ring


def _print_damage(pid: int, unraised: list[str]) -> None:
    """Raise an error that no later batch raised: Python prints it, with its text."""
    if unraised and pid == os.getpid():
        raise RuntimeError(unraised[0])


def total_nbytes(num_slabs: int, slab_nbytes: int) -> int:
    """Return the size of a ring in bytes; memory is reserved only when it is used."""
    return _header_nbytes(num_slabs) + num_slabs * _stride(slab_nbytes)


def largest_slab(num_slabs: int, nbytes: int) -> int:
    """Return the largest size of slabs with which a ring takes at most ``nbytes``.

    Slabs consist of whole pages with edges, and a header comes before them. 0 if no
    slab fits.
    """
    pages = (nbytes - _header_nbytes(num_slabs)) // num_slabs // mmap.PAGESIZE
    return max(pages * mmap.PAGESIZE - 2 * _LINE, 0)


def _header_nbytes(num_slabs: int) -> int:
    return _whole_pages(_LINE * (1 + num_slabs))


def _stride(slab_nbytes: int) -> int:
    """Return the distance between slabs in bytes: a slab has two edges."""
    return _whole_pages(slab_nbytes + 2 * _LINE)


def _whole_pages(nbytes: int) -> int:
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE


def _attach(fd: Any, *layout: Any) -> RingMemory:
    """Map the ring of another process, to claim its slabs."""
    return RingMemory(fd.detach(), *layout)
