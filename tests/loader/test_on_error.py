"""With on_error, samples that raise are skipped or replaced, and counted."""

from __future__ import annotations

import itertools
import json
import os
import signal
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import (
    DistributedSampler,
    IterableDataset,
    Subset,
    SubsetRandomSampler,
)
from torch.utils.data.datapipes.iter import IterableWrapper

import pyparallel
from pyparallel import DataLoader
from pyparallel.core import errors
from pyparallel.core.errors import ErrorLimitError
from pyparallel.loader.sample_errors import SampleError

pytestmark = pytest.mark.one_backend
quiet = pytest.mark.filterwarnings(r"ignore:\[PP21[56]\]")


@pytest.fixture(autouse=True)
def new_process() -> Iterator[None]:
    """Let warnings appear again."""
    errors._warned.clear()
    yield
    errors._warned.clear()


class Damaged:
    """Numbers; reading one of ``bad`` raises an error."""

    def __init__(self, length: int, bad: set[int], kind: Any = ValueError) -> None:
        self.length, self.bad, self.kind = length, bad, kind

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        if index in self.bad:
            raise self.kind(f"sample {index} is damaged")
        return index


class DamagedBatches(Damaged):
    """The same, read in batches. ``calls`` has the indices of each call."""

    def __init__(self, length: int, bad: set[int]) -> None:
        super().__init__(length, bad)
        self.calls: list[list[int]] = []

    def __getitems__(self, indices: list[int]) -> list[int]:
        self.calls.append(indices)
        return [self[index] for index in indices]


class Columns(Damaged):
    """A dataset that joins the samples of a batch itself."""

    def __getitems__(self, indices: list[int]) -> dict[str, torch.Tensor]:
        return {"x": torch.tensor([self[index] for index in indices])}


class Unsized:
    """Numbers without a length. Reading several returns them as a batch."""

    def __init__(self, length: int, bad: set[int]) -> None:
        self.numbers = Damaged(length, bad)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, int):
            return self.numbers[index]
        return torch.tensor([self.numbers[int(each)] for each in index])


class Unmeasured(Unsized):
    """The same with a length that is not known."""

    def __len__(self) -> int:
        raise NotImplementedError


class Sized(Unsized):
    """The same with a length."""

    def __len__(self) -> int:
        return self.numbers.length


class Keyed(Sized):
    """A dataset whose indices are texts."""

    def __getitem__(self, index: str) -> int:
        return self.numbers[int(index.removeprefix("key"))]


class Stream(IterableDataset[int]):
    """The numbers of a `Damaged` that this worker reads, in turn."""

    def __init__(self, length: int, bad: set[int], make: Callable[..., Any] = map):
        self.numbers, self.make = Damaged(length, bad), make

    def __iter__(self) -> Iterator[int]:
        info = torch.utils.data.get_worker_info()
        first, step = (info.id, info.num_workers) if info else (0, 1)
        samples: Iterator[int] = self.make(
            self.numbers.__getitem__, range(first, self.numbers.length, step)
        )
        return samples


class Rewinding(IterableDataset[int]):
    """A stream that continues after an error, and begins again after its end."""

    def __init__(self, length: int, bad: set[int]) -> None:
        self.numbers, self.next = Damaged(length, bad), 0

    def __iter__(self) -> Rewinding:
        return self

    def __next__(self) -> int:
        if self.next == self.numbers.length:
            self.next = 0
            raise StopIteration
        self.next += 1
        return self.numbers[self.next - 1]


class ResumableStream(Rewinding):
    """The same with a state."""

    def state_dict(self) -> dict[str, int]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.next = state["next"]


def generate(read: Callable[[int], int], numbers: range) -> Iterator[int]:
    for number in numbers:
        yield read(number)


def generate_inside(read: Callable[[int], int], numbers: range) -> Iterator[int]:
    return map(abs, generate(read, numbers))


def collect(loader: DataLoader[Any]) -> list[list[int]]:
    return [batch.tolist() for batch in loader]


def failed(*indices: int) -> list[SampleError]:
    return [SampleError(i, f"ValueError: sample {i} is damaged") for i in indices]


