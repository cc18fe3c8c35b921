"""Read the samples of a batch, where the dataset is read, and locate their errors."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from torch.utils.data import Subset

from ..core.cpu_time import cpu_seconds
from ._dataset_state import DatasetTracker
from ._random_state import (
    SampleTask,
    own_seed,
    raw_states,
    restore_raw,
    sample_key,
    seed_all,
)
from .sample_errors import NO_SAMPLES, ErrorPolicy
from .tracebacks import Indices, format_indices, locate_in_batch


class Source(NamedTuple):
    """The dataset of a loader, and the arguments for reading it.

    Attributes:
        dataset: the user's dataset.
        collate_fn: makes a batch of samples.
        is_iterable: the dataset has no indices.
        auto_collation: a task has the indices of several samples.
        drop_last: drop a last batch that is short.
        num_workers: the number of workers, 0 for the calling thread.
        init: the user's ``worker_init_fn``.
        tracker: saves and restores the dataset, None if it needs no state.
        policy: reads samples with ``on_error``, None if errors are raised.
        has_keys: tasks are those of a `SampleTask`.
        seeds: set the random states before each sample. A function is called after
            that, with a seed of the sample. With seeds, ``__getitems__`` of the dataset
            is not called, which would read several samples with one random state.
    """

    dataset: Any
    collate_fn: Callable[[Any], Any]
    is_iterable: bool
    auto_collation: bool
    drop_last: bool
    num_workers: int
    init: Callable[[int], Any] | None
    tracker: DatasetTracker | None
    policy: ErrorPolicy | None
    has_keys: bool
    seeds: bool | Callable[[int], Any]


class _Fetcher:
    """The part of both fetchers that makes a batch.

    Attributes:
        collate_fn: makes a batch of samples.
        cpu_clock: returns the CPU time of this process.
        collate_start: the wall clock and the CPU clock when the samples were complete.
    """

    collate_start = (0.0, 0.0)

    def __init__(self, source: Source) -> None:
        self.collate_fn = source.collate_fn
        # Finished child processes are counted in workers only: it takes a call more.
        self.cpu_clock = cpu_seconds if source.num_workers else time.process_time

    def locate(self, error: BaseException) -> str:
        """Return the samples of an error of the last batch, as a text."""
        raise NotImplementedError

    def _collate(self, samples: Any) -> Any:
        """Return a batch. ``StopIteration`` would look like the end of the data."""
        self.collate_start = time.perf_counter(), self.cpu_clock()
        if samples is NO_SAMPLES:
            return samples
        try:
            return self.collate_fn(samples)
        except (StopIteration, GeneratorExit) as error:
            raise early_end("collate_fn", error, self.locate(error)) from error


class MapFetcher(_Fetcher):
    """Reads the batches of a map-style dataset."""

    def __init__(self, source: Source) -> None:
        super().__init__(source)
        self._dataset, self._policy = source.dataset, source.policy
        self._auto_collation = source.auto_collation
        self._has_keys, self._seeds = source.has_keys, source.seeds
        self._saves = source.seeds is not False and not source.num_workers
        self._saved: Any = None  # the random states before a batch
        self._indices: Any = None  # of the last batch
        self._location = ""  # of its error, once it is known
        method = getattr(source.dataset, "__getitems__", None)
        # torch's method reads samples one by one, in the order of the indices.
        is_each = getattr(method, "__func__", None) is Subset.__getitems__
        self._reads_each = source.has_keys or not method or is_each

    def fetch(self, task: Any) -> Any:
        """Return the batch of a task."""
        return self._collate(self.read(task))

    def read(self, task: Any) -> Any:
        """Return the samples of a task, or `NO_SAMPLES`."""
        indices = task.indices if self._has_keys else task
        if self._auto_collation and self._reads_each:
            indices = Indices(indices)
        self._indices, self._location = indices, ""
        try:
            if self._has_keys:
                return self._read_with_keys(task, indices)
            if not self._auto_collation:
                return self._dataset[indices]
            if getattr(self._dataset, "__getitems__", None):
                return self._dataset.__getitems__(indices)
            return [self._dataset[index] for index in indices]
        except (StopIteration, GeneratorExit) as error:
            self._location = self.locate(error)
            raise early_end("the dataset", error, self._location) from error

    def _read_with_keys(self, task: SampleTask, indices: Any) -> Any:
        if self._saves:
            self._saved = raw_states()
        read_one = functools.partial(self._read_one, task)
        each = indices if self._auto_collation else [indices]
        samples: Any
        if self._policy is None:
            samples = [read_one(index) for index in each]
        else:
            read_batch = None
            if self._auto_collation and self._seeds is False:
                read_batch = getattr(self._dataset, "__getitems__", None)
            samples = self._policy.read(task, each, read_one, read_batch)
        if self._seeds is not False:
            seed_all(sample_key(task.seed, task.epoch, "batch", task.number))
        is_batch = self._auto_collation or not isinstance(samples, list)
        return samples if is_batch else samples[0]

    def _read_one(self, task: SampleTask, index: Any) -> Any:
        if self._seeds is not False:
            key = sample_key(task.seed, task.epoch, "sample", index)
            seed_all(key)
            if callable(self._seeds):
                self._seeds(own_seed(key))
        return self._dataset[index]

    def restore(self) -> None:
        """Restore the random states from before the last batch."""
        states, self._saved = self._saved, None
        if states is not None:
            restore_raw(states)

    def locate(self, error: BaseException) -> str:
        """Return the samples of an error of the last batch, as a text."""
        indices, position = self._indices, None
        if self._location:
            return self._location
        if isinstance(indices, Indices):
            position = indices.take_position()
        if position is not None:
            return f"at index {format_indices(indices[position])}"
        if self._auto_collation and isinstance(indices, Iterable):
            return locate_in_batch("index", "indices", error, list(indices))
        return f"at index {format_indices(indices)}"  # maybe of a slice


class IterableFetcher(_Fetcher):
    """Reads the batches of an iterable dataset, one epoch of it."""

    def __init__(self, source: Source) -> None:
        super().__init__(source)
        self._auto_collation, self._drop_last = source.auto_collation, source.drop_last
        tracker: Any = source.tracker
        self._samples, self._ended = tracker.open(), False
        self._num_read = 0  # samples of earlier batches
        self._num_last: int | None = None  # of the last one, while it is read

    def fetch(self, places: Any) -> Any:
        """Return the next batch.

        Args:
            places: as many places as the batch has samples.
        """
        if self._ended:
            raise StopIteration
        self._num_last = 0
        if not self._auto_collation:
            samples = next(self._samples)
            self._num_last = 1
        else:
            samples = []
            for _ in places:
                try:
                    samples.append(next(self._samples))
                except StopIteration:
                    self._ended = True
                    break
                self._num_last += 1
            if not samples or (self._drop_last and len(samples) < len(places)):
                raise StopIteration
        first, self._num_read = self._num_read, self._num_read + self._num_last
        self._last, self._num_last = range(first, self._num_read), None
        return self._collate(samples)

    def restore(self) -> None:
        """Do nothing: samples have no seeds."""

    def locate(self, error: BaseException) -> str:
        """Return the samples of an error of the last batch, as a text."""
        if self._num_last is not None:  # the dataset raised it
            self._num_read += self._num_last + 1
            return f"at sample {self._num_read - 1}"
        if not self._auto_collation:
            return f"at sample {self._last[0]}"
        return locate_in_batch("sample", "samples", error, [*self._last])


def early_end(what: str, error: BaseException, where: str) -> RuntimeError:
    """Return the error for code that must not raise ``StopIteration``."""
    return RuntimeError(
        f"DataLoader: only the sampler ends an epoch, but {what} raised "
        f"{type(error).__name__} {where}. Raise another error there."
    )
