"""Where a dataset has got to in the process that reads it, and how it gets there again.

A ``Source`` travels into every worker with the dataset. There it knows the state of a
stateful dataset, and puts the dataset where the worker of a stopped loader was.
"""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from torch.utils.data import IterableDataset, get_worker_info

from ..core.torch_private import ExceptionWrapper, MapFetcher
from . import _random_state
from ._sample_seeds import Seeded
from ._sampler_state import END, Reader, state_of
from ._worker import wrap_exception


class Extra(NamedTuple):
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


class Source:
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
        self._reader = Reader(dataset)
        self._random: dict[str, Any] | None = None

    def enter(self, worker: int) -> None:
        """Begin in the process that reads: the one of that worker, or the parent."""
        self._worker = worker
        if isinstance(self.dataset, IterableDataset):
            return
        record = self._records.pop(worker, None)
        if record is not None and record["state"] is not None:
            with _random_state.kept_in_parent():
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
        with _random_state.kept_in_parent():
            samples = self._reader.continued(record["state"])
            for _ in samples:  # what drop_last had dropped, and what follows the end
                pass
        return self._fresh()

    def _fresh(self) -> Iterator[Any]:
        self._reader = Reader(self.dataset)
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
        return {"own": state_of(self.dataset)}

    def extra(self) -> bytes:
        """Return the pickled `Extra` of the batch that was just made."""
        random, self._random = self._random, None
        try:
            state = self.state() if self._wanted.value else None
            return pickle.dumps(Extra(self._worker, state, random))
        except Exception:  # for the caller of the loader's state_dict alone
            found = wrap_exception(f"in DataLoader worker process {self._worker}")
            return pickle.dumps(Extra(self._worker, found, random))


def _drop(samples: Any) -> None:
    """Collate samples that are not needed."""


class Sourced(IterableDataset[Any]):
    """What a loader reads in the place of an iterable dataset."""

    def __init__(self, source: Source) -> None:
        self.source, self.dataset = source, source.dataset

    def __iter__(self) -> Iterator[Any]:
        return self.source.open()

    def __repr__(self) -> str:
        return repr(self.dataset)


#: What this process reads, if it is a worker.
_here: Source | None = None


class Entering:
    """The ``worker_init_fn`` of workers that read a stand-in for the dataset."""

    def __init__(
        self, init: Callable[[int], Any] | None, source: Source | None
    ) -> None:
        self.init, self.source = init, source

    def __call__(self, worker: int) -> None:
        global _here
        info = get_worker_info()
        if info is not None and isinstance(info.dataset, Sourced | Seeded):
            # get_worker_info() must show users their own dataset; it forbids setattr.
            object.__setattr__(info, "dataset", info.dataset.dataset)
        if self.init is not None:
            self.init(worker)
        if self.source is not None:
            self.source.enter(worker)
        _here = self.source


def worker_extra() -> bytes | None:
    """Return the pickled `Extra` of the batch just made, None without a source.

    For the worker, right after the batch has been made.
    """
    return None if _here is None else _here.extra()
