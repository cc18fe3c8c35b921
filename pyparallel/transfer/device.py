"""The interface of a device: memory, streams, events and checksums.

All code of this folder reaches a device through `TorchDevice`. Tests pass a fake device
with the same methods whose copies are slow, so that a missing wait gives wrong values.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Generator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch

from .. import backend
from ..core.errors import restoring
from ..core.torch_private import dense_parts
from . import _cudart, gpu_record
from ._cudart import Cudart

_RELAXED = 2  # cudaStreamCaptureModeRelaxed
_CHECKSUM_CHUNK = 1 << 24  # bytes summed at a time; the sum needs three times as many


class Fence(Protocol):
    """All work that was queued on current streams of a thread."""

    def is_done(self) -> bool:
        """Return True if that work is done; the host does not wait."""


class TorchProbe:
    """The calls that ``PYPARALLEL_DEBUG=1`` makes besides."""

    def sums(self, block: torch.Tensor, row: int, stream: Any) -> torch.Tensor:
        """Queue `row_sums` of device bytes; return pinned memory for the result."""
        with torch.get_device_module(block.device).stream(stream):
            sums = row_sums(block, row)
            shape, dtype = sums.shape, sums.dtype
            found = torch.empty(shape, dtype=dtype, device="cpu", pin_memory=True)
            return found.copy_(sums, non_blocking=True)

    def fill(self, block: torch.Tensor, value: int, stream: Any) -> None:
        """Queue a fill of device bytes with ``value``."""
        with torch.get_device_module(block.device).stream(stream):
            block.fill_(value)


class TorchDevice:
    """The device interface on torch's allocators and streams, for any accelerator.

    Note: [calls and captures]. Each call to CUDA has to avoid three things: it may end
    a graph capture in another thread, open a context on a device that the process does
    not use, and leave an error behind for the next kernel of its thread. The backend's
    `Runtime` avoids them in one place, so events and memory come from there. Torch's
    own calls, also those of its allocators, are safe inside `relaxed` alone: all
    functions that move batches use it. Pure Python changes the mode of the thread by
    ctypes. If torch's CUDA runtime is not found there, a capture beside loading threads
    needs ``capture_error_mode="thread_local"``.

    Note: [own streams]. Streams of torch's pool have several owners: after 32 streams
    it returns the first one again. On such a stream a copy would wait for the work of
    the other owner, and a capture there would refuse all copies. So CUDA creates the
    copy streams.

    Args:
        engines: the device types that the backend's ``send`` supports.
    """

    probe: TorchProbe = TorchProbe()

    def __init__(self, engines: Collection[str] = ()) -> None:
        self._engines = engines
        self._streams: dict[torch.device, Any] = {}
        self._lock = threading.RLock()  # a handler of a signal may run while it is held

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Return True if copies can read this CPU tensor in place."""
        return tensor.is_pinned()

    def pinned(self, nbytes: int) -> torch.Tensor:
        """Return pinned bytes that stay untouched while a copy reads them.

        They are a block of torch's caching host allocator, which records its copies.
        """
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)

    def allocate(self, sizes: Sequence[int], stream: Any) -> list[torch.Tensor]:
        """Return blocks of these numbers of bytes that belong to ``stream``.

        Earlier work of ``stream`` may still use them, but no other work.
        """
        runtime = self._runtime(stream.device)
        if runtime is not None:
            return runtime.allocate(sizes, stream)
        with self.using(stream):
            like = {"dtype": torch.uint8, "device": stream.device}
            return [torch.empty(nbytes, **like) for nbytes in sizes]

    def copy_stream(self, device: torch.device) -> Any:
        """Return the one copy stream of ``device`` in this process."""
        with self._lock:
            if device not in self._streams:
                gpu_record.warn_if_untested(device)
                self._streams.setdefault(device, self._own_stream(device))
            return self._streams[device]

    def _own_stream(self, device: torch.device) -> Any:
        """Return a stream that no other code has, if possible."""
        calls = self._calls(device)
        if calls is None:
            return self.new_stream(device)
        with self.relaxed(device):
            self.current_stream(device)  # initialises CUDA
            return torch.cuda.ExternalStream(calls.create_stream(device.index), device)

    def new_stream(self, device: torch.device) -> Any:
        """Return a stream of ``device`` for a thread of its own.

        It is of torch's pool, which has 32 streams.
        """
        return torch.get_device_module(device).Stream(device=device)

    def current_stream(self, device: torch.device) -> Any:
        """Return the stream that is current on ``device`` for this thread.

        No context is opened on another device.
        """
        module = torch.get_device_module(device)
        with module.device(device):
            return module.current_stream(device)

    @restoring
    def using(self, stream: Any) -> Generator[None, None, None]:
        """Make ``stream`` the current one of its device for this thread.

        Torch's context manager of a stream alone opens a context on the device that was
        current before.
        """
        module = torch.get_device_module(stream.device)
        with module.device(stream.device), module.stream(stream):
            yield

    def holds(self, device: torch.device, tensor: torch.Tensor) -> bool:
        """Return True if the tensor is in the memory of ``device``."""
        return tensor.device == device

    def copy(self, dst: torch.Tensor, src: torch.Tensor, stream: Any) -> None:
        """Queue a copy on ``stream``; the host does not wait."""
        with self.using(stream):
            dst.copy_(src, non_blocking=True)

    def record(self, stream: Any) -> Any:
        """Return an event after all work that is queued on ``stream`` so far.

        It is of the backend, or else of torch.
        """
        runtime = self._runtime(stream.device)
        return stream.record_event() if runtime is None else runtime.record(stream)

    def wait(self, stream: Any, event: Any) -> None:
        """Make ``stream`` wait for ``event``; the host does not wait."""
        if isinstance(event, backend.RecordedEvent):
            event.wait(stream)
        else:
            stream.wait_event(event)

    def is_done(self, event: Any) -> bool:
        """Return True if all work before ``event`` is done; the host does not wait.

        An event of torch is not queried if that ends a capture of this thread.
        """
        if isinstance(event, backend.RecordedEvent):
            return event.is_done()
        return not _is_capturing_here(event.device) and bool(event.query())

    def fence(self, device: torch.device) -> Fence:
        """Return a fence after the work on this thread's current stream of ``device``.

        The stream may be under graph capture. Then the fence passes after the capture.
        """
        runtime = self._runtime(device)
        if runtime is not None:
            return runtime.fence()
        return TorchFence(self.current_stream(device), self)

    def keep(self, tensors: Sequence[torch.Tensor], stream: Any) -> None:
        """Keep the memory, once freed, from reuse until ``stream`` is done with it.

        The backend records the use, and limits the memory in use; or torch does, whose
        allocator reuses the memory only after the host has seen that the device is
        done.
        """
        runtime = self._runtime(stream.device)
        others = tensors if runtime is None else runtime.keep(tensors, stream)
        for tensor in others:
            tensor.record_stream(stream)

    def relaxed(self, device: torch.device) -> AbstractContextManager[None]:
        """Let no call of this thread end a graph capture in another thread.

        See Note: [calls and captures].
        """
        calls = self._calls(device)
        return nullcontext() if calls is None else _Relaxed(calls, device.index)

    def is_idle(self, stream: Any) -> bool:
        """Return True if copies on ``stream`` cost less than on the copy stream.

        It has no work left, and needs no events of another stream. Torch's events would
        cost more than they save.
        """
        runtime = self._runtime(stream.device)
        return runtime is not None and runtime.is_idle(stream)

    def is_capturing(self, stream: Any) -> bool:
        """Return True if work queued on ``stream`` is captured into a graph."""
        runtime = self._runtime(stream.device)
        if runtime is not None:
            return runtime.is_capturing(stream)
        with self.using(stream):
            return _is_capturing_here(stream.device)

    def has_engine(self, device: torch.device) -> bool:
        """Return True if the backend's ``send`` supports ``device`` and its streams."""
        return device.type in self._engines

    def _runtime(self, device: torch.device) -> backend.Runtime | None:
        has_one = device.type in self._engines
        return backend.Runtime(device.type) if has_one else None

    def _calls(self, device: torch.device) -> backend.Runtime | Cudart | None:
        """Return the backend's runtime, or that of pure Python for CUDA."""
        if device.type != "cuda":
            return None
        return self._runtime(device) or _cudart.load()


