"""Slabs and flights: one buffer on the host, one copy to a device, views on arrival."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from operator import attrgetter
from typing import Any

import torch

from .. import backend
from ..backend.plain import PLAIN, is_plain
from ..core.errors import LoaderWarning, has_warned, warn_once
from ..core.text import nbytes_text
from ..core.tracing import span
from . import debug, engine, layout
from .device import DeviceApi, TorchDevice, torch_device
from .engine import keeper as _keeper

__all__ = ["DeviceApi", "TorchDevice", "torch_device"]  # for those above

_is_cpu = attrgetter("is_cpu")
_requires_grad = attrgetter("requires_grad")


#: The fewest batches and bytes in pageable memory before a warning.
_PAGEABLE_BATCHES, _PAGEABLE_NBYTES = 50, 1_000_000_000


class _Pageable:
    """The batches that were sent from pageable memory."""

    batches = nbytes = 0


_pageable = _Pageable()


class Flight:
    """Tensors on their way to a device, or landed there.

    Note: [slab lifetime]. Device memory is allocated on one stream, the flight's home.
    An event is recorded there *after* the allocation, and the copy stream waits for it
    before it writes: whoever used this memory before, in any thread, had queued that
    use by then. Landing makes the stream that is current *then* wait for the copy.
    Memory is freed to its home: if it lands elsewhere, the allocator is told of that
    stream too; if it never lands, home waits for the copy. A wait would end a graph
    capture of home, so then the memory is held until the copy is done. The slab on the
    host that leaves are packed into is the engine's (Note [staging lifetime] in
    ``csrc``), or torch's, whose allocator saw the copy: neither is used again before
    the copy is done. What is not packed may be anybody's, and lives until the copy has
    read it: see Note [lent memory] in ``_keep_alive.py``. A copy may be queued on home
    itself (Note [copies on the home stream] in ``csrc``): then there are no waits.
    """

    def __init__(
        self,
        leaves: Sequence[torch.Tensor],
        device: torch.device,
        api: DeviceApi,
        home: Any = None,
        stream: Any = None,
    ) -> None:
        if debug.enabled:
            debug.check()
        self._device, self._api = device, api
        cargo = layout.load(leaves, api.is_pinned)
        self._plan, self._order = cargo.plan, cargo.order
        if cargo.pageable_nbytes:
            warn_about_pageable_memory(cargo.pageable_nbytes, device)
        with nullcontext() if home is None else api.using(home):
            self._slab = api.empty(cargo.plan.nbytes, device)
            self._direct = {
                i: api.empty(leaves[i].nbytes, device) for i in cargo.direct
            }
            self._home = api.current_stream(device)
        self._forms = {i: (leaves[i].dtype, leaves[i].shape) for i in cargo.direct}
        direct = [(self._direct[i], _bytes(leaves[i])) for i in cargo.direct]
        if cargo.span is not None:
            direct.append((self._slab[: cargo.span.numel()], cargo.span))
        copies = api.copy_stream(device) if stream is None else stream
        streams = (copies, self._home)
        # The checksums of debug mode are queued on the copy stream.
        at_once = home is None and stream is None and not debug.enabled
        self._arrival = engine.start(cargo, self._slab, direct, streams, api, at_once)
        self._watch: debug.Watch | None = None
        if debug.enabled:
            way = (api, device, copies, self._home)
            memory = (self._slab, self._direct)
            self._watch = debug.Watch(leaves, cargo, memory, way, self._arrival)
            self._arrival = self._watch.arrival
        blocks = (self._slab, *self._direct.values())
        self._lost = weakref.finalize(
            self, _give_up, self._arrival, self._home, api, blocks
        )
        self._lost.atexit = False
        _keeper.release_done()

    def land(self) -> list[torch.Tensor]:
        """Return the tensors; the current stream waits for the copy, the host does not.

        Tensors that were packed share one slab: it lives as long as any of them.
        """
        api = self._api
        stream = api.current_stream(self._device)
        if self._watch is not None:
            debug.check()
            self._watch.land_on(stream)
        self._arrival.wait(stream)
        self._lost.detach()
        if stream != self._home:
            for block in (self._slab, *self._direct.values()):
                api.keep(block, stream)
        _keeper.release_done()
        landed = backend.views(self._slab, self._plan)
        if self._order is not None:
            places = dict(zip(self._order, landed, strict=True))
            landed = [places[i] for i in range(len(landed))]
        for i, (dtype, shape) in self._forms.items():  # ascending: each finds its place
            landed.insert(i, self._direct[i].view(dtype).view(shape))
        return landed


def send(
    leaves: Sequence[torch.Tensor],
    device: torch.device,
    api: DeviceApi = torch_device,
    home: Any = None,
    stream: Any = None,
) -> Flight:
    """Start one packed copy of dense CPU tensors to ``device``.

    Leaves that fill one page-locked span (`layout`) are copied as they lie there, and
    so is each page-locked leaf of 1 MiB and more. The device reads these in place: they
    may be dropped when this returns, but not changed before the copy is done. All
    others may be changed too.

    Raises:
        RuntimeError: a stream is under graph capture. Nothing was queued.

    Stream: device memory is allocated on ``home``, by default the current stream. The
    copy is queued on ``stream``, by default the one copy stream of the device. The
    rest: see `Flight`.
    """
    with span("pyparallel.send"):
        return Flight(leaves, device, api, home, stream)


def depart(
    tensors: list[torch.Tensor],
    target: torch.device | None,
    dtype: torch.dtype | None = None,
    stream: Any = None,
) -> Callable[[], list[torch.Tensor]]:
    """Start to copy tensors to a target; return the function that gives the copies.

    Tensors for several targets are on their way to all of them before the first
    arrives. The returned function need not be called.

    Args:
        tensors: of any kind, on any device.
        target: None is the host, where only tensors that are not contiguous are copied.
        dtype: of floating-point tensors, or None.
        stream: of the copy, if it is on the target; else the target's own.
    """
    if dtype is not None:
        tensors = [_cast(tensor, dtype) for tensor in tensors]
    if target is None:
        return lambda: list(map(contiguous, tensors))
    if target.type == "cpu":
        return lambda: [contiguous(tensor).to(target) for tensor in tensors]
    if not has_streams(target):
        return lambda: [tensor.to(target) for tensor in tensors]
    on_target = stream is not None and stream.device == target
    return Departure(tensors, target, stream=stream if on_target else None).land


def has_streams(device: torch.device) -> bool:
    """Tell whether copies to ``device`` can be queued; MPS has one queue for all."""
    return hasattr(torch.get_device_module(device), "Stream")


class Departure:
    """Tensors of any kind that leave for a device with streams.

    Those whose bytes are all that has to get there are packed and on their way at
    once. The others follow by torch's own operators when this lands.

    Stream: that of `send`; the others are copied on the landing's stream.
    """

    def __init__(
        self,
        tensors: list[torch.Tensor],
        device: torch.device,
        api: DeviceApi = torch_device,
        home: Any = None,
        stream: Any = None,
    ) -> None:
        self._device, self._api = device, api
        self._flight: Flight | None = None
        packed: Sequence[int] = range(len(tensors))
        if tensors and _look_plain(tensors):
            try:
                self._flight = send(tensors, device, api, home, stream)
            except TypeError:  # and nothing was sent; one of them is conjugated, or so
                pass
        if self._flight is None:
            packed = [i for i, tensor in enumerate(tensors) if packs(tensor)]
            if packed:
                chosen = [tensors[i] for i in packed]
                self._flight = send(chosen, device, api, home, stream)
        places = frozenset(packed)
        # What is packed is not held: memory of the host is free for the next batch.
        self._others = {
            i: tensor for i, tensor in enumerate(tensors) if i not in places
        }

    def land(self) -> list[torch.Tensor]:
        """Return the tensors on the device; the host does not wait for the copy."""
        landed = self._flight.land() if self._flight else []
        for i, tensor in self._others.items():  # ascending: each finds its place
            landed.insert(i, tensor.to(self._device, non_blocking=True))
        lent = [tensor for tensor in self._others.values() if self._is_lent(tensor)]
        if lent:
            hold_while_read(lent, self._device, self._api)
        self._others = {}
        return landed

    def _is_lent(self, tensor: torch.Tensor) -> bool:
        strided = tensor.is_cpu and tensor.layout is torch.strided
        return strided and self._api.is_pinned(tensor)


def contiguous(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor contiguous; sparse tensors as they are."""
    try:
        return tensor.contiguous()
    except RuntimeError:  # sparse tensors have no such thing
        if tensor.layout is torch.strided:
            raise
        return tensor


