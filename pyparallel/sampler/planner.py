"""Plan the batches of an epoch from the sizes of all samples."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence, ValuesView
from dataclasses import dataclass
from typing import Any
from zlib import crc32

import numpy as np
import numpy.typing as npt

from ..batch.padding import Padding
from ..core.errors import BatchTypeError, BatchValueError, type_name
from ._division import (
    MAX_SIZE,
    Array,
    Floats,
    Sizes,
    divide_by_budget,
    divide_by_count,
    divide_by_total,
    size_codes,
    split_evenly,
)
from .places import BLOCK, Places

#: Steps are combined from the batches of this many steps for each batch of a window.
#: Only a large number gives neighbours of similar cost to the most expensive batches.
_STEPS_PER_WINDOW = 40
_WHERE = "SizeBatchSampler:"


def check_sizes(sizes: Any) -> Sizes:
    """Return sizes as int32 of shape ``(n, d)``: a copy, unless they are read-only.

    Args:
        sizes: an array, a tensor or nested sequences of integers, ``(n,)`` or
            ``(n, d)``.

    Raises:
        TypeError: the sizes are not integers.
        ValueError: the shape is another one, or a size is negative or too large.
    """
    # NumPy would read all samples of a data set.
    if not (isinstance(sizes, Sequence) or hasattr(sizes, "__array__")):
        advice = "Use list(...) of it."
        if not isinstance(sizes, Iterator | ValuesView):
            advice = (
                "Pass one size for each sample, for example [len(text) for text in "
                "texts], or a function with num_samples=len(dataset)."
            )
        raise BatchTypeError(
            f"{_WHERE} sizes must be the sizes of the samples, but is "
            f"{type_name(sizes)}. {advice}"
        )
    check_mask(sizes, f"{_WHERE} sizes")
    try:
        found = np.asarray(sizes)
    except ValueError:
        raise BatchValueError(
            f"{_WHERE} sizes must have the same number of dimensions for each sample, "
            "but the numbers differ. Give the same dimensions for all samples."
        ) from None
    if found.dtype.kind not in "iu" and found.size:
        raise BatchTypeError(
            f"{_WHERE} sizes must be integers, but are of dtype {found.dtype} "
            f"({type_name(sizes)}). Convert them to integers."
        )
    if found.ndim not in (1, 2) or (found.ndim == 2 and not found.shape[1]):
        raise BatchValueError(
            f"{_WHERE} sizes must have the shape (n,) or (n, d), but have the shape "
            f"{found.shape}. Give the sizes of one sample in each row."
        )
    rows = found if found.ndim == 2 else found[:, None]
    if rows.size and (rows.min() < 0 or rows.max() > MAX_SIZE):
        index = int(((rows < 0) | (rows > MAX_SIZE)).any(axis=1).argmax())
        raise BatchValueError(
            f"{_WHERE} sizes[{index}] must be from 0 to {MAX_SIZE}, but is "
            f"{found[index].tolist()}. Correct the size of sample {index}."
        )
    return rows.astype(np.int32, copy=rows.flags.writeable)


def check_mask(sizes: Any, name: str) -> None:
    """Check that no size is masked, because `numpy.asarray` drops the mask.

    Raises:
        ValueError: a size is masked.
    """
    mask: Any = getattr(sizes, "mask", None)
    if isinstance(sizes, np.ma.MaskedArray) and np.any(mask):
        raise BatchValueError(
            f"{name} must have no masked size, but {np.sum(mask)} of {sizes.size} are "
            "masked. Leave out these samples, or call filled() with their sizes."
        )


def checksum(sizes: Sizes) -> int:
    """Return a checksum of sizes."""
    rows: Any = np.ascontiguousarray(sizes)
    return crc32(rows, crc32(repr(sizes.shape).encode()))


class PaddedShapes:
    """Calculate the shapes to which a `Padding` pads batches."""

    def __init__(
        self, padding: Padding | None, num_dims: int, where: str = _WHERE
    ) -> None:
        """Check the number of dimensions of a padding.

        Raises:
            ValueError: the padding has another number of dimensions.
        """
        options = padding or Padding()
        if options.num_dims not in (None, num_dims):
            raise BatchValueError(
                f"{where} padding must be for {num_dims} dimensions like sizes, but "
                f"is {options!r}. Give sizes of {options.num_dims} dimensions."
            )
        divisor: Any = options.size_divisor
        self._divisor = np.broadcast_to(divisor, num_dims).astype(np.int64)[:, None]
        buckets = [options.shape] if options.shape else list(options.buckets)
        # From the largest to the smallest, so that smaller ones replace larger ones.
        # sorted() is stable: the first of equally small ones is the last to replace.
        self._buckets = sorted(reversed(buckets), key=lambda shape: -math.prod(shape))
        self._padding, self._where = options, where

    def check_largest(self, sizes: Sizes, names: str = "sizes[{}]") -> None:
        """Check that one shape of the padding holds all samples.

        Args:
            sizes: the sizes of samples, ``(n, d)``.
            names: the format of the name of a sample.

        Raises:
            ValueError: no shape of the padding holds all samples.
        """
        if not self._buckets or not len(sizes):
            return
        largest = sizes.max(axis=0)
        if any((largest <= bucket).all() for bucket in np.array(self._buckets)):
            return
        index = int((sizes == largest).any(axis=1).argmax())
        for dim, size in enumerate(largest):
            if all(size > bucket[dim] for bucket in self._buckets):
                index = int((sizes[:, dim] == size).argmax())
        raise BatchValueError(
            f"{self._where} one shape of {self._padding!r} must hold the largest sizes "
            f"{largest.tolist()}, but none does. {names.format(index)} is "
            f"{sizes[index].tolist()}. Add a larger shape."
        )

    def __call__(self, sizes: npt.NDArray[Any]) -> Array:
        """Return the padded shapes ``(d, m)`` of the largest sizes of batches."""
        if not self._buckets:
            return -(-sizes.astype(np.int64) // self._divisor) * self._divisor
        shapes = np.empty(sizes.shape, dtype=np.int64)
        shapes[:] = np.array(self._buckets[0])[:, None]
        for bucket in np.array(self._buckets)[1:, :, None]:
            np.copyto(shapes, bucket, where=(sizes <= bucket).all(axis=0))
        return shapes

    def num_elements(self, sizes: npt.NDArray[Any]) -> Floats:
        """Return the number of elements of one padded sample of each batch."""
        elements: Floats = self(sizes).prod(axis=0, dtype=np.float64)
        return elements


@dataclass(frozen=True)
class Budget:
    """The limit of a batch in elements.

    Attributes:
        shapes: the shapes of padded batches.
        max_padded: the limit of elements with padding, 0 without one.
        max_total: the limit of the sum of all sizes, 0 without one.
        where: the class whose errors it raises.
    """

    shapes: PaddedShapes
    max_padded: int
    max_total: int
    where: str = _WHERE

    @property
    def limit(self) -> int:
        """The limit, 0 without one."""
        return self.max_padded or self.max_total

    def needs(self, sizes: npt.NDArray[Any]) -> Floats:
        """Return the needs of single samples, from their sizes ``(d, n)``."""
        if self.max_total:
            totals: Floats = sizes.sum(axis=0, dtype=np.float64)
            return totals
        return self.shapes.num_elements(sizes)

    def raise_oversized(self, name: str, sizes: list[int], needed: float) -> None:
        """Raise the error for a sample that exceeds the limit."""
        limit, unit = "max_padded", "padded elements"
        if self.max_total:
            limit, unit = "max_total", "elements"
        raise BatchValueError(
            f"{self.where} every sample must fit in {limit}={self.limit}, but {name} "
            f"has {needed:.0f} {unit} (sizes {sizes}). Increase {limit}, remove the "
            "sample, or set skip_oversized=True."
        )


def find_candidates(
    sizes: Sizes, budget: Budget, skip_oversized: bool
) -> npt.NDArray[np.int32] | None:
    """Return the indices of the samples that fit the budget, None for all samples.

    Args:
        sizes: the sizes of the samples.
        budget: the limit of a batch.
        skip_oversized: whether to leave out the others, instead of an error.

    Raises:
        ValueError: a sample exceeds the budget, unless ``skip_oversized``.
    """
    if not (budget.limit and len(sizes)):
        return None
    largest = np.array([[column.max()] for column in sizes.T])
    if budget.needs(largest)[0] <= budget.limit:
        return None  # without a look at each sample, as needs grow with sizes
    oversized = []
    for begin in range(0, len(sizes), BLOCK):
        block = sizes[begin : begin + BLOCK]
        needs = budget.needs(block.T)
        found = np.flatnonzero(needs > budget.limit)
        if len(found) and not skip_oversized:
            first = int(found[0])
            budget.raise_oversized(
                f"sample {begin + first}", block[first].tolist(), needs[first]
            )
        oversized.append(begin + found)
    left_out = np.concatenate(oversized)
    if not len(left_out):
        return None
    return np.delete(np.arange(len(sizes), dtype=np.int32), left_out)


@dataclass(frozen=True)
class Plan:
    """The batches of an epoch, or of the rest of an epoch, for all ranks.

    A cell is a batch of places with one sample of each. The number of a cell is the
    number of its batch times the samples of a place, plus the position in a place.

    Attributes:
        places: the places.
        turns: the first sample of each place.
        order: the places, batch by batch.
        ends: the position after the last place of each batch, preceded by 0.
        shapes: the padded shapes of the batches, ``(d, batches)``.
        costs: the padded elements of the batches.
        steps: the numbers of the cells, ``(steps, num_replicas)``.
        num_complete: the number of steps without repeated cells.
    """

    places: Places
    turns: npt.NDArray[np.int32]
    order: npt.NDArray[np.int32]
    ends: Array
    shapes: Array
    costs: Floats
    steps: npt.NDArray[np.int32]
    num_complete: int

    def batch(self, step: int, rank: int) -> list[int]:
        """Return the samples of a batch."""
        number, copy = divmod(int(self.steps[step, rank]), self.places.depth)
        places = self.order[self.ends[number] : self.ends[number + 1]]
        found: list[int] = self.places.samples(places, copy, self.turns).tolist()
        return found

    def cells_of_batches(self) -> Array:
        """Return the number of different cells of each batch in the steps."""
        cells = np.unique(self.steps) // self.places.depth
        return np.bincount(cells, minlength=len(self.costs))


@dataclass(frozen=True)
class Planner:
    """The arguments of a sampler that determine its plans, apart from the ranks.

    Attributes:
        places: the places of the samples.
        shapes: the shapes of padded batches.
        batch_size: the number of samples of a batch, 0 with a budget.
        max_padded: the budget of a batch in padded elements, 0 without one.
        max_total: the budget of a batch in elements without padding, 0 without one.
        max_batch_size: the limit of samples of a batch with a budget, 0: no limit.
        shuffle: whether plans are random.
        seed: the seed of all plans.
        window: the number of batches that are divided together.
        drop_last: whether to drop samples that do not fill a step.
    """

    places: Places
    shapes: PaddedShapes
    batch_size: int
    max_padded: int
    max_total: int
    max_batch_size: int
    shuffle: bool
    seed: int
    window: int
    drop_last: bool

    def plan(
        self,
        seeds: Sequence[int],
        num_replicas: int,
        history: Sequence[tuple[int, int]] = (),
    ) -> Plan:
        """Return the plan of the rest of an epoch.

        The batches do not depend on the number of ranks. The cells that no rank has
        used are combined into other steps when the number changes.

        Args:
            seeds: the number of the epoch, and others that determine the plan.
            num_replicas: the number of ranks.
            history: the earlier parts of this epoch with other numbers of ranks: the
                number of ranks and the number of steps of each part.
        """
        generator = self._generator(*seeds)
        order = np.arange(self._num_planned(), dtype=np.int32)
        if self.shuffle:
            generator.shuffle(order)
        turns = self.places.turns(generator if self.shuffle else None)
        if self.drop_last and self.batch_size:
            order = order[: len(order) // self.batch_size * self.batch_size]
        lengths, shapes, costs = self._divide(order)
        ends = np.concatenate([[0], np.cumsum(lengths)])
        left = self.places.cells(order, ends, turns)
        for part, (replicas, num_steps) in enumerate((*history, (num_replicas, 0))):
            if part:
                generator = self._generator(*seeds, part)
            steps, complete = self._make_steps(left, costs, replicas, generator)
            if part < len(history):
                left = np.setdiff1d(left, steps[:num_steps], assume_unique=True)
                if num_steps == len(steps):  # the rest was dropped
                    left = left[:0]
        return Plan(self.places, turns, order, ends, shapes, costs, steps, complete)

    def _generator(self, *seeds: int) -> np.random.Generator:
        return np.random.Generator(np.random.PCG64([self.seed, *seeds]))

    def _num_planned(self) -> int:
        """Return the number of places. All batches are full if samples are dropped."""
        if self.drop_last and self.batch_size:
            return self.places.num_complete
        return len(self.places.sizes)

    def _divide(self, samples: npt.NDArray[np.int32]) -> tuple[Array, Array, Floats]:
        """Sort the samples into batches. Return their lengths, shapes and costs."""
        if self.max_total:
            sizes = self.places.sizes[samples].T
            totals = sizes.sum(axis=0, dtype=np.int64)
            # The sizes of a place may not belong to one sample, but each sample fits.
            np.minimum(totals, self.max_total, out=totals)
            counts = divide_by_total(totals, self.max_total, self.max_batch_size)
            return counts, *self.measure(sizes, counts)
        windows = self._window_lengths(samples)
        lengths = [np.zeros(0, dtype=np.int64)]
        shapes = [np.zeros((self.places.sizes.shape[1], 0), dtype=np.int64)]
        costs = [np.zeros(0)]
        begin = first = 0
        ends = np.cumsum(windows)
        while first < len(windows):
            last = max(first + 1, int(np.searchsorted(ends, begin + BLOCK, "right")))
            block = samples[begin : ends[last - 1]]
            sizes = np.ascontiguousarray(self.places.sizes[block].T)
            order, counts = self._divide_block(sizes, windows[first:last])
            block[:] = block[order]
            shape, cost = self.measure(sizes.take(order, axis=1), counts)
            lengths.append(counts)
            shapes.append(shape)
            costs.append(cost)
            begin, first = int(ends[last - 1]), last
        return (
            np.concatenate(lengths),
            np.concatenate(shapes, axis=1),
            np.concatenate(costs),
        )

    def measure(self, sizes: npt.NDArray[Any], counts: Array) -> tuple[Array, Floats]:
        """Return the shapes ``(d, batches)`` and the costs of consecutive batches.

        Args:
            sizes: the sizes of the samples, ``(d, n)``.
            counts: the numbers of samples of the batches.
        """
        starts = np.cumsum(counts) - counts
        if self.max_total:
            totals = np.add.reduceat(sizes, starts, axis=1, dtype=np.int64)
            return totals, totals.sum(axis=0, dtype=np.float64)
        shapes = self.shapes(np.maximum.reduceat(sizes, starts, axis=1))
        return shapes, shapes.prod(axis=0, dtype=np.float64) * counts

    def num_elements(self, places: npt.NDArray[np.int32], cells: Array) -> float:
        """Return the number of elements without padding.

        Args:
            places: the numbers of places.
            cells: the number of samples of each place.
        """
        add = np.sum if self.max_total else np.prod
        elements = add(self.places.sizes[places], axis=1, dtype=np.float64)
        return float((elements * cells).sum())

    def _window_lengths(self, samples: npt.NDArray[np.int32]) -> Array:
        """Return the numbers of samples of the windows."""
        if not len(samples):
            return np.zeros(0, dtype=np.int64)
        if self.batch_size:
            num_batches = -(-len(samples) // self.batch_size)
            counts = split_evenly(num_batches, -(-num_batches // self.window))
            counts *= self.batch_size
            counts[-1] -= num_batches * self.batch_size - len(samples)
            return counts
        total = 0
        for begin in range(0, len(samples), BLOCK):
            sizes = self.places.sizes[samples[begin : begin + BLOCK]].T
            loads = self._load(sizes, np.ones(sizes.shape[1]))
            # A sum of floats may differ between processors, and so between ranks.
            total += int((loads * 2**20).astype(np.int64).sum())
        num_windows = max(1, (total >> 20) // self.window)
        return split_evenly(len(samples), min(len(samples), num_windows))

    def _divide_block(self, sizes: Sizes, windows: Array) -> tuple[Array, Array]:
        codes = size_codes(self.shapes(sizes))
        elements = self.shapes.num_elements
        if not self.batch_size:
            return divide_by_budget(sizes, codes, windows, self._load, elements)
        order = divide_by_count(sizes, codes, windows, self.batch_size, elements)
        last = int(windows[-1] % self.batch_size)
        lengths = np.full(len(order) // self.batch_size, self.batch_size)
        return order, np.append(lengths, last) if last else lengths

    def _load(self, largest: npt.NDArray[Any], counts: npt.NDArray[Any]) -> Floats:
        """Return the fraction of the budget that batches need."""
        load: Floats = self.shapes.num_elements(largest) * counts / self.max_padded
        if self.max_batch_size:
            np.maximum(load, counts / self.max_batch_size, out=load)
        # The sizes of a place may not belong to one sample, but each sample fits.
        return np.where(counts == 1, np.minimum(load, 1), load)

    def _make_steps(
        self,
        left: npt.NDArray[np.int32],
        costs: Floats,
        num_replicas: int,
        generator: np.random.Generator,
    ) -> tuple[npt.NDArray[np.int32], int]:
        """Return the cells of the steps, and the number of complete steps.

        The cells of a step are neighbours in cost, among those of many windows. The
        incomplete step is the last.

        Args:
            left: the numbers of the cells that no rank has used, in increasing order.
            costs: the costs of the batches.
            num_replicas: the number of ranks.
            generator: determines the order.
        """
        num_complete, num_extra = divmod(len(left), num_replicas)
        if num_replicas > 1:
            windows = -(-num_complete // (self.window * _STEPS_PER_WINDOW))
            left = self._sort_cells(left, costs, windows)
        start = num_complete * num_replicas
        if self.shuffle:
            start = int(generator.integers(num_complete + 1)) * num_replicas
        incomplete = left[start : start + num_extra]
        complete = np.delete(left, np.s_[start : start + num_extra])
        steps = complete.reshape(num_complete, num_replicas)
        if self.shuffle:
            if num_replicas > 1:
                generator.permuted(steps, axis=1, out=steps)
            steps = steps[generator.permutation(num_complete)]
        if num_extra and not self.drop_last:
            steps = np.concatenate([steps, np.resize(incomplete, (1, num_replicas))])
        return steps, num_complete

    def _sort_cells(
        self, cells: npt.NDArray[np.int32], costs: Floats, num_windows: int
    ) -> npt.NDArray[np.int32]:
        """Return cells in the order of windows and of the costs of their batches.

        Costs rise in one window and fall in the next one, as a step may have the last
        cells of a window and the first ones of the next.
        """
        counts = np.bincount(cells // self.places.depth, minlength=len(costs))
        starts = np.cumsum(counts) - counts
        windows = starts * num_windows // max(1, len(cells))
        order = np.lexsort((np.where(windows % 2, -costs, costs), windows))
        counts = counts[order]
        moves = starts[order] - (np.cumsum(counts) - counts)
        return cells[np.repeat(moves, counts) + np.arange(len(cells))]