# ------------------------------------------------------------------------ every sample
damaged = st.tuples(
    st.integers(1, 20), st.sets(st.integers(0, 19), max_size=12), st.integers(1, 6)
)


def check_epoch(
    found: list[list[int]], plan: list[list[int]], bad: set[int], mode: str
) -> None:
    """Compare the batches of a rank with its plan."""
    assert len(found) == len(plan)
    for batch, indices in zip(found, plan, strict=True):
        good = [index for index in indices if index not in bad]
        assert not bad & set(batch)
        if mode == "replace":
            assert len(batch) == len(indices)
            kept = [b for b, index in zip(batch, indices, strict=True) if b == index]
            assert kept[: len(good)] == kept and set(good) <= set(kept)
        elif good:
            assert batch == good
        else:
            assert len(batch) == 1


@quiet
@pytest.mark.parametrize("mode", ["skip", "replace"])
@settings(max_examples=40, deadline=None)
@given(damaged=damaged, num_ranks=st.integers(1, 3), drop_last=st.booleans())
def test_each_good_sample_is_delivered_once_on_all_ranks(
    mode: Any, damaged: Any, num_ranks: int, drop_last: bool
) -> None:
    length, bad, batch_size = damaged
    dataset = Damaged(length, bad)
    if len(bad & set(range(length))) == length:
        return  # tested below
    counts = set()
    for rank in range(num_ranks):
        sampler: Any = DistributedSampler(dataset, num_ranks, rank, shuffle=True)
        options = {"sampler": sampler, "drop_last": drop_last}
        plan = collect(DataLoader(range(length), batch_size, **options))
        loader = DataLoader(
            dataset, batch_size, on_error=mode, max_errors=500, **options
        )
        check_epoch(found := collect(loader), plan, bad, mode)
        counts.add(len(found))
        assert {error.index for error in loader.sample_errors} >= {
            index for batch in plan for index in batch if index in bad
        }
    assert len(counts) == 1


SERVED = {"multiprocessing_context": "forkserver", "persistent_workers": True}
WORKERS: list[tuple[str, dict[str, Any]]] = [
    ("skip", {"num_workers": 3, "persistent_workers": True}),
    ("replace", {"num_workers": 2, "sample_seeds": True}),
    ("replace", {"num_workers": 1, **SERVED}),
    ("replace", {"num_workers": 2, "worker_method": "thread"}),
]


@quiet
@pytest.mark.parametrize("mode, options", WORKERS, ids=str)
def test_workers_deliver_and_report_the_same(mode: Any, options: Any) -> None:
    numbers: Any = Damaged(99, {0, 1, 2, 7, 13, 22})
    dataset = Subset(numbers, range(23))
    order = [*range(22, -1, -2), *range(1, 23, 2)]
    torch.manual_seed(3)  # the seed of replacements

    def two_epochs(**workers: Any) -> list[Any]:
        loader = DataLoader(dataset, 3, sampler=order, on_error=mode, **workers)
        epochs = [(collect(loader), loader.sample_errors) for _ in range(2)]
        return [epochs, loader.stats().sample_errors]

    expected = two_epochs()
    assert two_epochs(**options) == expected
    assert expected[1] == sum(len(found) for _, found in expected[0]) >= 12
    assert all(i < 23 for found, _ in expected[0] for batch in found for i in batch)
    if mode == "replace":  # each epoch draws other replacements
        assert expected[0][0] != expected[0][1]


@quiet
@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_batch_without_a_good_sample_has_a_replacement(num_workers: int) -> None:
    loader = DataLoader(
        Damaged(9, {3, 4, 5}), 3, num_workers=num_workers, on_error="skip"
    )
    first, replacement, last = collect(loader)
    assert (first, last) == ([0, 1, 2], [6, 7, 8])
    assert len(replacement) == 1 and replacement[0] not in {3, 4, 5}
    assert loader.sample_errors[:3] == failed(3, 4, 5)


@quiet
def test_a_sample_that_is_no_batch_is_replaced() -> None:
    loader = DataLoader(Damaged(5, {2}), None, on_error="skip")
    samples = list(loader)
    assert samples[:2] + samples[3:] == [0, 1, 3, 4] and samples[2] != 2


