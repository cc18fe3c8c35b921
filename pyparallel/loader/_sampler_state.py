"""Track the order in which a sampler yields indices, and restore it.

`StatefulIterable` saves and restores something with torchdata's ``Stateful`` protocol.
`Order` counts the indices of one epoch, with a checksum and the sampler's states.
"""

from __future__ import annotations

import copy
import marshal
import re
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any
from zlib import crc32

from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from ..core.stateful import copy_state, is_stateful
from .errors import wrap_exception

#: Default of ``next`` for iterators that may yield any value.
END = object()
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def save_sampler(state: Callable[[], Any]) -> Any:
    """Return the state of a sampler, or the error of its ``state_dict``."""
    try:
        return state()
    except Exception:
        return wrap_exception("in state_dict of the sampler")


def save_own_state(sampler: Any) -> Any:
    """Return the state of a loader's sampler without an iterator, None without state.

    It is the error of ``state_dict`` if that raises one.
    """
    inner = unwrap_batch_sampler(sampler)
    if not is_stateful(inner):
        return None
    return save_sampler(
        lambda: {"own": copy_state(inner), "iterator": None, "ended": False}
    )


def unwrap_batch_sampler(sampler: Any) -> Any:
    """Return the sampler inside torch's ``BatchSampler``: only that has a state."""
    # Other classes of batch samplers may draw more samples than they yield.
    return sampler.sampler if type(sampler) is BatchSampler else sampler


def has_other_replicas(sampler: Any, state: Any) -> bool:
    """Return True if the state of a sampler was saved with another number of ranks.

    Args:
        sampler: the sampler of a loader. It has an attribute ``num_replicas``, as in
            torch, if it divides samples between ranks.
        state: the state of a `StatefulIterable`, whose sampler may have saved the
            number. Or the error of its ``state_dict``.
    """
    own = state["own"] if isinstance(state, dict) else None
    if not isinstance(own, dict) or "num_replicas" not in own:
        return False
    num_replicas = getattr(unwrap_batch_sampler(sampler), "num_replicas", None)
    return num_replicas not in (None, own["num_replicas"])


class StatefulIterable:
    """A sampler or an iterable dataset, with its state and the state of its iterator.

    Args:
        iterable: the sampler or the dataset.
        skip_errors: wraps the iterator so that it skips samples that raise an error.
            None: errors are raised.
        saves: whether to use the states of both, if they are stateful.

    Attributes:
        ended: the iterator has raised ``StopIteration``. Its state may then be the
            beginning of the next epoch.
        is_iterator: whether the last ``iter()`` of the iterable returned itself.
    """

    def __init__(
        self,
        iterable: Any,
        skip_errors: Callable[[Iterator[Any]], Iterator[Any]] | None = None,
        *,
        saves: bool = True,
    ) -> None:
        self.iterable, self._skip_errors = iterable, skip_errors
        self._saves = saves
        self.ended = self.is_iterator = False
        self._iterator: Any = None

    def __iter__(self) -> Iterator[Any]:
        samples: Iterator[Any] = iter(self.iterable)
        self._iterator = samples
        self.is_iterator = samples is self.iterable
        if self._skip_errors is not None:
            samples = self._skip_errors(samples)
        if self.has_state():
            return _NotedEnd(self, samples)
        self._iterator = None  # so that the end of an epoch closes a generator
        return samples

    def has_state(self) -> bool:
        """Return True if the iterable or its iterator has a state to save."""
        parts = (self.iterable, self._iterator)
        return self._saves and any(map(is_stateful, parts))

    def state(self) -> dict[str, Any] | None:
        """Return copies of both states, or None if neither is stateful."""
        if not self.has_state():
            return None
        # As in torchdata, an iterable that is its own iterator has one state.
        own = None if self._iterator is self.iterable else copy_state(self.iterable)
        return {"own": own, "iterator": copy_state(self._iterator), "ended": self.ended}

    def resume(self, state: dict[str, Any]) -> Iterator[Any]:
        """Return an iterator that continues after a state."""
        self._load(state)
        if not state["ended"]:
            return self._restore(state)
        # Some iterables still skip samples of the epoch that has ended, and yield none.
        # An iterable that yields has begun its next epoch, so restore its state again.
        for _ in self._restore(state):
            self._load(state)
            break
        self.ended = True
        return iter(())

    def _load(self, state: dict[str, Any]) -> None:
        is_iterator = self._iterator is self.iterable
        if (own := state["iterator" if is_iterator else "own"]) is not None:
            self.iterable.load_state_dict(copy.deepcopy(own))

    def _restore(self, state: dict[str, Any]) -> Iterator[Any]:
        iterator = iter(self)
        if state["iterator"] is not None:
            self._iterator.load_state_dict(copy.deepcopy(state["iterator"]))
        return iterator


