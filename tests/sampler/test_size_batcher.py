"""Batches of similar sizes from a stream: each sample once, bounded memory, resume."""

from __future__ import annotations

import itertools
import json
import re
import weakref
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import IterableDataset, get_worker_info

from pyparallel import DataLoader, Padding, SizeBatcher, SizeBatchSampler

pytestmark = pytest.mark.one_backend

#: Arguments with which a stream of `pairs` can be divided.
LIMITS: list[dict[str, Any]] = [
    {"batch_size": 4},
    {"max_padded": 9000},
    {"max_padded": 9000, "max_batch_size": 3},
    {"max_total": 200},
]


def pairs(number: int) -> list[tuple[int, int]]:
    """Return different sizes, which are also the samples."""
    return [(17 * i % 50, 29 * i % 41) for i in range(number)]


def same(sample: Any) -> Any:
    return sample


class Stream(IterableDataset[tuple[int, int]]):
    """A stream of `pairs`, divided between the workers of a loader.

    Attributes:
        num_reads: The number of samples that this process has read.
    """

    def __init__(self, number: int) -> None:
        self.samples, self.num_reads = pairs(number), 0

    def __iter__(self) -> Iterator[tuple[int, int]]:
        info = get_worker_info()
        worker, count = (info.id, info.num_workers) if info else (0, 1)
        for sample in self.samples[worker::count]:
            self.num_reads += 1
            yield sample


class StatefulStream(Stream):
    """The same with a position."""

    position = 0

    def __iter__(self) -> Iterator[tuple[int, int]]:
        for number, sample in enumerate(super().__iter__()):
            if number >= self.position:
                self.position += 1
                yield sample
        self.position = 0

    def state_dict(self) -> dict[str, int]:
        return Counter(position=self.position)

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


class RewindingStream(StatefulStream):
    """The same as its own iterator, which ``iter()`` rewinds."""

    def __iter__(self) -> Iterator[tuple[int, int]]:
        self.position = 0
        return self

    def __next__(self) -> tuple[int, int]:
        if self.position == len(self.samples):
            raise StopIteration
        self.position += 1
        return self.samples[self.position - 1]


class RestartingStream(StatefulStream):
    """Each pass begins at the first sample, but the state stays at the last one."""

    first = 0

    def __iter__(self) -> Iterator[tuple[int, int]]:
        first, self.first = self.first, 0
        rest = self.samples[first:]
        for self.position, sample in enumerate(rest, first + 1):
            yield sample

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.first = self.position = state["position"]


class LoadedStream(RestartingStream):
    """Each pass begins at the loaded state, as of Hugging Face's IterableDataset."""

    def __iter__(self) -> Iterator[tuple[int, int]]:
        first = self.first
        yield from super().__iter__()
        self.first = first


STATEFUL = [StatefulStream, RewindingStream, RestartingStream, LoadedStream]


@given(
    number=st.integers(0, 200),
    batch_size=st.integers(1, 6),
    window=st.integers(1, 20),
    drop_last=st.booleans(),
)
def test_windows_are_divided_like_those_of_a_sampler(
    number: int, batch_size: int, window: int, drop_last: bool
) -> None:
    options: Any = {"window": window, "shuffle": False, "drop_last": drop_last}
    samples = pairs(number)
    expected = []
    for begin in range(0, number, batch_size * window):
        part = samples[begin : begin + batch_size * window]
        for batch in SizeBatchSampler(part, batch_size, **options):
            expected.append([part[i] for i in batch])
    assert list(SizeBatcher(samples, same, batch_size, **options)) == expected


@given(
    number=st.integers(0, 200),
    limit=st.sampled_from(["max_padded", "max_total"]),
    budget=st.integers(2500, 30000),
    most=st.one_of(st.none(), st.integers(1, 9)),
    window=st.integers(1, 20),
    shuffle=st.booleans(),
)
def test_each_sample_is_in_one_batch_of_the_budget(
    number: int,
    limit: str,
    budget: int,
    most: int | None,
    window: int,
    shuffle: bool,
) -> None:
    options: Any = {"max_batch_size": most, "window": window, "shuffle": shuffle}
    if limit == "max_total":
        budget //= 25
    samples = pairs(number)
    batches = list(SizeBatcher(samples, same, **{limit: budget}, **options))
    assert sorted(pair for batch in batches for pair in batch) == sorted(samples)
    for batch in batches:
        height, width = np.array(batch).max(axis=0)
        padded, total = height * width * len(batch), np.array(batch).sum()
        assert (padded if limit == "max_padded" else total) <= budget
        assert len(batch) <= (most or number)


