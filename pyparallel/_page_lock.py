"""Page-locked memory that torch did not allocate: the slabs of a ring."""

from __future__ import annotations

from typing import Any

import torch

from ._errors import LoaderWarning, warn_once


class AcceleratorPageLock:
    """Page-locks memory for the current accelerator, so that it is read in place.

    Note: [copies of dropped batches]. torch's own page-locked memory is not reused
    before the copies that read it are done, because its allocator sees them; of this
    memory it knows nothing. So when the last tensor of a batch dies, an event is
    recorded on the stream that is current in that thread, and the slab is not free
    before it has passed. It covers ``tensor.to(device, non_blocking=True)`` on that
    stream. A copy on another stream, which the current one does not wait for, needs the
    batch to be kept until it is done, as pageable memory would. `scatter` and
    `PreDataLoader` keep it themselves.
    """

    def lock(self, address: int, nbytes: int) -> bool:
        """Page-lock memory; False, and one warning, if the system refuses."""
        runtime: Any = torch.cuda.cudart()
        portable = 1  # page-locked for every device, not only for the current one
        error = int(runtime.cudaHostRegister(address, nbytes, portable))
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
        runtime: Any = torch.cuda.cudart()
        runtime.cudaHostUnregister(address)

    def fence(self) -> Any:
        """Return an event behind what is queued on this thread's current stream."""
        return torch.accelerator.current_stream().record_event()

    def is_done(self, mark: Any) -> bool:
        """Tell whether the event has passed."""
        return bool(mark.query())

    def wait(self, mark: Any) -> None:
        """Let the host wait for the event."""
        mark.synchronize()


def for_accelerator() -> AcceleratorPageLock | None:
    """Return how to page-lock for the accelerator there is, or None."""
    if torch.version.cuda is None or not torch.cuda.is_available():
        return None
    return AcceleratorPageLock()
