"""Random states for samples, from a seed, the epoch and the index of the sample.

The key of a sample is the BLAKE2b hash (RFC 7693) of the three as plain data. It does
not depend on earlier samples or on the worker. Its parts seed torch, ``random`` and
NumPy for that sample. A batch has a key too, for random numbers of ``collate_fn``.
"""

from __future__ import annotations

import marshal
import operator
import random
import sys
from hashlib import blake2b
from typing import Any, NamedTuple

import torch
from torch.utils.data import IterableDataset, get_worker_info

from ..core.errors import BatchTypeError, type_name


class Task(NamedTuple):
    """Indices to read, as they are sent to a worker."""

    seed: int
    epoch: int
    number: int
    indices: Any


class Seeded:
    """A stand-in that a loader reads instead of a map-style dataset.

    Every sample is read after the random states were set for it. ``__getitems__`` of
    the dataset is not called: it would read several samples in one random state.

    Attributes:
        dataset: that of the user.
    """

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        self._callers: Any = None

    def __repr__(self) -> str:
        return repr(self.dataset)

    def __getitem__(self, task: Task) -> Any:
        """Return a sample that is not part of a batch."""
        return self._read(task, [task.indices])[0]

    def __getitems__(self, task: Task) -> list[Any]:
        """Return the samples of a batch."""
        return self._read(task, task.indices)

    def _read(self, task: Task, indices: Any) -> list[Any]:
        if get_worker_info() is None:
            self._callers = _states()
        samples = []
        for index in indices:
            set_states(key(task.seed, task.epoch, "sample", index))
            samples.append(self.dataset[index])
        set_states(key(task.seed, task.epoch, "batch", task.number))
        return samples

    def restore(self) -> None:
        """Put the random states back to those before the last batch was read."""
        states, self._callers = self._callers, None
        if states is not None:
            torch.set_rng_state(states[0])
            random.setstate(states[1])
            if states[2] is not None:
                sys.modules["numpy.random"].set_state(states[2])


def check(dataset: Any) -> None:
    """Raise ``TypeError`` unless the samples of a dataset have indices."""
    if isinstance(dataset, IterableDataset):
        raise BatchTypeError(
            "DataLoader: with sample_seeds=True dataset must be map-style, so that "
            f"each sample has an index, but is iterable ({type_name(dataset)}). Draw "
            "from a generator that the dataset keeps in its state_dict."
        )
    try:
        import numpy as np  # now: the first sample that imports it is seeded too
    except ImportError:
        return
    np.random  # noqa: B018


def key(seed: int, epoch: int, purpose: str, index: Any) -> bytes:
    """Return 32 bytes that depend on all arguments.

    Raises:
        TypeError: the index is neither an integer nor plain data.
    """
    try:
        index = operator.index(index)
    except TypeError:
        pass
    try:
        # Version 2 writes equal values as equal bytes in every Python.
        data = marshal.dumps((seed, epoch, purpose, index), 2)
    except ValueError:
        raise BatchTypeError(
            "DataLoader: with sample_seeds=True an index must be an integer, a string "
            f"or a tuple of these, but is {index!r} ({type_name(index)})."
        ) from None
    return blake2b(data, digest_size=32).digest()


def set_states(found: bytes) -> None:
    """Seed torch's CPU generator, ``random`` and NumPy from the bytes of a key."""
    torch.default_generator.manual_seed(int.from_bytes(found[:8], "little"))
    random.seed(int.from_bytes(found[8:16], "little"))
    numpy = sys.modules.get("numpy.random")
    if numpy is not None and _is_ordinary(numpy):
        numpy.seed(int.from_bytes(found[16:20], "little"))


def _is_ordinary(numpy: Any) -> bool:
    """Return True if NumPy's global generator can be seeded again."""
    return bool(type(numpy.mtrand._rand._bit_generator).__name__ == "MT19937")


def _states() -> tuple[Any, Any, Any]:
    numpy = sys.modules.get("numpy.random")
    found = None if numpy is None else numpy.get_state(legacy=False)
    return torch.get_rng_state(), random.getstate(), found
