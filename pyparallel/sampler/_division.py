"""Divide samples into batches of similar sizes, as a k-d tree divides points.

All windows of a block are divided at once, level by level: each level sorts the whole
block by segment and size. A segment is a run of samples that are still together, and
segments that need no more division are batches.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.int64]
#: The bits of a code of `size_codes`.
_CODE_BITS = 28
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
        sizes: Sizes from 0 to `MAX_SIZE`, of any shape.
    """
    bits = (sizes.astype(np.float32) + np.float32(1)).view(np.int32)
    codes: Array = bits.astype(np.int64) - _BITS_OF_1
    return codes


def _sort_segments(codes: Array, counts: Array) -> Array:
    """Return the order of samples by segment, then by code, then by position.

    One sort of packed integers is several times as fast as ``numpy.lexsort``.

    Args:
        codes: The code of each sample in one dimension.
        counts: The numbers of samples of the segments.
    """
    position_bits = max(1, (len(codes) - 1).bit_length())
    segment_bits = (len(counts) - 1).bit_length()
    # Above 2**18 samples in a block, the last digits of codes may be lost.
    lost_bits = max(0, segment_bits + position_bits + _CODE_BITS - 63)
    segments = np.repeat(np.arange(len(counts)), counts)
    keys = (segments << (_CODE_BITS - lost_bits)) | (codes >> lost_bits)
    keys <<= position_bits
    keys |= np.arange(len(codes))
    keys.sort()
    keys &= (1 << position_bits) - 1
    return keys


def _starts(counts: Array) -> Array:
    """Return the first position of each segment."""
    return np.cumsum(counts) - counts


def _sort_along_widest(codes: Array, counts: Array) -> Array:
    """Return the order of samples by segment, then along its widest dimension."""
    if len(codes) == 1:
        return _sort_segments(codes[0], counts)
    starts = _starts(counts)
    spread = np.maximum.reduceat(codes, starts, axis=1)
    spread -= np.minimum.reduceat(codes, starts, axis=1)
    widest = np.repeat(spread.argmax(axis=0), counts)
    along = codes[0].copy()
    for dim in range(1, len(codes)):
        np.copyto(along, codes[dim], where=widest == dim)
    return _sort_segments(along, counts)


def divide_by_count(codes: Array, counts: Array, batch_size: int) -> Array:
    """Return the order in which consecutive samples of a window are batches.

    Every batch has ``batch_size`` samples, except the last one of a window.

    Args:
        codes: The codes of the samples of a block, ``(d, n)``.
        counts: The numbers of samples of the windows of the block.
        batch_size: The number of samples of a batch.
    """
    order = np.arange(codes.shape[1])
    while counts.max() > batch_size:
        by_size = _sort_along_widest(codes, counts)
        order, codes = order[by_size], codes[:, by_size]
        if len(codes) == 1:
            return order  # sorted along the only dimension
        left = -(-counts // batch_size) // 2 * batch_size
        counts = np.stack([left, counts - left], axis=1).ravel()
        counts = counts[counts > 0]
    return order


def divide_by_budget(
    sizes: npt.NDArray[np.int32],
    codes: Array,
    counts: Array,
    load: Callable[[npt.NDArray[np.int32], Array], npt.NDArray[np.float64]],
) -> tuple[Array, Array]:
    """Return the samples in the order of their batches, and the batches' lengths.

    Args:
        sizes: The sizes of the samples of a block, ``(d, n)``.
        codes: Their codes.
        counts: The numbers of samples of the windows of the block.
        load: Returns the fraction of the budget that batches need, from the largest
            sizes ``(d, m)`` and the numbers of samples ``(m,)``. Batches of 1 or less
            fit. It must not decrease with a size or a number.
    """
    orders, lengths = [], []
    order = np.arange(codes.shape[1])
    for attempt in range(_ROUNDS + 1):
        divider = _BudgetDivider(sizes[:, order], codes[:, order], counts, load)
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


def split_evenly(total: int, parts: int) -> Array:
    """Return ``parts`` numbers with the sum ``total`` that differ by at most 1."""
    edges = np.arange(parts + 1) * total // parts
    return np.diff(edges)


class _BudgetDivider:
    """Divide windows until every segment fits the budget."""

    def __init__(
        self,
        sizes: npt.NDArray[np.int32],
        codes: Array,
        counts: Array,
        load: Callable[[npt.NDArray[np.int32], Array], npt.NDArray[np.float64]],
    ) -> None:
        self.sizes, self.codes, self.counts, self.load = sizes, codes, counts, load
        self.order = np.arange(codes.shape[1])
        self.is_full = np.zeros(len(counts), dtype=bool)

    def divide(self, minimum: float) -> tuple[Array, Array, Array]:
        """Return the order of the batches, their lengths, and the other samples.

        Args:
            minimum: The least load of a batch. Samples of smaller ones are the others,
                except batches with which the next sample did not fit.
        """
        orders, lengths, rests = [], [], []
        while len(self.counts):
            largest = np.maximum.reduceat(self.sizes, _starts(self.counts), axis=1)
            loads = self.load(largest, self.counts)
            fits = loads <= 1
            accepted = fits & (self.is_full | (loads >= minimum))
            orders.append(self.order[np.repeat(accepted, self.counts)])
            lengths.append(self.counts[accepted])
            rests.append(self.order[np.repeat(fits & ~accepted, self.counts)])
            self._keep(~fits)
            if len(self.counts):
                self._split(loads[~fits])
        return np.concatenate(orders), np.concatenate(lengths), np.concatenate(rests)

    def _keep(self, kept: npt.NDArray[np.bool_]) -> None:
        samples = np.repeat(kept, self.counts)
        self.order, self.counts = self.order[samples], self.counts[kept]
        self.sizes, self.codes = self.sizes[:, samples], self.codes[:, samples]

    def _split(self, loads: npt.NDArray[np.float64]) -> None:
        """Split each segment in two, along its widest dimension."""
        by_size = _sort_along_widest(self.codes, self.counts)
        self.order = self.order[by_size]
        self.sizes, self.codes = self.sizes[:, by_size], self.codes[:, by_size]
        is_cut = loads <= _CUT_BELOW
        left = np.where(is_cut, self._count_fitting(), self.counts // 2)
        self.counts = np.stack([left, self.counts - left], axis=1).ravel()
        self.is_full = np.stack([is_cut, np.zeros_like(is_cut)], axis=1).ravel()

    def _count_fitting(self) -> Array:
        """Return the number of first samples of each segment that fit together."""
        starts = _starts(self.counts)
        # The running maximum of each segment: later segments have larger offsets.
        offsets = np.repeat(np.arange(len(starts)) << 31, self.counts)
        largest = np.maximum.accumulate(self.sizes + offsets, axis=1) - offsets
        numbers = np.arange(1, len(offsets) + 1) - np.repeat(starts, self.counts)
        fits = self.load(largest.astype(np.int32), numbers) <= 1
        return np.add.reduceat(fits.astype(np.int64), starts)
