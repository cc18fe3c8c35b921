"""Raise an error when the host waits for the GPU."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def forbid_synchronization() -> Iterator[None]:
    """Fail the operators of the block that synchronize with the device.

    torch warns at the first call of a process, after it has set the mode. As an error,
    that warning would leave the mode set for all later tests.
    """
    torch.cuda.synchronize()
    before = torch.cuda.get_sync_debug_mode()
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Synchronization debug mode")
            torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)