class _Relaxed(AbstractContextManager[None]):
    """The block of `TorchDevice.relaxed`; a generator would take several times as long.

    Args:
        calls: exchanges the mode.
        device: the index of a device that is in use.
    """

    __slots__ = ("_before", "_calls", "_device")

    def __init__(self, calls: backend.Runtime | Cudart, device: int) -> None:
        self._calls, self._device, self._before = calls, device, _RELAXED

    def __enter__(self) -> None:
        self._before = self._calls.exchange_capture_mode(_RELAXED, self._device)

    def __exit__(self, *error: object) -> None:
        self._calls.exchange_capture_mode(self._before, self._device)


class TorchReturn(TorchDevice):
    """The interface of device-to-host copies on torch, with its own copy streams.

    A stream shared with host-to-device copies would delay later batches until the
    results are copied. The bus can be busy in both directions at a time.
    """

    def device_of(self, tensor: torch.Tensor) -> torch.device | None:
        """Return the device of a tensor, or None if it is on the host."""
        return None if tensor.is_cpu else tensor.device

    def packs(self, device: torch.device) -> bool:
        """Return True if `pack` supports tensors of ``device``."""
        return device.type in backend.devices

    def pack(
        self,
        slab: torch.Tensor,
        leaves: Sequence[torch.Tensor],
        plan: backend.SlabPlan,
    ) -> None:
        """Queue the packing of leaves on the current stream of their device."""
        backend.pack(slab, leaves, plan)

    def wait_on_host(self, event: Any) -> None:
        """Block the host until all work before ``event`` is done."""
        if isinstance(event, backend.RecordedEvent):
            event.synchronize()
            return
        with self.relaxed(event.device):
            event.synchronize()


