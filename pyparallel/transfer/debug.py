"""``PYPARALLEL_DEBUG=1``: report races as errors, and overwrite freed memory.

Note: [debug checksums]. Checksums of the leaves are taken when they are sent. The
device computes checksums of the received bytes, after the copies and before any
consumer may change them. A difference means that some byte was changed before it was
copied: by the owner of a leaf that is read in place, or by a write to staging memory.
A second look at the host's memory would not prove that. The owner may change it as soon
as the copy is done, and no code waits for that moment here.

Note: [freed device memory]. A reference to each slab is kept. When all other references
to its storage are gone, the slab is overwritten before its memory goes back to the
allocator. That happens on the stream of a consumer, after all work that is queued there
and on the streams of the other consumers. So no copy waits for it. A consumer that
still reads it reads `POISON`.

Nothing here waits, and nothing raises on its own: finished copies are checked when the
next batch is sent or received.
"""

from __future__ import annotations

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
from ..core.process import at_exit, on_fork
from ..core.torch_private import use_count
from .device import TorchProbe, row_sums
from .engine import CopyEvent, DeviceEvent
from .layout import TransferLayout

#: The value of every byte of freed memory.
POISON = 0xDB
#: Most blocks of device memory that are watched at a time: they stay allocated.
MOST_WATCHED = 64
#: The most seconds that the exit of the interpreter waits for unchecked copies.
EXIT_SECONDS = 1.0

_ROW = 4096  # bytes with one checksum in a leaf that is read in place


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
    """Bytes that are copied together.

    Attributes:
        source: the bytes on the host, or a copy of them.
        target: the bytes on the device.
        row: bytes with one checksum.
        starts: where leaves begin, ascending.
        leaves: the index of the leaf at each start.
        in_place: the device reads the memory of the leaf itself.
    """

    source: torch.Tensor
    target: torch.Tensor
    row: int
    starts: Sequence[int]
    leaves: Sequence[int]
    in_place: bool


def _parts(
    leaves: Sequence[torch.Tensor],
    layout: TransferLayout,
    slab: torch.Tensor,
    direct: dict[int, torch.Tensor],
) -> Iterator[_Part]:
    for i, target in direct.items():
        source = leaves[i].detach().view(-1).view(torch.uint8)
        yield _Part(source, target, _ROW, (0,), (i,), True)
    if layout.span is not None and layout.order is not None:
        # One by one: the bytes between the leaves may change.
        for i, first in zip(layout.order, layout.plan.offsets, strict=True):
            last = first + leaves[i].nbytes
            ends = layout.span[first:last], slab[first:last]
            yield _Part(*ends, _ROW, (0,), (i,), True)
    elif layout.plan.nbytes:
        packed = torch.empty(layout.plan.nbytes, dtype=torch.uint8, device="cpu")
        backend.pack(packed, layout.packed, layout.plan)
        indices = [i for i in range(len(leaves)) if i not in direct]
        # One checksum a slot: no two leaves share it.
        row, starts = backend.ALIGNMENT, layout.plan.offsets
        yield _Part(packed, slab, row, starts, indices, False)


class Watch:
    """The checks of one copy: checksums of its bytes, poison for its freed memory.

    Args:
        leaves: the sources.
        layout: their division into slab and direct copies.
        blocks: memory of the device: the slab, and that of the direct copies.
        route: the interface of the device, the device, and the stream of the copies, to
            which the memory belongs.
        copied: its copies are done.
        is_static: the memory is fixed, and is not freed with its tensors.

    Attributes:
        event: its copies and the checksums of the received bytes are done.
    """

    def __init__(
        self,
        leaves: Sequence[torch.Tensor],
        layout: TransferLayout,
        blocks: tuple[torch.Tensor, dict[int, torch.Tensor]],
        route: tuple[Any, torch.device, Any],
        copied: CopyEvent,
        is_static: bool = False,
    ) -> None:
        self.event: CopyEvent | DeviceEvent = copied
        self._api, device, copies = route
        self._copies = copies
        self._streams: list[Any] = []
        probe: TorchProbe | None = getattr(self._api, "probe", None)
        if probe is None:  # this device has no checksums
            return
        parts = list(_parts(leaves, layout, *blocks))
        sent = [row_sums(part.source, part.row) for part in parts]
        found = [probe.sums(part.target, part.row, copies) for part in parts]
        self.event = DeviceEvent(self._api, self._api.record(copies))
        formats = [f"{leaf.dtype}, shape {tuple(leaf.shape)}" for leaf in leaves]
        places = [part._replace(source=_NOTHING, target=_NOTHING) for part in parts]
        check = _Check(places, sent, found, formats, device)
        _unchecked.append((self.event.is_done, check))
        slab, direct = blocks
        for block in () if is_static else (slab, *direct.values()):
            if block.numel():
                _watched.append(_Block(block, self, probe))

    def add_stream(self, stream: Any) -> None:
        """Record a stream whose work may use the memory from now on."""
        if stream not in self._streams:
            self._streams.append(stream)

    def is_captured(self) -> bool:
        """Return True if a graph is captured on the stream of a consumer."""
        return any(map(self._api.is_capturing, self._streams))

    def overwrite(self, block: torch.Tensor, probe: TorchProbe) -> None:
        """Queue the poison for memory of this copy that has no other reference."""
        *others, last = self._streams or [self._copies]
        for stream in others:
            self._api.wait(last, self._api.record(stream))
        probe.fill(block, POISON, last)


