"""Read samples and make batches, in the process or thread of a worker."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ..batch.stack import PaddingCounter
from ..core.cpu_time import cpu_seconds
from ..core.torch_private import data_worker
from ._dataset_state import DatasetTracker
from ._random_state import SampleTask
from ._sample_reader import NO_SAMPLES, SampleReader
from .sample_errors import ErrorPolicy
from .tracebacks import LocatingFetcher, format_indices

#: The kinds of answers: a batch, a batch without samples, an error, the end of an
#: iterable dataset.
BATCH, LEFT_OUT, ERROR, END = range(4)

#: The number of the epoch of these workers, the number of the batch in it, and the
#: indices, or the parts of a `SampleTask`. A plain tuple, which is cheap to send. A
#: new number of the epoch begins the dataset again.
Task = tuple[int, int, Any]


class Figures(NamedTuple):
    """Times and bytes of one batch. CPU times include finished child processes."""

    fetch_seconds: float = 0.0
    collate_seconds: float = 0.0
    fetch_cpu_seconds: float = 0.0
    collate_cpu_seconds: float = 0.0
    stacked_nbytes: int = 0
    padding_nbytes: int = 0


class Answer(NamedTuple):
    """The result of a task.

    Attributes:
        kind: ``BATCH``, ``LEFT_OUT``, ``ERROR`` or ``END``.
        value: a batch, or the exception.
        failures: the samples that ``on_error`` left out or replaced.
        report: the pickled state of the dataset, if the parent needs it.
        figures: the measurements of a batch.
        location: the samples of an exception.
    """

    kind: int
    value: Any = None
    failures: tuple[Any, ...] = ()
    report: bytes | None = None
    figures: Figures = Figures()
    location: str = ""


class Source(NamedTuple):
    """The arguments of a loader that a `Reader` needs.

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
        samples: tasks are those of a `SampleTask`.
        seeds: see `SampleReader`.
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
    samples: bool
    seeds: Any


class Reader:
    """Runs tasks. Pickled to a worker process, or used in the calling thread.

    Args:
        source: the dataset and the arguments of its loader.
        base_seed: seeds the workers.
    """

    def __init__(self, source: Source, base_seed: int) -> None:
        self._source, self._base_seed = source, base_seed
        self.number = -1  # of the batch in its epoch
        self._epoch = 0
        self._fetcher: Any = None
        self._start_error: BaseException | None = None
        self._location = ""
        self._collate_start = (0.0, 0.0)
        self._samples = None
        if source.samples:
            self._samples = SampleReader(
                source.dataset,
                seeds=source.seeds,
                policy=source.policy,
                saves=source.seeds is not False and not source.num_workers,
            )

    def start(self, worker: int) -> None:
        """Prepare a worker: threads of torch, seeds, the worker info, the user's init.

        The calling thread needs none of these. In a worker, an error is the answer to
        the first task, as in torch.
        """
        source = self._source
        if not source.num_workers:
            self._begin(worker)
            return
        torch.set_num_threads(1)
        seed = self._base_seed + worker
        random.seed(seed)
        torch.manual_seed(seed)
        try:
            import numpy as np
        except ImportError:
            pass
        else:
            np.random.seed(data_worker._generate_state(self._base_seed, worker))
        data_worker._worker_info = data_worker.WorkerInfo(
            id=worker, num_workers=source.num_workers, seed=seed, dataset=source.dataset
        )
        try:
            if source.init is not None:
                source.init(worker)
            self._begin(worker)
        except (StopIteration, GeneratorExit) as error:
            self._start_error = _early_end(f"worker_init_fn of worker {worker}", error)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:
            self._start_error = error

    def _begin(self, worker: int) -> None:
        """Restore the dataset, and begin its first epoch."""
        tracker = self._source.tracker
        if tracker is not None:
            tracker.enter(worker, self._read_again)
        self._begin_epoch()

    def _begin_epoch(self) -> None:
        make = _IterableFetcher if self._source.is_iterable else MapFetcher
        fetcher = make(self._source, self._samples, self.collate)
        self._fetcher = LocatingFetcher(fetcher, self._locate)

    def _read_again(self, task: Any) -> None:
        """Read the samples of a task, and make no batch."""
        MapFetcher(self._source, self._samples, _discard).fetch(task)

    def _locate(self, error: BaseException, location: str) -> None:
        self._location = location

    def run(self, task: Task) -> Answer:
        """Return the batch of a task, its error, or the end of an iterable dataset."""
        if self._start_error is not None:
            error, self._start_error = self._start_error, None
            return Answer(ERROR, error)
        epoch, number, indices = task
        self.number = number
        start, cpu = time.perf_counter(), cpu_seconds()
        try:
            if epoch != self._epoch:
                self._epoch = epoch
                self._begin_epoch()
            if self._samples is not None:
                indices = SampleTask(*indices)
            with PaddingCounter() as padding:
                batch = self._fetcher.fetch(indices)
        except StopIteration:  # of an iterable dataset: others are RuntimeErrors here
            return Answer(END, None, self._take_failures())
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:
            self._take_failures()  # of a batch that is not delivered
            location, self._location = self._location, ""
            return Answer(ERROR, error, location=location)
        finally:
            if self._samples is not None:
                self._samples.restore()
        end, (collate_start, collate_cpu) = time.perf_counter(), self._collate_start
        figures = Figures(
            collate_start - start,
            end - collate_start,
            collate_cpu - cpu,
            cpu_seconds() - collate_cpu,
            padding.stacked_nbytes,
            padding.padding_nbytes,
        )
        kind = LEFT_OUT if batch is NO_SAMPLES else BATCH
        return Answer(kind, batch, self._take_failures(), self._report(), figures)

    def _report(self) -> bytes | None:
        tracker = self._source.tracker
        if tracker is None or not self._source.num_workers:
            return None
        return tracker.report()

    def _take_failures(self) -> tuple[Any, ...]:
        policy = self._source.policy
        return () if policy is None else policy.take_failures()

    def collate(self, samples: Any) -> Any:
        """Return a batch. ``StopIteration`` would look like the end of the data."""
        self._collate_start = time.perf_counter(), cpu_seconds()
        if samples is NO_SAMPLES:
            return samples
        try:
            return self._source.collate_fn(samples)
        except (StopIteration, GeneratorExit) as error:
            raise _early_end("collate_fn", error) from error


