"""Slabs and flights: one buffer on the host, one copy to a device, views on arrival."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch

from . import _advice, _backend, _cargo, _debug, _transfer
from ._device import DeviceApi, TorchDevice, torch_device
from ._trace import span
from ._transfer import keeper as _keeper

__all__ = ["DeviceApi", "TorchDevice", "torch_device"]  # for those above


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
    read it: see Note [lent memory] in ``_keeper.py``. A copy may be queued on home
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
        if _debug.enabled:
            _debug.check()
        self._device, self._api = device, api
        cargo = _cargo.load(leaves, api.is_pinned)
        self._plan, self._order = cargo.plan, cargo.order
        if cargo.pageable_nbytes:
            _advice.of_pageable(cargo.pageable_nbytes, device)
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
        at_once = home is None and stream is None and not _debug.enabled
        self._arrival = _transfer.start(
            cargo, self._slab, direct, streams, api, at_once
        )
        self._watch: _debug.Watch | None = None
        if _debug.enabled:
            way = (api, device, copies, self._home)
            memory = (self._slab, self._direct)
            self._watch = _debug.Watch(leaves, cargo, memory, way, self._arrival)
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
            _debug.check()
            self._watch.land_on(stream)
        self._arrival.wait(stream)
        self._lost.detach()
        if stream != self._home:
            for block in (self._slab, *self._direct.values()):
                api.keep(block, stream)
        _keeper.release_done()
        landed = _backend.views(self._slab, self._plan)
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

    Leaves that fill one page-locked span (`_cargo`) are copied as they lie there, and
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
    if _debug.enabled:
        _debug.check()
    return is_drained


def _give_up(
    arrival: _transfer.Arrival,
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
