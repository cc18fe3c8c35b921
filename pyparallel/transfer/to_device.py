"""Copy tensors of the host to a device: one slab, one copy, views of it there."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from typing import Any

import torch

from .. import backend
from ..core.errors import LoaderWarning, has_warned, warn_once
from ..core.text import nbytes_text
from ..core.torch_private import is_wrapped
from ..core.tracing import span
from . import debug, engine
from .device import DeviceApi, torch_device
from .engine import keep_alive
from .layout import plan_transfer

#: The fewest batches and bytes in pageable memory before a warning.
_PAGEABLE_BATCHES, _PAGEABLE_NBYTES = 50, 1_000_000_000


class _PageableCount:
    """The batches that were sent from pageable memory."""

    batches = nbytes = 0


_pageable = _PageableCount()


class DeviceCopy:
    """One copy of plain CPU tensors to a device.

    Note: [slab lifetime]. Device memory is allocated on one stream, the copy's home. An
    event is recorded there *after* the allocation, and the copy stream waits for it
    before it writes: earlier users of this memory, in any thread, had queued their work
    by then. `wait` makes the stream that is current *then* wait for the copy. Memory is
    freed to its home. If the consumer uses another stream, the allocator records that
    stream too. If `wait` is never called, home waits for the copy. A wait would end a
    graph capture of home, so then the memory is held until the copy is done. The host
    slab into which leaves are packed belongs to the engine (Note [staging lifetime] in
    ``csrc``), or to torch, whose allocator recorded the copy. Neither reuses it before
    the copy is done. Leaves that are not packed may have any owner, and live until the
    copy has read them: see Note [in-place sources] in ``engine.py``. A copy may be
    queued on home itself (Note [copies on the home stream] in ``csrc``): then there are
    no waits.

    Args:
        leaves: plain CPU tensors.
        device: the target.
        api: the interface of the device.
        home: the stream that allocates device memory; None: the current stream.
        stream: the stream of the copy; None: the copy stream of the device.
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
        layout = plan_transfer(leaves, api.is_pinned)
        self._plan, self._order = layout.plan, layout.order
        if layout.pageable_nbytes:
            warn_about_pageable_memory(layout.pageable_nbytes, device)
        with nullcontext() if home is None else api.using(home):
            self._slab = api.empty(layout.plan.nbytes, device)
            self._direct = {
                i: api.empty(leaves[i].nbytes, device) for i in layout.direct
            }
            self._home = api.current_stream(device)
        self._formats = {i: (leaves[i].dtype, leaves[i].shape) for i in layout.direct}
        direct = [(self._direct[i], _bytes(leaves[i])) for i in layout.direct]
        if layout.span is not None:
            direct.append((self._slab[: layout.span.numel()], layout.span))
        copies = api.copy_stream(device) if stream is None else stream
        streams = (copies, self._home)
        # The checksums of debug mode are queued on the copy stream.
        immediately = home is None and stream is None and not debug.enabled
        self._event = engine.start(
            layout, self._slab, direct, streams, api, immediately
        )
        self._watch: debug.Watch | None = None
        if debug.enabled:
            route = (api, device, copies, self._home)
            memory = (self._slab, self._direct)
            self._watch = debug.Watch(leaves, layout, memory, route, self._event)
            self._event = self._watch.event
        blocks = (self._slab, *self._direct.values())
        self._finalizer = weakref.finalize(
            self, _free_after_copy, self._event, self._home, api, blocks
        )
        self._finalizer.atexit = False
        keep_alive.release_done()

    def wait(self) -> list[torch.Tensor]:
        """Return the tensors; the current stream waits for the copy, the host does not.

        Tensors that were packed share one slab: it lives as long as any of them.
        """
        api = self._api
        stream = api.current_stream(self._device)
        if self._watch is not None:
            debug.check()
            self._watch.add_stream(stream)
        self._event.wait(stream)
        self._finalizer.detach()
        if stream != self._home:
            for block in (self._slab, *self._direct.values()):
                api.keep(block, stream)
        keep_alive.release_done()
        tensors = backend.views(self._slab, self._plan)
        if self._order is not None:
            by_index = dict(zip(self._order, tensors, strict=True))
            tensors = [by_index[i] for i in range(len(tensors))]
        for i, (dtype, shape) in self._formats.items():  # ascending, so i is right
            tensors.insert(i, self._direct[i].view(dtype).view(shape))
        return tensors


def send(
    leaves: Sequence[torch.Tensor],
    device: torch.device,
    api: DeviceApi = torch_device,
    home: Any = None,
    stream: Any = None,
) -> DeviceCopy:
    """Start one packed copy of dense CPU tensors to ``device``.

    Leaves that fill one pinned span (`layout`) are copied from there without packing,
    and so is each pinned leaf of 1 MiB and more. The device reads these in place: they
    may be dropped when this returns, but not changed before the copy is done. All
    others may be changed too.

    Raises:
        RuntimeError: a stream is under graph capture. Nothing was queued.

    Stream: device memory is allocated on ``home``, by default the current stream. The
    copy is queued on ``stream``, by default the one copy stream of the device. The
    rest: see `DeviceCopy`.
    """
    with span("pyparallel.send"):
        return DeviceCopy(leaves, device, api, home, stream)


