"""Copy tensors of the host to a device: one slab, one copy, views of it there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from .. import backend
from ..core.errors import LoaderWarning, has_warned, warn_once
from ..core.text import nbytes_text
from ..core.torch_private import is_wrapped
from ..core.tracing import span
from . import debug, engine
from .device import TorchDevice, torch_device
from .engine import keep_alive
from .layout import DIRECT_NBYTES, SPAN_NBYTES, TransferLayout, plan_transfer

#: Returns the function that makes a copy of tensors on a stream and returns it.
Prepare = Callable[[list[torch.Tensor], Any], Callable[[], list[torch.Tensor]]]
#: `backend.plan_copy` of some leaves: takes the stream and the two limits.
Plan = Callable[[Any, int, int], backend.BatchCopy | None]

#: From this number on, the engine queues copies by one call.
_FEW_COPIES = 8
#: The fewest batches and bytes in pageable memory before a warning.
_PAGEABLE_BATCHES, _PAGEABLE_NBYTES = 50, 1_000_000_000


class _PageableCount:
    """The batches that were sent from pageable memory."""

    batches = nbytes = 0


_pageable = _PageableCount()


class DeviceCopy:
    """One copy of plain CPU tensors to a device, step by step.

    The compiled `backend.BatchCopy` makes the same copy of a batch by two calls. This
    class is for debug mode, and for devices and interfaces without a compiled engine.

    Note: [slab lifetime]. Device memory is allocated on the stream of the copy, which
    is also the stream that it is freed to. So the copy waits for no other stream: only
    earlier copies have used this memory, or work that is already done. `wait` makes the
    stream that is current *then* wait for the copy, and registers this stream as a user
    of the memory. Freed memory is not reused before its users have done the work that
    they had at that time: Note: [device memory] in ``csrc/transfer/loans.h`` has the
    order and the limit. A copy that is never waited for has no user, and later copies
    of its stream follow it. The host slab into which leaves are packed belongs to the
    engine (Note [staging lifetime] in ``csrc``), or to torch, whose allocator recorded
    the copy. Neither reuses it before the copy is done. Leaves that are not packed may
    have any owner, and live until the copy has read them: see Note [in-place sources]
    in ``engine.py``.

    Note: [copies on the home stream]. The home stream is the one that is current here.
    A copy stream costs an event and a wait, about 5 us on the device. That pays if home
    computes meanwhile. Copies go on home itself if all of these hold:

    - Home is idle, and waits for the copies at once. So no work could run there beside
      the copies.
    - No leaf is packed. Blocks are reused sooner if few streams read them.
    - There are fewer than 8 copies. Home is mostly the legacy default stream, and that
      stream accepts no batch of copies.

    Home then allocates the memory, uses it and takes it back, so its order replaces the
    events. Another thread may queue work on home after the check. The copies then run
    behind that work, and the order is still correct.

    Args:
        leaves: plain CPU tensors.
        device: the target.
        api: the interface of the device.
        stream: the stream of the copy; None: the copy stream of the device.
        waits_here: the stream that is current here waits for the copy at once.
    """

    def __init__(
        self,
        leaves: Sequence[torch.Tensor],
        device: torch.device,
        api: TorchDevice,
        stream: Any = None,
        waits_here: bool = True,
    ) -> None:
        if debug.enabled:
            debug.check()
        self._device, self._api = device, api
        layout = plan_transfer(leaves, api.is_pinned)
        self._plan, self._order = layout.plan, layout.order
        if layout.pageable_nbytes:
            warn_about_pageable_memory(layout.pageable_nbytes, device)
        self._stream = stream = self._choose_stream(layout, stream, waits_here)
        sizes = [layout.plan.nbytes, *(leaves[i].nbytes for i in layout.direct)]
        self._slab, *large = self._blocks = api.allocate(sizes, stream)
        self._direct = dict(zip(layout.direct, large, strict=True))
        self._formats = {i: (leaves[i].dtype, leaves[i].shape) for i in layout.direct}
        direct = [(self._direct[i], byte_view(leaves[i])) for i in layout.direct]
        if layout.span is not None:
            direct.append((self._slab[: layout.span.numel()], layout.span))
        self._event = engine.start(layout, self._slab, direct, stream, api)
        self._watch: debug.Watch | None = None
        if debug.enabled:
            memory = (self._slab, self._direct)
            route = (api, device, stream)
            self._watch = debug.Watch(leaves, layout, memory, route, self._event)
            self._event = self._watch.event
        keep_alive.release_done()

    def _choose_stream(
        self, layout: TransferLayout, stream: Any, waits_here: bool
    ) -> Any:
        """Return the stream of the copy, on which nothing is captured."""
        api, device = self._api, self._device
        home = api.current_stream(device) if waits_here else None
        if home is not None:
            engine.check_not_capturing("home", home, api)
        if stream is None:
            # The checksums of debug mode are queued on the copy stream.
            goes_home = home is not None and not debug.enabled and _is_small(layout)
            if goes_home and api.is_idle(home):
                return home
            stream = api.copy_stream(device)
        engine.check_not_capturing("copy", stream, api)
        return stream

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
        if stream != self._stream:
            api.keep(self._blocks, stream)
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
    api: TorchDevice = torch_device,
    stream: Any = None,
    waits_here: bool = True,
) -> DeviceCopy | backend.BatchCopy:
    """Start one packed copy of dense CPU tensors to ``device``.

    Leaves that fill one pinned span (`layout`) are copied from there without packing,
    and so is each pinned leaf of 1 MiB and more. The device reads these in place: they
    may be dropped when this returns, but not changed before the copy is done. All
    others may be changed too.

    Raises:
        RuntimeError: a stream is under graph capture. Nothing was queued.

    Stream: the copy is queued on ``stream``, by default the one copy stream of the
    device, and does not wait for the current stream. The rest: see `DeviceCopy`.
    """
    compiled = _send_compiled(leaves, device, api, stream, waits_here)
    if compiled is not None:
        return compiled
    with span("pyparallel.send"), api.relaxed(device):
        return DeviceCopy(leaves, device, api, stream, waits_here)


def start_copy(
    tensors: list[torch.Tensor],
    target: torch.device | None,
    dtype: torch.dtype | None = None,
    stream: Any = None,
    prepare: Prepare | None = None,
) -> Callable[[], list[torch.Tensor]]:
    """Start to copy tensors to a target; return a function that returns the copies.

    Copies to several targets can all be started before the first one is waited for. The
    returned function need not be called.

    Args:
        tensors: of any type and layout, on any device.
        target: None is the host, where only tensors that are not contiguous are copied.
        dtype: of floating-point tensors, or None.
        stream: of the copy, if it is on the target; else the target's own.
        prepare: makes the copy instead, with the tensors and the stream.
    """
    on_target = stream is not None and stream.device == target
    own = stream if on_target else None
    # Without a packing, or with static slabs, a cast by torch comes first.
    if prepare is not None:
        return prepare(_cast_all(tensors, dtype), own)
    if target is None:
        return lambda: list(map(contiguous, _cast_all(tensors, dtype)))
    if target.type == "cpu":
        return lambda: [contiguous(x).to(target) for x in _cast_all(tensors, dtype)]
    if target.type != "cuda" and not has_streams(target):
        return lambda: [x.to(target) for x in _cast_all(tensors, dtype)]
    return MixedCopy(tensors, target, stream=own, dtype=dtype).wait


def has_streams(device: torch.device) -> bool:
    """Return True if copies to ``device`` can be queued; MPS has one queue for all."""
    return hasattr(torch.get_device_module(device), "Stream")


class MixedCopy:
    """A copy of tensors of any type and layout to a device with streams.

    Plain CPU tensors without gradients are packed, and their copy starts at once. The
    others are copied by torch's own operators in `wait`.

    Note: [casts]. The bus and the staging memory are slower than any cast, so tensors
    that are packed are cast to ``dtype`` by the pass that packs them, and half of the
    bytes are sent. Pinned memory that the device reads in place is sent as it is and
    cast there: a cast on the host would read and write all of it once more. Casts that
    the extension does not make, and those of debug mode and of pure Python, are made by
    torch before the copy.

    Stream: that of `send`; the others are copied on the stream that is current in
    `wait`.
    """

    def __init__(
        self,
        tensors: list[torch.Tensor],
        device: torch.device,
        api: TorchDevice = torch_device,
        stream: Any = None,
        waits_here: bool = True,
        dtype: torch.dtype | None = None,
    ) -> None:
        self._device, self._api, self._dtype = device, api, dtype
        self._others: dict[int, torch.Tensor] = {}
        self._packed: DeviceCopy | backend.BatchCopy | None
        compiled = _send_compiled(tensors, device, api, stream, waits_here, dtype)
        if compiled is not None:
            self._packed = compiled
            if not compiled.num_in_place:
                self._dtype = None  # all are cast
            return
        if dtype is not None:
            tensors = [
                each if self._is_sent_in_place(each) else _cast(each, dtype)
                for each in tensors
            ]
        # Packed tensors are not kept: their memory is free for the next batch.
        self._others = {i: tensors[i] for i in backend.find_unpackable(tensors)}
        packed: Sequence[torch.Tensor] = tensors
        if self._others:
            others = self._others
            packed = [each for i, each in enumerate(tensors) if i not in others]
        self._packed = send(packed, device, api, stream, waits_here) if packed else None

    def wait(self) -> list[torch.Tensor]:
        """Return the tensors on the device; the host does not wait for the copy."""
        tensors = self._packed.wait() if self._packed else []
        if self._others:
            self._add_others(tensors)
        if self._dtype is not None:
            with self._api.relaxed(self._device):  # it may need more memory
                tensors = _cast_all(tensors, self._dtype)
        return tensors

    def _add_others(self, tensors: list[torch.Tensor]) -> None:
        with self._api.relaxed(self._device):
            for i, tensor in self._others.items():  # ascending, so i is right
                tensors.insert(i, tensor.to(self._device, non_blocking=True))
        in_place = [each for each in self._others.values() if self._is_in_place(each)]
        if in_place:
            hold_while_read(in_place, self._device, self._api)
        self._others = {}

    def _is_sent_in_place(self, tensor: torch.Tensor) -> bool:
        return self._is_in_place(tensor) and tensor.nbytes >= DIRECT_NBYTES

    def _is_in_place(self, tensor: torch.Tensor) -> bool:
        """Return True if the device may read the memory of this tensor itself."""
        strided = tensor.is_cpu and tensor.layout is torch.strided
        # torch does not report whether a tensor of vmap is pinned.
        return strided and (is_wrapped(tensor) or self._api.is_pinned(tensor))


def send_planned(
    plan: Plan,
    device: torch.device,
    api: TorchDevice = torch_device,
    stream: Any = None,
    waits_here: bool = True,
) -> backend.BatchCopy | None:
    """Start a copy by the compiled engine; return None if it needs another way.

    Args:
        plan: called unless debug mode is on or the device has no engine.
        device: the target.
        api: as for `DeviceCopy`.
        stream: as for `DeviceCopy`.
        waits_here: as for `DeviceCopy`.
    """
    if api is not torch_device or debug.enabled or not api.has_engine(device):
        return None
    own = torch_device.copy_stream(device) if stream is None else stream
    with span("pyparallel.send"):
        copy = plan(own, DIRECT_NBYTES, SPAN_NBYTES)
        if copy is None:
            return None
        sources = copy.sources
        if sources is None:
            copy.start(waits_here, stream is None)
        else:
            _start_in_place(copy, sources, waits_here, stream is None)
    if copy.pageable_nbytes:
        warn_about_pageable_memory(copy.pageable_nbytes, device)
    keep_alive.release_done()
    return copy


def _send_compiled(
    leaves: Sequence[torch.Tensor],
    device: torch.device,
    api: TorchDevice,
    stream: Any,
    waits_here: bool,
    dtype: torch.dtype | None = None,
) -> backend.BatchCopy | None:
    """Send leaves; those that are not read in place are cast to ``dtype``."""
    if not leaves:
        return None
    plan = partial(backend.plan_copy, leaves, dtype=dtype)
    return send_planned(plan, device, api, stream, waits_here)


def _start_in_place(
    copy: backend.BatchCopy, sources: object, waits_here: bool, may_go_home: bool
) -> None:
    """Start a copy that may read ``sources``: see Note [in-place sources]."""
    ticket = keep_alive.hold(sources)
    try:
        copy.start(waits_here, may_go_home)
    finally:
        reading = copy.reading
        if reading is None:
            keep_alive.drop(ticket)
        else:
            keep_alive.release_when(ticket, reading.is_done)


def contiguous(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor contiguous; return sparse tensors unchanged."""
    try:
        return tensor.contiguous()
    except RuntimeError:  # sparse tensors do not support it
        if tensor.layout is torch.strided:
            raise
        return tensor