@quiet
def test_a_dataset_is_read_in_batches_until_one_fails() -> None:
    dataset = DamagedBatches(6, {4})
    loader = DataLoader(dataset, 3, on_error="skip")
    assert collect(loader) == [[0, 1, 2], [3, 5]]
    assert dataset.calls == [[0, 1, 2], [3, 4, 5], [3], [4], [5]]
    assert loader.sample_errors == failed(4)


# ------------------------------------------------------------- every kind of a dataset
class OrderedSubset(SubsetRandomSampler):
    """The sampler without its randomness."""

    def __iter__(self) -> Iterator[int]:
        return iter(self.indices)


PAIRS = [[0, 1], [2, 3], [4, 5], [6, 7], [8]]
KEYS = [f"key{number}" for number in range(9)]
#: Datasets with the arguments of their loader, and what becomes of a batch without a
#: good sample.
KINDS: dict[str, tuple[Any, dict[str, Any], str]] = {
    "samples": (Damaged, {"batch_size": 2}, "replaced"),
    "batches of a sampler": (Damaged, {"batch_sampler": PAIRS}, "replaced"),
    "samples of a subset": (
        Damaged,
        {"batch_size": 2, "sampler": OrderedSubset(range(9))},
        "left out",
    ),
    "lists": (DamagedBatches, {"batch_size": 2}, "replaced"),
    "columns": (
        Columns,
        {"batch_sampler": PAIRS, "collate_fn": lambda batch: batch["x"]},
        "replaced",
    ),
    "no length": (Unsized, {"batch_sampler": PAIRS}, "left out"),
    "unknown length": (Unmeasured, {"batch_sampler": PAIRS}, "left out"),
    "keys": (Keyed, {"batch_size": 2, "sampler": KEYS}, "left out"),
    "single samples": (Sized, {"batch_size": None}, "replaced"),
    "single keys": (Keyed, {"batch_size": None, "sampler": KEYS}, "left out"),
    "whole batches": (Sized, {"batch_size": None, "sampler": PAIRS}, "whole"),
    "batches of tuples": (
        Unsized,
        {"batch_size": None, "sampler": [tuple(map(str, pair)) for pair in PAIRS]},
        "whole",
    ),
    "streams": (Rewinding, {"batch_size": 2}, "stream"),
    "single samples of streams": (Rewinding, {"batch_size": None}, "stream"),
}
DAMAGES = [{0}, {1, 4}, {8}, {2, 3}, {0, 1}, {0, 1, 5, 6, 7, 8}]


def expected_batches(
    kind: str, options: dict[str, Any], bad: set[int], mode: str
) -> list[list[int]]:
    """Return the batches, with -1 for each replacement."""
    single = options["batch_size"] is None if "batch_size" in options else False
    plan = [[number] for number in range(9)] if single else PAIRS
    if kind == "stream":
        good = [number for number in range(9) if number not in bad]
        size = 1 if single else 2
        return [good[i : i + size] for i in range(0, len(good), size)]
    if kind == "whole":
        return [pair for pair in PAIRS if not bad & {*pair}]
    found = []
    for pair in plan:
        batch = [number for number in pair if number not in bad]
        if kind == "replaced" and mode == "replace":
            batch = [-1 if number in bad else number for number in pair]
        if batch or kind == "replaced":
            found.append(batch or [-1])
    return found


def check_batches(found: list[list[int]], expected: list[list[int]]) -> None:
    """Compare batches with numbers; -1 matches every number."""
    assert len(found) == len(expected)
    for batch, numbers in zip(found, expected, strict=True):
        assert len(batch) == len(numbers)
        assert all(n in (-1, b) for b, n in zip(batch, numbers, strict=True))


def read(loader: Any, bad: set[int]) -> list[list[int]]:
    """Return the batches of an epoch. Damaged numbers must not be in them."""
    found = []
    for batch in loader:
        numbers = [batch] if isinstance(batch, int) else batch.reshape(-1).tolist()
        assert not bad & {*numbers}
        found.append(numbers)
    return found


