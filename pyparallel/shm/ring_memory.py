"""The memory of a ring, as every process that has it mapped sees it.

A header with a line for every slab, then the slabs, all of one size. A slab takes
memory when somebody first writes so far into it, and keeps it.

With ``PYPARALLEL_DEBUG=1`` or ``=poison``, free slabs are overwritten. Writes to a free
slab and writes beyond the edges of a batch are then errors.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import weakref
from collections.abc import Sequence
from typing import Any

import torch

from .. import backend
from ..transfer import debug
from . import memfd

#: What the header says of a slab that is free, and of one that the parent holds.
FREE, PARENT = 0, 1

_LINE = 64  # bytes of the header for each slab, and of either edge of a slab
_GROW = 1 << 21  # slabs grow by multiples of this many bytes
_POISON = 0xDB
_EDGE = 0xC5


class RingMemory:
    """Slabs of one size in one shared memory, claimed by atomics in its header.

    Args:
        fd: descriptor of the memory; it is closed with this object.
        name: unique among all rings of the machine.
        num_slabs: how many there are.
        slab_nbytes: the most bytes that one batch may take, a multiple of 64.
    """

    def __init__(self, fd: int, name: str, num_slabs: int, slab_nbytes: int) -> None:
        self.fd, self.name = fd, name
        self.num_slabs, self.slab_nbytes = num_slabs, slab_nbytes
        weakref.finalize(self, os.close, fd).atexit = False
        self._memory = mmap.mmap(fd, total_nbytes(num_slabs, slab_nbytes))
        self._whole = torch.frombuffer(self._memory, dtype=torch.uint8)
        self.header = self._whole[: _LINE * (1 + num_slabs)]
        lines = memoryview(self._memory)[: self.header.numel()]
        self._committed = lines.cast("q")[9::8]  # the second word of every slab's line
        self._stride = _stride(slab_nbytes)
        # One type for all slabs: ctypes keeps every type that it makes.
        self._slab_type: Any = ctypes.c_uint8 * self._stride
        self.poison_enabled = debug.poison_enabled

    def __reduce__(self) -> Any:
        # Only while a worker is started: the descriptor travels with its arguments.
        sent = memfd.sendable(self.fd)
        return _attach, (sent, self.name, self.num_slabs, self.slab_nbytes)

    def claim(self, holder: int) -> Slab | None:
        """Return a free slab for a worker to write into; None if there is none.

        Raises:
            RuntimeError: (with poison) it was written to while it was free.
        """
        slab = backend.ring_claim(self.header, holder, self.fd)
        if slab < 0:
            return None
        if self.poison_enabled and not self._is_all(
            slab, 0, self._committed[slab], _POISON
        ):
            raise RuntimeError(
                f"slab {slab} of the DataLoader's ring must not change while it is "
                "free, but somebody wrote to it. Look for memory of a batch that is "
                "used after its last tensor died."
            )
        return Slab(self, slab, holder)

    def release(self, slab: int, holder: int) -> None:
        """Free a slab."""
        if self.poison_enabled:
            self.poison(slab)
        backend.ring_pass(self.header, slab, holder, FREE)

    def commit(self, slab: int, nbytes: int) -> bool:
        """Take memory for ``nbytes`` in a slab; False if the system has none left."""
        have, need = self._committed[slab], nbytes + 2 * _LINE
        if need <= have:
            return True
        # Batches differ in size: a little more than asked for saves growing again.
        size = min(-(-(need + need // 8) // _GROW) * _GROW, self._stride)
        try:
            memfd.reserve(self.fd, self.start(slab), size)
        except OSError:
            return False
        if self.poison_enabled:
            self._fill(slab, have, size, _POISON)
        self._committed[slab] = size
        return True

    def committed(self, slab: int) -> int:
        """Return how much memory a slab has taken, its edges included."""
        return self._committed[slab]

    def owner(self, slab: int) -> Any:
        """Return a new owner of a slab's memory, which dies with its last user."""
        return self._slab_type.from_buffer(self._memory, self.start(slab))

    def payload(self, owner: Any, nbytes: int = -1) -> torch.Tensor:
        """Return what may be written of a slab as ``torch.uint8`` ``(nbytes,)``."""
        count = self.slab_nbytes if nbytes < 0 else nbytes
        return torch.frombuffer(owner, dtype=torch.uint8, count=count, offset=_LINE)

    def start(self, slab: int) -> int:
        """Return where in the memory a slab begins."""
        return _slabs_at(self.num_slabs) + slab * self._stride

    def address(self, slab: int) -> int:
        """Return where in this process a slab begins."""
        return self._whole.data_ptr() + self.start(slab)

    def bytes(self, slab: int, first: int, last: int) -> torch.Tensor:
        """Return some bytes of a slab, its edges included."""
        return self._whole[self.start(slab) + first : self.start(slab) + last]

    def poison(self, slab: int) -> None:
        """Overwrite all that a slab has taken."""
        self._fill(slab, 0, self._committed[slab], _POISON)

    # Not by torch: in a forked process its threads may be waited for in vain.

    def _fill(self, slab: int, first: int, last: int, value: int) -> None:
        ctypes.memset(self.address(slab) + first, value, last - first)

    def _is_all(self, slab: int, first: int, last: int, value: int) -> bool:
        if first == last:
            return True
        start, rest = self.address(slab) + first, last - first - 1
        memcmp: Any = ctypes.CDLL(None).memcmp
        memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
        begins = ctypes.c_uint8.from_address(start).value == value
        return begins and memcmp(start, start + 1, rest) == 0

    def mark_edges(self, slab: int, nbytes: int) -> None:
        """Write the edges that `check_edges` looks for."""
        self._fill(slab, 0, _LINE, _EDGE)
        self._fill(slab, _LINE + nbytes, 2 * _LINE + nbytes, _EDGE)

    def check_edges(self, slab: int, nbytes: int) -> None:
        """Raise if somebody wrote right before or behind the bytes of a batch."""
        for where, first in (("before", 0), ("behind", _LINE + nbytes)):
            if not self._is_all(slab, first, first + _LINE, _EDGE):
                raise RuntimeError(
                    f"slab {slab} of the DataLoader's ring must be written within its "
                    f"{nbytes} bytes, but somebody wrote {where} them."
                )


