"""Save and restore the state of a loader's dataset.

torch sends a `DatasetTracker` to every worker together with the dataset. It reports the
state of a stateful dataset with each batch, and restores the position of a stopped
worker. `DatasetStates` collects the reports in the parent.

Note: [dataset states]. Without workers, the dataset is in the parent and exactly behind
the last batch, so ``state_dict()`` of the loader calls its ``state_dict()``. A worker
is ahead of the consumer, so its state must come with each batch. A run that saves no
state needs none of these. So workers report states only after the first
``state_dict()`` of the loader. Until the first report, the state of a worker is its
number of batches, and a restored worker reads them again from the start of the epoch.
(torchdata's loader saves a state in every worker after ``iter(dataset)`` and after each
batch.)
"""

from __future__ import annotations

import contextlib
import copy
import pickle
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch.utils.data import IterableDataset, IterDataPipe, get_worker_info

from ..core.torch_private import ExceptionWrapper, MapFetcher
from . import _random_state
from ._random_state import SeededDataset
from ._sampler_state import END, StatefulIterable, copy_state, is_stateful
from ._worker import wrap_exception


class WorkerReport(NamedTuple):
    """What a worker tells about itself with a batch.

    Attributes:
        worker: which one it is.
        state: the dataset's, and its iterator's, after the batch, or the exception
            that its ``state_dict`` raised; None without any, or if the parent has not
            asked for states.
        random: the worker's random state before an iterable dataset was opened, with
            the first batch after that.
    """

    worker: int
    state: dict[str, Any] | ExceptionWrapper | None
    random: dict[str, Any] | None


class DatasetTracker:
    """A dataset in the process that reads it.

    Attributes:
        dataset: that of the user.
        read_as: the dataset, or the stand-in that torch reads instead.
    """

    def __init__(
        self,
        dataset: Any,
        samples: int,
        records: dict[int, dict[str, Any]],
        wanted: Any,
        replays: dict[int, list[Any]],
        auto_collation: bool,
    ) -> None:
        """Prepare, in the parent.

        Args:
            dataset: a stateful dataset, or an iterable one.
            samples: how many samples a batch has.
            records: for every worker that had given batches: how many (``given``), the
                last ``state``, the ``random`` state, and whether that was in an epoch
                that has ended (``ended``).
            wanted: a number in shared memory; workers report states while it is not 0.
            replays: for workers of a map-style dataset whose state is unknown: the
                indices that they had read, as torch sent them.
            auto_collation: those are batches of indices.
        """
        self.dataset = self.read_as = dataset
        self._samples = samples
        self._records = records
        self._wanted, self._replays = wanted, replays
        self._auto_collation = auto_collation
        self._worker = 0
        self._reader = StatefulIterable(dataset)
        self._random: dict[str, Any] | None = None

    def enter(self, worker: int) -> None:
        """Begin in the process that reads: the one of that worker, or the parent."""
        self._worker = worker
        if isinstance(self.dataset, IterableDataset):
            return
        record = self._records.pop(worker, None)
        if record is not None and record["state"] is not None:
            with _random_state.preserve_in_parent():
                self.dataset.load_state_dict(record["state"]["own"])
        fetcher = MapFetcher(self.read_as, self._auto_collation, _drop, False)
        for indices in self._replays.get(worker, ()):
            with contextlib.suppress(Exception):  # the consumer has seen it
                fetcher.fetch(indices)

    def open(self) -> Iterator[Any]:
        """Return the iterator over an iterable dataset, after what had been given.

        Raises:
            RuntimeError: the dataset ends before that.
        """
        record = self._records.pop(self._worker, None)
        if record is not None and record["state"] is not None:
            return self._restored(record)
        if get_worker_info() is not None:
            if record is not None and record["random"] and not record["ended"]:
                _random_state.restore(record["random"], {})
            self._random = _random_state.capture({})
        samples = self._fresh()
        if record is not None and not record["ended"]:
            self._skip(samples, record["given"])
        return samples

    def _restored(self, record: dict[str, Any]) -> Iterator[Any]:
        if not record["ended"]:
            return self._reader.continued(record["state"])
        with _random_state.preserve_in_parent():
            samples = self._reader.continued(record["state"])
            for _ in samples:  # what drop_last had dropped, and what follows the end
                pass
        return self._fresh()

    def _fresh(self) -> Iterator[Any]:
        self._reader = StatefulIterable(self.dataset)
        return iter(self._reader)

    def _skip(self, samples: Iterator[Any], batches: int) -> None:
        wanted = batches * self._samples
        found = 0
        while found < wanted and next(samples, END) is not END:
            found += 1
        if found <= wanted - self._samples:  # the last batch may have been short
            raise RuntimeError(
                f"DataLoader.load_state_dict: the dataset must give its samples again, "
                f"but worker {self._worker} had given {batches} batches of "
                f"{self._samples} and now finds {found} samples. Give the dataset "
                f"state_dict and load_state_dict, or the data that it had."
            )

    def state(self) -> dict[str, Any] | None:
        """Return a copy of the state as it is now; None without any.

        For this process, after `enter` or `open`.
        """
        if isinstance(self.dataset, IterableDataset):
            return self._reader.state()
        return {"own": copy_state(self.dataset)}

    def extra(self) -> bytes:
        """Return the pickled `WorkerReport` of the batch that was just made."""
        random, self._random = self._random, None
        try:
            state = self.state() if self._wanted.value else None
            return pickle.dumps(WorkerReport(self._worker, state, random))
        except Exception:  # for the caller of the loader's state_dict alone
            found = wrap_exception(f"in DataLoader worker process {self._worker}")
            return pickle.dumps(WorkerReport(self._worker, found, random))


