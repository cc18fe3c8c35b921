"""Save and restore the state of a loader's dataset.

Every worker gets a `DatasetTracker` together with the dataset. It reports the
state of a stateful dataset with each batch, and restores the position of a stopped
worker. `DatasetStates` collects the reports in the parent.

Note: [dataset states]. A worker is ahead of the consumer, so its state must come with
each batch, but only after the first ``state_dict()`` of the loader. Before that, the
state of a worker is its number of batches, and a restored worker reads them again.
"""

from __future__ import annotations

import contextlib
import copy
import os
import pickle
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.utils.data import IterableDataset, get_worker_info

from ..core.errors import BatchValueError, restoring, type_name
from ..core.stateful import copy_state, is_stateful
from ..core.torch_private import ExceptionWrapper, in_worker_thread
from . import _random_state
from ._loader_state import dataset_part, find_epochs, set_epochs, shares_dataset
from ._sampler_state import END, StatefulIterable
from .arguments import Loader
from .errors import worker_text, wrap_exception
from .sample_errors import ErrorPolicy


class WorkerReport(NamedTuple):
    """The state of a worker, sent with each batch.

    Attributes:
        worker: the number of the worker.
        state: the state of the dataset and its iterator after the batch, or the
            exception that ``state_dict`` raised. None if neither is stateful, or if
            the parent has not requested states.
        random: the worker's random state before ``iter()`` of an iterable dataset.
            Only with the first batch after that.
    """

    worker: int
    state: dict[str, Any] | ExceptionWrapper | None
    random: dict[str, Any] | None


