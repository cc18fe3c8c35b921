"""Let samples of similar sizes share a place of the plan, so that plans stay small."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ._division import Array, Sizes, size_codes

#: Samples are processed in blocks of about this many, which fit in the caches.
BLOCK = 2**18
#: The same for the keys, which have more temporary arrays.
_KEY_BLOCK = 2**15
#: The same for the order. Longer blocks write more neighbours for each key.
_ORDER_BLOCK = 2**19
#: The number of sort keys. NumPy sorts 16 bits by digits, in linear time.
_NUM_KEYS = 2**16
#: The largest range of sizes whose levels are looked up.
_MAX_TABLE = 2**16

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
    levels = _num_levels(sizes.shape[1], num_places)
    dimensions = [_Levels(*each) for each in zip(sizes.T, levels, strict=True)]
    counts = np.zeros(_NUM_KEYS, dtype=np.int64)
    for begin, end in _blocks(number, _KEY_BLOCK):
        block = sizes[begin:end] if candidates is None else sizes[candidates[begin:end]]
        keys[begin:end] = _find_keys(block, dimensions)
    for begin, end in _blocks(number, BLOCK):
        counts += np.bincount(keys[begin:end], minlength=_NUM_KEYS)
    order = np.empty(number, dtype=np.int32)
    starts = np.cumsum(counts) - counts
    for begin, end in _blocks(number, _ORDER_BLOCK):
        by_key = np.argsort(keys[begin:end], kind="stable")
        by_key += begin
        counts = np.bincount(keys[begin:end], minlength=_NUM_KEYS)
        moves = starts - (np.cumsum(counts) - counts)
        positions = np.repeat(moves, counts)
        positions += np.arange(end - begin)
        order[positions] = by_key
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


class _Levels:
    """Divide the sizes of one dimension into levels of similar logarithms."""

    def __init__(self, sizes: Indices, number: int) -> None:
        self.number = number
        # A reduction of all dimensions at once takes ten times as long.
        self._low, high = int(sizes.min()), int(sizes.max())
        self._low_code, high_code = size_codes(np.array([self._low, high]))
        # A product and a shift take less time than a division.
        self._factor = (number << 32) // int(high_code - self._low_code + 1)
        self._table: Indices | None = None
        if high - self._low < min(_MAX_TABLE, len(sizes)):
            levels = self._calculate(np.arange(self._low, high + 1))
            both = np.concatenate([levels, number - 1 - levels])
            self._table = both.astype(np.int32)

    def find(self, sizes: Indices, backwards: Indices) -> Indices:
        """Return the levels of sizes, counted from the last where ``backwards`` is 1.

        A table with both directions takes a third of the time of the calculation.
        """
        if self._table is None:
            levels = self._calculate(sizes)
            np.copyto(levels, self.number - 1 - levels, where=backwards > 0)
            return levels.astype(np.int32)
        index = sizes - np.int32(self._low)
        index += backwards * np.int32(len(self._table) // 2)
        found: Indices = self._table.take(index)
        return found

    def _calculate(self, sizes: npt.NDArray[Any]) -> Array:
        levels: Array = (size_codes(sizes) - self._low_code) * self._factor >> 32
        return levels


def _find_keys(sizes: Sizes, dimensions: list[_Levels]) -> Indices:
    """Return keys that differ little if all sizes differ little.

    A dimension runs forwards and backwards in turn, so no key has a jump after it.
    """
    keys = np.zeros(len(sizes), dtype=np.int32)
    for column, levels in zip(sizes.T, dimensions, strict=True):
        found = levels.find(column, keys & 1)
        keys *= levels.number
        keys += found
    return keys