def _cast(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def _look_plain(tensors: list[torch.Tensor]) -> bool:
    """Tell whether all may be packed, as far as a quick look can tell."""
    return (
        PLAIN.issuperset(map(type, tensors))
        and all(map(_is_cpu, tensors))
        and not (torch.is_grad_enabled() and any(map(_requires_grad, tensors)))
    )


def packs(tensor: torch.Tensor) -> bool:
    """Tell whether only the bytes of this CPU tensor have to reach its consumer."""
    return (
        tensor.device.type == "cpu"
        and is_plain(tensor)
        and not (tensor.requires_grad and torch.is_grad_enabled())
    )


def hold_while_read(
    tensors: Sequence[torch.Tensor], device: torch.device, api: DeviceApi = torch_device
) -> None:
    """Keep tensors until ``device`` has done all that is queued on its current stream.

    For copies that were queued by other means: see Note [lent memory].
    """
    fence = api.fence(device)
    _keeper.release_when(_keeper.hold(list(tensors)), fence.is_done)


#: Give up what has been read; every later flight does it too.
release_done = _keeper.release_done


def drain(seconds: float) -> bool:
    """Wait, at most so long, until the devices read nothing in place any more."""
    is_drained = _keeper.drain(seconds)
    if debug.enabled:
        debug.check()
    return is_drained


def _give_up(
    arrival: engine.Arrival,
    home: Any,
    api: DeviceApi,
    blocks: Sequence[torch.Tensor],
) -> None:
    """Let memory of a flight that never lands be reused after its copies only."""
    if api.is_capturing(home):
        _keeper.release_when(_keeper.hold(blocks), arrival.is_done)
    else:
        arrival.wait(home)


def _bytes(leaf: torch.Tensor) -> torch.Tensor:
    return leaf.view(-1).view(torch.uint8)


def warn_about_pageable_memory(nbytes: int, device: torch.device) -> None:
    """Warn if batches are sent to a device from memory that is not pinned.

    Args:
        nbytes: of the tensors of one batch that would have been read in place.
        device: where they went.
    """
    if has_warned("PP212"):
        return
    # Threads may lose one another's counts, which makes the warning come later.
    _pageable.batches += 1
    _pageable.nbytes += nbytes
    batches, total = _pageable.batches, _pageable.nbytes
    if batches < _PAGEABLE_BATCHES or total < _PAGEABLE_NBYTES:
        return
    warn_once(
        "PP212",
        f"scatter: large tensors for {device} should lie in page-locked memory, but "
        f"{nbytes_text(total)} of {batches} batches did not, and were copied once more "
        "on the host. Give pyparallel.DataLoader pin_memory=True.",
        LoaderWarning,
    )


def forget_pageable() -> None:
    """Count batches in pageable memory from zero, as a new process does."""
    _pageable.batches = _pageable.nbytes = 0