@dataclass
class DatasetTracker:
    """Saves and restores a dataset in the process that reads it.

    Attributes:
        dataset: a stateful dataset, or an iterable one.
        batch_size: the number of samples in a batch.
        records: for every worker that had delivered batches: their number (``given``),
            the last ``state``, the ``random`` state, whether the epoch has ended
            (``ended``), and its number of ``set_epoch`` (``number``). Threads share
            them.
        wants_states: a number in shared memory. Workers report states unless it is 0.
        replays: for workers of a map-style dataset whose state is unknown: the indices
            that they had read, as torch sent them.
        policy: reads the samples, None if errors are raised. Each thread has its own.
        saves: whether to use the state of the dataset. False: delivered samples are
            read again.
    """

    dataset: Any
    batch_size: int
    records: dict[int, dict[str, Any]]
    wants_states: Any
    replays: dict[int, list[Any]]
    policy: ErrorPolicy | None
    saves: bool

    def __post_init__(self) -> None:
        self._worker, self._tracked = 0, self._track()
        self._random: dict[str, Any] | None = None

    def enter(self, worker: int, read_again: Callable[[Any], Any]) -> None:
        """Begin in the process that reads: the process of a worker, or the parent.

        Args:
            worker: the number of the worker, 0 in the parent.
            read_again: reads the samples of a task, which were delivered before.
        """
        self._worker = worker
        if isinstance(self.dataset, IterableDataset):
            return
        record = self.records.pop(worker, None)
        if record is not None and record["state"] is not None:
            with _random_state.preserve_in_parent():
                self._load(record)
        for task in self.replays.get(worker, ()):
            with contextlib.suppress(Exception):  # already raised in the earlier run
                read_again(task)
        self._discard_failures()

    def open(self) -> Iterator[Any]:
        """Return the iterator over an iterable dataset, after the delivered samples.

        Raises:
            RuntimeError: the dataset ends before that position.
        """
        samples = self._open()
        self._discard_failures()
        info = get_worker_info() if in_worker_thread() else None
        is_shared = info is not None and info.num_workers > 1
        if is_shared and self._tracked.is_iterator:
            raise BatchValueError(
                "DataLoader: with several threads, each iter() of an iterable dataset "
                f"must return an iterator of its own, but {type_name(self.dataset)} "
                "returns itself, so its threads would share one position. Write "
                "__iter__ as a generator, or use processes."
            )
        return samples

    def _open(self) -> Iterator[Any]:
        record = self.records.pop(self._worker, None)
        if record is not None and record["state"] is not None and self.saves:
            return self._restore(record)
        if get_worker_info() is not None and not in_worker_thread():
            if record is not None and record["random"] and not record["ended"]:
                _random_state.restore(record["random"], {})
            self._random = _random_state.capture({})
        samples = self._new_epoch()
        if record is not None and not record["ended"]:
            self._skip(samples, record["given"])
        return samples

    def _restore(self, record: dict[str, Any]) -> Iterator[Any]:
        if "iterator" not in record["state"]:  # saved before an iter()
            self._load(record)
            return self._new_epoch()
        if not record["ended"]:
            return self._tracked.resume(record["state"])
        with _random_state.preserve_in_parent(), self._keep_epoch(record):
            own = record["state"]["own"] is not None
            first = copy_state(self.dataset) if own else None
            self._finish(record["state"])
            if own and next(self._new_epoch(), END) is END:  # it stays at its end
                self.dataset.load_state_dict(first)
            elif own:
                self._finish(record["state"])
        return self._new_epoch()

    def _load(self, record: dict[str, Any]) -> None:
        with self._keep_epoch(record):
            self.dataset.load_state_dict(record["state"]["own"])

    @restoring
    def _keep_epoch(self, record: dict[str, Any]) -> Generator[None, None, None]:
        """Keep the number of ``set_epoch``. A state may have that of an earlier epoch.

        A copy in another process may count its epochs. So it keeps the number only if
        the program has set it since the epoch of the record.
        """
        is_here = get_worker_info() is None or in_worker_thread()
        parts = dataset_part(self.dataset)
        epochs = find_epochs(parts)
        if not is_here and record.get("number") == epochs.get("dataset"):
            epochs = {}
        yield
        set_epochs(parts, epochs)

    def _finish(self, state: dict[str, Any]) -> None:
        """Read the rest of an epoch: samples that drop_last dropped, or none."""
        for _ in self._tracked.resume(state):
            pass

    def _track(self) -> StatefulIterable:
        skip_errors = None if self.policy is None else self.policy.skip_errors
        return StatefulIterable(self.dataset, skip_errors, saves=self.saves)

    def _discard_failures(self) -> None:
        """Forget failures of samples that were only read again."""
        if self.policy is not None:
            self.policy.take_failures()

    def _new_epoch(self) -> Iterator[Any]:
        self._tracked = self._track()
        return iter(self._tracked)

    def _skip(self, samples: Iterator[Any], batches: int) -> None:
        expected = batches * self.batch_size
        found = 0
        while found < expected and next(samples, END) is not END:
            found += 1
        if found <= expected - self.batch_size:  # the last batch may have been short
            advice = "Restore its data, and its epoch with set_epoch."
            if self.saves:
                advice = (
                    "Add state_dict and load_state_dict to the dataset, or restore its "
                    "data."
                )
            raise RuntimeError(
                f"DataLoader.load_state_dict: the dataset must yield its samples "
                f"again, but worker {self._worker} had delivered {batches} batches of "
                f"{self.batch_size} and now finds {found} samples. {advice}"
            )

    def state(self) -> dict[str, Any] | None:
        """Return a copy of the current state, None if the dataset has no state.

        Call this in the process that reads, after `enter` or `open`.
        """
        if isinstance(self.dataset, IterableDataset):
            return self._tracked.state()
        return {"own": copy_state(self.dataset)}

    def report(self) -> bytes:
        """Return the pickled `WorkerReport` of the last batch."""
        random, self._random = self._random, None
        try:
            state = self.state() if self.wants_states.value else None
            return pickle.dumps(WorkerReport(self._worker, state, random))
        except Exception:  # raised again by state_dict() of the loader, not by next()
            error = wrap_exception(worker_text(self._worker))
            return pickle.dumps(WorkerReport(self._worker, error, random))


