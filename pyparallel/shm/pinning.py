"""Page-locked memory that torch did not allocate: the slabs of a ring."""

from __future__ import annotations

import contextlib
from typing import Any, Protocol

import torch

from .. import backend
from ..core.errors import LoaderWarning, warn_once
from ..transfer.device import Fence, TorchFence, torch_device


class Runtime(Protocol):
    """The part of the backend's ``Runtime`` that pins memory of others."""

    def pin(self, address: int, nbytes: int) -> int:
        """Pin memory for all devices; return 0, or the code of an error."""

    def unpin(self, address: int) -> None:
        """Undo `pin`."""

    def fence(self) -> Fence:
        """Return a fence behind the current streams of this thread."""


class AcceleratorPageLock:
    """Page-locks memory for the current accelerator, so that it is read in place.

    Note: [copies of dropped batches]. torch's own page-locked memory is not reused
    before the copies that read it are done, because its allocator sees them; of this
    memory it knows nothing. So when the last tensor of a batch dies, an event is
    recorded on each stream that is current in that thread, one for each device in use,
    and the slab is not free before they have passed. They cover
    ``tensor.to(device, non_blocking=True)`` on such a stream. A copy on another stream,
    which the current one does not wait for, needs the batch to be kept until it is
    done, as pageable memory would. `scatter` and `PreDataLoader` keep it themselves. A
    stream under graph capture takes its event when the capture is over.

    Args:
        runtime: pins the memory.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    def lock(self, address: int, nbytes: int) -> bool:
        """Page-lock memory; False, and one warning, if the system refuses."""
        error = self._runtime.pin(address, nbytes)
        if error == 0:
            return True
        warn_once(
            "PP208",
            f"DataLoader: a slab of {nbytes} bytes must be page-locked, but CUDA "
            f"refuses with error {error}. Raise the limit of locked memory (ulimit -l) "
            "or lower max_ring_bytes. Until then torch copies every batch once more.",
            LoaderWarning,
        )
        return False

    def unlock(self, address: int) -> None:
        """Undo `lock`."""
        self._runtime.unpin(address)

    def fence(self) -> Fence:
        """Return a fence behind the current streams of this thread."""
        return self._runtime.fence()


class TorchRuntime:
    """The same by torch, for pure Python.

    Pinning ends a graph capture in another thread: see Note [events and captures] in
    ``transfer/device.py``. The fence covers the current device alone.
    """

    def pin(self, address: int, nbytes: int) -> int:
        """Register the memory."""
        cudart: Any = torch.cuda.cudart()
        portable = 1  # pinned for every device, not only for the current one
        error = int(cudart.cudaHostRegister(address, nbytes, portable))
        if error:
            # The error stays in the thread, and its next kernel launch raises it.
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


def for_accelerator() -> AcceleratorPageLock | None:
    """Return how to page-lock for the accelerator there is, or None."""
    if torch.version.cuda is None or not torch.cuda.is_available():
        return None
    has_native = "cuda" in backend.transfers
    runtime = backend.Runtime("cuda") if has_native else TorchRuntime()
    return AcceleratorPageLock(runtime)
