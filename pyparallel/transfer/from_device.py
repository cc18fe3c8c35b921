"""The way back: tensors of one device, in one copy, to a page-locked slab."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from .. import backend
from ..backend.plain import is_plain
from ..core.tracing import span
from . import engine, layout, to_device
from .pinned_results import host_slabs

_ALIGNMENT = 64  # of the slots of a slab


class ReturnApi(to_device.DeviceApi, Protocol):
    """What the way back asks of a device besides; tests put a slow fake here too."""

    def device_of(self, tensor: torch.Tensor) -> torch.device | None:
        """Return the device that a tensor has to come back from; None: the host."""

    def packs(self, device: torch.device) -> bool:
        """Tell whether `pack` takes tensors of ``device``."""

    def pack(
        self,
        slab: torch.Tensor,
        leaves: Sequence[torch.Tensor],
        plan: backend.SlabPlan,
    ) -> None:
        """Queue the packing of leaves on the current stream of their device."""

    def wait_on_host(self, event: Any) -> None:
        """Block the host until all work before ``event`` is done."""


class TorchReturn(to_device.TorchDevice):
    """The same on torch, with copy streams of its own.

    A stream of the way out would make batches that are sent later wait for the results
    that are copied here, and both directions of the bus can be busy at a time.
    """

    def device_of(self, tensor: torch.Tensor) -> torch.device | None:
        """Return the tensor's device."""
        return None if tensor.is_cpu else tensor.device

    def packs(self, device: torch.device) -> bool:
        """Ask the backend."""
        return device.type in backend.devices

    def pack(
        self,
        slab: torch.Tensor,
        leaves: Sequence[torch.Tensor],
        plan: backend.SlabPlan,
    ) -> None:
        """Call the backend."""
        backend.pack(slab, leaves, plan)

    def wait_on_host(self, event: Any) -> None:
        """Wait for the event alone, not for the device."""
        event.synchronize()


#: The one real interface of the way back.
torch_return = TorchReturn(backend.transfers)


class ReturnFlight:
    """Tensors of one device on their way to the host, or landed there.

    Note: [return flights]. Leaves are packed on the current stream, so the slab has
    their values of this moment, whatever is queued there later. With ``snapshot`` the
    copy runs on the way back's own stream, behind an event of the current one; the
    keeper holds the slab until the copy has read it, whether or not anybody waits for
    it, and then it goes back to the stream that it was allocated on. Without, the copy
    is queued on the current stream itself, in front of which nothing can free or change
    what it reads, and large leaves are read where they are. The host's slab is torch's:
    its allocator saw the copy and does not hand the block out again before it is done.
    Where there may be no more of such slabs it is ordinary memory, which the keeper
    holds until it has been written, also if a later copy cannot be queued.
    """

    def __init__(
        self,
        leaves: Sequence[torch.Tensor],
        device: torch.device,
        api: ReturnApi = torch_return,
        snapshot: bool = True,
    ) -> None:
        home = api.current_stream(device)
        if api.is_capturing(home):
            raise RuntimeError(
                f"to_host: the current stream of {device} must not be recording a "
                "graph, but it is. Call to_host after the capture, or after a replay."
            )
        to_device.release_done()
        self._api = api
        direct = [] if snapshot else _large(leaves)
        packed, ordered = leaves, leaves
        self._order: list[int] | None = None
        if direct:
            alone = frozenset(direct)
            kept = [i for i in range(len(leaves)) if i not in alone]
            packed = [leaves[i] for i in kept]
            self._order = [*kept, *direct]
            ordered = [leaves[i] for i in self._order]
        self._plan = backend.plan_slab(ordered)
        self._host = torch.empty(0, dtype=torch.uint8)
        self._event: Any = None
        if self._plan.nbytes == 0:
            return
        self._host, is_pinned = host_slabs.take(self._plan.nbytes, api.pinned)
        slab = _packed(packed, device, api)
        copies = [(self._host[: slab.numel()], slab)] if slab.numel() else []
        offsets = self._plan.offsets[len(packed) :] if direct else ()
        for i, begin in zip(direct, offsets, strict=True):
            copies.append(self._place(leaves[i], begin))
        stream = home
        if snapshot:
            stream = api.copy_stream(device)
            api.wait(stream, api.record(home))
        held = [slab] if is_pinned else [slab, self._host]
        self._event = engine.queue(copies, held, (stream, home), api).event

    def _place(
        self, leaf: torch.Tensor, begin: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return where a leaf goes, and its bytes; those behind it become zero."""
        end = begin + leaf.nbytes
        self._host[end : -(-end // _ALIGNMENT) * _ALIGNMENT].zero_()
        return self._host[begin:end], leaf.detach().view(-1).view(torch.uint8)

    def is_done(self) -> bool:
        """Tell whether the copy is done; the host does not wait."""
        return self._event is None or self._api.is_done(self._event)

    def land(self) -> list[torch.Tensor]:
        """Return the tensors; the host waits for the copy."""
        if self._event is not None:
            self._api.wait_on_host(self._event)
            to_device.release_done()
        views = backend.views(self._host, self._plan)
        if self._order is None:
            return views
        places = dict(zip(self._order, views, strict=True))
        return [places[i] for i in range(len(places))]


def _packed(
    leaves: Sequence[torch.Tensor], device: torch.device, api: ReturnApi
) -> torch.Tensor:
    """Return the leaves in one slab on their device."""
    plan = backend.plan_slab(leaves)
    slab = api.empty(plan.nbytes, device)
    if plan.nbytes:
        with span("pyparallel.pack"):
            api.pack(slab, leaves, plan)
    return slab


def _large(leaves: Sequence[torch.Tensor]) -> list[int]:
    """Return which leaves are copied where they are."""
    return [
        i
        for i, leaf in enumerate(leaves)
        if leaf.nbytes >= layout.DIRECT_NBYTES and leaf.is_contiguous()
    ]


class MixedHostCopy:
    """Tensors of any kind and device on their way to the host.

    The plain tensors of each device are in one packed copy. Other tensors are copied by
    ``Tensor.cpu``.
    """

    def __init__(
        self, tensors: list[torch.Tensor], api: ReturnApi, snapshot: bool
    ) -> None:
        groups: dict[torch.device, list[int]] = {}
        others = []
        for i, tensor in enumerate(tensors):
            device = api.device_of(tensor)
            if device is not None and api.packs(device) and is_plain(tensor):
                groups.setdefault(device, []).append(i)
            else:
                others.append(i)
        self._flights = [
            (places, ReturnFlight([tensors[i] for i in places], device, api, snapshot))
            for device, places in groups.items()
        ]
        # These may block the host, so all that does not is on its way before.
        self._landed = {i: tensors[i].detach().cpu() for i in others}

    def is_done(self) -> bool:
        """Return True if `land` would return at once."""
        return all(flight.is_done() for _, flight in self._flights)

    def land(self) -> list[torch.Tensor]:
        """Return the tensors on the host, which waits for them."""
        landed = dict(self._landed)
        for places, flight in self._flights:
            landed.update(zip(places, flight.land(), strict=True))
        return [landed[i] for i in range(len(landed))]
