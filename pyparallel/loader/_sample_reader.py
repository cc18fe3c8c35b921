"""Read the samples of a map-style dataset for ``sample_seeds`` and ``on_error``."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Protocol

from ._random_state import (
    SampleTask,
    own_seed,
    raw_states,
    restore_raw,
    sample_key,
    seed_all,
)

#: Takes the place of the samples of a batch if no sample could be read or replaced.
#: The collate functions of the iterators return it, and the batch is left out.
NO_SAMPLES: Any = object()


class ReadPolicy(Protocol):
    """Reads the samples of a batch although some raise: see `ErrorPolicy`."""

    def read(
        self,
        task: SampleTask,
        indices: Any,
        read_one: Callable[[Any], Any],
        read_batch: Callable[[Any], Any] | None,
    ) -> Any:
        """Return the samples of these indices, or `NO_SAMPLES`."""


class SampleReader:
    """A wrapper of a map-style dataset that reads the samples of a `SampleTask`.

    With seeds it does not call ``__getitems__`` of the dataset, which would read
    several samples with one random state.

    Args:
        dataset: the user's dataset.
        seeds: seed the random states before each sample. A function is called after
            that, with a seed of the sample.
        policy: handles errors of samples. None: they are raised.
        saves: save the random states before each batch, for `restore`.

    Attributes:
        dataset: the user's dataset.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        seeds: bool | Callable[[int], Any],
        policy: ReadPolicy | None,
        saves: bool,
    ) -> None:
        self.dataset = dataset
        self._seeds, self._policy, self._saves = seeds is not False, policy, saves
        self._set_seed = seeds if callable(seeds) else None
        self._saved: Any = None  # the random states before a batch

    def __repr__(self) -> str:
        return repr(self.dataset)

    def __getitem__(self, task: SampleTask) -> Any:
        """Return a sample that is not part of a batch, or `NO_SAMPLES`."""
        samples = self._read(task, [task.indices], None)
        return samples if samples is NO_SAMPLES else samples[0]

    def __getitems__(self, task: SampleTask) -> Any:
        """Return the samples of a batch, or `NO_SAMPLES`."""
        read_batch = getattr(self.dataset, "__getitems__", None)
        return self._read(task, task.indices, None if self._seeds else read_batch)

    def _read(
        self, task: SampleTask, indices: Any, read_batch: Callable[[Any], Any] | None
    ) -> Any:
        if self._saves:
            self._saved = raw_states()
        read_one = functools.partial(self._read_one, task)
        samples: Any
        if self._policy is None:
            samples = [read_one(index) for index in indices]
        else:
            samples = self._policy.read(task, indices, read_one, read_batch)
        if self._seeds:
            seed_all(sample_key(task.seed, task.epoch, "batch", task.number))
        return samples

    def _read_one(self, task: SampleTask, index: Any) -> Any:
        if self._seeds:
            key = sample_key(task.seed, task.epoch, "sample", index)
            seed_all(key)
            if self._set_seed is not None:
                self._set_seed(own_seed(key))
        return self.dataset[index]

    def restore(self) -> None:
        """Restore the random states from before the last batch."""
        states, self._saved = self._saved, None
        if states is not None:
            restore_raw(states)
