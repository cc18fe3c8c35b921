"""``PYPARALLEL_DEBUG=1``: races become errors, or values that nobody takes for data.

Note: [what a flight is checked for]. Checksums of the leaves are taken when they are
sent, and of what has arrived by the device, behind the copies and before anybody else
may touch it. That they differ means that some byte was changed before it was copied: by
the owner of a leaf that is read in place, or by whoever writes to staging memory. It
does not mean anything else, which a second look at the host's memory would: its owner
may change it as soon as the copy is done, and nobody waits for that moment here.

Note: [freed device memory]. A slab is watched by a reference of its own. When all other
references to its storage are gone it is overwritten before its memory goes back to the
allocator, on the stream that it belongs to, behind all that is queued on the streams
where it landed. Who still reads it, reads `POISON`.

Nothing here waits or raises by itself: what is done is looked at when the next batch is
sent or lands.
"""

from __future__ import annotations

import atexit
import bisect
import ctypes
import functools
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from .. import backend
from ..core.torch_private import use_count
from ._checksums import Probe, row_sums
from .engine import Arrival, Event
from .layout import Cargo

#: What freed memory reads as, in every byte.
POISON = 0xDB
#: Most blocks of device memory that are watched at a time: they are held meanwhile.
MOST_WATCHED = 64
#: How long the end of the interpreter waits for what has not been checked, in seconds.
EXIT_SECONDS = 1.0

_SLOT = 64  # bytes of a slab that belong to one leaf
_ROW = 4096  # bytes of a large leaf that have one checksum


#: Every check is on. Read once: batches may be on their way when it changes.
enabled: bool
#: Freed host memory is overwritten: the part that ``PYPARALLEL_DEBUG=poison`` asks for.
poison_enabled: bool


def reset() -> None:
    """Read ``PYPARALLEL_DEBUG`` again, and forget the memory and copies under check."""
    global enabled, poison_enabled
    value = os.environ.get("PYPARALLEL_DEBUG", "")
    poison_enabled = value not in ("", "0")
    enabled = poison_enabled and value != "poison"
    _unchecked.clear()
    _watched.clear()


class _Part(NamedTuple):
    """Bytes that travel together.

    Attributes:
        source: them on the host, or others that are equal.
        target: them on the device.
        row: how many have a checksum.
        starts: where leaves begin, ascending.
        leaves: whose each start is.
        is_lent: the device reads the leaf in place.
    """

    source: torch.Tensor
    target: torch.Tensor
    row: int
    starts: Sequence[int]
    leaves: Sequence[int]
    is_lent: bool


def _parts(
    leaves: Sequence[torch.Tensor],
    cargo: Cargo,
    slab: torch.Tensor,
    direct: dict[int, torch.Tensor],
) -> Iterator[_Part]:
    for i, target in direct.items():
        source = leaves[i].detach().view(-1).view(torch.uint8)
        yield _Part(source, target, _ROW, (0,), (i,), True)
    if cargo.span is not None and cargo.order is not None:
        # One by one: what lies between them may change.
        for i, first in zip(cargo.order, cargo.plan.offsets, strict=True):
            last = first + leaves[i].nbytes
            ends = cargo.span[first:last], slab[first:last]
            yield _Part(*ends, _ROW, (0,), (i,), True)
    elif cargo.plan.nbytes:
        packed = torch.empty(cargo.plan.nbytes, dtype=torch.uint8, device="cpu")
        backend.pack(packed, cargo.packed, cargo.plan)
        numbers = [i for i in range(len(leaves)) if i not in direct]
        yield _Part(packed, slab, _SLOT, cargo.plan.offsets, numbers, False)


class Watch:
    """One flight, watched.

    Args:
        leaves: that were sent.
        cargo: how.
        blocks: memory of the device: the slab, and that of leaves that travel alone.
        way: interface of the device, its name, the stream of the copies, the one that
            the memory belongs to.
        copied: its copies are done.

    Attributes:
        arrival: its copies and the checksums of what arrived are done.
    """

    def __init__(
        self,
        leaves: Sequence[torch.Tensor],
        cargo: Cargo,
        blocks: tuple[torch.Tensor, dict[int, torch.Tensor]],
        way: tuple[Any, torch.device, Any, Any],
        copied: Arrival,
    ) -> None:
        self.arrival = copied
        self._api, device, copies, self._home = way
        self._landed_on: list[Any] = []
        probe: Probe | None = getattr(self._api, "probe", None)
        if probe is None:  # of a device that cannot be looked at
            return
        parts = list(_parts(leaves, cargo, *blocks))
        try:
            sent = [row_sums(part.source, part.row) for part in parts]
            found = [probe.sums(part.target, part.row, copies) for part in parts]
        except BaseException:  # the flight is lost, and its memory is about to be freed
            self._api.wait(self._home, self._api.record(copies))
            raise
        self.arrival = Event(self._api, self._api.record(copies))
        forms = [f"{leaf.dtype}, shape {tuple(leaf.shape)}" for leaf in leaves]
        whose = [part._replace(source=_NOTHING, target=_NOTHING) for part in parts]
        check = _Check(whose, sent, found, forms, device)
        _unchecked.append((self.arrival.is_done, check))
        slab, direct = blocks
        for block in (slab, *direct.values()):
            if block.numel():
                _watched.append(_Block(block, self, probe))

    def land_on(self, stream: Any) -> None:
        """Note a stream that may use the memory from now on."""
        if stream != self._home and stream not in self._landed_on:
            self._landed_on.append(stream)

    def overwrite(self, block: torch.Tensor, probe: Probe) -> None:
        """Queue poison for memory of this flight that nobody refers to any more.

        Its home has waited for its copies: by itself where the flight was lost or
        landed there, or else with the streams of the landings.
        """
        for stream in self._landed_on:
            self._api.wait(self._home, self._api.record(stream))
        probe.fill(block, POISON, self._home)


