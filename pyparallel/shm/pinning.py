"""Pin memory that torch did not allocate: the slabs of a ring."""

from __future__ import annotations

import contextlib
from typing import Any, Protocol

import torch

from .. import backend
from ..core.errors import LoaderWarning, warn_once
from ..transfer.device import Fence, TorchFence, torch_device


class Runtime(Protocol):
    """The part of the backend's ``Runtime`` that pins memory."""

    def pin(self, address: int, nbytes: int) -> int:
        """Pin memory for all devices; return 0, or an error code of CUDA."""

    def unpin(self, address: int) -> None:
        """Undo `pin`."""

    def fence(self) -> Fence:
        """Return a fence behind the current streams of this thread."""


class AcceleratorPinner:
    """Pin memory for the current accelerator, so that copies read it in place.

    Note: [copies of dropped batches]. torch's host allocator tracks the copies that
    read its own pinned memory and reuses the memory after them. It does not track the
    slabs. So when the last tensor of a batch is freed, an event is recorded on each
    current stream of that thread, one for each device in use. The slab is free when all
    events have passed.

    The events cover ``tensor.to(device, non_blocking=True)`` on a current stream. For a
    copy on another stream, which the current one does not wait for, the caller must
    keep the batch until the copy is done. `scatter` and `PreDataLoader` do so
    themselves. On a stream under graph capture, the event is recorded after the
    capture.

    Args:
        runtime: pins the memory.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    def pin(self, address: int, nbytes: int) -> bool:
        """Pin memory; return False, and warn once, if CUDA refuses."""
        error = self._runtime.pin(address, nbytes)
        if error == 0:
            return True
        warn_once(
            "PP208",
            f"DataLoader: CUDA cannot pin a ring slab of {nbytes} bytes (error "
            f"{error}), so torch copies every batch once more. Raise the limit of "
            "locked memory (ulimit -l), or decrease max_ring_bytes.",
            LoaderWarning,
        )
        return False

    def unpin(self, address: int) -> None:
        """Undo `pin`."""
        self._runtime.unpin(address)

    def fence(self) -> Fence:
        """Return a fence behind the current streams of this thread."""
        return self._runtime.fence()


class TorchRuntime:
    """The same, by torch's API, for the Python backend.

    Pinning ends a graph capture in another thread: see Note [events and captures] in
    ``transfer/device.py``. The fence covers the current device only.
    """

    def pin(self, address: int, nbytes: int) -> int:
        """Pin memory for all devices; return 0, or an error code of CUDA."""
        cudart: Any = torch.cuda.cudart()
        portable = 1  # cudaHostRegisterPortable: for every device
        error = int(cudart.cudaHostRegister(address, nbytes, portable))
        if error:
            # CUDA keeps the error for the next kernel launch of this thread: clear it.
            with contextlib.suppress(RuntimeError):
                torch.zeros(1, device="cuda")
        return error

    def unpin(self, address: int) -> None:
        """Undo `pin`."""
        cudart: Any = torch.cuda.cudart()
        cudart.cudaHostUnregister(address)

    def fence(self) -> Fence:
        """Return an event behind the current stream of the current device."""
        stream = torch_device.current_stream(torch.device("cuda"))
        return TorchFence(stream, torch_device)


def accelerator_pinner() -> AcceleratorPinner | None:
    """Return a pinner for the current accelerator, or None without CUDA."""
    if torch.version.cuda is None or not torch.cuda.is_available():
        return None
    has_native = "cuda" in backend.transfers
    runtime = backend.Runtime("cuda") if has_native else TorchRuntime()
    return AcceleratorPinner(runtime)
