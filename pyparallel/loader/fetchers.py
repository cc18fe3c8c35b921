"""Read the samples of a batch, where the dataset is read, and locate their errors."""

from __future__ import annotations

import functools
import math
import operator
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils.data import Subset, default_collate

from .. import backend
from ..batch import allocation
from ..core.cpu_time import CoreWait, GilWait
from ..core.torch_private import (
    data_collate,
    in_forward_ad,
    is_recorded,
    num_function_modes,
)
from . import sample_random
from ._dataset_state import DatasetTracker
from ._random_state import (
    SampleTask,
    own_seed,
    raw_states,
    restore_raw,
    sample_key,
    seed_all,
)
from .errors import early_end
from .sample_errors import NO_SAMPLES, ErrorPolicy
from .sample_random import DrawWatch
from .tracebacks import Indices, format_indices, last_position, locate_in_batch

#: A reading of the CPU clock is not repeated within this time, or within the second
#: time after a batch that took less than the first one.
_CPU_SECONDS, _SHORT_CPU_SECONDS = 1e-3, 20e-3


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
        in_thread: the workers are threads, which share the global random states.
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
    in_thread: bool = False


class Times:
    """Measure the parts of batches: the samples, the batch, and its message.

    Readings of the CPU clock take half as long as a small batch, and most of them if
    the caches are cold, as with many workers. So batches that begin soon after a
    reading have the shares of CPU time of the last batch. If such a batch takes long,
    its CPU time is that since the reading. Other threads may have used CPU time before
    the batch, so after a pause it is at most the time of the batch.

    Args:
        cpu_clock: returns the CPU time of this process.
        core_wait: measures the waits of this thread for a core, which are counted at
            the readings of the CPU clock.
        gil_wait: measures the waits of this thread for the GIL.
    """

    def __init__(
        self,
        cpu_clock: Callable[[], float],
        core_wait: CoreWait | None = None,
        gil_wait: GilWait | None = None,
    ) -> None:
        self._cpu_clock, self._core_wait = cpu_clock, core_wait
        self._gil_wait = gil_wait
        self._core_waited = core_wait.seconds() if core_wait else 0.0
        self._read_at, self._due_at, self._cpu = 0.0, -math.inf, 0.0
        self._shares = 0.0, 0.0, 0.0

    def close(self) -> None:
        """Close the counters of the thread."""
        for counter in (self._core_wait, self._gil_wait):
            if counter is not None:
                counter.close()

    def begin(self) -> None:
        """Begin a batch."""
        if self._gil_wait is not None:
            self._gil_wait.begin()
        start = time.perf_counter()
        self._ends = [start]
        self._cpus = [self._cpu_clock()] if start > self._due_at else []

    def end_part(self) -> None:
        """Note the end of a part."""
        self._ends.append(time.perf_counter())
        if self._cpus:
            self._cpus.append(self._cpu_clock())

    def end(self) -> tuple[float, ...]:
        """Return the seconds of the three parts, their CPU seconds, and the two waits.

        A part that was not measured takes no time.
        """
        ends, core, gil = self._ends, 0.0, 0.0
        if len(ends) == 3:
            ends.append(ends[2])
        start, fetched, collated, packed = ends
        fetch, collate, pack = fetched - start, collated - fetched, packed - collated
        is_long = packed - start > _CPU_SECONDS
        if self._cpus or is_long:
            core, gil = self._read_clocks((fetch, collate, pack))
            self._due_at = packed + (_CPU_SECONDS if is_long else _SHORT_CPU_SECONDS)
        a, b, c = self._shares
        return fetch, collate, pack, a * fetch, b * collate, c * pack, core, gil

    def _read_clocks(self, seconds: Sequence[float]) -> tuple[float, float]:
        """Measure the shares of CPU time, and return the two waits."""
        cpus, duration, waited, gil_waited = self._cpus, sum(seconds), 0.0, 0.0
        if cpus:
            parts = map(operator.sub, cpus[1:], cpus)
            shares = *map(operator.truediv, parts, seconds), 0.0
            self._shares, self._cpu = shares[:3], cpus[-1]
        else:
            before, self._cpu = self._cpu, self._cpu_clock()
            spent = self._cpu - before
            if self._ends[0] - self._read_at > _CPU_SECONDS:
                spent = min(spent, duration)
            self._shares = (spent / duration,) * 3
        self._read_at = self._ends[-1]
        if self._core_wait is not None:
            before, self._core_waited = self._core_waited, self._core_wait.seconds()
            waited = self._core_waited - before
        if self._gil_wait is not None:
            used = sum(map(operator.mul, self._shares, seconds))
            gil_waited = self._gil_wait.end(duration - used - waited)
        return waited, gil_waited


