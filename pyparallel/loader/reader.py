"""Read samples and make batches, in the process or thread of a worker."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from ..batch import pytree
from ..batch.container import DataContainer
from ..batch.stack import PaddingCounter
from ..core.cpu_time import CoreWait, GilWait, cpu_seconds
from ..core.errors import add_note
from ..core.torch_private import numpy_seed, set_worker_info
from ..shm.messages import RingMiss
from ._loader_state import dataset_part, find_epochs, set_epochs
from ._random_state import SampleTask
from .errors import early_end
from .fetchers import IterableFetcher, MapFetcher, Source, Times
from .sample_errors import NO_SAMPLES
from .stats import Figures
from .tracebacks import message_of, rank_text

#: The kinds of answers: a batch, a batch without samples, an error, the end of an
#: iterable dataset, and the error of a worker that could not start.
BATCH, LEFT_OUT, ERROR, END, NOT_STARTED = range(5)
#: Classes of leaves that contain no tensors.
_WITHOUT_TENSORS = frozenset((int, float, bool, str, bytes, type(None)))

#: The epoch of these workers, the number of the batch in it, and the indices, or the
#: parts of a `SampleTask`. A plain tuple, which is cheap to send. A new epoch begins
#: the dataset again. It is a count, and the number of ``set_epoch`` for copies of the
#: dataset, or None.
Task = tuple[tuple[int, int | None], int, Any]


@dataclass(slots=True)
class Answer:
    """The result of a task.

    Attributes:
        kind: ``BATCH``, ``LEFT_OUT``, ``ERROR``, ``END`` or ``NOT_STARTED``.
        value: a batch, or the exception.
        failures: the samples that ``on_error`` left out or replaced.
        report: the pickled state of the dataset, if the parent needs it.
        figures: the `Figures` of a batch, or their values from a message. A worker
            adds them when the batch is packed.
        location: the samples of an exception.
        is_pinned: all tensors of the batch are in pinned memory.
        miss: the reason why they are not in the ring, or None.
    """

    kind: int
    value: Any = None
    failures: tuple[Any, ...] = ()
    report: bytes | None = None
    figures: tuple[float, ...] = Figures()
    location: str = ""
    is_pinned: bool = False
    miss: RingMiss | None = None


class Reader:
    """Runs tasks. Pickled to a worker process, or used in the calling thread.

    Args:
        source: the dataset and the arguments of its loader.
        base_seed: seeds the workers.
    """

    def __init__(self, source: Source, base_seed: int) -> None:
        self._source, self._base_seed = source, base_seed
        self.number: int = -1  # of the batch in its epoch
        self._epoch: tuple[int, int | None] = (0, None)
        self._fetcher: MapFetcher | IterableFetcher
        policy = source.policy
        self._take_failures: Callable[[], tuple[Any, ...]]
        self._take_failures = tuple if policy is None else policy.take_failures
        #: Of `start`, or the text of the error for later tasks.
        self._start_error: BaseException | str | None = None

    def start(self, worker: int) -> None:
        """Prepare a worker: threads of torch, seeds, the worker info, the user's init.

        The calling thread needs none of these. In a worker, an error is the answer to
        the first task, as in torch.
        """
        source = self._source
        if not source.num_workers:
            self._times = Times(time.process_time)
            self._begin(worker)
            return
        # Finished child processes are counted in processes only: it takes a call more.
        if source.in_thread:
            self._times = Times(time.thread_time, CoreWait(), GilWait())
        else:
            self._times = Times(cpu_seconds, CoreWait())
            self._prepare_process(worker)
        try:
            if source.init is not None:
                self._init(worker, source.init)
            self._begin(worker)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:
            self._start_error = error

    def _init(self, worker: int, init: Callable[[int], Any]) -> None:
        try:
            init(worker)
        except (StopIteration, GeneratorExit) as error:
            where = f"in worker {worker}"
            raise early_end("worker_init_fn", error, where) from error

    def _prepare_process(self, worker: int) -> None:
        source, seed = self._source, self._base_seed + worker
        torch.set_num_threads(1)
        random.seed(seed)
        torch.manual_seed(seed)
        try:
            import numpy as np
        except ImportError:
            pass
        else:
            np.random.seed(numpy_seed(self._base_seed, worker))
        set_worker_info(worker, source.num_workers, seed, source.dataset)

    def _begin(self, worker: int) -> None:
        """Restore the dataset, and begin its first epoch."""
        tracker = self._source.tracker
        epochs = find_epochs(dataset_part(self._source.dataset))
        self._set_number = epochs.get("dataset")
        if tracker is not None:
            read_again = MapFetcher(self._source, self._times).read
            tracker.enter(worker, read_again)
        self._begin_epoch()

    def collate_in(self, block: AbstractContextManager[Any]) -> None:
        """Call the collate function in a block from now on."""
        collate_fn = self._source.collate_fn

        def collate(samples: Any) -> Any:
            with block:
                return collate_fn(samples)

        self._source = self._source._replace(collate_fn=collate)
        self._fetcher.collate_fn = collate

    def stop(self) -> None:
        """Let `run` read no more samples. Called in another thread."""
        if (fetcher := vars(self).get("_fetcher")) is not None:
            fetcher.stop()

    def close(self) -> None:
        """Close the counters of the thread, which runs no more tasks."""
        self._times.close()

    def _begin_epoch(self) -> None:
        make = IterableFetcher if self._source.is_iterable else MapFetcher
        try:
            self._fetcher = make(self._source, self._times)
        except (StopIteration, GeneratorExit) as error:
            where = "at the start of an epoch"
            raise early_end("iter() of the dataset", error, where) from error

    def _set_epoch(self, number: int | None) -> None:
        """Set a number of ``set_epoch``, unless a dataset counts its epochs itself."""
        if number != self._set_number and number is not None:
            set_epochs(dataset_part(self._source.dataset), {"dataset": number})
            self._set_number = number

    def run(self, task: Task) -> Answer:
        """Return the batch of a task, its error, or the end of an iterable dataset.

        Without workers, an error is raised. An answer would be a cycle: the traceback
        of the error refers to the frames that have the answer.
        """
        if self._start_error is not None:
            return Answer(NOT_STARTED, self._take_start_error())
        source = self._source
        epoch, self.number, indices = task
        self._times.begin()
        try:
            if epoch != self._epoch:
                self._set_epoch(epoch[1])
                self._begin_epoch()
                self._epoch = epoch  # not after an error: the next task begins it
            if source.has_keys:
                indices = SampleTask(*indices)
            with PaddingCounter() as self._padding:
                batch = self._fetcher.fetch(indices)
            self._times.end_part()
        except StopIteration:  # of an iterable dataset: others are RuntimeErrors here
            return Answer(END, None, self._take_failures())
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:
            failures = self._take_failures()  # of a batch that is not delivered
            location = self.locate(error) if epoch == self._epoch else ""
            if source.num_workers:
                return self._error_answer(error, location, failures)
            add_note(error, f"DataLoader{rank_text()}: {location}.")
            raise
        kind = BATCH
        if batch is NO_SAMPLES:
            kind, batch = LEFT_OUT, None
        failures = self._take_failures()
        if source.num_workers:
            return Answer(kind, batch, failures, self._report())
        return Answer(kind, batch, failures, None, self._figures(nbytes_of(batch)))

    def _error_answer(
        self, error: BaseException, location: str, failures: tuple[Any, ...]
    ) -> Answer:
        """Return the error of a batch, or its failures if they exceed the limit.

        The parent then raises the error of the limit. Its cause would be lost between
        two processes.
        """
        policy = self._source.policy
        if policy is not None and len(failures) > policy.max_errors:
            return Answer(LEFT_OUT, None, failures)
        return Answer(ERROR, error, location=location)

    def end_message(self, *counted: int) -> tuple[float, ...]:
        """Return the `Figures` of the last batch, whose message is complete.

        Args:
            counted: its bytes, and whether it is in the ring or missed the ring.
        """
        self._times.end_part()
        return self._figures(*counted)

    def _figures(
        self, nbytes: int, is_hit: int = 0, is_miss: int = 0
    ) -> tuple[float, ...]:
        stacked, padding = self._padding.stacked_nbytes, self._padding.padding_nbytes
        return *self._times.end(), stacked, padding, nbytes, is_hit, is_miss

    def _take_start_error(self) -> BaseException:
        """Return the error of `start`, for each task.

        The loop raises the object of a thread, and its traceback then refers to the
        iterator, which would keep the thread alive. So the thread forgets it.
        """
        error = self._start_error
        if not isinstance(error, BaseException):
            return RuntimeError(error)
        if self._source.in_thread:
            name, text = type(error).__name__, message_of(error)
            self._start_error = (
                "DataLoader: a worker must start before it reads samples, but its "
                f"start raised {name}: {text}. Make a new iterator."
            )
        return error

    def locate(self, error: BaseException) -> str:
        """Return the samples of an error of the last batch, as a text."""
        try:
            return self._fetcher.locate(error)
        except Exception:  # an index, or the message of the error, may raise anything
            return ""

    def _report(self) -> bytes | None:
        tracker = self._source.tracker
        return None if tracker is None else tracker.report()


def nbytes_of(batch: Any) -> int:
    """Return the bytes of all tensors in a batch."""
    try:
        if type(batch) is torch.Tensor:
            return batch.nbytes
        return _sum_nbytes(batch, 0)
    except Exception:  # a reference cycle, or an object that fails to be read
        return 0


def _sum_nbytes(batch: Any, depth: int) -> int:
    cls = type(batch)
    # Faster for most batches: `pytree.flatten` takes twice as long.
    if cls is dict or cls is list or cls is tuple:
        if depth > pytree.MAX_DEPTH:
            raise pytree.nesting_error("the batch")
        total = 0
        for value in batch.values() if cls is dict else batch:
            if type(value) not in _WITHOUT_TENSORS:
                total += _sum_nbytes(value, depth + 1)
        return total
    if isinstance(batch, torch.Tensor):
        return batch.numel() * batch.element_size()
    if isinstance(batch, DataContainer):
        return _sum_nbytes(batch.data, depth + 1)
    leaves, _ = pytree.flatten(batch)
    if len(leaves) == 1 and leaves[0] is batch:
        return 0
    return sum(_sum_nbytes(leaf, depth + 1) for leaf in leaves)
