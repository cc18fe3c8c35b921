"""How fast bytes are copied here: on the host, and from it to every device."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from ..loader import preflight

#: What is copied at a time; more than most caches hold.
NBYTES = 64 << 20
_MOST_SECONDS = 0.15
_MOST_REPEATS = 10


def bandwidth() -> dict[str, Any]:
    """Return GB/s; takes below a second and twice `NBYTES` of memory at most."""
    left = preflight.Machine().memory_left()
    nbytes = min(NBYTES, left[0] // 16 if left else NBYTES)
    if not nbytes:
        return {"copied_nbytes": 0, "memcpy_gb_per_s": None, "to_devices": []}
    return {
        "copied_nbytes": nbytes,
        "memcpy_gb_per_s": memcpy(nbytes),
        "to_devices": [
            to_device(torch.device("cuda", i), nbytes)
            for i in range(torch.cuda.device_count())
        ],
    }


def memcpy(nbytes: int) -> float:
    """Return GB/s of one thread that copies bytes; each is counted once."""
    source, target = bytearray(nbytes), bytearray(nbytes)
    read, written = memoryview(source), memoryview(target)

    def copy() -> None:
        written[:] = read

    return best(copy, nbytes)


def to_device(device: torch.device, nbytes: int) -> dict[str, Any]:
    """Return GB/s to ``device`` from page-locked and from pageable memory.

    Stream: copies are queued on the current stream, which the host waits for.
    """
    found: dict[str, Any] = {"device": str(device), "error": None}
    for kind in ("pinned", "pageable"):
        found[f"{kind}_gb_per_s"] = None
        try:
            source = torch.ones(nbytes, dtype=torch.uint8)
            if kind == "pinned":
                source = source.pin_memory()
            speed = _copying(source, device)
        except RuntimeError as error:  # no memory left, say
            found["error"] = f"{type(error).__name__}: {error}"
        else:
            found[f"{kind}_gb_per_s"] = speed
    return found


def _copying(source: torch.Tensor, device: torch.device) -> float:
    target = torch.empty_like(source, device=device)
    wait = torch.get_device_module(device).synchronize

    def copy() -> None:
        target.copy_(source, non_blocking=True)
        wait(device)

    return best(copy, source.nbytes)


def best(
    copy: Callable[[], None],
    nbytes: int,
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """Return GB/s of the fastest of some copies, after one that is not counted."""
    copy()  # fresh pages come with it
    started = now = clock()
    fastest = float("inf")
    for _ in range(_MOST_REPEATS):
        before = now
        copy()
        now = clock()
        fastest = min(fastest, now - before)
        if now - started > _MOST_SECONDS:
            break
    return nbytes / max(fastest, 1e-9) / 1e9
