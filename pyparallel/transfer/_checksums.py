"""Checksums of bytes, also of a device's; memory of a device that is overwritten."""

from __future__ import annotations

from typing import Any, Protocol

import torch

_CHUNK = 1 << 24  # bytes that are looked at together: it takes three times as many


class Probe(Protocol):
    """What this mode asks of a device, beside what a flight does."""

    def sums(self, block: torch.Tensor, row: int, stream: Any) -> torch.Tensor:
        """Queue `row_sums` of device bytes; return the host's memory for the result."""

    def fill(self, block: torch.Tensor, value: int, stream: Any) -> None:
        """Queue the overwriting of device bytes."""


class TorchProbe:
    """The probe in torch's operators."""

    def sums(self, block: torch.Tensor, row: int, stream: Any) -> torch.Tensor:
        """Sum on the device, and copy the sums to page-locked memory."""
        with torch.get_device_module(block.device).stream(stream):
            sums = row_sums(block, row)
            shape, dtype = sums.shape, sums.dtype
            found = torch.empty(shape, dtype=dtype, device="cpu", pin_memory=True)
            return found.copy_(sums, non_blocking=True)

    def fill(self, block: torch.Tensor, value: int, stream: Any) -> None:
        """Fill on the stream."""
        with torch.get_device_module(block.device).stream(stream):
            block.fill_(value)


def row_sums(data: torch.Tensor, row: int) -> torch.Tensor:
    """Return a checksum of every ``row`` bytes, the last of which may be fewer.

    It is a sum of words of 32 bits with weights of 20, and below 2**62. Without weights
    words could change places, and float32 their signs in pairs.

    Args:
        data: ``torch.uint8`` ``(n,)``.
        row: 64 to 4096, a multiple of 4.

    Returns:
        ``torch.int64`` ``(ceil(n / row),)``.
    """
    weights = _weights(row // 4, data.device)
    sums = [torch.empty(0, dtype=torch.int64, device=data.device)]
    for chunk in data.split(_CHUNK):
        missing = -chunk.numel() % row
        if missing:
            chunk = torch.nn.functional.pad(chunk, (0, missing))
        elif chunk.storage_offset() % 4 or chunk.data_ptr() % 4:
            chunk = chunk.clone()
        words = chunk.view(torch.int32).view(-1, row // 4)
        sums.append((words * weights).sum(1))
    return torch.cat(sums)


def _weights(count: int, device: torch.device) -> torch.Tensor:
    """Return odd numbers below 2**20 between which there is no simple relation.

    They are made where they are used: a copy from the host would be waited for.
    """
    mixed = torch.arange(1, count + 1, device=device) * 0x9E3779B1 & 0xFFFFFFFF
    mixed = (mixed ^ mixed >> 15) * 0x85EBCA6B & 0xFFFFFFFF
    return (mixed ^ mixed >> 13) & 0xFFFFF | 1