@pytest.mark.parametrize("source", [Stream, StatefulStream])
@pytest.mark.parametrize("limit", LIMITS, ids=str)
def test_a_batcher_continues_after_any_batch(
    source: Any, limit: dict[str, Any]
) -> None:
    def batcher() -> SizeBatcher[Any]:
        return SizeBatcher(source(101), same, **limit, window=5)

    expected = list(batcher())
    for num_batches in range(0, len(expected) + 1, 3):
        stopped, again = batcher(), batcher()
        batches = iter(stopped)
        for _ in range(num_batches):
            next(batches)
        state = json.loads(json.dumps(stopped.state_dict()))
        again.load_state_dict(state)
        assert again.state_dict() == state
        assert list(again) == expected[num_batches:] == list(batches)
        assert list(again) == list(stopped) == expected


@pytest.mark.parametrize("source", STATEFUL)
@pytest.mark.parametrize("num_before", [0, 7, None])
def test_a_pass_continues_after_another(source: Any, num_before: int | None) -> None:
    for num_batches in (1, 5, 9):
        stopped, again = (SizeBatcher(source(101), same, 4, window=5) for _ in "12")
        for _ in itertools.islice(stopped, num_before):  # None: to its end
            pass
        batches = iter(stopped)
        for _ in range(num_batches):
            next(batches)
        again.load_state_dict(json.loads(json.dumps(stopped.state_dict())))
        rest = list(batches)
        assert list(again) == rest


@pytest.mark.parametrize("source", STATEFUL)
@pytest.mark.parametrize("in_loader", [False, True])
def test_a_state_between_passes_begins_the_next_one(
    source: Any, in_loader: bool
) -> None:
    def make() -> Any:
        batcher = SizeBatcher(source(101), same, 4, window=5)
        return DataLoader(batcher, None, collate_fn=list) if in_loader else batcher

    stopped, again = make(), make()
    expected = list(stopped)
    again.load_state_dict(stopped.state_dict())
    assert list(again) == expected == list(stopped)


def test_a_stateful_dataset_continues_at_the_window() -> None:
    stopped = SizeBatcher(StatefulStream(1000), same, 4, window=5)
    batches = iter(stopped)
    for _ in range(203):  # 40 windows of 20 samples, and 3 batches
        next(batches)
    source = StatefulStream(1000)
    again = SizeBatcher(source, same, 4, window=5)
    again.load_state_dict(stopped.state_dict())
    assert next(iter(again)) == next(batches)
    assert source.position == 40 * 20 + 20 + 3 * 4
    assert source.num_reads == source.position


def test_a_batcher_is_shown_in_one_line() -> None:
    batcher = SizeBatcher(Stream(101), same, max_padded=90, max_batch_size=4)
    batcher.set_epoch(2)
    assert repr(batcher) == (
        "SizeBatcher(<Stream>, max_padded=90, max_batch_size=4, epoch=2)"
    )


def test_a_dataset_that_ends_before_the_position_is_an_error() -> None:
    stopped = SizeBatcher(Stream(100), same, 4, window=5)
    batches = iter(stopped)
    for _ in range(12):
        next(batches)
    for number in (39, 59):  # before the window, and in it
        again = SizeBatcher(Stream(number), same, 4, window=5)
        again.load_state_dict(stopped.state_dict())
        expected = 40 if number == 39 else 60
        message = (
            f"SizeBatcher: the dataset must yield at least {expected} samples as "
            f"before the saved state, but ended after {number}. Restore its data."
        )
        with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
            next(iter(again))


class Sample:
    """A sample with a weak reference to it in a set."""

    def __init__(self, size: int, live: weakref.WeakSet[Sample]) -> None:
        self.size = size
        live.add(self)


@pytest.mark.parametrize(
    "limit", [{"batch_size": 4}, {"max_padded": 200, "max_batch_size": 4}], ids=str
)
def test_at_most_one_window_is_in_memory(limit: dict[str, int]) -> None:
    live: weakref.WeakSet[Sample] = weakref.WeakSet()
    stream = (Sample(17 * i % 50 + 1, live) for i in range(400))
    batcher = SizeBatcher(stream, lambda sample: sample.size, **limit, window=5)
    counts, num_samples = [], 0
    for batch in batcher:
        counts.append(len(live))
        num_samples += len(batch)
        del batch
    assert num_samples == 400
    assert 10 < max(counts) <= 5 * 4


def test_the_order_depends_on_seed_and_epoch() -> None:
    def epochs(seed: int) -> list[Any]:
        batcher = SizeBatcher(pairs(101), same, 4, window=50, seed=seed)
        orders = []
        for epoch in range(2):
            batcher.set_epoch(epoch)
            orders.append(list(batcher))
        return orders

    first, second = epochs(0)
    assert first != second
    assert sorted(sum(first, [])) == sorted(sum(second, []))  # noqa: RUF017
    assert epochs(0) == [first, second] != epochs(1)


def test_set_epoch_reaches_the_dataset_and_drops_a_position() -> None:
    class Shuffled(Stream):
        epoch = 0

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

    batcher = SizeBatcher(Shuffled(101), same, 4)
    next(iter(batcher))
    state = batcher.state_dict()
    batcher.load_state_dict(state)
    batcher.set_epoch(0)
    assert batcher.state_dict() == state
    batcher.set_epoch(3)
    assert batcher.dataset.epoch == 3  # type: ignore[attr-defined]
    assert sum(map(len, batcher)) == 101
    again = SizeBatcher(Shuffled(101), same, 4)
    again.load_state_dict(batcher.state_dict())
    assert again.dataset.epoch == 3  # type: ignore[attr-defined]