def _cast_all(
    tensors: list[torch.Tensor], dtype: torch.dtype | None
) -> list[torch.Tensor]:
    return tensors if dtype is None else [_cast(each, dtype) for each in tensors]


def _cast(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def hold_while_read(
    tensors: Sequence[torch.Tensor],
    device: torch.device,
    api: TorchDevice = torch_device,
) -> None:
    """Keep tensors until ``device`` has done all work on its current stream.

    For copies that were queued by other means: see Note [in-place sources].
    """
    fence = api.fence(device)
    keep_alive.release_when(keep_alive.hold(list(tensors)), fence.is_done)


#: Drop the in-place sources of finished copies; every later copy does it too.
release_done: Callable[[], int] = keep_alive.release_done


def drain(seconds: float) -> bool:
    """Wait at most ``seconds`` until the devices read no more memory in place."""
    is_drained = keep_alive.drain(seconds)
    if debug.enabled:
        debug.check()
    return is_drained


def _is_small(layout: TransferLayout) -> bool:
    """Return True if a few pinned tensors are copied, and no leaf is packed."""
    if layout.span is not None:
        return True
    return layout.plan.nbytes == 0 and len(layout.direct) < _FEW_COPIES


def byte_view(leaf: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a contiguous tensor as ``torch.uint8``."""
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