_NOTHING = torch.empty(0, dtype=torch.uint8, device="cpu")


class _Check(NamedTuple):
    """What was sent and what arrived: checksums, and whose they are."""

    parts: list[_Part]
    sent: list[torch.Tensor]
    found: list[torch.Tensor]
    forms: list[str]
    device: torch.device

    def error(self) -> RuntimeError | None:
        """Return an error that names the first leaf that arrived other than sent."""
        for part, sent, found in zip(self.parts, self.sent, self.found, strict=True):
            wrong = (sent != found).nonzero()
            if len(wrong):
                return self._describe(part, int(wrong[0]) * part.row)
        return None

    def _describe(self, part: _Part, byte: int) -> RuntimeError:
        place = bisect.bisect_right(part.starts, byte) - 1
        i, first = part.leaves[place], byte - part.starts[place]
        what = f"leaf {i} of {len(self.forms)} ({self.forms[i]})"
        if not part.is_lent:
            what = f"the staging memory of {what}"
            advice = (
                "Nobody but pyparallel has this memory: look for what writes beyond "
                "the edges of its own."
            )
        else:
            advice = (
                "It is page-locked, so the device reads it in place: synchronize with "
                "the device before you write to it, or send a clone."
            )
        return RuntimeError(
            f"{what} must not change before its copy to {self.device} is done, but its "
            f"bytes from {first} on arrived other than they were sent. {advice}"
        )


class _Block:
    """Device memory that is overwritten when all other references to it are gone."""

    def __init__(self, block: torch.Tensor, watch: Watch, probe: Probe) -> None:
        # Its own object: one that is shared would count once.
        self._alias, self._watch, self._probe = block.detach(), watch, probe
        self._storage = block.untyped_storage()

    def is_dropped(self) -> bool:
        return _references(self._storage) == _alone()

    def overwrite(self) -> None:
        self._watch.overwrite(self._alias, self._probe)


def _references(storage: Any) -> tuple[int, int]:
    """Return how many tensors there are on a storage, and how many names it has."""
    return use_count(storage), sys.getrefcount(storage)


@functools.cache
def _alone() -> tuple[int, int]:
    """Return `_references` of a storage with one tensor that is held as by `_Block`.

    What torch counts beside tensors differs between its versions.
    """

    class Held:
        tensor = torch.empty(1, device="cpu")
        storage = tensor.untyped_storage()

    return _references(Held.storage)


# Changed by single operations, without a lock: a destructor may send something itself.
_unchecked: deque[tuple[Callable[[], bool], _Check]] = deque()
_watched: deque[_Block] = deque()
reset()


def check() -> None:
    """Overwrite what nobody refers to any more, and look at what has arrived.

    Raises:
        RuntimeError: something else than was sent. Once for every flight.
    """
    for block in _each(_watched):
        if block.is_dropped():
            block.overwrite()
        else:
            _watched.append(block)
    while len(_watched) > MOST_WATCHED:
        _watched.popleft()
    for is_done, found in _each(_unchecked):
        if not is_done():
            _unchecked.append((is_done, found))
        elif error := found.error():
            raise error


def _each(items: deque[Any]) -> Iterator[Any]:
    """Take as many items out as there are now; another thread may be faster."""
    for _ in range(len(items)):
        try:
            item = items.popleft()
        except IndexError:
            return
        yield item
        del item  # the last reference is the caller's


@atexit.register
def _check_the_rest() -> None:
    deadline = time.monotonic() + EXIT_SECONDS
    while _unchecked and time.monotonic() < deadline:
        check()
        time.sleep(1e-3)


def _begin_in_child() -> None:
    """Leave to the parent what the parent sent: no event can be asked here."""
    for items in (_unchecked, _watched):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(tuple(items)))
        items.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_in_child)