class _Fetcher:
    """The part of both fetchers that makes a batch."""

    def __init__(self, source: Source, times: Times) -> None:
        self.collate_fn: Callable[[list[Any]], Any] = source.collate_fn
        self._times, self._is_stopped = times, False
        self._places: Any = None  # a copy of the task, one for each sample
        if source.collate_fn is default_collate:
            own = DefaultCollate(source.num_workers > 0).collate
            self.collate_fn = own if backend.name == "native" else _default_collate

    def locate(self, error: BaseException) -> str:
        """Return the samples of an error of the last batch, as a text."""
        raise NotImplementedError

    def stop(self) -> None:
        """Read no more samples, and return no batch. For any thread."""
        self._is_stopped = True
        if isinstance(self._places, list):
            self._places.clear()  # this ends the loop over them

    def _collate(self, samples: Any) -> Any:
        """Return a batch. ``StopIteration`` would look like the end of the data."""
        self._times.end_part()
        if samples is NO_SAMPLES or self._is_stopped:
            return NO_SAMPLES
        try:
            return self.collate_fn(samples)
        except (StopIteration, GeneratorExit) as error:
            raise early_end("collate_fn", error, self.locate(error)) from error


class DefaultCollate:
    """torch's ``default_collate``, in half of its time for small plain samples.

    Args:
        in_worker: large tensors go to the functions of ``default_collate_fn_map``,
            which write into the slab of a worker.
    """

    def __init__(self, in_worker: bool) -> None:
        self._in_worker = in_worker
        modules = data_collate.__name__, f"{__package__}.messages"
        self._known = {
            kind: function
            for kind, function in data_collate.default_collate_fn_map.items()
            if function.__module__ in modules
        }
        self._functions: Any = None  # of the last batch
        self._are_for_others = False

    def collate(self, samples: list[Any]) -> Any:
        """Return torch's batch, or raise torch's error."""
        functions = data_collate.default_collate_fn_map
        if functions != self._functions:  # the user, or a library, has added one
            self._functions = functions.copy()
            self._are_for_others = self._check_for_others()
        if self._are_for_others and not (
            in_forward_ad() or is_recorded() or num_function_modes()
        ):
            try:
                return self._column(samples)
            except Exception:
                pass
        return _default_collate(samples)

    def _check_for_others(self) -> bool:
        """Return True if all functions of the user are for classes not handled here."""
        functions, known = self._functions, self._known
        if any(functions.get(kind) is not known[kind] for kind in known):
            return False
        handled: tuple[Any, ...] = torch.empty(0), {}, (), 0, 0.0, "", b""
        added = tuple(kind for kind in functions if kind not in known)
        try:
            return not any(isinstance(value, added) for value in handled)
        except Exception:  # of a metaclass
            return False

    def _column(self, column: Any) -> Any:
        cls = type(column[0])
        found: Any = None
        if cls is torch.Tensor:
            if not self._in_worker or _is_small(column):
                found = backend.stack_equal(column)
        elif cls is dict:
            found = backend.columns([*column], True)
            for key, values in found.items() if found else ():
                if type(values) is list:
                    found[key] = self._column(values)
        elif cls is tuple:
            found = self._tuples(column)
        if found is not None:
            return found
        function: Any = self._known.get(cls)
        if function is None:
            return default_collate(column)
        return function(column, collate_fn_map=self._known)

    def _tuples(self, column: Any) -> list[Any] | None:
        if set(map(type, column)) != {tuple} or len(set(map(len, column))) > 1:
            return None
        return [self._column(each) for each in zip(*column, strict=True)]


def _default_collate(samples: Any) -> Any:
    """Return torch's batch, also of a sequence that ``__getitems__`` has returned.

    torch stacks the tensors of a list or a tuple only.
    """
    is_sequence = isinstance(samples, torch.Tensor | deque)
    return default_collate([*samples] if is_sequence else samples)


