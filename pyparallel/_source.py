"""Where a dataset has got to in the process that reads it, and how it gets there again.

A ``Source`` travels into every worker with the dataset. There it knows the state of a
stateful dataset, and puts the dataset where the worker of a stopped loader was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from torch.utils.data import IterableDataset, get_worker_info

from . import _random_state
from ._order import END, Reader, state_of


class Extra(NamedTuple):
    """What a worker tells about itself with a batch.

    Attributes:
        worker: which one it is.
        state: the dataset's, and its iterator's, after the batch; None without any.
        random: the worker's random state before an iterable dataset without state was
            opened, with the first batch after that.
    """

    worker: int
    state: dict[str, Any] | None
    random: dict[str, Any] | None


class Source:
    """A dataset in the process that reads it.

    Attributes:
        dataset: what was given to the loader.
    """

    def __init__(
        self, dataset: Any, samples: int, records: dict[int, dict[str, Any]]
    ) -> None:
        """Prepare, in the parent.

        Args:
            dataset: a stateful dataset, or an iterable one.
            samples: how many samples a batch has.
            records: for every worker that had given batches: how many (``given``), the
                last ``state``, the ``random`` state, and whether that was in an epoch
                that has ended (``ended``).
        """
        self.dataset = dataset
        self._samples = samples
        self._records = records
        self._worker = 0
        self._reader = Reader(dataset)
        self._random: dict[str, Any] | None = None

    def enter(self, worker: int) -> None:
        """Begin in the process that reads: the one of that worker, or the parent."""
        self._worker = worker
        if not isinstance(self.dataset, IterableDataset):
            record = self._records.pop(worker, None)
            if record is not None and record["state"] is not None:
                with _random_state.kept_in_parent():
                    self.dataset.load_state_dict(record["state"]["own"])

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

    def extra(self) -> Extra | None:
        """Return what goes with the batch that was just made, None if nothing."""
        if not isinstance(self.dataset, IterableDataset):
            return Extra(self._worker, {"own": state_of(self.dataset)}, None)
        if (state := self._reader.state()) is not None:
            return Extra(self._worker, state, None)
        random, self._random = self._random, None
        return Extra(self._worker, None, random)


class Sourced(IterableDataset[Any]):
    """What a loader reads in the place of an iterable dataset."""

    def __init__(self, source: Source) -> None:
        self.source = source

    def __iter__(self) -> Iterator[Any]:
        return self.source.open()

    def __repr__(self) -> str:
        return repr(self.source.dataset)


#: What this process reads, if it is a worker.
_here: Source | None = None


class Entering:
    """The ``worker_init_fn`` of workers that have a source."""

    def __init__(self, init: Callable[[int], Any] | None, source: Source) -> None:
        self.init, self.source = init, source

    def __call__(self, worker: int) -> None:
        global _here
        info = get_worker_info()
        if info is not None and isinstance(info.dataset, Sourced):
            # get_worker_info() must show users their own dataset; it forbids setattr.
            object.__setattr__(info, "dataset", self.source.dataset)
        if self.init is not None:
            self.init(worker)
        self.source.enter(worker)
        _here = self.source


def worker_extra() -> Extra | None:
    """Return what must travel to the parent with the batch just made, None if nothing.

    For the worker, right after the batch has been made.
    """
    return None if _here is None else _here.extra()
