"""Slabs and flights: one buffer on the host, one copy to a device, views on arrival."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from . import _backend
from ._trace import span

#: Leaves of at least this many bytes are not packed if they are page-locked already.
DIRECT_NBYTES = 1 << 20


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

    def copy(self, dst: torch.Tensor, src: torch.Tensor, stream: Any) -> None:
        """Queue a copy on ``stream``; the host does not wait."""

    def record(self, stream: Any) -> Any:
        """Return an event behind everything queued on ``stream`` so far."""

    def wait(self, stream: Any, event: Any) -> None:
        """Make ``stream`` wait for ``event``; the host does not."""

    def keep(self, tensor: torch.Tensor, stream: Any) -> None:
        """Keep the memory, once freed, from reuse until ``stream`` is done with it."""


class TorchDevice:
    """The device interface on torch's allocators and streams, for any accelerator."""

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

    def keep(self, tensor: torch.Tensor, stream: Any) -> None:
        """Tell torch's caching allocator about one more stream."""
        tensor.record_stream(stream)


class Flight:
    """Tensors on their way to a device, or landed there.

    Note: [slab lifetime]. Device memory is allocated on the stream that is current when
    the flight starts, its home. An event is recorded there *after* the allocation, and
    the copy stream waits for it before it writes: whoever used this memory before, in
    any thread, had queued that use by then. Landing makes the stream that is current
    *then* wait for the copy. Memory is freed to its home: if it lands elsewhere, the
    allocator is told of that stream too; if it never lands, home waits for the copy.
    The pinned slab is torch's: its allocator saw the copy and does not hand the block
    out again before the copy is done.
    """

    def __init__(
        self, leaves: Sequence[torch.Tensor], device: torch.device, api: DeviceApi
    ) -> None:
        self._device = device
        self._api = api
        packed = leaves
        self._plan = _backend.plan_slab(leaves)
        in_place: list[int] = []
        if self._plan.nbytes >= DIRECT_NBYTES:  # else no leaf is large
            large = [i for i, leaf in enumerate(leaves) if _is_large(leaf)]
            in_place = [i for i in large if api.is_pinned(leaves[i])]
        if in_place:
            direct = frozenset(in_place)
            packed = [leaf for i, leaf in enumerate(leaves) if i not in direct]
            self._plan = _backend.plan_slab(packed)
        self._slab = api.empty(self._plan.nbytes, device)
        self._direct = {i: api.empty(leaves[i].nbytes, device) for i in in_place}
        self._home = api.current_stream(device)
        allocated = api.record(self._home)
        # All that can fail on the host comes before the first copy is queued.
        with span("pyparallel.pack"):
            host = _pack(packed, self._plan, api)
        stream = api.copy_stream(device)
        api.wait(stream, allocated)
        for i, target in self._direct.items():
            api.copy(target, _bytes(leaves[i]), stream)
        if host is not None:
            api.copy(self._slab, host, stream)
        self._event = api.record(stream)
        self._forms = {i: (leaves[i].dtype, leaves[i].shape) for i in self._direct}
        self._lost = weakref.finalize(self, api.wait, self._home, self._event)
        self._lost.atexit = False

    def land(self) -> list[torch.Tensor]:
        """Return the tensors; the current stream waits for the copy, the host does not.

        Tensors that were packed share one slab: it lives as long as any of them.
        """
        api = self._api
        stream = api.current_stream(self._device)
        api.wait(stream, self._event)
        self._lost.detach()
        if stream != self._home:
            for block in (self._slab, *self._direct.values()):
                api.keep(block, stream)
        landed = _backend.views(self._slab, self._plan)
        for i, (dtype, shape) in self._forms.items():  # ascending: each finds its place
            landed.insert(i, self._direct[i].view(dtype).view(shape))
        return landed


#: The one real device interface.
torch_device = TorchDevice()


def send(
    leaves: Sequence[torch.Tensor], device: torch.device, api: DeviceApi = torch_device
) -> Flight:
    """Start one packed copy of dense CPU tensors to ``device``.

    Stream: see `Flight`. The leaves may be changed or freed when this returns, except
    page-locked ones of 1 MiB and more, which the device reads in place.
    """
    with span("pyparallel.send"):
        return Flight(leaves, device, api)


def _pack(
    leaves: Sequence[torch.Tensor], plan: _backend.SlabPlan, api: DeviceApi
) -> torch.Tensor | None:
    """Return the leaves in one page-locked slab, or None if there are no bytes."""
    if not plan.nbytes:
        return None
    host = api.pinned(plan.nbytes)
    _backend.pack(host, leaves, plan)
    return host


def _is_large(leaf: torch.Tensor) -> bool:
    return leaf.nbytes >= DIRECT_NBYTES and leaf.is_contiguous()


def _bytes(leaf: torch.Tensor) -> torch.Tensor:
    return leaf.view(-1).view(torch.uint8)