def _drop(samples: Any) -> None:
    """Collate samples that are not needed."""


class TrackedDataset(IterableDataset[Any]):
    """What a loader reads in the place of an iterable dataset."""

    def __init__(self, source: DatasetTracker) -> None:
        self.source, self.dataset = source, source.dataset

    def __iter__(self) -> Iterator[Any]:
        return self.source.open()

    def __repr__(self) -> str:
        return repr(self.dataset)


#: What this process reads, if it is a worker.
_here: DatasetTracker | None = None


class StatefulWorkerInit:
    """The ``worker_init_fn`` of workers that read a stand-in for the dataset."""

    def __init__(
        self, init: Callable[[int], Any] | None, source: DatasetTracker | None
    ) -> None:
        self.init, self.source = init, source

    def __call__(self, worker: int) -> None:
        global _here
        info = get_worker_info()
        if info is not None and isinstance(
            info.dataset, TrackedDataset | SeededDataset
        ):
            # get_worker_info() must show users their own dataset; it forbids setattr.
            object.__setattr__(info, "dataset", info.dataset.dataset)
        if self.init is not None:
            self.init(worker)
        if self.source is not None:
            self.source.enter(worker)
        _here = self.source


def worker_report() -> bytes | None:
    """Return the pickled `WorkerReport` of the batch just made, None without a source.

    For the worker, right after the batch has been made.
    """
    return None if _here is None else _here.extra()


class DatasetStates:
    """What is known of the dataset's states in one epoch.

    Attributes:
        source: the dataset, if it is iterable or stateful.
        extra: the worker's report with the batch that is about to be given.
        records: for every worker that has given something, see `DatasetTracker`.
        unknown: the persistent workers that went on alone in an epoch that was left.
        turn: how many workers to pass over before the first one has its turn.
    """

    def __init__(self, loader: Any, state: dict[str, Any], *, left: bool) -> None:
        """Begin an epoch.

        Args:
            loader: the ``DataLoader``.
            state: from which the epoch begins or continues.
            left: the same workers were left in the middle of the epoch before.
        """
        self.source: DatasetTracker | None = None
        self.extra: WorkerReport | None = None
        records = copy.deepcopy(state["workers"])
        self.records: dict[int, Any] = {int(k): record for k, record in records.items()}
        self.unknown = set(self.records) if left else set()
        self.turn = 0
        self._replays: dict[int, list[Any]] = {}
        self._samples = loader.batch_size or 1
        self._num_workers = loader.num_workers
        self._auto_collation = loader._auto_collation
        self._continued = loader._loaded is not None
        # Persistent workers go on with their dataset, and cannot read an epoch again.
        self._wants = loader._states_wanted or loader.persistent_workers
        self._context = loader.multiprocessing_context or torch.multiprocessing
        self._wanted: Any = None

    def read(self, dataset: Any) -> DatasetTracker | None:
        """Return the source of the dataset; None if it needs none."""
        if isinstance(dataset, IterDataPipe):  # has a protocol of its own in workers
            return None
        if isinstance(dataset, IterableDataset) or is_stateful(dataset):
            records = self.records if self._continued else {}
            if self._num_workers:
                self._wanted = self._context.RawValue("b", self._wants)
            self.source = DatasetTracker(
                *(dataset, self._samples, copy.deepcopy(records), self._wanted),
                *(self._replays, self._auto_collation),
            )
        return self.source

    def want(self) -> None:
        """Let workers report states from now on."""
        if self._wanted is not None:
            self._wanted.value = True

    def find_replays(self, given: list[Any]) -> None:
        """Note the batches of workers whose map-style dataset has an unknown state.

        Args:
            given: the indices of the epoch until now. Workers took turns, and the
                first one had the first batch.
        """
        for worker, record in self.records.items():
            if record["state"] is None:
                self._replays[worker] = given[worker :: self._num_workers]

    def receive(self) -> None:
        """Take over the report that came with the batch that is given."""
        extra, self.extra = self.extra, None
        if extra is None:
            return
        record = self.records.get(extra.worker)
        if record is None or record["ended"]:
            record = {"given": 0, "ended": False, "random": None}
            self.records[extra.worker] = record
        record["given"] += 1
        record["state"] = extra.state
        random = extra.random or record["random"]
        record["random"] = random if extra.state is None else None
        self.unknown.discard(extra.worker)
        self.turn = extra.worker + 1

    def now(self, given: int) -> dict[str, dict[str, Any]]:
        """Return a record for every process that has given something, by its number.

        Args:
            given: how many batches all of them have given.
        """
        if self._num_workers or self.source is None:
            return {str(worker): dict(r) for worker, r in self.records.items()}
        record = {"given": given, "ended": False, "random": None}
        return {"0": {**record, "state": self.source.state()}}
