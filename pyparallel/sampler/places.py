"""Let samples of similar sizes share a place of the plan, so that plans stay small."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ._division import Array, Sizes, size_codes

#: Samples are processed in blocks of about this many, which fit in the caches.
BLOCK = 2**18
#: The same for the keys, where ten temporary arrays have 8 bytes for each sample.
_KEY_BLOCK = 2**15
#: The number of sort keys. NumPy sorts 16 bits by digits, in linear time.
_NUM_KEYS = 2**16

Indices = npt.NDArray[np.int32]


@dataclass(frozen=True)
class Places:
    """The places of a plan, which have several samples of similar sizes each.

    A batch that the sizes of its places fit is used once for each sample of a place.
    So the number of batches of an epoch is known from a plan of the places alone.

    Attributes:
        sizes: the largest size of each place in each dimension, ``(places, d)``.
        order: the indices of the samples, place by place. None: they are the places.
        num_samples: the number of samples.
        depth: the number of samples of a place. The last one may have fewer.
    """

    sizes: Sizes
    order: Indices | None
    num_samples: int
    depth: int

    @classmethod
    def of(
        cls,
        sizes: Sizes,
        candidates: Indices | None = None,
        plan_size: int | None = None,
    ) -> Places:
        """Return the places of samples.

        Args:
            sizes: the sizes of the samples, ``(n, d)``.
            candidates: the indices of the samples that batches may have, None for all.
            plan_size: the largest number of places, None: each sample has its own.
        """
        number = len(sizes if candidates is None else candidates)
        depth = max(1, -(-number // (plan_size or number or 1)))
        if depth == 1:
            own = sizes if candidates is None else sizes[candidates]
            return cls(own, candidates, number, depth)
        order = _sort(sizes, candidates, -(-number // depth))
        largest = np.empty((-(-number // depth), sizes.shape[1]), dtype=np.int32)
        for begin, end in _blocks(len(largest), max(1, BLOCK // depth)):
            block = sizes.take(order[begin * depth : end * depth], axis=0)
            starts = np.arange(0, len(block), depth)
            np.maximum.reduceat(block, starts, axis=0, out=largest[begin:end])
        return cls(largest, order, number, depth)

    @property
    def num_complete(self) -> int:
        """The number of places with ``depth`` samples."""
        return self.num_samples // self.depth

    def turns(self, generator: np.random.Generator | None) -> Indices:
        """Return the first sample of each place, None: not random."""
        if generator is None or self.depth == 1:
            return np.zeros(len(self.sizes), dtype=np.int32)
        return generator.integers(self.depth, size=len(self.sizes), dtype=np.int32)

    def samples(self, places: Indices, copy: int, turns: Indices) -> Indices:
        """Return a sample of each place, except of an incomplete one that has none.

        Args:
            places: the numbers of the places.
            copy: which sample: each number from 0 to ``depth - 1`` gives others.
            turns: the first sample of each place.
        """
        found = places
        if self.depth > 1:
            offsets = (turns[places].astype(np.int64) + copy) % self.depth
            found = places * np.int64(self.depth) + offsets
            found = found[found < self.num_samples]
        return found if self.order is None else self.order[found]

    def cells(self, order: Indices, ends: Array, turns: Indices) -> Indices:
        """Return the numbers of the cells of batches that have a sample.

        Args:
            order: the places, batch by batch.
            ends: the position after the last place of each batch, preceded by 0.
            turns: the first sample of each place.
        """
        cells = np.arange((len(ends) - 1) * self.depth, dtype=np.int32)
        alone = np.flatnonzero(np.diff(ends) == 1)
        alone = alone[order[ends[alone]] == self.num_complete]  # at most one batch
        last = order[ends[alone]]
        empty = [
            number * self.depth + copy
            for number in alone.tolist()
            for copy in range(self.depth)
            if not len(self.samples(last, copy, turns))
        ]
        return np.delete(cells, empty) if empty else cells


def _blocks(number: int, length: int) -> Iterator[tuple[int, int]]:
    for begin in range(0, number, length):
        yield begin, min(number, begin + length)


def _sort(sizes: Sizes, candidates: Indices | None, num_places: int) -> Indices:
    """Return the samples in an order in which neighbours have similar sizes."""
    number = len(sizes if candidates is None else candidates)
    keys = np.empty(number, dtype=np.uint16)
    counts = np.zeros(_NUM_KEYS, dtype=np.int64)
    # A reduction along the first axis takes ten times as long.
    lows, highs = (
        size_codes(np.array([f(column) for column in sizes.T]))
        for f in (np.min, np.max)
    )
    levels = _num_levels(sizes.shape[1], num_places)
    for begin, end in _blocks(number, _KEY_BLOCK):
        block = sizes[begin:end] if candidates is None else sizes[candidates[begin:end]]
        codes = size_codes(np.ascontiguousarray(block.T))
        keys[begin:end] = _find_keys(codes, lows, highs, levels)
    for begin, end in _blocks(number, BLOCK):
        counts += np.bincount(keys[begin:end], minlength=_NUM_KEYS)
    order = np.empty(number, dtype=np.int32)
    starts = np.cumsum(counts) - counts
    for begin, end in _blocks(number, BLOCK):
        by_key = np.argsort(keys[begin:end], kind="stable")
        counts = np.bincount(keys[begin:end], minlength=_NUM_KEYS)
        moves = starts - (np.cumsum(counts) - counts)
        positions = np.repeat(moves, counts)
        positions += np.arange(end - begin)
        order[positions] = (begin + by_key).astype(np.int32)
        starts += counts
    return order if candidates is None else candidates[order]


def _num_levels(num_dims: int, num_places: int) -> list[int]:
    """Return the numbers of levels of the dimensions. Their product is a key's limit.

    With few places, the first dimensions have few levels, so that neighbours in the
    last one are similar.
    """
    level = 1
    while num_dims > 1 and (level + 1) ** num_dims <= min(num_places, _NUM_KEYS):
        level += 1
    first = [level] * (num_dims - 1)
    return [*first, _NUM_KEYS // level ** (num_dims - 1)]


def _find_keys(codes: Array, lows: Array, highs: Array, levels: list[int]) -> Array:
    """Return keys that differ little if all sizes differ little.

    A dimension runs forwards and backwards in turn, so no key has a jump after it.
    """
    key = np.zeros(codes.shape[1], dtype=np.int64)
    for code, low, high, number in zip(codes, lows, highs, levels, strict=True):
        # A product and a shift take less time than a division.
        level = (code - low) * ((number << 32) // int(high - low + 1)) >> 32
        key = key * number + np.where(key & 1, number - 1 - level, level)
    return key
