"""Inspect and limit the recycled and the pinned host memory of batches.

The operating system clears each fresh page, so a write of a large batch to used memory
is several times faster. With the compiled backend, `collate` in the main process
therefore recycles the memory of batches of 1 MiB and more: when the last tensor of a
batch dies, its memory is kept for the next batch. A number of bytes limits the kept
memory. Blocks that no batch takes within some seconds return to the operating system.

Two kinds of batches do not use this memory: those of ``DataLoader`` workers, which use
shared memory, and those of pure Python, which use torch's allocator.

Batches for a device are packed into pinned blocks, and results of `to_host` are copied
to pinned slabs. A limit applies to each: see `pinned_info` and `set_pinned_limit`.
"""

from __future__ import annotations

import math
import operator
from typing import NamedTuple

from . import backend
from .core.errors import BatchTypeError, BatchValueError, check_int, type_name
from .transfer.pinned_results import host_slabs

__all__ = [
    "CacheInfo",
    "PinnedInfo",
    "cache_info",
    "empty_cache",
    "pinned_info",
    "set_cache_limit",
    "set_pinned_limit",
]

_LARGEST_BLOCK = 4 << 20  # kLargestBlock of csrc/transfer/staging.h


class CacheInfo(NamedTuple):
    """The recycled memory of batches.

    Attributes:
        in_use: bytes of recyclable blocks that tensors use.
        cached: bytes of blocks that are kept for the next batch.
        limit: the most bytes of kept blocks.
        hits: the number of batches that used a kept block.
        misses: the number of batches that needed a new block.
    """

    in_use: int
    cached: int
    limit: int
    hits: int
    misses: int


class PinnedInfo(NamedTuple):
    """The pinned memory of copies between host and devices.

    Attributes:
        in_use: bytes of blocks that are being packed or copied. Blocks that a failed
            device may still read count here until the process ends.
        cached: bytes of blocks that are kept for the next batch, at most 64 MiB.
        limit: the most bytes of ``in_use`` and ``cached`` together, and also the most
            bytes of ``results``.
        waits: the number of times that the host waited for a copy due to the limit.
        results: bytes of slabs of `to_host` that still have a live tensor.
    """

    in_use: int
    cached: int
    limit: int
    waits: int
    results: int


def cache_info() -> CacheInfo:
    """Return the state of the recycled memory; zeros in pure Python.

    Example:
        >>> cache_info().in_use >= 0
        True
    """
    return CacheInfo(*backend.cache_info())


def set_cache_limit(nbytes: int, idle_seconds: float = 10.0) -> None:
    """Limit the kept memory, and free the excess now.

    Args:
        nbytes: the most bytes of kept blocks; 0 keeps none. The default limit is 1 GiB,
            or an eighth of the machine's memory if that is less.
        idle_seconds: the longest time that an unused block is kept.

    Raises:
        TypeError: ``nbytes`` is not an integer, or ``idle_seconds`` not a number.
        ValueError: ``nbytes`` is negative or does not fit in 64 bits; ``idle_seconds``
            is not between a millisecond and a year.
    """
    where = "set_cache_limit:"
    try:
        limit = operator.index(nbytes)
        seconds = float(idle_seconds)
    except (TypeError, ValueError):
        raise BatchTypeError(
            f"{where} nbytes must be an integer and idle_seconds a number, but are "
            f"{type_name(nbytes)} and {type_name(idle_seconds)}."
        ) from None
    except OverflowError:  # of an integer above the largest float
        seconds = math.inf
    if not 0 <= limit < 2**63:
        raise BatchValueError(f"{where} nbytes must be 0 or more, but is {nbytes}.")
    if not (math.isfinite(seconds) and 1e-3 <= seconds <= 366 * 86400):
        raise BatchValueError(
            f"{where} idle_seconds must be between 0.001 and a year, but is {seconds}."
        )
    backend.bound_cache(limit, seconds)


def empty_cache() -> int:
    """Free all kept blocks; return the number of freed bytes."""
    return backend.clear_cache()


def pinned_info() -> PinnedInfo:
    """Return the state of the pinned memory.

    In pure Python, only ``limit`` and ``results`` are known: torch's allocator manages
    the staging memory.

    Example:
        >>> pinned_info().cached <= 64 << 20
        True
    """
    return PinnedInfo(*backend.pinned_info(), host_slabs.in_use())


def set_pinned_limit(nbytes: int) -> None:
    """Limit the pinned memory of batches for devices, and that of results.

    Batches are packed into blocks. At the limit, the host waits, without the GIL, for
    the oldest copy on the same stream and reuses its block. So a batch of any size
    reaches the device, and a low limit only costs time: see ``pinned_info().waits``. A
    stream without a block always gets one, so that no stream waits for another stream.
    With n streams the blocks may therefore exceed the limit by 4 MiB for each stream
    but the first.

    Blocks above a lower limit are freed now, or when their copies are done. They return
    to torch's pinned memory allocator, which may keep them.

    A separate limit of the same size applies to the results of `to_host`. Results that
    would exceed it, together with all live results, go to pageable memory. The host
    then waits for their copy immediately, also in `start_to_host`. A `LoaderWarning`
    reports the first such result.

    Args:
        nbytes: the most bytes, at least 4 MiB (the largest block). The default limit is
            1 GiB, or an eighth of the machine's memory if that is less.

    Raises:
        TypeError: ``nbytes`` is not an integer.
        ValueError: ``nbytes`` is less than 4 MiB, or does not fit in 64 bits.
    """
    where = "set_pinned_limit: nbytes"
    limit = check_int(nbytes, _LARGEST_BLOCK, where)
    if limit >= 2**63:
        raise BatchValueError(f"{where} must be less than 2**63, but is {nbytes}.")
    backend.bound_pinned(limit)
    host_slabs.limit = limit