class _NotedEnd:
    """An iterator that records its end. Unlike a generator, it outlives an error."""

    def __init__(self, tracked: StatefulIterable, samples: Iterator[Any]) -> None:
        self._tracked, self._samples = tracked, samples

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        try:
            return next(self._samples)
        except StopIteration:
            self._tracked.ended = True
            self._samples = iter(())  # some iterators begin again after their end
            raise


class _ResumedSampler:
    """A sampler for ``BatchSampler`` that continues after a state."""

    def __init__(self, sampler: StatefulIterable, state: dict[str, Any]) -> None:
        self.sampler, self.state = sampler, state

    def __iter__(self) -> Iterator[Any]:
        return self.sampler.resume(self.state)


#: Samplers of torch that draw from the global random states with the first index only.
_DRAW_AT_START = {
    SequentialSampler,
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    DistributedSampler,
}


def draws_at_start(sampler: Any) -> bool:
    """Return True if only the first index may change the global random states.

    A class of this package says so by ``_draws_at_start``. A subclass may do otherwise.
    """
    cls = type(unwrap_batch_sampler(sampler))
    return cls in _DRAW_AT_START or bool(vars(cls).get("_draws_at_start"))


class Order:
    """An iterator over the indices of one epoch, in batches.

    Attributes:
        num_drawn: the number of batches that the sampler has yielded.
        digest: the checksum of their indices.
        exhausted: the sampler has ended.
        state: the state of the sampler after the batches that the consumer has
            received (see `drop_states`). None: it has no state.
        stateful: the sampler or its iterator has a state. None before the first draw.
    """

    def __init__(self, sampler: Any, state: dict[str, Any] | None = None) -> None:
        """Begin an epoch.

        Args:
            sampler: the sampler of indices of the loader.
            state: the state after which a stateful sampler, or its iterator, continues.
        """
        inner = unwrap_batch_sampler(sampler)
        self._tracked = StatefulIterable(inner)
        source: Any = self._tracked
        if state is not None:
            source = _ResumedSampler(self._tracked, state)
        if inner is not sampler:
            source = BatchSampler(source, sampler.batch_size, sampler.drop_last)
        self._source = source
        self._indices = iter(source)
        self._ahead: deque[Any] = deque()
        self._states: deque[Any] = deque()
        self._num_dropped, self.state = 0, state
        self.stateful: bool | None = None
        self.num_drawn, self.digest, self.exhausted = 0, 0, False

    @property
    def num_yielded(self) -> int:
        """The number of batches of indices that this iterator has yielded."""
        return self.num_drawn - len(self._ahead)

    def restart(self) -> None:
        """Call ``iter()`` of the sampler again, as torch does if there are workers."""
        self._indices = iter(self._source)

    def resume_counting(self, num_drawn: int) -> None:
        """Count from this number of batches on: the sampler continues after them."""
        self.num_drawn = self._num_dropped = num_drawn

    def __iter__(self) -> Order:
        return self

    def __next__(self) -> Any:
        return self._ahead.popleft() if self._ahead else self._draw()

    def _draw(self) -> Any:
        try:
            index = next(self._indices)
        except StopIteration:
            self.exhausted = True
            raise
        self.num_drawn += 1
        try:
            # The fastest way to read integers. Version 2 writes equal values as equal
            # bytes in every Python. Later versions depend on references.
            self.digest = crc32(marshal.dumps(index, 2), self.digest)
        except ValueError:  # not plain data
            shown = index.tolist() if hasattr(index, "tolist") else index
            text = _ADDRESS.sub("", repr(shown))
            self.digest = crc32(text.encode(), self.digest)
        if self.stateful is None:  # now, because the iterator exists
            self.stateful = self._tracked.has_state()
        if self.stateful:
            self._states.append(save_sampler(self._tracked.state))
        return index

    def skip(self, count: int) -> list[Any]:
        """Draw indices that were yielded in an earlier run, and return them."""
        return [self._draw() for _ in range(count)]

    def look_ahead(self, count: int) -> None:
        """Draw indices ahead of their use, as the stopped loader had done."""
        for _ in range(count):
            self._ahead.append(self._draw())

    def is_at_end(self) -> bool:
        """Return True if no indices are left. This draws the next ones ahead."""
        try:
            self.look_ahead(1)
        except StopIteration:
            return True
        return False

    def drop_states(self, num_delivered: int) -> None:
        """Drop the states of the sampler that are older than the consumer's position.

        Args:
            num_delivered: the number of batches that the consumer has received. At
                least the number of the previous call.
        """
        while self._states and self._num_dropped < num_delivered:
            self.state = self._states.popleft()
            self._num_dropped += 1