def _has_reports(dataset: Any) -> bool:
    """Return True if workers report their position in a dataset."""
    return isinstance(dataset, IterableDataset) or is_stateful(dataset)


class DatasetStates:
    """The states of the dataset in all processes during one epoch, for the parent.

    Attributes:
        tracker: tracks the dataset, if it is iterable or stateful.
        report: the worker's report with the batch that is about to be delivered.
        records: for every worker that has delivered a batch, see `DatasetTracker`.
        unknown: persistent workers that continued after the consumer left an epoch.
        turn: the number of workers to skip before the first one that sends a batch.
        number: the number of ``set_epoch`` of the dataset in this epoch, if it has one.
    """

    number: int | None = None

    def __init__(self, loader: Loader, state: dict[str, Any], *, left: bool) -> None:
        """Begin an epoch, or continue one, from a state.

        ``left``: the consumer left the previous epoch of these workers before its end.
        """
        self.tracker: DatasetTracker | None = None
        self.report: WorkerReport | None = None
        records = copy.deepcopy(state["workers"])
        self.records: dict[int, Any] = {int(k): record for k, record in records.items()}
        # Also workers that have only read ahead.
        is_unknown = left and _has_reports(loader.dataset)
        self.unknown = set(range(loader.num_workers)) if is_unknown else set()
        self.turn = 0
        self._replays: dict[int, list[Any]] = {}
        self._batch_size = loader.batch_size or 1
        self._num_workers = loader.num_workers
        self._saves = not loader.replay_dataset
        self._continued = loader._loaded is not None
        # Persistent workers and threads keep their dataset, so they cannot read an
        # epoch again.
        keeps_dataset = loader.persistent_workers or shares_dataset(loader)
        self._wants_at_start = loader._states_wanted or keeps_dataset
        self._context = loader.multiprocessing_context or torch.multiprocessing
        self._wants_states: Any = None
        self._pid = os.getpid()

    def track(self, dataset: Any, policy: ErrorPolicy | None) -> DatasetTracker | None:
        """Return a tracker of the dataset, None if it has no state and is map-style."""
        if _has_reports(dataset):
            records = self.records if self._continued else {}
            if self._num_workers:
                self._wants_states = self._context.RawValue("b", self._wants_at_start)
            self.tracker = DatasetTracker(
                *(dataset, self._batch_size, copy.deepcopy(records)),
                self._wants_states,
                self._replays,
                policy,
                self._saves,
            )
        return self.tracker

    def request_states(self) -> None:
        """Let workers report states from now on. A fork of the parent cannot."""
        if self._wants_states is not None and os.getpid() == self._pid:
            self._wants_states.value = True

    def set_replays(self, tasks: list[Any]) -> None:
        """Set the batches that workers with an unknown state read again.

        Args:
            tasks: the delivered tasks of the epoch, of a map-style dataset. Worker 0
                had the first task, worker 1 the second, and so on in turn.
        """
        for worker, record in self.records.items():
            if record["state"] is None:
                self._replays[worker] = tasks[worker :: self._num_workers]

    def store(self, report: WorkerReport) -> None:
        """Store the report that came with the delivered batch."""
        self.report = None
        record = self.records.get(report.worker)
        if record is None or record["ended"]:
            record = {"given": 0, "ended": False, "random": None, "number": self.number}
            self.records[report.worker] = record
        record["given"] += 1
        record["state"] = report.state
        random = report.random or record["random"]
        record["random"] = random if report.state is None else None
        self.unknown.discard(report.worker)
        self.turn = report.worker + 1

    def copy_records(self, num_delivered: int) -> dict[str, dict[str, Any]]:
        """Return a record for every process that has delivered a batch, by its number.

        Args:
            num_delivered: the number of batches that all of them have delivered.
        """
        if self._num_workers or self.tracker is None:
            return {str(worker): dict(r) for worker, r in self.records.items()}
        record = {"given": num_delivered, "ended": False, "random": None}
        return {"0": {**record, "state": self.tracker.state()}}