def _is_small(column: Any) -> bool:
    size: int = column[0].nbytes * len(column)
    return size <= allocation.SMALL_NBYTES


class MapFetcher(_Fetcher):
    """Reads the batches of a map-style dataset."""

    def __init__(self, source: Source, times: Times) -> None:
        super().__init__(source, times)
        self._dataset, self._policy = source.dataset, source.policy
        self._auto_collation = source.auto_collation
        self._has_keys, self._seeds = source.has_keys, source.seeds
        self._saves = source.seeds is not False and not source.num_workers
        # Threads share the global states, so they set none.
        self._seeds_all = source.seeds is not False and not source.in_thread
        self._watch = DrawWatch() if source.in_thread and source.seeds else None
        self._saved: Any = None  # the random states before a batch
        self._indices: Any = None  # of the last batch
        self._iterator: Any = None  # over them
        self._location = ""  # of its error, once it is known
        method = getattr(source.dataset, "__getitems__", None)
        # torch's method reads samples one by one, in the order of the indices.
        is_each = getattr(method, "__func__", None) is Subset.__getitems__
        self._reads_all = bool(method)
        #: Makes a list of the indices of samples that are read one by one.
        self._copy: type[list[Any]] | None = None
        if source.auto_collation and (source.has_keys or is_each):
            self._copy = Indices
        elif source.auto_collation and not method:
            self._copy = list

    def fetch(self, task: Any) -> Any:
        """Return the batch of a task."""
        if self._seeds is False:
            return self._collate(self.read(task))
        with sample_random.reading():
            try:
                return self._collate(self.read(task))
            finally:
                self._restore()

    def read(self, task: Any) -> Any:
        """Return the samples of a task, or `NO_SAMPLES`."""
        indices, dataset = task.indices if self._has_keys else task, self._dataset
        self._location, self._iterator = "", None
        self._indices = indices
        if self._copy is not None:
            self._places = self._indices = indices = self._copy(indices)
        try:
            if self._has_keys:
                return self._read_with_keys(task, indices)
            if not self._auto_collation:
                return dataset[indices]
            if self._reads_all:
                return dataset.__getitems__(indices)
            self._iterator = iter(indices)
            return [dataset[index] for index in self._iterator]
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
            sample_random.begin(task.seed, task.epoch, "batch", task.number)
        if self._seeds_all:
            seed_all(sample_key(task.seed, task.epoch, "batch", task.number))
        is_batch = self._auto_collation or not isinstance(samples, list)
        return samples if is_batch else samples[0]

    def _read_one(self, task: SampleTask, index: Any) -> Any:
        if self._seeds is not False:
            key = sample_key(task.seed, task.epoch, "sample", index)
            sample_random.begin(task.seed, task.epoch, "sample", index)
            if self._seeds_all:
                seed_all(key)
            if callable(self._seeds):
                self._seeds(own_seed(key))
            watch = None if task.number else self._watch
            if watch is not None and not watch.is_done():
                size = len(self._indices) if self._auto_collation else 1
                with watch.sample(max(size, 1)):  # `stop` empties the indices
                    return self._dataset[index]
        return self._dataset[index]

    def _restore(self) -> None:
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
        elif self._iterator is not None:
            position = last_position(self._iterator, len(indices))
        if position is not None:
            return f"at index {format_indices(indices[position])}"
        if self._auto_collation and isinstance(indices, Iterable):
            return locate_in_batch("index", "indices", error, list(indices))
        return f"at index {format_indices(indices)}"  # maybe of a slice


class IterableFetcher(_Fetcher):
    """Reads the batches of an iterable dataset, one epoch of it."""

    def __init__(self, source: Source, times: Times) -> None:
        super().__init__(source, times)
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
            samples, self._places = [], list(places)
            for _ in self._places:
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

    def locate(self, error: BaseException) -> str:
        """Return the samples of an error of the last batch, as a text."""
        if self._num_last is not None:  # the dataset raised it
            self._num_read += self._num_last + 1
            return f"at sample {self._num_read - 1}"
        if not self._auto_collation:
            return f"at sample {self._last[0]}"
        return locate_in_batch("sample", "samples", error, [*self._last])