@pytest.mark.parametrize("source", [Stream, StatefulStream])
@pytest.mark.parametrize("num_batches", [0, 9, 26])
def test_our_loader_continues_with_the_next_batch(
    source: Any, num_batches: int
) -> None:
    def loader_of() -> DataLoader[Any]:
        batcher = SizeBatcher(source(101), same, 4, window=5)
        return DataLoader(batcher, None, num_workers=2, collate_fn=list)

    loader, again = loader_of(), loader_of()
    loader.state_dict()  # workers report their states from now on
    batches = iter(loader)
    for _ in range(num_batches):
        next(batches)
    again.load_state_dict(json.loads(json.dumps(loader.state_dict())))
    rest = list(again)
    assert rest == list(batches)
    assert len(rest) == 26 - num_batches
    assert sorted(map(tuple, sum(again, []))) == sorted(pairs(101))  # noqa: RUF017


def test_oversized_samples_are_left_out_on_request() -> None:
    batcher = SizeBatcher([5, 50, 6, 70], same, max_padded=20, skip_oversized=True)
    assert list(batcher) == [[5, 6]]
    assert batcher.num_skipped == 2
    state = batcher.state_dict()
    batcher.load_state_dict(state)
    assert list(batcher) == [[5, 6]]


#: The samples and the arguments of a batcher, by the message of its error.
VALUE_ERRORS: dict[str, tuple[list[Any], dict[str, Any]]] = {
    "one of batch_size, max_padded and max_total must be set, but they are None, None "
    "and None. Set one of them.": ([1], {"batch_size": None}),
    "size_of must return 2 sizes for each sample like for the first one, but returned "
    "[5] for sample 1 of the stream. Return the same dimensions for all samples.": (
        [(3, 4), (5,)],
        {},
    ),
    "sizes must be from 0 to 2147483647, but are [5, -1] for sample 1 of the stream. "
    "Correct size_of.": ([(3, 4), (5, -1)], {}),
    "every sample must fit in max_padded=20, but sample 1 of the stream has 30 padded "
    "elements (sizes [5, 6]). Increase max_padded, remove the sample, or set "
    "skip_oversized=True.": ([(3, 4), (5, 6)], {"batch_size": None, "max_padded": 20}),
    "the size of sample 0 of the stream must have no masked size, but 1 of 2 are "
    "masked. Leave out these samples, or call filled() with their sizes.": (
        [np.ma.array([3, 4], mask=[0, 1])],
        {},
    ),
    "every sample must fit in max_total=10, but sample 1 of the stream has 11 elements "
    "(sizes [5, 6]). Increase max_total, remove the sample, or set "
    "skip_oversized=True.": ([(3, 4), (5, 6)], {"batch_size": None, "max_total": 10}),
    "padding must be for 1 dimensions like sizes, but is Padding(size_divisor=(8, 8)). "
    "Give sizes of 2 dimensions.": ([3], {"padding": Padding(size_divisor=(8, 8))}),
    "one shape of Padding(buckets=((4,), (8,))) must hold the largest sizes [9], but "
    "none does. The size of sample 1 of the stream is [9]. Add a larger shape.": (
        [3, 9],
        {"padding": Padding(buckets=[(4,), (8,)])},
    ),
}
TYPE_ERRORS: dict[str, tuple[list[Any], dict[str, Any]]] = {
    "size_of must be a function of a sample, but is list. If the sizes are known, use "
    "SizeBatchSampler.": ([1], {"size_of": [1]}),
    "size_of must return an integer or a sequence of integers, but returned 1.5 "
    "(float) for sample 1 of the stream. Return the sizes that differ between "
    "samples.": ([3, 1.5], {}),
}


def test_errors_name_the_argument_or_the_sample() -> None:
    for error, cases in ((ValueError, VALUE_ERRORS), (TypeError, TYPE_ERRORS)):
        for message, (samples, options) in cases.items():
            text = f"^{re.escape(f'SizeBatcher: {message}')}$"
            with pytest.raises(error, match=text):
                options = {"size_of": same, "batch_size": 2, **options}
                list(SizeBatcher(samples, **options))


def test_a_state_of_other_arguments_is_an_error() -> None:
    batcher = SizeBatcher([1], same, 2)
    message = (
        "SizeBatcher.load_state_dict: the state must be of a sampler with batch_size=2 "
        "like this one, but is of one with batch_size=3. Make the sampler with "
        "batch_size=3."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        batcher.load_state_dict(SizeBatcher([1], same, 3).state_dict())
    with pytest.raises(ValueError, match=r"must come from SizeBatcher\.state_dict"):
        batcher.load_state_dict({})
