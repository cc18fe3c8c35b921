"""Divide samples into batches of similar sizes, as a k-d tree divides points.

All windows of a block are divided at once, level by level: each level sorts all
segments of the block by size. A segment is a run of samples that are still together.
Segments that need no more division are batches.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.int64]
Sizes = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float64]
Elements = Callable[[Sizes], Floats]
Load = Callable[[Sizes, Array], Floats]
#: The bits of a position in a sort key. A code of `size_codes` has 28 bits.
_POSITION_BITS = 35
#: The bits of 1.0 as a 32-bit float.
_BITS_OF_1 = 0x3F800000
#: The largest size that a code can represent.
MAX_SIZE = 2**31 - 1
#: A segment of more than this many batches is halved. A smaller one is cut batch by
#: batch, so that only its last batch is not full.
_CUT_BELOW = 4.0
#: Batches with less than this fraction of the budget are divided once more, together.
_FULL = 0.9
#: The number of times that batches which are not full are divided once more.
_ROUNDS = 3


def size_codes(sizes: Array) -> Array:
    """Return integers that grow with the logarithm of sizes.

    They are the bits of the sizes as 32-bit floats, which approximate the logarithm
    linearly between two powers of two. So equal sizes have equal codes on any machine.

    Args:
        sizes: sizes from 0 to `MAX_SIZE`, of any shape.
    """
    bits = (sizes.astype(np.float32) + np.float32(1)).view(np.int32)
    codes: Array = bits.astype(np.int64) - _BITS_OF_1
    return codes


def _sort_segments(codes: Array, counts: Array) -> Array:
    """Return the order of samples by segment, then by code, then by position.

    Segments of similar lengths are the rows of a matrix: many short sorts are several
    times as fast as one long sort, and sorts of packed integers as `numpy.lexsort`.

    Args:
        codes: the code of each sample in one dimension.
        counts: the numbers of samples of the segments.
    """
    keys = (codes << _POSITION_BITS) | np.arange(len(codes))
    powers = np.frexp(counts)[1]
    for power in np.unique(powers):
        is_similar = powers == power
        lengths = counts[is_similar]
        samples = np.repeat(is_similar, counts)
        is_used = np.arange(lengths.max()) < lengths[:, None]
        rows = np.full(is_used.shape, np.iinfo(np.int64).max)
        rows[is_used] = keys[samples]
        rows.sort(axis=1)
        keys[samples] = rows[is_used]
    keys &= (1 << _POSITION_BITS) - 1
    return keys


def _starts(counts: Array) -> Array:
    """Return the first position of each segment."""
    return np.cumsum(counts) - counts


def _sort_for_halves(
    sizes: Sizes, codes: Array, counts: Array, left: Array, elements: Elements
) -> Array:
    """Return the order of samples by segment, then along a dimension of the segment.

    It is the dimension along which two halves need the least elements with padding.

    Args:
        sizes: the sizes of the samples, ``(d, n)``.
        codes: their codes.
        counts: the numbers of samples of the segments.
        left: the numbers of samples of their first halves, 0 if not divided.
        elements: returns the elements of one padded sample of batches, from the largest
            sizes ``(d, m)``.
    """
    order = _sort_segments(codes[0], counts)
    if len(codes) == 1:
        return order
    halves = _interleave(left, counts - left)
    least = _elements_of(sizes.take(order, axis=1), halves, elements)
    for dim in range(1, len(codes)):
        other = _sort_segments(codes[dim], counts)
        needed = _elements_of(sizes.take(other, axis=1), halves, elements)
        np.copyto(order, other, where=np.repeat(needed < least, counts))
        np.minimum(least, needed, out=least)
    return order


def _interleave(left: npt.NDArray[Any], right: npt.NDArray[Any]) -> npt.NDArray[Any]:
    return np.stack([left, right], axis=1).ravel()


def _elements_of(sizes: Sizes, halves: Array, elements: Elements) -> Floats:
    """Return the elements of both halves of each segment, with padding."""
    largest = np.maximum.reduceat(sizes, _starts(halves), axis=1)
    both: Floats = (elements(largest) * halves).reshape(-1, 2).sum(axis=1)
    return both


def divide_by_count(
    sizes: Sizes, codes: Array, counts: Array, batch_size: int, elements: Elements
) -> Array:
    """Return the order in which consecutive samples of a window are batches.

    Every batch has ``batch_size`` samples, except the last one of a window.

    Args:
        sizes: the sizes of the samples of a block, ``(d, n)``.
        codes: their codes.
        counts: the numbers of samples of the windows of the block.
        batch_size: the number of samples of a batch.
        elements: as of `_sort_for_halves`.
    """
    order = np.arange(codes.shape[1])
    while counts.max() > batch_size:
        left = -(-counts // batch_size) // 2 * batch_size
        by_size = _sort_for_halves(sizes, codes, counts, left, elements)
        order = order[by_size]
        if len(codes) == 1:
            return order  # sorted along the only dimension
        sizes, codes = sizes.take(by_size, axis=1), codes.take(by_size, axis=1)
        counts = _interleave(left, counts - left)
        counts = counts[counts > 0]
    return order


def divide_by_budget(
    sizes: Sizes,
    codes: Array,
    counts: Array,
    load: Load,
    elements: Elements,
) -> tuple[Array, Array]:
    """Return the samples in the order of their batches, and the batches' lengths.

    Args:
        sizes: the sizes of the samples of a block, ``(d, n)``.
        codes: their codes.
        counts: the numbers of samples of the windows of the block.
        load: returns the fraction of the budget that batches need, from the largest
            sizes ``(d, m)`` and the numbers of samples ``(m,)``. Batches of 1 or less
            fit. It must not decrease with a size or a number.
        elements: as of `_sort_for_halves`.
    """
    orders, lengths = [], []
    order = np.arange(codes.shape[1])
    for attempt in range(_ROUNDS + 1):
        parts = sizes.take(order, axis=1), codes.take(order, axis=1)
        divider = _BudgetDivider(*parts, counts, load, elements)
        minimum = _FULL if attempt < _ROUNDS else 0.0
        by_batch, batches, rest = divider.divide(minimum)
        orders.append(order[by_batch])
        lengths.append(batches)
        if not len(rest):
            break
        order = order[rest]
        windows = max(1, len(order) * len(counts) // codes.shape[1])
        counts = split_evenly(len(order), windows)
    return np.concatenate(orders), np.concatenate(lengths)


def divide_by_total(totals: Array, max_total: int, max_batch_size: int) -> Array:
    """Return the lengths of consecutive batches, each as long as its budget permits.

    Args:
        totals: the need of each sample, at most ``max_total``.
        max_total: the budget of a batch.
        max_batch_size: the limit of samples of a batch, 0: no limit.
    """
    needed = np.cumsum(totals)
    most = max_batch_size or len(totals)
    ends, end, used = [0], 0, 0
    while end < len(totals):
        fitting = int(np.searchsorted(needed, used + max_total, "right"))
        end = min(fitting, end + most)
        used = int(needed[end - 1])
        ends.append(end)
    return np.diff(np.array(ends))


def split_evenly(total: int, parts: int) -> Array:
    """Return ``parts`` numbers with the sum ``total`` that differ by at most 1."""
    edges = np.arange(parts + 1) * total // parts
    return np.diff(edges)


class _BudgetDivider:
    """Divide windows until every segment fits the budget."""

    def __init__(
        self,
        sizes: Sizes,
        codes: Array,
        counts: Array,
        load: Load,
        elements: Elements,
    ) -> None:
        self.sizes, self.codes, self.counts = sizes, codes, counts
        self.load, self.elements = load, elements
        self.order = np.arange(codes.shape[1])
        self.is_full = np.zeros(len(counts), dtype=bool)

    def divide(self, minimum: float) -> tuple[Array, Array, Array]:
        """Return the order of the batches, their lengths, and the other samples.

        Args:
            minimum: the least load of a batch. Samples of smaller ones are the others,
                except batches with which the next sample did not fit.
        """
        orders, lengths, rests = [], [], []
        while len(self.counts):
            largest = np.maximum.reduceat(self.sizes, _starts(self.counts), axis=1)
            loads = self.load(largest, self.counts)
            fits = loads <= 1
            if fits.any():
                accepted = fits & (self.is_full | (loads >= minimum))
                orders.append(self.order[np.repeat(accepted, self.counts)])
                lengths.append(self.counts[accepted])
                rests.append(self.order[np.repeat(fits & ~accepted, self.counts)])
                self._keep(~fits)
            if len(self.counts):
                self._split(loads[~fits])
        return np.concatenate(orders), np.concatenate(lengths), np.concatenate(rests)

    def _keep(self, kept: npt.NDArray[np.bool_]) -> None:
        samples = np.flatnonzero(np.repeat(kept, self.counts))
        self.order, self.counts = self.order[samples], self.counts[kept]
        self.sizes = self.sizes.take(samples, axis=1)
        self.codes = self.codes.take(samples, axis=1)

    def _split(self, loads: Floats) -> None:
        """Split each segment in two."""
        half = self.counts // 2
        by_size = _sort_for_halves(
            self.sizes, self.codes, self.counts, half, self.elements
        )
        self.order = self.order[by_size]
        self.sizes = self.sizes.take(by_size, axis=1)
        self.codes = self.codes.take(by_size, axis=1)
        is_cut = loads <= _CUT_BELOW
        left = np.where(is_cut, self._count_fitting(), half) if is_cut.any() else half
        self.counts = _interleave(left, self.counts - left)
        self.is_full = _interleave(is_cut, np.zeros_like(is_cut))

    def _count_fitting(self) -> Array:
        """Return the number of first samples of each segment that fit together."""
        starts = _starts(self.counts)
        # The running maximum of each segment: later segments have larger offsets.
        offsets = np.repeat(np.arange(len(starts)) << 31, self.counts)
        largest = np.maximum.accumulate(self.sizes + offsets, axis=1) - offsets
        numbers = np.arange(1, len(offsets) + 1) - np.repeat(starts, self.counts)
        fits = self.load(largest.astype(np.int32), numbers) <= 1
        return np.add.reduceat(fits.astype(np.int64), starts)