def _discard(samples: Any) -> None:
    """Collate samples of a batch that is only read."""


class MapFetcher:
    """Reads the batches of a map-style dataset.

    Attributes:
        dataset: the dataset, or the `SampleReader` that reads it.
        auto_collation: a task has the indices of several samples.
        collate_fn: makes a batch.
    """

    def __init__(self, source: Source, samples: Any, collate_fn: Any) -> None:
        self.dataset = source.dataset if samples is None else samples
        self.auto_collation, self.collate_fn = source.auto_collation, collate_fn

    def fetch(self, indices: Any) -> Any:
        """Return the batch of these indices."""
        dataset = self.dataset
        try:
            samples: Any
            if not self.auto_collation:
                samples = dataset[indices]
            elif getattr(dataset, "__getitems__", None):
                samples = dataset.__getitems__(indices)
            else:
                samples = [dataset[index] for index in indices]
        except (StopIteration, GeneratorExit) as error:
            shown = indices.indices if isinstance(indices, SampleTask) else indices
            what = f"the dataset at index {format_indices(shown)}"
            raise _early_end(what, error) from error
        return self.collate_fn(samples)


class _IterableFetcher:
    """Reads the batches of an iterable dataset, one epoch of it.

    Attributes:
        dataset_iter: yields the samples.
        ended: the dataset has no more samples.
    """

    def __init__(self, source: Source, samples: Any, collate_fn: Any) -> None:
        self.dataset, self.auto_collation = source.dataset, source.auto_collation
        self.collate_fn, self._drop_last = collate_fn, source.drop_last
        tracker: Any = source.tracker
        self.dataset_iter, self.ended = tracker.open(), False

    def fetch(self, places: Any) -> Any:
        """Return the next batch.

        Args:
            places: as many places as the batch has samples.
        """
        if self.ended:
            raise StopIteration
        if not self.auto_collation:
            return self.collate_fn(next(self.dataset_iter))
        samples = []
        for _ in places:
            try:
                samples.append(next(self.dataset_iter))
            except StopIteration:
                self.ended = True
                break
        if not samples or (self._drop_last and len(samples) < len(places)):
            raise StopIteration
        return self.collate_fn(samples)


def _early_end(what: str, error: BaseException) -> RuntimeError:
    found = RuntimeError(
        f"DataLoader: only the sampler ends an epoch, but {what} raised "
        f"{type(error).__name__}. Raise another error there."
    )
    found.__cause__ = error
    return found
