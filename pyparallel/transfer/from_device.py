"""Copy tensors of a device to the host: pack them there, and make one copy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .. import backend
from ..backend.plain import is_plain
from ..core.tracing import span
from . import engine, layout
from .device import TorchReturn, torch_return
from .pinned_results import host_slabs


class PackedHostCopy:
    """One copy of plain tensors from a device to a slab on the host.

    Note: [copies to the host]. Leaves are packed on the current stream, so the slab has
    their values of this moment; work queued there later does not change it. With
    ``snapshot`` the copy runs on the copy stream of this direction, after an event of
    the current stream. `engine.keep_alive` holds the slab until the copy has read it,
    even if no caller waits for the copy. Then the slab goes back to the stream that
    allocated it. Without ``snapshot`` the copy is queued on the current stream itself.
    No earlier work can free or change the sources there, so large leaves are read in
    place. The host's slab is torch's: its allocator recorded the copy and does not
    reuse the block before the copy is done. Beyond the limit of pinned results the slab
    is ordinary memory. `engine.keep_alive` holds it until the copy has written it, also
    if a later copy cannot be queued.

    The backend does the same by one call if no leaf is read in place. There the slab is
    kept as the memory of a batch, whose user is the copy stream: Note: [device memory]
    in ``csrc/transfer/loans.h``.

    Args:
        leaves: plain tensors of ``device``.
        device: the device of the leaves.
        api: the interface of the device.
        snapshot: the caller may change the tensors before the copy is done.

    Raises:
        RuntimeError: the current stream of the device is under graph capture.
    """

    def __init__(
        self,
        leaves: Sequence[torch.Tensor],
        device: torch.device,
        api: TorchReturn = torch_return,
        snapshot: bool = True,
    ) -> None:
        self._api, self._device = api, device
        self._order: list[int] | None = None
        self._event: Any = None
        job = None
        if api.has_engine(device):
            most = None if snapshot else layout.DIRECT_NBYTES
            job = backend.prepare_return(leaves, most)
        if job is None:
            home = api.current_stream(device)
            if api.is_capturing(home):
                raise RuntimeError(
                    f"to_host: the current stream of {device} must not be under graph "
                    "capture, but it is. Call to_host after the capture, or after a "
                    "replay."
                )
        engine.keep_alive.release_done()
        if job is not None:
            self._run(job, snapshot)
            return
        with api.relaxed(device):
            self._start(leaves, home, snapshot)

    def _run(self, job: backend.ReturnJob, snapshot: bool) -> None:
        """Start the copy by the backend, whose allocator holds the slab."""
        self._plan = job.plan
        self._host, is_pinned = host_slabs.take(self._plan.nbytes, job.pinned)
        stream = self._api.copy_stream(self._device) if snapshot else None
        held = [] if is_pinned else [self._host]
        with span("pyparallel.pack"):
            self._event = engine.start_held(lambda: job.run(self._host, stream), held)

    def _start(self, leaves: Sequence[torch.Tensor], home: Any, snapshot: bool) -> None:
        api, device = self._api, self._device
        direct = []
        if not snapshot:
            direct = [i for i, leaf in enumerate(leaves) if layout.is_large(leaf)]
        packed, ordered = leaves, leaves
        if direct:
            in_place = frozenset(direct)
            kept = [i for i in range(len(leaves)) if i not in in_place]
            packed = [leaves[i] for i in kept]
            self._order = [*kept, *direct]
            ordered = [leaves[i] for i in self._order]
        self._plan = backend.plan_slab(ordered)
        self._host = torch.empty(0, dtype=torch.uint8, device="cpu")
        if self._plan.nbytes == 0:
            return
        self._host, is_pinned = host_slabs.take(self._plan.nbytes, api.pinned)
        slab = _packed(packed, home, api)
        copies = [(self._host[: slab.numel()], slab)] if slab.numel() else []
        offsets = self._plan.offsets[len(packed) :] if direct else ()
        for i, begin in zip(direct, offsets, strict=True):
            copies.append(self._place(leaves[i], begin))
        stream = home
        if snapshot:
            stream = api.copy_stream(device)
            api.wait(stream, api.record(home))
        held = [slab] if is_pinned else [slab, self._host]
        self._event = engine.queue(copies, held, stream, api).event

    def _place(
        self, leaf: torch.Tensor, begin: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a leaf's slot on the host and its bytes; zero the end of the slot."""
        end = begin + leaf.nbytes
        self._host[end : -(-end // backend.ALIGNMENT) * backend.ALIGNMENT].zero_()
        return self._host[begin:end], leaf.detach().view(-1).view(torch.uint8)

    def is_done(self) -> bool:
        """Return True if the copy is done; the host does not wait."""
        return self._event is None or self._api.is_done(self._event)

    def wait(self) -> list[torch.Tensor]:
        """Return the tensors; the host waits for the copy."""
        if self._event is not None:
            self._api.wait_on_host(self._event)
            engine.keep_alive.release_done()
        views = backend.views(self._host, self._plan)
        if self._order is None:
            return views
        by_index = dict(zip(self._order, views, strict=True))
        return [by_index[i] for i in range(len(by_index))]


def _packed(
    leaves: Sequence[torch.Tensor], home: Any, api: TorchReturn
) -> torch.Tensor:
    """Return the leaves in one slab on their device, packed on its current stream."""
    plan = backend.plan_slab(leaves)
    (slab,) = api.allocate([plan.nbytes], home)
    if plan.nbytes:
        with span("pyparallel.pack"):
            api.pack(slab, leaves, plan)
    return slab


class MixedHostCopy:
    """A copy to the host of tensors of any type, layout and device.

    The plain tensors of each device are in one packed copy. Other tensors are copied by
    ``Tensor.cpu``.

    Args:
        tensors: the sources.
        api: the interface of the devices.
        snapshot: the caller may change the tensors before the copy is done.
    """

    def __init__(
        self, tensors: list[torch.Tensor], api: TorchReturn, snapshot: bool
    ) -> None:
        groups, others = _groups(tensors, api)
        self._packed = []
        for device, indices in groups.items():
            is_all = len(indices) == len(tensors)
            leaves = tensors if is_all else [tensors[i] for i in indices]
            copy = PackedHostCopy(leaves, device, api, snapshot)
            self._packed.append((indices, copy))
        # These copies may block the host, so the packed ones are queued before them.
        self._others = {}
        for i in others:
            with api.relaxed(tensors[i].device):
                self._others[i] = tensors[i].detach().cpu()

    def is_done(self) -> bool:
        """Return True if `wait` returns at once."""
        return all(copy.is_done() for _, copy in self._packed)

    def wait(self) -> list[torch.Tensor]:
        """Return the tensors on the host, which waits for the copies."""
        if len(self._packed) == 1 and not self._others:
            return self._packed[0][1].wait()
        by_index = dict(self._others)
        for indices, copy in self._packed:
            by_index.update(zip(indices, copy.wait(), strict=True))
        return [by_index[i] for i in range(len(by_index))]


def _groups(
    tensors: list[torch.Tensor], api: TorchReturn
) -> tuple[dict[torch.device, Sequence[int]], list[int]]:
    """Return the indices of the tensors that each device packs, and those of others."""
    if api is torch_return and backend.are_on_one_device(tensors):
        device = tensors[0].device
        if api.packs(device):
            return {device: range(len(tensors))}, []
    groups: dict[torch.device, list[int]] = {}
    others = []
    for i, tensor in enumerate(tensors):
        found = api.device_of(tensor)
        if found is not None and api.packs(found) and is_plain(tensor):
            groups.setdefault(found, []).append(i)
        else:
            others.append(i)
    return {**groups}, others
