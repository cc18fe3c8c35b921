"""What a flight asks of a device, and torch's answers."""

from __future__ import annotations

import threading
from collections.abc import Collection
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from . import _backend
from ._probe import TorchProbe


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

    def keep(self, tensor: torch.Tensor, stream: Any) -> None:
        """Keep the memory, once freed, from reuse until ``stream`` is done with it."""

    def is_capturing(self, stream: Any) -> bool:
        """Tell whether what is queued on ``stream`` goes to a graph instead."""

    def has_engine(self, device: torch.device) -> bool:
        """Tell whether the backend's ``send`` reaches ``device`` by these streams."""


class TorchDevice:
    """The device interface on torch's allocators and streams, for any accelerator.

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
        """Return the current stream of ``device``."""
        return torch.get_device_module(device).current_stream(device)

    def using(self, stream: Any) -> AbstractContextManager[Any]:
        """Return torch's own context manager."""
        context = torch.get_device_module(stream.device).stream(stream)
        return context  # type: ignore[no-any-return]  # torch's modules have no types

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

    def is_capturing(self, stream: Any) -> bool:
        """Ask torch, which tells it of the current stream only."""
        module = torch.get_device_module(stream.device)
        ask = getattr(module, "is_current_stream_capturing", None)
        if ask is None:
            return False
        with module.stream(stream):
            return bool(ask())

    def has_engine(self, device: torch.device) -> bool:
        """Look the device's type up."""
        return device.type in self._engines


#: The one real device interface.
torch_device = TorchDevice(_backend.transfers)
