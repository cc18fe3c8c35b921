"""What a flight asks of a device, and torch's answers."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch

from .. import backend
from ._checksums import TorchProbe


class Fence(Protocol):
    """All work that was queued on current streams of a thread."""

    def is_done(self) -> bool:
        """Return True if that work is done; the host does not wait."""


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

    def new_stream(self, device: torch.device) -> Any:
        """Return a stream of ``device`` for a thread of its own."""

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

    def fence(self, device: torch.device) -> Fence:
        """Return a fence behind this thread's current stream of ``device``.

        The stream may be under graph capture. Then the fence passes after the capture.
        """

    def keep(self, tensor: torch.Tensor, stream: Any) -> None:
        """Keep the memory, once freed, from reuse until ``stream`` is done with it."""

    def is_capturing(self, stream: Any) -> bool:
        """Tell whether what is queued on ``stream`` goes to a graph instead."""

    def has_engine(self, device: torch.device) -> bool:
        """Tell whether the backend's ``send`` reaches ``device`` by these streams."""


class TorchDevice:
    """The device interface on torch's allocators and streams, for any accelerator.

    Note: [events and captures]. Each call to CUDA has to avoid three things: it may
    end a graph capture in another thread, open a context on a device that the process
    does not use, and leave an error behind for the next kernel of its thread. The
    backend's `Runtime` avoids them in one place, so events come from there. Torch's
    own events, which pure Python uses, end a capture in another thread if they are
    asked meanwhile. Such a capture needs ``capture_error_mode="thread_local"``.

    Args:
        engines: device types that the backend's ``send`` knows.
    """

    probe = TorchProbe()

    def __init__(self, engines: Collection[str] = ()) -> None:
        self._engines = engines
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
                self._streams[device] = self.new_stream(device)
            return self._streams[device]

    def new_stream(self, device: torch.device) -> Any:
        """Return one of the streams that torch has; beyond 32 they are shared."""
        return torch.get_device_module(device).Stream(device=device)

    def current_stream(self, device: torch.device) -> Any:
        """Return the current stream of ``device``; open no context on another one."""
        module = torch.get_device_module(device)
        with module.device(device):
            return module.current_stream(device)

    @contextmanager
    def using(self, stream: Any) -> Iterator[None]:
        """Use torch's context managers.

        Alone, that of a stream opens a context on the device that was current before.
        """
        module = torch.get_device_module(stream.device)
        with module.device(stream.device), module.stream(stream):
            yield

    def holds(self, device: torch.device, tensor: torch.Tensor) -> bool:
        """Compare the devices."""
        return tensor.device == device

    def copy(self, dst: torch.Tensor, src: torch.Tensor, stream: Any) -> None:
        """Queue a non-blocking copy."""
        with self.using(stream):
            dst.copy_(src, non_blocking=True)

    def record(self, stream: Any) -> Any:
        """Record an event of the backend, or else a new one of torch."""
        runtime = self._runtime(stream.device)
        return stream.record_event() if runtime is None else runtime.record(stream)

    def wait(self, stream: Any, event: Any) -> None:
        """Queue a wait."""
        if isinstance(event, backend.RecordedEvent):
            event.wait(stream)
        else:
            stream.wait_event(event)

    def is_done(self, event: Any) -> bool:
        """Ask the event, but not torch's if that would end a capture of this thread."""
        if isinstance(event, backend.RecordedEvent):
            return event.is_done()
        return not _is_capturing_here(event.device) and bool(event.query())

    def fence(self, device: torch.device) -> Fence:
        """Return a fence of the backend, or else an event of torch."""
        runtime = self._runtime(device)
        if runtime is not None:
            return runtime.fence()
        return TorchFence(self.current_stream(device), self)

    def keep(self, tensor: torch.Tensor, stream: Any) -> None:
        """Tell torch's caching allocator about one more stream."""
        tensor.record_stream(stream)

    def is_capturing(self, stream: Any) -> bool:
        """Ask torch, which knows it of the current stream only."""
        with self.using(stream):
            return _is_capturing_here(stream.device)

    def has_engine(self, device: torch.device) -> bool:
        """Look the device's type up."""
        return device.type in self._engines

    def _runtime(self, device: torch.device) -> backend.Runtime | None:
        has_one = device.type in self._engines
        return backend.Runtime(device.type) if has_one else None


class TorchFence:
    """An event of torch that is recorded when its stream is not under graph capture.

    Args:
        stream: behind whose work it is recorded.
        api: of its device.
    """

    def __init__(self, stream: Any, api: DeviceApi) -> None:
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


def _is_capturing_here(device: torch.device) -> bool:
    """Return True if a graph is captured on the current stream of this thread."""
    module = torch.get_device_module(device)
    ask = getattr(module, "is_current_stream_capturing", None)
    return ask is not None and bool(ask())


#: The one real device interface.
torch_device = TorchDevice(backend.transfers)