_NOTHING = torch.empty(0, dtype=torch.uint8, device="cpu")


class _Check(NamedTuple):
    """The checksums of one copy, and the leaves that they belong to.

    Attributes:
        parts: the copied bytes, without their memory.
        sent: checksums of the sources, for each part.
        found: checksums of the received bytes, for each part.
        formats: dtype and shape of every leaf.
        device: the target of the copy.
    """

    parts: list[_Part]
    sent: list[torch.Tensor]
    found: list[torch.Tensor]
    formats: list[str]
    device: torch.device

    def error(self) -> RuntimeError | None:
        """Return an error for the first leaf that differs on the device, or None."""
        for part, sent, found in zip(self.parts, self.sent, self.found, strict=True):
            wrong = (sent != found).nonzero()
            if len(wrong):
                return self._describe(part, int(wrong[0]) * part.row)
        return None

    def _describe(self, part: _Part, byte: int) -> RuntimeError:
        place = bisect.bisect_right(part.starts, byte) - 1
        i, first = part.leaves[place], byte - part.starts[place]
        name = f"leaf {i} of {len(self.formats)} ({self.formats[i]})"
        if part.in_place:
            advice = (
                "It is pinned, so the device reads it in place: synchronize with the "
                "device before you write to it, or send a clone."
            )
        else:
            name = f"the staging memory of {name}"
            advice = (
                "Only pyparallel may write to this memory: look for code that writes "
                "out of bounds."
            )
        return RuntimeError(
            f"{name} must not change before its copy to {self.device} is done, but its "
            f"bytes from {first} on differ on the device. {advice}"
        )


class _Block:
    """Device memory that is overwritten when all other references to it are gone."""

    def __init__(self, block: torch.Tensor, watch: Watch, probe: TorchProbe) -> None:
        # A new tensor: the caller's own object would hide the caller's reference.
        self._alias, self._watch, self._probe = block.detach(), watch, probe
        self._storage = block.untyped_storage()

    def is_dropped(self) -> bool:
        is_last = _references(self._storage) == _no_other_references()
        return is_last and not self._watch.is_captured()

    def overwrite(self) -> None:
        self._watch.overwrite(self._alias, self._probe)


def _references(storage: Any) -> tuple[int, int]:
    """Return the number of tensors on a storage, and of Python references to it."""
    return use_count(storage), sys.getrefcount(storage)


@functools.cache
def _no_other_references() -> tuple[int, int]:
    """Return the `_references` of a storage whose only user is a `_Block`.

    Versions of torch differ in the other references that they count.
    """

    class Held:
        tensor = torch.empty(1, device="cpu")
        storage = tensor.untyped_storage()

    return _references(Held.storage)


# Changed by single operations, without a lock: a destructor may send a batch itself.
_unchecked: deque[tuple[Callable[[], bool], _Check]] = deque()
_watched: deque[_Block] = deque()
reset()


def check() -> None:
    """Overwrite device memory without references, and check the finished copies.

    Raises:
        RuntimeError: received bytes differ from the sources. Once for every copy.
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
    """Remove and yield the items of this moment; another thread may take some."""
    for _ in range(len(items)):
        try:
            item = items.popleft()
        except IndexError:
            return
        yield item
        del item  # the last reference is the caller's


@at_exit
def _check_at_exit() -> None:
    deadline = time.monotonic() + EXIT_SECONDS
    while _unchecked and time.monotonic() < deadline:
        check()
        time.sleep(1e-3)


def _begin_in_child() -> None:
    """Leave the copies of the parent unchecked: a child cannot query their events."""
    for items in (_unchecked, _watched):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(tuple(items)))
        items.clear()


on_fork(_begin_in_child)
