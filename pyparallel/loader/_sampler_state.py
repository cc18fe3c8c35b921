"""The order in which a sampler gives indices: followed, and found again."""

from __future__ import annotations

import copy
import marshal
import re
from collections import deque
from collections.abc import Iterator
from typing import Any
from zlib import crc32

from torch.utils.data import BatchSampler

#: The end of an iterator that may yield anything.
END = object()
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def is_stateful(thing: object) -> bool:
    """Tell whether a thing keeps torchdata's ``Stateful`` protocol."""
    return hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict")


def copy_state(thing: Any) -> Any:
    """Return a copy of the state of a stateful thing, None of another one.

    A copy, because a thing may return what it goes on changing, and batches that have
    been prefetched have moved it before the state is saved.
    """
    return copy.deepcopy(thing.state_dict()) if is_stateful(thing) else None


def unwrap_batch_sampler(sampler: Any) -> Any:
    """Return the sampler that may have a state: what a ``BatchSampler`` batches."""
    # Only torch's own class is known to take no more samples than it gives.
    return sampler.sampler if type(sampler) is BatchSampler else sampler


class StatefulIterable:
    """Something iterable, with its state and its iterator's.

    It is a sampler, or an iterable dataset: what a loader reads to its end, in batches,
    of which the last may be short.

    Attributes:
        ended: the iterator has been asked for more than it had. Then the state may be
            that of the beginning of the next epoch.
    """

    def __init__(self, thing: Any) -> None:
        self.thing = thing
        self.ended = False
        self._iterator: Any = None

    def __iter__(self) -> Iterator[Any]:
        self._iterator = iter(self.thing)
        return self._noting(self._iterator) if self.has_state() else self._iterator

    def _noting(self, iterator: Any) -> Iterator[Any]:
        # ``yield from`` would call iter() again, which rewinds a data set that is its
        # own iterator.
        while (sample := next(iterator, END)) is not END:
            yield sample
        self.ended = True

    def has_state(self) -> bool:
        """Tell whether the thing or its iterator is stateful."""
        return is_stateful(self.thing) or is_stateful(self._iterator)

    def state(self) -> dict[str, Any] | None:
        """Return copies of the states, None without any."""
        if not self.has_state():
            return None
        # As in torchdata: what is its own iterator has one state.
        own = None if self._iterator is self.thing else copy_state(self.thing)
        return {"own": own, "iterator": copy_state(self._iterator), "ended": self.ended}

    def continued(self, state: dict[str, Any]) -> Iterator[Any]:
        """Return the iterator from a state on."""
        self._load(state)
        if not state["ended"]:
            return self._restored(state)
        # One that skips what it has given does so in the epoch that is over; one that
        # has begun its next epoch gives something, and is put back.
        for _ in self._restored(state):
            self._load(state)
            break
        self.ended = True
        return iter(())

    def _load(self, state: dict[str, Any]) -> None:
        is_iterator = self._iterator is self.thing
        if (own := state["iterator" if is_iterator else "own"]) is not None:
            self.thing.load_state_dict(copy.deepcopy(own))

    def _restored(self, state: dict[str, Any]) -> Iterator[Any]:
        iterator = iter(self)
        if state["iterator"] is not None:
            self._iterator.load_state_dict(copy.deepcopy(state["iterator"]))
        return iterator


class _Continued:
    """What a ``BatchSampler`` reads from a sampler that continues."""

    def __init__(self, reader: StatefulIterable, state: dict[str, Any]) -> None:
        self.reader, self.state = reader, state

    def __iter__(self) -> Iterator[Any]:
        return self.reader.continued(self.state)


class Order:
    """One pass over the indices of an epoch.

    Attributes:
        drawn: how many batches of indices the sampler has given.
        digest: the checksum of all those.
        exhausted: it has no more.
        state: the sampler's after the batches that ``pass_to`` was told of, None if it
            has none.
        stateful: the sampler or its iterator has a state; None before the first draw.
    """

    def __init__(self, sampler: Any, state: dict[str, Any] | None = None) -> None:
        """Begin a pass.

        Args:
            sampler: what the loader takes its indices from.
            state: where a stateful sampler, or its iterator, continues.
        """
        inner = unwrap_batch_sampler(sampler)
        self._reader = StatefulIterable(inner)
        made: Any = self._reader if state is None else _Continued(self._reader, state)
        if inner is not sampler:
            made = BatchSampler(made, sampler.batch_size, sampler.drop_last)
        self._made = made
        self._indices = iter(self._made)
        self._ahead: deque[Any] = deque()
        self._states: deque[Any] = deque()
        self._passed, self.state = 0, state
        self.stateful: bool | None = None
        self.drawn, self.digest, self.exhausted = 0, 0, False

    @property
    def taken(self) -> int:
        """How many batches of indices have left this object."""
        return self.drawn - len(self._ahead)

    def again(self) -> None:
        """Ask the sampler for its iterator once more, as a loader with workers does."""
        self._indices = iter(self._made)

    def continue_at(self, drawn: int) -> None:
        """Count on from there: a stateful sampler has been put there by its state."""
        self.drawn = self._passed = drawn

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
        self.drawn += 1
        try:
            # Of all ways to read integers the fastest. Version 2 writes equal values
            # as equal bytes in every Python; later ones depend on references.
            self.digest = crc32(marshal.dumps(index, 2), self.digest)
        except ValueError:  # no plain data
            shown = index.tolist() if hasattr(index, "tolist") else index
            text = _ADDRESS.sub("", repr(shown))
            self.digest = crc32(text.encode(), self.digest)
        if self.stateful is None:  # the iterator has been made by now
            self.stateful = self._reader.has_state()
        if self.stateful:
            self._states.append(self._reader.state())
        return index

    def skip(self, count: int) -> list[Any]:
        """Draw indices and return them: they had been given before."""
        return [self._draw() for _ in range(count)]

    def look_ahead(self, count: int) -> None:
        """Draw indices now, as the loader that was stopped had done."""
        for _ in range(count):
            self._ahead.append(self._draw())

    def is_at_end(self) -> bool:
        """Tell whether there are no more indices, by asking for one."""
        try:
            self.look_ahead(1)
        except StopIteration:
            return True
        return False

    def pass_to(self, given: int) -> None:
        """Forget the states of the sampler before that many batches.

        Args:
            given: not fewer than the time before.
        """
        while self._states and self._passed < given:
            self.state = self._states.popleft()
            self._passed += 1
