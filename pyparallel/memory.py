"""The host memory of batches: how much is kept for the next one, or page-locked.

A large batch is written several times faster into memory that has been written before:
the system clears every fresh page first. So with the compiled backend the memory of a
batch of 1 MiB or more that `collate` makes in the main process is kept when its last
tensor dies, and handed to the next batch. What is kept is bounded by a number of bytes,
and by time: what nothing asked for is given back to the system.

Not affected: batches made in ``DataLoader`` workers, which lie in shared memory, and
pure Python, where torch's allocator decides.

Batches that go to a device are packed into page-locked blocks on the way, and results
come back to page-locked slabs. Of each no more than a limit exist: `pinned_info`,
`set_pinned_limit`.
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
    """How much memory is kept for the next batches.

    Attributes:
        in_use: bytes of recyclable blocks that tensors use now.
        cached: bytes of blocks that wait for the next batch.
        limit: the most bytes that may wait.
        hits: how many batches found their memory waiting.
        misses: how many did not.
    """

    in_use: int
    cached: int
    limit: int
    hits: int
    misses: int


class PinnedInfo(NamedTuple):
    """How much is page-locked, for batches and results on their way.

    Attributes:
        in_use: bytes of blocks that are written, or read by copies under way. What a
            failed device may read for ever counts here for ever.
        cached: bytes of blocks that wait for the next batch: at most 64 MiB.
        limit: the most bytes that both may be together, and again the most that
            results may be.
        waits: how often the host had to wait for a copy because of the limit.
        results: bytes of slabs of `to_host` of which a tensor is alive.
    """

    in_use: int
    cached: int
    limit: int
    waits: int
    results: int


def cache_info() -> CacheInfo:
    """Return what is kept; zeros in pure Python, which keeps nothing.

    Example:
        >>> cache_info().in_use >= 0
        True
    """
    return CacheInfo(*backend.cache_info())


def set_cache_limit(nbytes: int, idle_seconds: float = 10.0) -> None:
    """Bound what is kept from now on, and give back at once what is above it.

    Args:
        nbytes: the most bytes that may wait for a batch; 0 keeps nothing. Until this is
            called it is 1 GiB, or an eighth of the machine's memory if that is less.
        idle_seconds: how long a block may wait.

    Raises:
        TypeError: ``nbytes`` is not an integer, or ``idle_seconds`` not a number.
        ValueError: ``nbytes`` is negative or beyond 64 bits; ``idle_seconds`` is not
            between a millisecond and a year.
    """
    where = "set_cache_limit:"
    try:
        limit, seconds = operator.index(nbytes), float(idle_seconds)
    except (TypeError, ValueError):
        raise BatchTypeError(
            f"{where} nbytes must be an integer and idle_seconds a number, but are "
            f"{type_name(nbytes)} and {type_name(idle_seconds)}."
        ) from None
    if not 0 <= limit < 2**63:
        raise BatchValueError(f"{where} nbytes must be 0 or more, but is {nbytes}.")
    if not (math.isfinite(seconds) and 1e-3 <= seconds <= 366 * 86400):
        raise BatchValueError(
            f"{where} idle_seconds must be between 0.001 and a year, but is "
            f"{idle_seconds}."
        )
    backend.bound_cache(limit, seconds)


def empty_cache() -> int:
    """Give back to the system all that waits; return how many bytes that was."""
    return backend.clear_cache()


def pinned_info() -> PinnedInfo:
    """Return what is page-locked.

    In pure Python only the limit and the results count: torch's allocator decides of
    the rest.

    Example:
        >>> pinned_info().cached <= 64 << 20
        True
    """
    return PinnedInfo(*backend.pinned_info(), host_slabs.in_use())


def set_pinned_limit(nbytes: int) -> None:
    """Bound the page-locked memory of batches for a device, and that of results.

    Batches are packed into blocks. At the limit the host waits, without the GIL, for
    the oldest copy of the same stream and packs into its block. So a batch of any size
    goes to the device; what a tight limit costs is time, and ``pinned_info().waits``
    counts it. A stream that has no block at all gets one, so that no device waits for
    another one: with n devices the blocks may take 4 MiB more for each but the first.

    Blocks above a lower limit are given back now, or when they have been read: to
    torch's allocator of page-locked memory, which may keep them.

    What `to_host` returns has as much for itself. Results that would go beyond it, with
    all that are alive, come to ordinary memory: the host waits for the copy at once,
    also in `start_to_host`, and the first time a `LoaderWarning` says so.

    Args:
        nbytes: the most bytes; at least 4 MiB, the largest block. Until this is called
            it is 1 GiB, or an eighth of the machine's memory if that is less.

    Raises:
        TypeError: ``nbytes`` is not an integer.
        ValueError: it is below 4 MiB, or beyond 64 bits.
    """
    where = "set_pinned_limit: nbytes"
    limit = check_int(nbytes, _LARGEST_BLOCK, where)
    if limit >= 2**63:
        raise BatchValueError(f"{where} must be less than 2**63, but is {nbytes}.")
    backend.bound_pinned(limit)
    host_slabs.limit = limit
