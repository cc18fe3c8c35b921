"""Integers that the host knows, as a tensor where the data are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..transfer import to_device
from . import allocation


def integers(
    values: Sequence[Any], shape: tuple[int, ...], device: torch.device
) -> torch.Tensor:
    """Return a contiguous ``torch.int64`` tensor of this shape with these values.

    On the host it lies where `allocation.empty` puts it.

    Stream: to a device with streams it goes as everything in `to_device.send`, from a
    page-locked slab: the host does not wait for it, as it does for a plain copy.
    """
    host = torch.tensor(values, dtype=torch.int64, device="cpu").view(shape)
    if device.type in ("cpu", "meta"):
        return allocation.empty(shape, torch.int64, device).copy_(host)
    (sent,) = to_device.start_copy([host], device)()
    return sent