class TorchFence:
    """An event of torch that is recorded when its stream is not under graph capture.

    Args:
        stream: the stream whose work the event follows.
        api: the interface of its device.
    """

    def __init__(self, stream: Any, api: TorchDevice) -> None:
        self._stream, self._api, self._event = stream, api, None
        self._record()

    def is_done(self) -> bool:
        """Return True if the work is done; False while the stream is under capture."""
        if self._event is None:
            self._record()
        return self._event is not None and self._api.is_done(self._event)

    def _record(self) -> None:
        if not self._api.is_capturing(self._stream):
            self._event = self._api.record(self._stream)


def relaxed_here(device: torch.device | None = None) -> AbstractContextManager[None]:
    """Return `TorchDevice.relaxed` for a device, if CUDA is in use.

    None: CUDA's current device.
    """
    if not torch.cuda.is_initialized():
        return nullcontext()
    if device is None:
        device = torch.device("cuda", torch.cuda.current_device())
    return torch_device.relaxed(device)


def _is_capturing_here(device: torch.device) -> bool:
    """Return True if a graph is captured on the current stream of this thread."""
    module = torch.get_device_module(device)
    ask = getattr(module, "is_current_stream_capturing", None)
    return ask is not None and bool(ask())


def keep_parts(
    api: TorchDevice, device: torch.device, tensor: torch.Tensor, stream: Any
) -> torch.Tensor:
    """Keep the memory of a tensor of ``device`` from reuse; see `TorchDevice.keep`.

    Torch records no sparse tensor, so its indices and values are kept.
    """
    parts = [part for part in dense_parts(tensor) if api.holds(device, part)]
    api.keep(parts, stream)
    return tensor


def row_sums(data: torch.Tensor, row: int) -> torch.Tensor:
    """Return a checksum of every ``row`` bytes; the last row may be shorter.

    Each is a sum of 32-bit words times 20-bit weights, below 2**62. Without weights,
    exchanged words, or signs changed in pairs of float32, would not change the sum.

    Args:
        data: ``torch.uint8`` ``(n,)``.
        row: 64 to 4096, a multiple of 4.

    Returns:
        ``torch.int64`` ``(ceil(n / row),)``.
    """
    weights = _weights(row // 4, data.device)
    sums = [torch.empty(0, dtype=torch.int64, device=data.device)]
    for chunk in data.split(_CHECKSUM_CHUNK):
        missing = -chunk.numel() % row
        if missing:
            chunk = torch.nn.functional.pad(chunk, (0, missing))
        elif chunk.storage_offset() % 4 or chunk.data_ptr() % 4:
            chunk = chunk.clone()
        words = chunk.view(torch.int32).view(-1, row // 4)
        sums.append((words * weights).sum(1))
    return torch.cat(sums)


def _weights(count: int, device: torch.device) -> torch.Tensor:
    """Return odd numbers below 2**20 without a simple relation between them.

    They are computed on the device: a copy from the host would block.
    """
    mixed = torch.arange(1, count + 1, device=device) * 0x9E3779B1 & 0xFFFFFFFF
    mixed = (mixed ^ mixed >> 15) * 0x85EBCA6B & 0xFFFFFFFF
    return (mixed ^ mixed >> 13) & 0xFFFFF | 1


#: The real interface for host-to-device copies.
torch_device: TorchDevice = TorchDevice(backend.transfers)
#: The real interface for device-to-host copies.
torch_return: TorchReturn = TorchReturn(backend.transfers)
