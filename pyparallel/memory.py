"""The host memory of batches: how much of it is kept for the next one.

A large batch is written several times faster into memory that has been written before:
the system clears every fresh page first. So with the compiled backend the memory of a
batch of 1 MiB or more that `collate` makes in the main process is kept when its last
tensor dies, and handed to the next batch. What is kept is bounded by a number of bytes,
and by time: what nothing asked for is given back to the system.

Not affected: batches made in ``DataLoader`` workers, which lie in shared memory, and
pure Python, where torch's allocator decides.
"""

from __future__ import annotations

import math
import operator
from typing import NamedTuple

from . import _backend
from ._errors import BatchTypeError, BatchValueError, kind


class CacheInfo(NamedTuple):
    """What is kept.

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


def cache_info() -> CacheInfo:
    """Return what is kept; zeros in pure Python, which keeps nothing.

    Example:
        >>> cache_info().in_use >= 0
        True
    """
    return CacheInfo(*_backend.cache_info())


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
            f"{kind(nbytes)} and {kind(idle_seconds)}."
        ) from None
    if not 0 <= limit < 2**63:
        raise BatchValueError(f"{where} nbytes must be 0 or more, but is {nbytes}.")
    if not (math.isfinite(seconds) and 1e-3 <= seconds <= 366 * 86400):
        raise BatchValueError(
            f"{where} idle_seconds must be between 0.001 and a year, but is "
            f"{idle_seconds}."
        )
    _backend.bound_cache(limit, seconds)


def empty_cache() -> int:
    """Give back to the system all that waits; return how many bytes that was."""
    return _backend.clear_cache()
