"""``pyparallel.SizeBatcher``: batches of samples of similar sizes from a stream."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from torch.utils.data import IterableDataset, get_worker_info

from ..batch.padding import Padding
from ..core.errors import BatchTypeError, BatchValueError, check_int, type_name
from ..core.stateful import copy_state
from ._arguments import check_arguments, check_state, import_planner, limit_text

T = TypeVar("T")
#: The version of the format of a state.
_VERSION = 1
_WHERE = "SizeBatcher:"
#: Follows the last sample.
_END = object()
#: The budget of a batch in the units of `_Window.loads`.
_FULL = 2**20


class SizeBatcher(IterableDataset[list[T]]):
    """An iterable dataset of batches of similar sizes, from a dataset of samples.

    It is `SizeBatchSampler` for a stream, whose sizes are known only when the samples
    are read. It reads a window of samples, divides it like `SizeBatchSampler` does, and
    yields the batches as lists of samples. It reads the next window at the same rate,
    so at most one window of samples is in memory.

    Pass it to a loader with ``batch_size=None``. Each worker has windows of its own,
    so the dataset must divide its samples between workers, and between ranks. Ranks
    may have different numbers of batches.

    ``state_dict`` and ``load_state_dict`` are torchdata's ``Stateful`` protocol. A
    state has the position of the window and the number of its batches, but no samples.
    A resumed batcher reads the samples of the window again. If the dataset has
    ``state_dict`` and ``load_state_dict`` too, it continues at that window. Otherwise
    it is read from its start.

    Args:
        dataset: an iterable of samples, which must yield the same samples again after
            a state is loaded.
        size_of: returns the integer sizes of the dimensions of a sample that are
            padded: one integer, or a sequence.
        batch_size: as of `SizeBatchSampler`.
        max_padded: as of `SizeBatchSampler`.
        max_total: as of `SizeBatchSampler`.
        max_batch_size: as of `SizeBatchSampler`.
        padding: as of `SizeBatchSampler`.
        shuffle: yield the batches of a window in random order. The samples of the
            dataset are not shuffled otherwise.
        seed: the seed of that order.
        window: the number of batches that are divided together.
        drop_last: drop the samples at the end that do not fill a batch.
        skip_oversized: leave out samples that alone exceed ``max_padded`` or
            ``max_total``, instead of an error.

    Attributes:
        epoch: the number of the epoch, by `set_epoch`.
        num_skipped: the number of samples that this process has left out as oversized.

    Raises:
        ImportError: NumPy is not installed.
        TypeError: an argument, or a size, has the wrong type.
        ValueError: an argument, or a size, has an impossible value, or a sample exceeds
            ``max_padded`` or ``max_total``. The message names the sample.

    Example:
        >>> words = ["a", "bbbb", "cc", "dddd", "e", "ff"]
        >>> list(SizeBatcher(words, len, batch_size=2, shuffle=False))
        [['a', 'e'], ['cc', 'ff'], ['bbbb', 'dddd']]
    """

    def __init__(
        self,
        dataset: Iterable[T],
        size_of: Callable[[T], Any],
        batch_size: int | None = None,
        *,
        max_padded: int | None = None,
        max_total: int | None = None,
        max_batch_size: int | None = None,
        padding: Padding | None = None,
        shuffle: bool = True,
        seed: int = 0,
        window: int = 50,
        drop_last: bool = False,
        skip_oversized: bool = False,
    ) -> None:
        import_planner(_WHERE)
        if not callable(size_of):
            raise BatchTypeError(
                f"{_WHERE} size_of must be a function of a sample, but is "
                f"{type_name(size_of)}. If the sizes are known, use SizeBatchSampler."
            )
        self._options, self._arguments = check_arguments(
            _WHERE,
            batch_size=batch_size,
            max_padded=max_padded,
            max_total=max_total,
            max_batch_size=max_batch_size,
            padding=padding,
            shuffle=shuffle,
            seed=seed,
            window=window,
            drop_last=drop_last,
            skip_oversized=skip_oversized,
        )
        self.dataset: Iterable[T] = dataset
        self.size_of: Callable[[T], Any] = size_of
        self.padding: Padding | None = padding
        self.epoch: int = 0
        self.num_skipped: int = 0
        # The position after the last batch, None before the first and after the end.
        self._position: _Position | None = None
        self._is_loaded = False
        # Of a stateful dataset: its first state, and the beginning of the last pass.
        self._initial: Any = None
        self._begin: _Begin | None = None

    def __iter__(self) -> Iterator[list[T]]:
        """Yield the batches of this worker, after a loaded position."""
        position = self._position if self._is_loaded else None
        self._position, self._is_loaded = position, False
        reader = _Reader(self, position)
        num_yielded = position.num_batches if position else 0
        reader.fill()
        while (window := reader.window).samples:
            reader.next_window()
            batches = self._divide(window)
            pending = sum(window.loads[i] for batch in batches for i in batch)
            for number, batch in enumerate(batches, start=1):
                if number > num_yielded:
                    reader.fill(pending)
                    self._position = replace(window.start, num_batches=number)
                    yield window.take(batch)
                pending -= sum(window.loads[i] for i in batch)
            reader.fill()
            num_yielded = 0
        self._position = None

    def __repr__(self) -> str:
        """Return the main arguments in one line."""
        limit = limit_text(self._arguments)
        dataset = type(self.dataset).__name__
        return f"{type(self).__name__}(<{dataset}>, {limit}, epoch={self.epoch})"

    def set_epoch(self, epoch: int) -> None:
        """Set the number of the epoch, also of the dataset if it has ``set_epoch``.

        Call it before each ``iter()``: passes are not counted, because each worker of a
        loader has a copy of this object. It does not reach workers that are kept for
        several epochs. A loaded position is kept if its epoch has the same number.
        """
        epoch = check_int(epoch, 0, "SizeBatcher.set_epoch: epoch")
        if set_epoch := getattr(self.dataset, "set_epoch", None):
            set_epoch(epoch)
        if epoch != self.epoch:
            self.epoch, self._position, self._is_loaded = epoch, None, False

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last batch that was yielded.

        ``json`` and ``torch.save`` support it, if they support the state of the
        dataset. Take the state of the loader instead if it has workers.
        """
        position = self._position
        return {
            "version": _VERSION,
            "epoch": self.epoch,
            # Not asdict(), which also converts the state of the dataset.
            "position": vars(
                copy.deepcopy(position or _Position(source=self._source_state()))
            ),
            "arguments": dict(self._arguments),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Let the next ``iter()`` continue after a position.

        The epoch of the state is also set in the dataset, if it has ``set_epoch``.

        Args:
            state_dict: a return value of `state_dict`.

        Raises:
            ValueError: the state has another format, or belongs to a batcher with other
                arguments.
        """
        state = check_state("SizeBatcher", state_dict, _VERSION, self._arguments)
        self.epoch = state["epoch"]
        if set_epoch := getattr(self.dataset, "set_epoch", None):
            set_epoch(self.epoch)
        self._position = _Position(**copy.deepcopy(state["position"]))
        self._is_loaded = True

    def _source_state(self) -> Any:
        """Return the state of the dataset, None if it has none."""
        return copy_state(self.dataset)

    def _shapes(self, num_dims: int) -> Any:
        planner = import_planner(_WHERE)
        return planner.PaddedShapes(self.padding, num_dims, _WHERE)

    def _divide(self, window: _Window) -> list[list[int]]:
        """Return the batches of a window as positions in the window."""
        planner = import_planner(_WHERE)
        info = get_worker_info()
        seeds = (self.epoch, info.id if info else 0, window.start.number)
        sizes = planner.np.array(window.sizes, dtype=planner.np.int32)
        places = planner.Places.of(sizes)
        part = planner.Planner(places, self._shapes(sizes.shape[1]), **self._options)
        plan = part.plan(seeds, 1)
        return [plan.batch(step, 0) for step in range(len(plan.steps))]


@dataclass
class _Begin:
    """The beginning of a pass over a stateful dataset.

    Attributes:
        source: the state of the dataset before the pass.
        second: the pickled state after the first sample.
    """

    source: Any
    second: bytes


@dataclass
class _Position:
    """A place between two batches.

    Attributes:
        number: the number of the window.
        before: the number of samples of the dataset before the window.
        source: the state of the dataset before the window, if it has one.
        num_read: the number of samples of the dataset in the window.
        num_batches: the number of its batches that were yielded.
    """

    number: int = 0
    before: int = 0
    source: Any = None
    num_read: int = 0
    num_batches: int = 0


@dataclass
class _Window:
    """Samples that are divided together.

    Attributes:
        start: the position before the first batch.
        samples: the samples. Those of yielded batches are replaced by None.
        sizes: their sizes.
        loads: their shares of a batch.
        load: the sum of the shares.
    """

    start: _Position
    samples: list[Any] = field(default_factory=list)
    sizes: list[list[int]] = field(default_factory=list)
    loads: list[int] = field(default_factory=list)
    load: int = 0

    def take(self, batch: list[int]) -> list[Any]:
        """Return the samples of a batch, and release them."""
        samples = [self.samples[i] for i in batch]
        for i in batch:
            self.samples[i] = None
        return samples


class _Reader:
    """Reads the samples of a dataset into windows."""

    def __init__(self, batcher: SizeBatcher[Any], position: _Position | None) -> None:
        """Begin at the window of a position.

        Raises:
            ValueError: the dataset ends before it.
        """
        self._batcher, self._options = batcher, batcher._arguments
        self._planner = import_planner(_WHERE)
        self._shapes: Any = None
        self._num_dims = 0
        self._target = self._options["window"] * (self._options["batch_size"] or _FULL)
        self._ahead: list[Any] = []
        start, self._samples = self._open(position)
        self._num_read = start.before
        self.window = _Window(replace(start, num_read=0, num_batches=0))
        if start.source is None:  # read it from its start
            for number in range(start.before):
                if next(self._samples, _END) is _END:
                    self._raise_end(start.before, number)
        while self.window.start.num_read < start.num_read:
            if not self._read_into(self.window):
                self._raise_end(start.before + start.num_read, self._num_read)

    def _open(self, position: _Position | None) -> tuple[_Position, Iterator[Any]]:
        """Return the position of the first window, and an iterator from there."""
        batcher = self._batcher
        dataset: Any = batcher.dataset
        # iter() may change the state of the dataset, so save it first.
        current = batcher._source_state()
        if batcher._initial is None:
            batcher._initial = current
        start = position or _Position(source=current)
        if current is None or start.source is None:
            return start, iter(dataset)
        if position:
            self._restore(start.source)
        samples = iter(dataset)
        if samples is dataset and position:  # iter() rewinds it
            self._restore(start.source)
        elif samples is dataset:
            start = replace(start, source=batcher._source_state())
        first = next(samples, _END)
        if first is _END and position and position.number == 0:
            samples, first = self._open_next()
        if first is _END:
            return start, samples
        self._ahead = [first]
        begin = _Begin(start.source, pickle.dumps(batcher._source_state()))
        # Until the first sample is read, the state may be of the pass before it.
        if batcher._begin and batcher._begin.second == begin.second:
            begin = batcher._begin
        batcher._begin = begin
        return replace(start, source=begin.source), samples

    def _open_next(self) -> tuple[Iterator[Any], Any]:
        """Return an iterator over the next pass, and the first sample."""
        dataset = self._batcher.dataset
        samples = iter(dataset)
        if (first := next(samples, _END)) is _END:  # it stays at its end
            self._restore(self._batcher._initial)
            samples = iter(dataset)
            first = next(samples, _END)
        return samples, first

    def _restore(self, source: Any) -> None:
        """Load a copy of a state of the dataset."""
        dataset: Any = self._batcher.dataset
        dataset.load_state_dict(copy.deepcopy(source))

    def next_window(self) -> _Window:
        """Return an empty window that begins after the samples that were read."""
        number = self.window.start.number + 1
        source = self._batcher._source_state()
        self.window = _Window(_Position(number, self._num_read, source))
        return self.window

    def fill(self, pending: int = 0) -> None:
        """Read samples until the window is full, or the dataset ends.

        Args:
            pending: the load of the samples of the window before it.
        """
        while pending + self.window.load < self._target:
            if not self._read_into(self.window):
                break

    def _raise_end(self, expected: int, found: int) -> None:
        raise BatchValueError(
            f"{_WHERE} the dataset must yield at least {expected} samples as before "
            f"the saved state, but ended after {found}. Restore its data."
        )

    def _read_into(self, window: _Window) -> bool:
        """Add the next sample to a window. Return False at the end of the data."""
        sample = self._ahead.pop() if self._ahead else next(self._samples, _END)
        if sample is _END:
            return False
        self._num_read += 1
        window.start.num_read += 1
        sizes = self._check_sizes(self._batcher.size_of(sample))
        if load := self._load(sizes):
            window.samples.append(sample)
            window.sizes.append(sizes)
            window.loads.append(load)
            window.load += load
        return True

    def _check_sizes(self, size: Any) -> list[int]:
        """Return sizes as a list."""
        name = f"sample {self._num_read - 1} of the stream"
        self._planner.check_mask(size, f"{_WHERE} the size of {name}")
        found = self._planner.np.asarray(size)
        if found.dtype.kind not in "iu" or found.ndim > 1 or not found.size:
            raise BatchTypeError(
                f"{_WHERE} size_of must return an integer or a sequence of integers, "
                f"but returned {size!r} ({type_name(size)}) for {name}. Return the "
                "sizes that differ between samples."
            )
        sizes: list[int] = found.reshape(-1).tolist()
        if self._shapes is None:
            self._num_dims = len(sizes)
            self._shapes = self._batcher._shapes(self._num_dims)
        if len(sizes) != self._num_dims:
            raise BatchValueError(
                f"{_WHERE} size_of must return {self._num_dims} sizes for each sample "
                f"like for the first one, but returned {sizes} for {name}. Return the "
                "same dimensions for all samples."
            )
        if min(sizes) < 0 or max(sizes) > self._planner.MAX_SIZE:
            raise BatchValueError(
                f"{_WHERE} sizes must be from 0 to {self._planner.MAX_SIZE}, but are "
                f"{sizes} for {name}. Correct size_of."
            )
        self._shapes.check_largest(
            self._planner.np.array([sizes]), f"The size of {name}"
        )
        return sizes

    def _load(self, sizes: list[int]) -> int:
        """Return the share of a batch that a sample needs, 0 if it is left out."""
        if self._options["batch_size"]:
            return 1
        options, most = self._options, self._options["max_batch_size"]
        budget = self._planner.Budget(
            self._shapes, options["max_padded"], options["max_total"], _WHERE
        )
        needed = float(budget.needs(self._planner.np.array(sizes)[:, None])[0])
        if needed <= budget.limit:
            load = max(needed / budget.limit, 1 / most if most else 0)
            return max(1, int(load * _FULL))
        if not options["skip_oversized"]:
            name = f"sample {self._num_read - 1} of the stream"
            budget.raise_oversized(name, sizes, needed)
        self._batcher.num_skipped += 1
        return 0
