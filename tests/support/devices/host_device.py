"""The host as a synchronous device of the native engine."""

from __future__ import annotations

import contextlib
from typing import NamedTuple

import torch

CPU = torch.device("cpu")


class HostStream(NamedTuple):
    """The attributes of a stream that the engine reads."""

    stream_id: int
    device_index: int = -1
    device_type: int = 0
    device: torch.device = CPU


COPIES, MAIN, SIDE = map(HostStream, range(3))


class HostDevice:
    """The device interface for host memory, with an engine."""

    def is_capturing(self, stream):
        return False

    def __init__(self) -> None:
        self.current = MAIN
        self.kept: list[HostStream] = []
        self.idle: set[HostStream] = set()
        self.locked: set[int] = set()

    def lock(self, tensor: torch.Tensor) -> torch.Tensor:
        """Mark the storage of a tensor as pinned."""
        self.locked.add(tensor.untyped_storage().data_ptr())
        return tensor

    @contextlib.contextmanager
    def using(self, stream: HostStream):
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self.locked

    def relaxed(self, device: torch.device) -> contextlib.AbstractContextManager:
        return contextlib.nullcontext()

    def is_idle(self, stream: HostStream) -> bool:
        return stream in self.idle

    def allocate(self, sizes: list[int], stream: HostStream) -> list[torch.Tensor]:
        return [torch.full((nbytes,), 0xCC, dtype=torch.uint8) for nbytes in sizes]

    def copy_stream(self, device: torch.device) -> HostStream:
        return COPIES

    def current_stream(self, device: torch.device) -> HostStream:
        return self.current

    def keep(self, tensors: list[torch.Tensor], stream: HostStream) -> None:
        self.kept += [stream] * len(tensors)

    def has_engine(self, device: torch.device) -> bool:
        return True
