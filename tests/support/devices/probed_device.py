"""Fake devices for the checks of PYPARALLEL_DEBUG=1."""

from __future__ import annotations

import threading
from typing import Any

import torch

from pyparallel.transfer import device as checksums
from tests.support.devices.fake_device import FakeDevice, PinnedRing, memory


class FakeProbe:
    """Sums and fills by address, in stream order, like a device."""

    def sums(self, block: torch.Tensor, row: int, stream: Any) -> torch.Tensor:
        found = torch.empty(-(-block.numel() // row), dtype=torch.int64)
        where = memory(block.data_ptr(), block.numel())
        stream.queue(
            lambda: found.copy_(checksums.row_sums(torch.from_numpy(where), row))
        )
        return found

    def fill(self, block: torch.Tensor, value: int, stream: Any) -> None:
        stream.queue(memory(block.data_ptr(), block.numel()).fill, value)


class Device(FakeDevice):
    probe = FakeProbe()


class ProbedRing(PinnedRing):
    probe = FakeProbe()


class Trampling(Device):
    """One byte of staging memory is overwritten before its copy."""

    def copy(self, dst, src, stream):
        src[64 * 2 + 66] += 1
        super().copy(dst, src, stream)


def passed(device: FakeDevice) -> None:
    """Wait for all queued work, including the checks."""
    device.wait(device.copies, device.record(device.main))
    assert device.record(device.copies).wait(30)
    device.wait(device.main, device.record(device.side))
    assert device.record(device.main).wait(30)


def held_back(device: FakeDevice) -> threading.Event:
    """Let the copies wait until the event is set."""
    gate = threading.Event()
    device.wait(device.copies, gate)
    return gate


def stale(tensor: torch.Tensor) -> Any:
    return memory(tensor.data_ptr(), tensor.nbytes)
