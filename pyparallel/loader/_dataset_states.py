"""The states of a loader's dataset in the processes that read it, as the parent knows.

Note: [when a dataset is asked]. Without workers the dataset is in the parent, exactly
behind the last batch, and is asked when the loader is. A worker is ahead of the
consumer, so its state must come with each batch. A run that takes no state needs none
of them, so workers report states only after the first ``state_dict()`` of the loader.
Until a worker's first report its state is "all that it had given, read again from the
beginning of the epoch". (torchdata's loader asks in every worker, after ``iter()`` of
the dataset and after each batch.)
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch.utils.data import IterableDataset, IterDataPipe

from ._dataset_state import Extra, Source
from ._sampler_state import is_stateful


class DatasetStates:
    """What is known of the dataset's states in one epoch.

    Attributes:
        source: the dataset, if it is iterable or stateful.
        extra: the worker's report with the batch that is about to be given.
        records: for every worker that has given something, see `Source`.
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
        self.source: Source | None = None
        self.extra: Extra | None = None
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

    def read(self, dataset: Any) -> Source | None:
        """Return the source of the dataset; None if it needs none."""
        if isinstance(dataset, IterDataPipe):  # has a protocol of its own in workers
            return None
        if isinstance(dataset, IterableDataset) or is_stateful(dataset):
            records = self.records if self._continued else {}
            if self._num_workers:
                self._wanted = self._context.RawValue("b", self._wants)
            self.source = Source(
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