class Slab:
    """A slab that this worker holds and fills from its start on."""

    def __init__(self, ring: RingMemory, index: int, holder: int) -> None:
        self.ring_name, self.index, self.holder = ring.name, index, holder
        self.capacity = ring.slab_nbytes
        self.used = 0
        #: How many bytes somebody wanted in the slab when he last took some.
        self.asked = 0
        #: First and last bytes of what no tensor of the batch covers.
        self.gaps: list[tuple[int, int]] = []
        self._ring = ring
        owner = ring.owner(index)
        self._owner = weakref.ref(owner)
        self._memory: torch.Tensor | None = ring.payload(owner)
        self._address = ring.address(index) + _LINE

    @property
    def next_start(self) -> int:
        """Where the next bytes begin: a multiple of 64."""
        return -(-self.used // _LINE) * _LINE

    def take(self, nbytes: int) -> torch.Tensor | None:
        """Return the next bytes; None if they do not fit, or there is no memory."""
        start = self.next_start
        self.asked = start + nbytes
        if self._memory is None or self.asked > self.capacity:
            return None
        if not self._ring.commit(self.index, self.asked):
            return None
        self.used = self.asked
        return self._memory[start : self.used]

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor | None:
        """Return a tensor on the next bytes; None as for `take`, or if it is empty."""
        numel = math.prod(shape)
        memory = self.take(numel * dtype.itemsize)
        if memory is None or numel == 0:
            return None
        start = _LINE + self.used - memory.numel()
        # A storage of its own, so that no tensor can grow into its neighbour.
        made = torch.frombuffer(self._owner(), dtype=dtype, count=numel, offset=start)
        return made.view(tuple(shape))

    def offset(self, tensor: torch.Tensor) -> int | None:
        """Return at which byte of this slab a tensor starts; None: not in it."""
        offset = tensor.data_ptr() - self._address
        return offset if 0 <= offset < self.used else None

    def written(self, nbytes: int) -> torch.Tensor:
        """Return the first bytes, not counted as use."""
        return self._ring.bytes(self.index, _LINE, _LINE + nbytes)

    def let_go(self) -> bool:
        """Forget the memory; False if a tensor on it is still alive in this process."""
        self._memory = None
        if self._ring.poison_enabled:
            self._ring.mark_edges(self.index, self.used)
        if self._owner() is not None:  # of a tensor that may lie in a gap
            return False
        self.clear_gaps(self.written(self.used))
        return True

    def clear_gaps(self, memory: torch.Tensor) -> None:
        """Write zeros into the gaps of the slab's bytes, or of a copy of them."""
        for first, last in self.gaps:
            if first < last:
                memory[first:last].zero_()

    def release(self) -> None:
        """Free the slab as soon as no tensor on it is alive in this process."""
        self._memory = None
        owner = self._owner()
        if owner is None:
            self._ring.release(self.index, self.holder)
            return
        end = weakref.finalize(owner, self._ring.release, self.index, self.holder)
        end.atexit = False


def total_nbytes(num_slabs: int, slab_nbytes: int) -> int:
    """Return the size of a ring's memory, nearly all of which is never taken."""
    return _slabs_at(num_slabs) + num_slabs * _stride(slab_nbytes)


def largest_slab(num_slabs: int, nbytes: int) -> int:
    """Return the bytes of the largest slabs with which a ring takes ``nbytes`` at most.

    0 if there are none: slabs have whole pages, edges, and a header before them.
    """
    pages = (nbytes - _slabs_at(num_slabs)) // num_slabs // mmap.PAGESIZE
    return max(pages * mmap.PAGESIZE - 2 * _LINE, 0)


def _slabs_at(num_slabs: int) -> int:
    return _whole_pages(_LINE * (1 + num_slabs))


def _stride(slab_nbytes: int) -> int:
    """Return the bytes from slab to slab: each has an edge on either side."""
    return _whole_pages(slab_nbytes + 2 * _LINE)


def _whole_pages(nbytes: int) -> int:
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE


def _attach(fd: Any, name: str, num_slabs: int, slab_nbytes: int) -> RingMemory:
    """Return the ring of another process, to claim slabs of it."""
    return RingMemory(fd.detach(), name, num_slabs, slab_nbytes)
