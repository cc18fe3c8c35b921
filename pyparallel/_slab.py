"""Slabs and flights: one buffer on the host, one copy to a device, views on arrival."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Protocol

import torch

from . import _backend, _cargo, _debug
from ._keeper import Keeper
from ._probe import TorchProbe
from ._trace import span

_keeper = Keeper()


class DeviceApi(Protocol):
    """What a flight asks of a device; tests put a slow fake in its place."""

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Tell whether copies can read this CPU tensor in place."""

    def pinned(self, nbytes: int) -> torch.Tensor:
        """Return page-locked bytes that stay untouched while a copy reads them."""

    def empty(self, nbytes: int, device: torch.device) -> torch.Tensor:
        """Return device bytes that belong to the current stream."""

    def copy_stream(self, device: torch.device) -> Any:
        """Return the one copy stream of ``device``."""

    def current_stream(self, device: torch.device) -> Any:
        """Return the stream that is current on ``device`` for this thread."""

    def using(self, stream: Any) -> AbstractContextManager[Any]:
        """Make ``stream`` the current one of its device for this thread."""

    def holds(self, device: torch.device, tensor: torch.Tensor) -> bool:
        """Tell whether the tensor lies in the memory of ``device``."""

    def copy(self, dst: torch.Tensor, src: torch.Tensor, stream: Any) -> None:
        """Queue a copy on ``stream``; the host does not wait."""

    def record(self, stream: Any) -> Any:
        """Return an event behind everything queued on ``stream`` so far."""

    def wait(self, stream: Any, event: Any) -> None:
        """Make ``stream`` wait for ``event``; the host does not."""

    def is_done(self, event: Any) -> bool:
        """Tell whether all work before ``event`` is done; the host does not wait."""

    def keep(self, tensor: torch.Tensor, stream: Any) -> None:
        """Keep the memory, once freed, from reuse until ``stream`` is done with it."""


class TorchDevice:
    """The device interface on torch's allocators and streams, for any accelerator."""

    probe = TorchProbe()

    def __init__(self) -> None:
        self._streams: dict[torch.device, Any] = {}
        self._lock = threading.Lock()

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Tell whether the tensor is page-locked."""
        return tensor.is_pinned()

    def pinned(self, nbytes: int) -> torch.Tensor:
        """Return a block of torch's caching host allocator: it records its copies."""
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def empty(self, nbytes: int, device: torch.device) -> torch.Tensor:
        """Return a block of torch's caching device allocator."""
        return torch.empty(nbytes, dtype=torch.uint8, device=device)

    def copy_stream(self, device: torch.device) -> Any:
        """Return the copy stream of ``device``, made once for the process."""
        with self._lock:
            if device not in self._streams:
                module = torch.get_device_module(device)
                self._streams[device] = module.Stream(device=device)
            return self._streams[device]

    def current_stream(self, device: torch.device) -> Any:
        """Return the current stream of ``device``."""
        return torch.get_device_module(device).current_stream(device)

    def using(self, stream: Any) -> AbstractContextManager[Any]:
        """Return torch's own context manager."""
        context = torch.get_device_module(stream.device).stream(stream)
        return context  # type: ignore[no-any-return]

    def holds(self, device: torch.device, tensor: torch.Tensor) -> bool:
        """Compare the devices."""
        return tensor.device == device

    def copy(self, dst: torch.Tensor, src: torch.Tensor, stream: Any) -> None:
        """Queue a non-blocking copy."""
        with torch.get_device_module(dst.device).stream(stream):
            dst.copy_(src, non_blocking=True)

    def record(self, stream: Any) -> Any:
        """Record a new event."""
        return stream.record_event()

    def wait(self, stream: Any, event: Any) -> None:
        """Queue a wait."""
        stream.wait_event(event)

    def is_done(self, event: Any) -> bool:
        """Ask the event."""
        return bool(event.query())

    def keep(self, tensor: torch.Tensor, stream: Any) -> None:
        """Tell torch's caching allocator about one more stream."""
        tensor.record_stream(stream)


