"""Pin memory that torch did not allocate: the slabs of a ring."""

from __future__ import annotations

import mmap
import os

import torch

from .. import backend
from ..core.errors import LoaderWarning, warn_once
from ..transfer.device import Fence
from ..transfer.engine import keep_alive


class Pinner:
    """Pin memory for the current accelerator, so that copies read it in place.

    Note: [copies of dropped batches]. torch's host allocator tracks the copies that
    read its own pinned memory, on any stream, and reuses the memory after them. The
    slabs need the same: a user may copy a batch on a side stream and drop it at once.
    So the backend records an event behind each copy that torch queues from a slab, and
    a dropped slab is free when these events have passed. Copies of `scatter` and
    `PreDataLoader` hold the slab themselves (Note [in-place sources]).

    A fence behind all work of the device would need no help of torch. But the wait for
    a device ends every graph capture that begins meanwhile (Note [foreign copies] in
    ``csrc``), and a host that runs ahead of the device would find no free slab. So
    without that help, `accelerator_pinner` returns None. torch's pinning thread then
    copies each batch into memory of torch, as it does for torch's own loader.

    Args:
        runtime: pins memory for all devices, and records events behind torch's copies.
    """

    def __init__(self, runtime: backend.Runtime) -> None:
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
        """Undo `pin`, before the memory is unmapped or pinned again."""
        self._runtime.unpin(address)

    def fence(self, address: int) -> Fence | None:
        """Return a fence behind the copies of pinned memory since the last call.

        Returns:
            None if the end of a copy is unknown. The memory must not be used again.
        """
        return self._runtime.take_copies(address)


def accelerator_pinner() -> Pinner | None:
    """Return a pinner for the current accelerator; None if torch must pin batches."""
    if torch.version.cuda is None or not torch.cuda.is_available():
        return None
    if "cuda" not in backend.transfers:
        return None
    runtime = backend.Runtime("cuda")
    return Pinner(runtime) if runtime.observe_copies() else None


def unpin_all(
    pid: int,
    pinner: Pinner,
    pinned_nbytes: dict[int, int],
    addresses: list[int],
    memory: mmap.mmap,
) -> None:
    """Unpin all slabs of a freed ring; while a device reads them, it is not freed.

    Pages that could not be unpinned stay mapped. Otherwise another ring could be mapped
    at their addresses, which the device would still take for pinned ones.
    """
    if pid != os.getpid():  # a forked copy, which has not pinned them
        return
    for slab, nbytes in pinned_nbytes.items():
        if nbytes > 0:
            try:
                pinner.unpin(addresses[slab])
            except RuntimeError:  # the next call of the program raises it
                keep_alive.leak(keep_alive.hold(memory))