@pytest.mark.filterwarnings(r"ignore:\[PP21[567]\]")
@pytest.mark.parametrize("num_workers", [0, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("mode", ["skip", "replace"])
@pytest.mark.parametrize("name", KINDS)
def test_every_kind_of_a_dataset_continues_after_damages(
    name: str, mode: Any, num_workers: int
) -> None:
    make, options, kind = KINDS[name]
    if kind == "stream":
        num_workers = min(num_workers, 1)

    def loader(bad: set[int]) -> DataLoader[Any]:
        torch.manual_seed(5)
        return DataLoader(
            make(9, bad), num_workers=num_workers, on_error=mode, **options
        )

    is_unsized = make in (Unsized, Unmeasured, Rewinding)
    if mode == "replace" and (is_unsized or "subset" in name):
        with pytest.raises((TypeError, ValueError), match=r"Use "):
            loader(set())
        return
    for bad in DAMAGES[3 * bool(num_workers) :]:
        whole = loader(bad)
        found = read(whole, bad)
        check_batches(found, expected_batches(kind, options, bad, mode))
        errors = whole.sample_errors
        assert whole.stats().sample_errors == len(errors) > 0
        stops = range(1, len(found))
        if num_workers:  # each loader starts processes
            stops = stops[1:2] if bad == {2, 3} else stops[:0]
        for stop in stops:
            begun = loader(bad)
            batches = iter(begun)
            for _ in range(stop):
                next(batches)
            resumed = loader(bad)
            resumed.load_state_dict(json.loads(json.dumps(begun.state_dict())))
            assert read(resumed, bad) == found[stop:]
            assert resumed.sample_errors == errors


# ----------------------------------------------------------------------------- streams
LIMIT = (
    "DataLoader: an epoch must have at most max_errors=2 failed samples, but has more. "
    "The last one has index {0}: ValueError: sample {0} is damaged. Repair the samples "
    "in DataLoader.sample_errors, or increase max_errors."
)
AT_THE_END = [
    (0, {}, [10, 11]),
    (1, {}, [10, 11]),
    (2, {}, [10, 11]),
    (2, {"drop_last": True, "persistent_workers": True}, [3, 10, 11]),
    (1, {"batch_size": None}, [10, 11]),
]


@quiet
@pytest.mark.parametrize("num_workers, options, bad", AT_THE_END)
def test_errors_after_the_last_batch_of_a_stream_are_reported(
    num_workers: int, options: dict[str, Any], bad: list[int]
) -> None:
    options = {"batch_size": 2, **options}
    loader = DataLoader(
        Stream(12, set(bad)), num_workers=num_workers, on_error="skip", **options
    )
    for _ in range(2):  # epochs
        list(batches := iter(loader))
        assert next(batches, "the end") == "the end"
        assert sorted(loader.sample_errors) == sorted(
            (error.index // max(num_workers, 1), error.error) for error in failed(*bad)
        )
    assert loader.stats().sample_errors == 2 * len(bad)


@quiet
def test_a_stream_that_begins_again_ends_after_an_error() -> None:
    options: Any = {"batch_size": None, "num_workers": 1, "on_error": "skip"}
    loader = DataLoader(Rewinding(3, {2}), **options)
    assert list(itertools.islice(loader, 9)) == [0, 1]
    assert loader.sample_errors == failed(2)


@quiet
@pytest.mark.parametrize("num_workers", [0, 1])
def test_errors_after_the_last_batch_count_for_the_limit(num_workers: int) -> None:
    options: Any = {"num_workers": num_workers, "on_error": "skip", "max_errors": 2}
    batches = iter(loader := DataLoader(Stream(6, {1, 4, 5}), 3, **options))
    assert next(batches).tolist() == [0, 2, 3]
    with pytest.raises(ErrorLimitError) as raised:
        next(batches)
    assert str(raised.value) == LIMIT.format(5)
    assert loader.sample_errors == failed(1)


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("kind", [Stream, ResumableStream])
def test_a_stream_continues_after_an_error_that_is_raised(
    kind: Any, num_workers: int
) -> None:
    batches = iter(DataLoader(kind(5, {2}), 1, num_workers=num_workers))
    assert [next(batches).tolist() for _ in range(2)] == [[0], [1]]
    with pytest.raises(ValueError, match="sample 2 is damaged"):
        next(batches)
    assert [batch.tolist() for batch in batches] == [[3], [4]]


class Generated(Stream):
    """A stream whose ``__iter__`` is a generator."""

    def __iter__(self) -> Iterator[int]:
        yield from range(6)


GENERATOR = (
    "DataLoader: with on_error='skip' the iterator of an iterable dataset must "
    "continue after an error, but a generator ends there, and __iter__ {}. Catch "
    "errors in the generator and set on_error='raise', or return an object with "
    "__next__ from __iter__."
)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_generator_is_refused_before_its_first_sample(num_workers: int) -> None:
    options: Any = {"num_workers": num_workers, "on_error": "skip"}
    with pytest.raises(TypeError) as raised:
        DataLoader(Generated(6, set()), 2, **options)
    assert str(raised.value) == GENERATOR.format(f"of {__name__}.Generated is one")
    loader = DataLoader(Stream(6, {3}, generate), 2, **options)
    with pytest.raises(TypeError) as raised:
        next(iter(loader))
    text = GENERATOR.format("returns one")
    assert text in str(raised.value).splitlines()[-1 if num_workers else 0]


def test_a_stream_that_ends_at_an_error_is_a_warning() -> None:
    loader = DataLoader(Stream(6, {3}, generate_inside), 2, on_error="skip")
    with pytest.warns(pyparallel.LoaderWarning) as caught:
        assert collect(loader) == [[0, 1], [2]]
    assert str(caught[0].message) == (
        "[PP216] DataLoader: sample 3 raised ValueError: sample 3 is damaged, and the "
        "iterable dataset ended directly after it. Samples may be missing, as an "
        "iterator around a generator ends at its first error. Catch the error in the "
        "generator."
    )
    assert loader.sample_errors == failed(3)


# -------------------------------------------------------------------------- resumption
@quiet
@pytest.mark.parametrize("mode, workers, later", [("replace", 2, 0), ("skip", 0, 1)])
@pytest.mark.parametrize("stop", [3, 8])
def test_a_resumed_epoch_is_the_same(
    mode: Any, workers: int, later: int, stop: int
) -> None:
    def make(num_workers: int) -> DataLoader[Any]:
        generator = torch.Generator().manual_seed(11)
        dataset = Damaged(23, {1, 2, 3, 9, 14, 15, 20})
        return DataLoader(
            dataset,
            *(3, True),
            num_workers=num_workers,
            generator=generator,
            on_error=mode,
        )

    batches = collect(whole := make(0))
    loader = make(workers)
    iterator = iter(loader)
    for _ in range(stop):
        next(iterator)
    state = json.loads(json.dumps(loader.state_dict()))
    before = loader.sample_errors
    resumed = make(later)
    resumed.load_state_dict(state)
    assert resumed.sample_errors == before
    assert collect(resumed) == batches[stop:]
    assert resumed.sample_errors == whole.sample_errors
    assert resumed.stats().sample_errors == len(whole.sample_errors)


@quiet
@pytest.mark.parametrize("kind", [Stream, ResumableStream])
@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize(
    # The last errors of the second stream follow its last batch.
    "stop, length, bad",
    [(2, 12, [1, 6, 10]), (4, 13, [1, 6, 10, 11, 12])],
)
def test_a_resumed_stream_counts_no_error_twice(
    kind: Any, num_workers: int, stop: int, length: int, bad: list[int]
) -> None:
    def make() -> DataLoader[Any]:
        dataset = kind(length, set(bad))
        return DataLoader(dataset, 2, num_workers=num_workers, on_error="skip")

    batches = iter(loader := make())
    found = [next(batches).tolist() for _ in range(stop)]
    resumed = make()
    resumed.load_state_dict(loader.state_dict())
    good = sorted({*range(length)} - {*bad})
    expected = [good[i : i + 2] for i in range(0, len(good), 2)]
    assert found + collect(resumed) == expected
    texts = [error.error for error in resumed.sample_errors]
    assert texts == [error.error for error in failed(*bad)]


# ------------------------------------------------------------------------------- limit
@quiet
@pytest.mark.parametrize("num_workers", [0, 2])
def test_more_errors_than_the_limit_raise_the_last(num_workers: int) -> None:
    loader = DataLoader(
        Damaged(8, {0, 2, 4, 6}),
        2,
        num_workers=num_workers,
        on_error="skip",
        max_errors=2,
    )
    batches = iter(loader)
    assert [next(batches).tolist() for _ in range(2)] == [[1], [3]]
    with pytest.raises(ErrorLimitError) as raised:
        next(batches)
    assert str(raised.value) == LIMIT.format(4)
    cause = raised.value.__cause__
    assert type(cause) is ValueError and "sample 4 is damaged" in str(cause)
    assert ("at index 4" in str(cause)) is bool(num_workers)
    assert loader.sample_errors == failed(0, 2)
    # A later run that allows more continues with the batch that raised.
    state = json.loads(json.dumps(loader.state_dict()))
    loader = DataLoader(loader.dataset, 2, on_error="skip", max_errors=4)
    loader.load_state_dict(state)
    assert collect(loader) == [[5], [7]]
    assert loader.sample_errors == failed(0, 2, 4, 6)


@quiet
@pytest.mark.parametrize("method", [None, "multiprocessing", "thread"])
@pytest.mark.parametrize(
    "dataset, on_error, last",
    [
        (Damaged(4, {0, 1}), "skip", 1),
        (Damaged(4, {0, 1, 2, 3}), "replace", None),
        (Stream(4, {0, 1}), "skip", 1),
    ],
    ids=["skip", "replace", "stream"],
)
def test_one_batch_beyond_the_limit_has_the_last_error_as_the_cause(
    dataset: Any, on_error: Any, last: int | None, method: Any
) -> None:
    options = {} if method is None else {"num_workers": 1, "worker_method": method}
    loader = DataLoader(dataset, 2, on_error=on_error, max_errors=1, **options)
    with pytest.raises(ErrorLimitError) as raised:
        next(iter(loader))
    assert str(raised.value).startswith("DataLoader: an epoch must have at most max_er")
    cause = raised.value.__cause__
    assert type(cause) is ValueError
    assert f"sample {'' if last is None else last}" in str(cause)


@quiet
@pytest.mark.parametrize("num_workers", [0, 1])
def test_the_limit_ends_the_search_for_a_replacement(num_workers: int) -> None:
    options: Any = {"on_error": "replace", "max_errors": 5, "num_workers": num_workers}
    with pytest.raises(ErrorLimitError, match="max_errors=5 failed samples"):
        next(iter(DataLoader(Damaged(1000, set(range(1000))), 2, **options)))


@pytest.mark.filterwarnings(r"ignore:\[PP21[57]\]")
@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize(
    "options, last",
    [
        ({"batch_size": 2}, "0: ValueError: sample 0 is damaged"),
        (
            {"batch_size": None, "sampler": [[1], [0, 1]]},
            "[0, 1]: TypeError: unhashable type: 'list'",
        ),
    ],
    ids=["numbers", "lists"],
)
def test_a_dataset_without_a_good_sample_is_an_error(
    options: Any, last: str, num_workers: int
) -> None:
    options = {"num_workers": num_workers, "on_error": "skip", **options}
    batches = iter(DataLoader(Damaged(2, {0, 1}), **options))
    with pytest.raises(ValueError) as raised:
        next(batches)
    assert (
        "DataLoader: a batch must have a sample, but all samples failed. The last "
        f"failed one has index {last}. Repair the samples."
    ) in str(raised.value)
    assert next(batches, None) is None


class DamagedOnce(Damaged):
    """A dataset that has been repaired after its first epoch, in the same worker."""

    def __getitem__(self, index: int) -> int:
        try:
            return super().__getitem__(index)
        finally:
            if index == self.length - 1:
                self.bad = set()


@quiet
def test_the_limit_is_that_of_one_epoch() -> None:
    loader = DataLoader(
        DamagedOnce(4, {0, 3}),
        *(4, False, [0, 1, 2, 3]),
        num_workers=1,
        persistent_workers=True,
        on_error="skip",
        max_errors=1,
    )
    with pytest.raises(ErrorLimitError):
        list(loader)
    assert collect(loader) == [[0, 1, 2, 3]]
    assert loader.sample_errors == []


# ------------------------------------------------------------------ never left out
@pytest.mark.parametrize(
    "kind, num_workers",
    [
        *itertools.product([MemoryError, NameError, ImportError], [0, 1]),
        *((KeyboardInterrupt, 0), (SystemExit, 0)),
    ],
)
def test_errors_of_the_machine_and_the_program_are_raised(
    kind: Any, num_workers: int
) -> None:
    loader = DataLoader(
        Damaged(2, {1}, kind), 2, num_workers=num_workers, on_error="skip"
    )
    with pytest.raises(kind, match="sample 1 is damaged"):
        next(iter(loader))


class Killed(Damaged):
    """A dataset whose bad samples kill the worker."""

    def __getitem__(self, index: int) -> int:
        if index in self.bad:
            os.kill(os.getpid(), signal.SIGKILL)
        return index


class Nested(Damaged):
    """A dataset with a loader of its own, whose worker dies."""

    def __getitem__(self, index: int) -> int:
        return int(next(iter(DataLoader(Killed(1, {0}), 1, num_workers=1))))


def test_the_death_of_a_worker_of_the_dataset_is_raised() -> None:
    loader = DataLoader(Nested(2, set()), 2, on_error="skip")
    with pytest.raises(RuntimeError, match=r"^DataLoader: a worker must live"):
        next(iter(loader))


def test_an_error_of_collate_fn_is_raised() -> None:
    loader = DataLoader([1, 2], 2, on_error="skip", collate_fn=lambda batch: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        next(iter(loader))


# ------------------------------------------------------------------- report, arguments
def test_the_first_error_is_a_warning() -> None:
    loader = DataLoader(Damaged(6, {1, 4}), 2, on_error="skip")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert collect(loader) == [[0], [2, 3], [5]]
    assert [str(warning.message) for warning in caught] == [
        "[PP215] DataLoader: sample 1 was left out, because it raised ValueError: "
        "sample 1 is damaged. Further samples are left out without a warning: see "
        "DataLoader.sample_errors. Repair them, or set on_error='raise'."
    ]
    assert caught[0].filename == __file__
    assert str(loader.stats()).splitlines()[-1] == (
        "  errors   2 samples skipped or replaced"
    )


class Silent(Exception):
    def __str__(self) -> str:
        raise TypeError("no text")


@quiet
@pytest.mark.parametrize(
    "kind, text",
    [
        (Silent, "Silent: "),
        (lambda _: ValueError("x" * 10_000), f"ValueError: {'x' * 488}"),
    ],
    ids=["no text", "a long text"],
)
def test_the_text_of_an_error_is_at_most_500_characters(kind: Any, text: str) -> None:
    loader = DataLoader(Damaged(3, {1}, kind), 3, on_error="skip")
    assert collect(loader) == [[0, 2]]
    assert loader.sample_errors == [SampleError(1, text)]


#: Arguments by the message of their error.
REFUSED: dict[str, dict[str, Any]] = {
    "on_error must be 'raise', 'skip' or 'replace', but is 'ignore'.": {
        "on_error": "ignore"
    },
    "max_errors must be an integer of 0 or more, but is -1.": {
        "on_error": "skip",
        "max_errors": -1,
    },
    "snapshot_every_n_steps must be None or an integer of 0 or more, but is -1.": {
        "snapshot_every_n_steps": -1
    },
    "with on_error='replace' dataset must be map-style and have a length, but is "
    f"{__name__}.Stream. Use on_error='skip'.": {
        "dataset": Stream(2, set()),
        "on_error": "replace",
    },
    "with on_error='skip' dataset must be a Dataset or an IterableDataset, but is a "
    "DataPipe, which torch's own iterator reads. Wrap it in an IterableDataset.": {
        "dataset": IterableWrapper([1]),
        "on_error": "skip",
    },
    "with on_error='replace' sampler must draw from the whole dataset, as replacements "
    "do, but is a SubsetRandomSampler. Use Subset(dataset, indices) with "
    "shuffle=True.": {"sampler": SubsetRandomSampler([0, 1]), "on_error": "replace"},
}


def test_arguments_that_do_not_fit_are_refused() -> None:
    for message, arguments in REFUSED.items():
        error = TypeError if "dataset" in arguments else ValueError
        with pytest.raises(error) as raised:
            DataLoader(**{"dataset": range(4), **arguments})
        assert str(raised.value) == f"DataLoader: {message}"