class Flight:
    """Tensors on their way to a device, or landed there.

    Note: [slab lifetime]. Device memory is allocated on one stream, the flight's home.
    An event is recorded there *after* the allocation, and the copy stream waits for it
    before it writes: whoever used this memory before, in any thread, had queued that
    use by then. Landing makes the stream that is current *then* wait for the copy.
    Memory is freed to its home: if it lands elsewhere, the allocator is told of that
    stream too; if it never lands, home waits for the copy. The slab that leaves are
    packed into is torch's: its allocator saw the copy and does not hand the block out
    again before the copy is done. What is not packed may be anybody's, and lives until
    the copy has read it: see Note [lent memory] in ``_keeper.py``.
    """

    def __init__(
        self,
        leaves: Sequence[torch.Tensor],
        device: torch.device,
        api: DeviceApi,
        home: Any = None,
    ) -> None:
        _keeper.release_done()
        if _debug.enabled:
            _debug.check()
        self._device, self._api = device, api
        cargo = _cargo.load(leaves, api.is_pinned)
        self._plan, self._order = cargo.plan, cargo.order
        with nullcontext() if home is None else api.using(home):
            self._slab = api.empty(cargo.plan.nbytes, device)
            self._direct = {
                i: api.empty(leaves[i].nbytes, device) for i in cargo.direct
            }
            self._home = api.current_stream(device)
            allocated = api.record(self._home)
        self._forms = {i: (leaves[i].dtype, leaves[i].shape) for i in cargo.direct}
        # All that can fail on the host comes before the first copy is queued.
        copies = [(self._direct[i], _bytes(leaves[i])) for i in cargo.direct]
        if cargo.span is not None:
            copies.append((self._slab[: cargo.span.numel()], cargo.span))
        lent = [source for _, source in copies]
        if cargo.packed and cargo.plan.nbytes:
            with span("pyparallel.pack"):
                host = _pack(cargo.packed, cargo.plan, api)
            copies.append((self._slab, host))
        stream = api.copy_stream(device)
        api.wait(stream, allocated)
        self._event = queue(copies, lent, stream, api)
        self._watch: _debug.Watch | None = None
        if _debug.enabled:
            blocks, way = (self._slab, self._direct), (api, device, stream, self._home)
            self._watch = _debug.Watch(leaves, cargo, blocks, way, self._event)
            self._event = self._watch.event
        self._lost = weakref.finalize(self, api.wait, self._home, self._event)
        self._lost.atexit = False

    def land(self) -> list[torch.Tensor]:
        """Return the tensors; the current stream waits for the copy, the host does not.

        Tensors that were packed share one slab: it lives as long as any of them.
        """
        api = self._api
        stream = api.current_stream(self._device)
        if self._watch is not None:
            _debug.check()
            self._watch.land_on(stream)
        api.wait(stream, self._event)
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


#: The one real device interface.
torch_device = TorchDevice()


def send(
    leaves: Sequence[torch.Tensor],
    device: torch.device,
    api: DeviceApi = torch_device,
    home: Any = None,
) -> Flight:
    """Start one packed copy of dense CPU tensors to ``device``.

    Leaves that fill one page-locked span (`_cargo`) are copied as they lie there, and
    so is each page-locked leaf of 1 MiB and more. The device reads these in place: they
    may be dropped when this returns, but not changed before the copy is done. All
    others may be changed too.

    Stream: device memory is allocated on ``home``, by default the current stream. The
    rest: see `Flight`.
    """
    with span("pyparallel.send"):
        return Flight(leaves, device, api, home)


def hold_while_read(
    tensors: Sequence[torch.Tensor], device: torch.device, api: DeviceApi = torch_device
) -> None:
    """Keep tensors until ``device`` has done all that is queued on its current stream.

    For copies that were queued by other means: see Note [lent memory].
    """
    event = api.record(api.current_stream(device))
    ticket = _keeper.hold(list(tensors))
    _keeper.release_when(ticket, partial(api.is_done, event))


#: Give up what has been read; every later flight does it too.
release_done = _keeper.release_done


def drain(seconds: float) -> bool:
    """Wait, at most so long, until the devices read nothing in place any more."""
    is_drained = _keeper.drain(seconds)
    if _debug.enabled:
        _debug.check()
    return is_drained


def queue(
    copies: Sequence[tuple[torch.Tensor, torch.Tensor]],
    lent: Sequence[torch.Tensor],
    stream: Any,
    api: DeviceApi,
) -> Any:
    """Queue copies, hold what they read in place, and return the event behind them."""
    ticket = _keeper.hold(lent) if lent else None
    try:
        for target, source in copies:
            api.copy(target, source, stream)
    finally:  # also for those that were queued before an error
        event = api.record(stream)
        if ticket is not None:
            _keeper.release_when(ticket, partial(api.is_done, event))
    return event


def _pack(
    leaves: Sequence[torch.Tensor], plan: _backend.SlabPlan, api: DeviceApi
) -> torch.Tensor:
    """Return the leaves in one page-locked slab."""
    host = api.pinned(plan.nbytes)
    _backend.pack(host, leaves, plan)
    return host


def _bytes(leaf: torch.Tensor) -> torch.Tensor:
    return leaf.view(-1).view(torch.uint8)