def start_copy(
    tensors: list[torch.Tensor],
    target: torch.device | None,
    dtype: torch.dtype | None = None,
    stream: Any = None,
) -> Callable[[], list[torch.Tensor]]:
    """Start to copy tensors to a target; return a function that returns the copies.

    Copies to several targets can all be started before the first one is waited for. The
    returned function need not be called.

    Args:
        tensors: of any type and layout, on any device.
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
    return MixedCopy(tensors, target, stream=stream if on_target else None).wait


def has_streams(device: torch.device) -> bool:
    """Return True if copies to ``device`` can be queued; MPS has one queue for all."""
    return hasattr(torch.get_device_module(device), "Stream")


class MixedCopy:
    """A copy of tensors of any type and layout to a device with streams.

    Plain CPU tensors without gradients are packed, and their copy starts at once. The
    others are copied by torch's own operators in `wait`.

    Stream: that of `send`; the others are copied on the stream that is current in
    `wait`.
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
        # Packed tensors are not kept: their memory is free for the next batch.
        self._others = {i: tensors[i] for i in backend.find_unpackable(tensors)}
        packed: Sequence[torch.Tensor] = tensors
        if self._others:
            others = self._others
            packed = [each for i, each in enumerate(tensors) if i not in others]
        self._packed = send(packed, device, api, home, stream) if packed else None

    def wait(self) -> list[torch.Tensor]:
        """Return the tensors on the device; the host does not wait for the copy."""
        tensors = self._packed.wait() if self._packed else []
        for i, tensor in self._others.items():  # ascending, so i is right
            tensors.insert(i, tensor.to(self._device, non_blocking=True))
        in_place = [each for each in self._others.values() if self._is_in_place(each)]
        if in_place:
            hold_while_read(in_place, self._device, self._api)
        self._others = {}
        return tensors

    def _is_in_place(self, tensor: torch.Tensor) -> bool:
        """Return True if the device may read the memory of this tensor itself."""
        strided = tensor.is_cpu and tensor.layout is torch.strided
        # torch does not report whether a tensor of vmap is pinned.
        return strided and (is_wrapped(tensor) or self._api.is_pinned(tensor))


def contiguous(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor contiguous; return sparse tensors unchanged."""
    try:
        return tensor.contiguous()
    except RuntimeError:  # sparse tensors do not support it
        if tensor.layout is torch.strided:
            raise
        return tensor


def _cast(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def hold_while_read(
    tensors: Sequence[torch.Tensor], device: torch.device, api: DeviceApi = torch_device
) -> None:
    """Keep tensors until ``device`` has done all work on its current stream.

    For copies that were queued by other means: see Note [in-place sources].
    """
    fence = api.fence(device)
    keep_alive.release_when(keep_alive.hold(list(tensors)), fence.is_done)


#: Drop the in-place sources of finished copies; every later copy does it too.
release_done = keep_alive.release_done


def drain(seconds: float) -> bool:
    """Wait at most ``seconds`` until the devices read no more memory in place."""
    is_drained = keep_alive.drain(seconds)
    if debug.enabled:
        debug.check()
    return is_drained


def _free_after_copy(
    event: engine.CopyEvent,
    home: Any,
    api: DeviceApi,
    blocks: Sequence[torch.Tensor],
) -> None:
    """Delay the reuse of the memory of a copy that was never waited for."""
    # A failed device raises an error at the next call of the program.
    with suppress(RuntimeError):
        if not api.is_capturing(home):
            event.wait(home)
            return
    keep_alive.release_when(keep_alive.hold(blocks), event.is_done)


def _bytes(leaf: torch.Tensor) -> torch.Tensor:
    return leaf.view(-1).view(torch.uint8)


def warn_about_pageable_memory(nbytes: int, device: torch.device) -> None:
    """Warn if batches are sent to a device from memory that is not pinned.

    Args:
        nbytes: bytes of one batch that pinned memory would have saved from packing.
        device: the target.
    """
    if has_warned("PP212"):
        return
    # Threads may overwrite each other's counts, which only delays the warning.
    _pageable.batches += 1
    _pageable.nbytes += nbytes
    batches, total = _pageable.batches, _pageable.nbytes
    if batches < _PAGEABLE_BATCHES or total < _PAGEABLE_NBYTES:
        return
    warn_once(
        "PP212",
        f"scatter: {nbytes_text(total)} of large tensors in {batches} batches for "
        f"{device} came from pageable memory, so the host copied them once more. Give "
        "pyparallel.DataLoader pin_memory=True.",
        LoaderWarning,
    )


def reset_pageable_count() -> None:
    """Count batches in pageable memory from zero, as in a new process."""
    _pageable.batches = _pageable.nbytes = 0
