"""The random generators of the sample that this thread reads.

Note: [sample generators]. The generators have seeds of their own, from another key than
the global states of Note: [sample seeds], so that both never yield the same numbers.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Generator
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode

from ..core.errors import LoaderWarning, restoring, warn_once
from ._random_state import raw_states, sample_key

if TYPE_CHECKING:
    import numpy as np

#: Functions of torch that draw from the global generator without ``generator=``.
_DRAWS = frozenset(
    "rand randn randint randperm rand_like randn_like randint_like normal bernoulli "
    "multinomial poisson uniform_ normal_ random_ bernoulli_ exponential_ cauchy_ "
    "geometric_ log_normal_".split()
)
#: The most samples of the first batch that are watched, and the number of those that
#: must draw from ``random`` or NumPy: unknown threads may draw as well.
_NUM_WATCHED, _NUM_CHANGED = 8, 3


class SampleRandom:
    """The generators of one sample, or of the ``collate_fn`` of one batch.

    Each is created at its first use, and continues at the next one.

    Attributes:
        torch: a ``torch.Generator`` of the CPU, for ``generator=``.
        numpy: a ``numpy.random.Generator``.
        python: a ``random.Random``.
    """

    def __init__(self, key: tuple[int, int, str, Any]) -> None:
        self._key = key

    @cached_property
    def _hash(self) -> bytes:
        seed, epoch, purpose, index = self._key
        return sample_key(seed, epoch, f"{purpose} generators", index)

    @cached_property
    def torch(self) -> torch.Generator:
        """A ``torch.Generator`` of the CPU."""
        seed = int.from_bytes(self._hash[:8], "little")
        return torch.Generator().manual_seed(seed)

    @cached_property
    def python(self) -> random.Random:
        """A ``random.Random``."""
        return random.Random(int.from_bytes(self._hash[8:16], "little"))

    @cached_property
    def numpy(self) -> np.random.Generator:
        """A ``numpy.random.Generator``."""
        import numpy

        return numpy.random.default_rng(int.from_bytes(self._hash[16:], "little"))


class _Current(threading.local):
    """The sample or the batch of this thread."""

    key: tuple[int, int, str, Any] | None = None
    found: SampleRandom | None = None


_current = _Current()


def sample_random() -> SampleRandom:
    """Return the random generators of the sample that this thread reads.

    They need a `DataLoader` with ``sample_seeds=True``. Call this in the dataset or its
    transforms, in the thread that reads the sample. In ``collate_fn``, it returns the
    generators of the batch. The generators depend on the seed, the epoch and the index
    alone: they are equal without workers, with processes and with threads, in any
    number, and after a resume. They differ from the global generators, which worker
    threads share.

    Returns:
        The generators, by the same object for each call within a sample.

    Raises:
        RuntimeError: this thread reads no sample of such a loader.

    Example:
        >>> class Noisy(torch.utils.data.Dataset):
        ...     def __len__(self):
        ...         return 2
        ...     def __getitem__(self, index):
        ...         return torch.rand(3, generator=sample_random().torch)
        >>> from pyparallel import DataLoader
        >>> loaders = [DataLoader(Noisy(), sample_seeds=True) for _ in range(2)]
        >>> for loader in loaders:
        ...     loader.generator = torch.Generator().manual_seed(1)
        >>> torch.equal(*(torch.cat(list(loader)) for loader in loaders))
        True
    """
    current = _current
    if current.key is None:
        raise RuntimeError(
            "sample_random() must be called in a thread that reads a sample of a "
            "DataLoader with sample_seeds=True, but this thread reads none. Set "
            "sample_seeds=True, or hand the generators to the threads of a sample."
        )
    if current.found is None:
        current.found = SampleRandom(current.key)
    return current.found


def begin(seed: int, epoch: int, purpose: str, index: Any) -> None:
    """Let `sample_random` return new generators in this thread."""
    _current.key, _current.found = (seed, epoch, purpose, index), None


@restoring
def reading() -> Generator[None, None, None]:
    """Restore the generators of an outer sample at the end of a block."""
    before = _current.key, _current.found
    try:
        yield
    finally:
        _current.key, _current.found = before


class DrawWatch:
    """Warns once if samples of the first batch draw from the global generators.

    The loop may draw from ``random`` and NumPy beside all later batches.
    """

    def __init__(self) -> None:
        self._num_left, self._num_changed = _NUM_WATCHED, 0

    def is_done(self) -> bool:
        """Return True if no sample has to be watched any more."""
        return self._num_left <= 0

    @restoring
    def sample(self, batch_size: int) -> Generator[None, None, None]:
        """Watch a sample that is read in the block.

        Args:
            batch_size: the number of samples of its batch.
        """
        self._num_left -= 1
        _, python, numpy = raw_states()
        with _FindDraws() as mode:
            yield
        _, python_after, numpy_after = raw_states()
        is_changed = python_after != python or _words(numpy_after) != _words(numpy)
        self._num_changed += is_changed
        if mode.name or self._num_changed >= min(_NUM_CHANGED, batch_size):
            self._num_left = 0
            what = f"torch ({mode.name})" if mode.name else "random or NumPy"
            warn_once(
                "PP219",
                "DataLoader: with sample_seeds=True and worker_method='thread' samples "
                f"drew from the global generator of {what}, which threads share. So "
                "their random numbers are not reproducible. Draw from "
                "pyparallel.sample_random(), or use worker_method='multiprocessing'.",
                LoaderWarning,
            )


def _words(state: Any) -> Any:
    """Return NumPy's state in a form that compares."""
    if state is None:
        return None
    inner = state["state"]
    return repr({**inner, "key": None}), getattr(inner.get("key"), "tobytes", bytes)()


class _FindDraws(TorchFunctionMode):
    """Finds draws from torch's global generator, in this thread alone."""

    name = ""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Note the name of a function that draws, and call it."""
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in _DRAWS and kwargs.get("generator") is None:
            self.name = name
        return func(*args, **kwargs)
