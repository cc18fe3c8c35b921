"""A state of each position is continued, also that of a run that was continued before.

A table: position x first, second and third start x kind of sampler or dataset x
workers x `PreDataLoader` x call of ``set_epoch`` before, after or not at each start.
Each cell is compared with the same run without a stop.
"""

from __future__ import annotations

import contextlib
import random
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch.utils.data import BatchSampler, DistributedSampler, IterableDataset

from pyparallel import (
    DataLoader,
    LoaderWarning,
    PreDataLoader,
    SizeBatcher,
    SizeBatchSampler,
)
from pyparallel.core import errors
from tests.support.loader.loader_sets import wait_for
from tests.support.loader.resumed import Eager, Numbers, seed

pytestmark = pytest.mark.one_backend

LENGTH, EPOCHS = 4, 3


class Epochs(Eager):
    """A sampler whose order depends on the number of ``set_epoch``."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def order(self) -> list[int]:
        generator = torch.Generator().manual_seed(self.epoch)
        return torch.randperm(self.length, generator=generator).tolist()

    def __iter__(self) -> Iterator[Any]:
        return iter(self.order())


class LateEpochs(Epochs):
    """The same as a generator, whose state has no number before ``set_epoch``."""

    epoch: Any = None

    def __iter__(self) -> Iterator[Any]:
        generator = torch.Generator().manual_seed(self.epoch or 0)
        yield from torch.randperm(self.length, generator=generator).tolist()


class EpochBatches(Epochs):
    """A batch sampler that is not torch's."""

    def __iter__(self) -> Iterator[Any]:
        order = self.order()
        return iter([order[:2], order[2:]])

    def __len__(self) -> int:
        return 2


class CountedEpochs(Epochs):
    """A sampler that counts its epochs, unless the program sets them."""

    def __iter__(self) -> Iterator[Any]:
        yield from self.order()
        self.epoch += 1


class SavedEpochs(Epochs):
    """A sampler that saves its position and its number."""

    next = 0

    def __iter__(self) -> Iterator[Any]:
        while self.next < self.length:
            self.next += 1
            yield self.order()[self.next - 1]
        self.next = 0

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "next": self.next}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update(state)


class EpochNumbers(Numbers):
    """A dataset whose samples depend on the number of ``set_epoch``."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __getitem__(self, index: int) -> torch.Tensor:
        return super().__getitem__(index) + 100 * self.epoch


class CountedNumbers(EpochNumbers):
    """The same, and its samples depend on the number of reads. Its state has both."""

    def __getitem__(self, index: int) -> torch.Tensor:
        return super().__getitem__(index) + 1000 * self.reads

    def state_dict(self) -> dict[str, Any]:
        return {"reads": self.reads, "epoch": self.epoch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update(state)


class EpochStream(IterableDataset[int]):
    """A stream whose order depends on the number of ``set_epoch``."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        order = list(range(2 * LENGTH))
        random.Random(self.epoch).shuffle(order)
        return iter(order)


class CountedStream(EpochStream):
    """The same as a generator, with a state that counts its epochs, too."""

    next = passes = 0

    def __iter__(self) -> Iterator[int]:
        order = list(super().__iter__())
        while self.next < 2 * LENGTH:
            self.next += 1
            yield 100 * self.passes + order[self.next - 1]
        self.next, self.passes = 0, self.passes + 1

    def state_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("epoch", "next", "passes")}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update(state)


class Cursor(Iterator[int]):
    def __init__(self, order: list[int]) -> None:
        self.order, self.at = order, 0

    def __next__(self) -> int:
        if self.at == len(self.order):
            raise StopIteration
        self.at += 1
        return self.order[self.at - 1]

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


class CursorEpochs(Epochs):
    """A sampler whose iterators save their positions."""

    def __iter__(self) -> Iterator[Any]:
        return Cursor(self.order())


def distributed() -> Any:
    return DistributedSampler(range(2 * LENGTH), 2, 1)


#: Arguments of a loader by kind. The kinds differ in the part that has a number.
KINDS: dict[str, Callable[[], dict[str, Any]]] = {
    "shuffle": lambda: {"shuffle": True, "batch_size": 2},
    "distributed": lambda: {"sampler": distributed(), "batch_size": 2},
    "in a batch sampler": lambda: {
        "batch_sampler": BatchSampler(distributed(), 2, drop_last=False)
    },
    "batch sampler": lambda: {"batch_sampler": EpochBatches(LENGTH)},
    "eager": lambda: {"sampler": Epochs(LENGTH), "batch_size": 2},
    "late": lambda: {"sampler": LateEpochs(LENGTH), "batch_size": 2},
    "counted": lambda: {"sampler": CountedEpochs(LENGTH), "batch_size": 2},
    "saved": lambda: {"sampler": SavedEpochs(LENGTH), "batch_size": 2},
    "cursor": lambda: {"sampler": CursorEpochs(LENGTH), "batch_size": 2},
    "sizes": lambda: {
        "batch_sampler": SizeBatchSampler([3, 1, 4, 1, 5, 9, 2, 6], 4, window=1)
    },
}
#: The same for datasets with a number. The program sets it in each epoch.
DATASETS: dict[str, Callable[[], dict[str, Any]]] = {
    "numbers": lambda: {"dataset": EpochNumbers(LENGTH), "batch_size": 2},
    "counted numbers": lambda: {"dataset": CountedNumbers(LENGTH), "batch_size": 2},
    "stream": lambda: {"dataset": EpochStream(), "batch_size": 3},
    "counted stream": lambda: {"dataset": CountedStream(), "batch_size": 3},
    "batcher": lambda: {
        "dataset": SizeBatcher(EpochStream(), int.bit_count, 2, window=2),
        "batch_size": None,
        "collate_fn": torch.tensor,
    },
}
#: Calls of set_epoch: never; else once in each epoch. In the epoch of a start: before
#: the sampler is given to its loader, before load_state_dict, after it, both, or not,
#: because the state has the number.
MODES = ("never", "first", "before", "after", "both", "not")


class Point(NamedTuple):
    """A position: the epoch, the number of its batches, and the last event."""

    epoch: int
    given: int
    moment: str  # "made", "set", "begun", "batch" or "end"

    def is_between(self) -> bool:
        return self.moment in ("made", "end")


class Run:
    """A run of a program: it starts, perhaps from a state, and takes a state anywhere.

    Attributes:
        batches: All batches, with their epochs.
        states: The states, with their positions.
    """

    def __init__(self, kind: str, mode: str, prefetches: bool, options: Any) -> None:
        self.kind, self.mode, self.options = kind, mode, options
        self.prefetches = prefetches
        self.batches: list[tuple[int, list[int]]] = []
        self.states: list[tuple[Point, Any]] = []

    def set_epoch(self, args: dict[str, Any], epoch: int) -> None:
        sampler = args.get("batch_sampler", args.get("sampler"))
        sampler = getattr(sampler, "sampler", sampler)  # as Lightning and others do
        part = args.get("dataset") if sampler is None else sampler
        if hasattr(part, "set_epoch") and self.mode != "never":
            part.set_epoch(epoch)

    def go(self, point: Point | None, state: Any) -> Run:
        """Run from a state to the end of the last epoch."""
        seed(1 if point is None else 2)
        args = (KINDS | DATASETS)[self.kind]()
        start = point or Point(0, 0, "made")
        first = start.epoch + (start.moment == "end")
        calls = self.mode if not (self.mode == "not" and start.is_between()) else "both"
        if point is not None and calls == "first":
            self.set_epoch(args, first)
        args.setdefault("dataset", Numbers(2 * LENGTH))
        loader: Any = DataLoader(**args, **self.options)
        if self.prefetches:
            loader = PreDataLoader(loader)
        if point is None:
            self.states.append((start, loader.state_dict()))
        else:
            if calls in ("before", "both"):
                self.set_epoch(args, first)
            loader.load_state_dict(state)
        with loader if self.prefetches else contextlib.nullcontext():
            for epoch in range(first, EPOCHS):
                if epoch > first or point is None or calls in ("after", "both"):
                    self.set_epoch(args, epoch)
                given = start.given if epoch == start.epoch == first else 0
                self.epoch(loader, epoch, given)
        return self

    def epoch(self, loader: Any, epoch: int, given: int) -> None:
        waits = ("batch", "batch") if given else ("set", "begun")
        self.states.append((Point(epoch, given, waits[0]), loader.state_dict()))
        batches = iter(loader)
        self.states.append((Point(epoch, given, waits[1]), loader.state_dict()))
        for batch in batches:
            given += 1
            self.batches.append((epoch, batch.tolist()))
            self.states.append((Point(epoch, given, "batch"), loader.state_dict()))
        self.states.append((Point(epoch, 0, "end"), loader.state_dict()))


def rest(batches: list[Any], point: Point) -> list[Any]:
    """Return the batches of a run after a position."""
    first = point.epoch + (point.moment == "end")
    return [
        batch
        for epoch in range(first, EPOCHS)
        for batch in [b for b in batches if b[0] == epoch][
            point.given if epoch == point.epoch else 0 :
        ]
    ]


def check(
    kind: str,
    mode: str,
    numbers: tuple[int, int, int],
    prefetches: bool = False,
    **options: Any,
) -> None:
    """Stop and start a run three times, each time at this number of positions."""
    source = random.Random(f"{kind}, {mode}")

    def go(point: Point | None = None, state: Any = None) -> Run:
        return Run(kind, mode, prefetches, options).go(point, state)

    whole = go()
    orders = [[b for e, b in whole.batches if e == epoch] for epoch in range(EPOCHS)]
    assert all(orders)
    if mode != "never" or kind in ("shuffle", "counted", "sizes"):
        assert orders[0] != orders[1] != orders[2]

    def stop(run: Run, path: list[Point]) -> None:
        number = min(numbers[len(path)], len(run.states))
        for point, state in source.sample(run.states, number):
            later = go(point, state)
            assert later.batches == rest(whole.batches, point), [*path, point]
            if len(path) < 2:
                stop(later, [*path, point])

    stop(whole, [])


@pytest.mark.parametrize("prefetches", [False, True], ids=["plain", "prefetch"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", KINDS)
def test_three_starts_at_some_positions(kind: str, mode: str, prefetches: bool) -> None:
    check(kind, mode, (4, 2, 2), prefetches)


WORKERS: list[dict[str, Any]] = [
    {},
    {"num_workers": 1, "worker_method": "thread"},
    {"num_workers": 1},
    {"num_workers": 2, "persistent_workers": True},
]


@pytest.mark.parametrize("mode", MODES[1:])
@pytest.mark.parametrize("kind", DATASETS)
def test_three_starts_of_a_dataset_with_a_number(kind: str, mode: str) -> None:
    number = [*DATASETS].index(kind) + MODES.index(mode)
    check(kind, mode, (4, 2, 2), number % 2 == 0, **WORKERS[number % len(WORKERS)])


class OwnCount(EpochStream):
    """A stream that counts its epochs in each process, and yields the number."""

    def __iter__(self) -> Iterator[int]:
        yield self.epoch
        self.epoch += 1


class Hidden(EpochNumbers):
    """A dataset that keeps the number in another attribute."""

    epoch = property()  # type: ignore[assignment]
    hidden = 0

    def set_epoch(self, epoch: int) -> None:
        self.hidden = epoch

    def __getitem__(self, index: int) -> torch.Tensor:
        return Numbers.__getitem__(self, index) + 100 * self.hidden


PERSISTENT: dict[str, Any] = {"num_workers": 1, "persistent_workers": True}


@pytest.mark.parametrize("method", ["fork", "spawn", "thread"])
def test_persistent_workers_get_the_number_of_the_epoch(method: str) -> None:
    options: Any = {**PERSISTENT, "multiprocessing_context": method}
    if method == "thread":
        options = {**PERSISTENT, "worker_method": method}
    data = EpochNumbers(1)
    loader = DataLoader(data, **options)
    for epoch in (0, 3, 3, 1):
        data.set_epoch(epoch)
        if epoch == 1:
            next(iter(loader))  # a pass that is left
            data.set_epoch(epoch + 1)
            epoch += 1
        assert [batch.tolist() for batch in loader] == [[100 * epoch]]


def test_persistent_workers_may_count_epochs_themselves() -> None:
    loader = DataLoader(OwnCount(), **PERSISTENT)
    assert [[x.item() for x in loader] for _ in range(3)] == [[0], [1], [2]]
    loader.dataset.set_epoch(7)
    assert [[x.item() for x in loader] for _ in range(2)] == [[7], [8]]


def test_a_number_that_persistent_workers_cannot_get_is_a_warning() -> None:
    data = Hidden(1)
    loader = DataLoader(data, **PERSISTENT)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            assert [batch.tolist() for batch in loader] == [[0]]
    data.set_epoch(1)
    expected = r"\[PP222\] DataLoader: set_epoch of .*Hidden must set an integer attri"
    errors._warned.discard("PP222 ")
    with pytest.warns(LoaderWarning, match=expected):
        assert [batch.tolist() for batch in loader] == [[0]]
    # The advice.
    loader = DataLoader(data, num_workers=1)
    data.set_epoch(2)
    assert [batch.tolist() for batch in loader] == [[200]]


@pytest.mark.slow
@pytest.mark.parametrize("which", range(2))
@pytest.mark.parametrize("kind", KINDS)
def test_three_starts_at_all_positions(kind: str, which: int) -> None:
    # Each kind in two of the modes.
    check(kind, MODES[([*KINDS].index(kind) + 3 * which) % 6], (99, 4, 1))


@pytest.mark.slow
@pytest.mark.parametrize("persistent", [False, True], ids=["anew", "persistent"])
@pytest.mark.parametrize("kind", KINDS)
def test_three_starts_with_workers(kind: str, persistent: bool) -> None:
    options = {"num_workers": 1 + persistent, "persistent_workers": persistent}
    # Each kind in two of the modes, once with and once without a prefetcher.
    number = [*KINDS].index(kind)
    prefetches, mode = (
        (number + persistent) % 2 == 0,
        MODES[(number + 3 * persistent) % 6],
    )
    check(kind, mode, (2, 2, 1), prefetches, **options)


def is_idle(pass_: Any) -> bool:
    """Return True if a pass of a `PreDataLoader` reads no more batches for now."""
    is_full = len(pass_.items) >= pass_.options.queue_size
    number = pass_.num_taken + len(pass_.items)
    # At the end, a sampler may draw: the thread waits until the loop asks for it.
    waits = number >= pass_.num_wanted and pass_.draws.waits_at(number)
    return is_full or waits or not pass_.thread.is_alive()


@pytest.mark.parametrize("prefetches", [False, True], ids=["plain", "prefetch"])
@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("sets", [False, True], ids=["", "set_epoch"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_beginning_of_an_epoch_after_one_that_was_left(
    kind: str, sets: bool, workers: int, prefetches: bool
) -> None:
    def new() -> tuple[dict[str, Any], Any]:
        args = KINDS[kind]()
        loader = DataLoader(Numbers(2 * LENGTH), **args, num_workers=workers)
        return args, PreDataLoader(loader) if prefetches else loader

    run = Run(kind, "both", prefetches, {})
    seed(1)
    args, loader = new()
    left = iter(loader)
    next(left)
    if prefetches:  # its thread reads more of the sampler meanwhile
        assert wait_for(lambda: is_idle(left._thread), 60)
    if sets:
        run.set_epoch(args, 1)
    batches = iter(loader)
    states = [loader.state_dict()]
    rest = [next(batches).tolist()]
    states.append(loader.state_dict())
    rest += [batch.tolist() for batch in batches]
    for given, state in enumerate(states):
        seed(2)
        _, again = new()
        again.load_state_dict(state)
        assert [batch.tolist() for batch in again] == rest[given:], given


class SlowStates(SizeBatchSampler):
    """A sampler that another thread may read while its state is saved."""

    def state_dict(self) -> dict[str, Any]:
        time.sleep(0.004)
        return super().state_dict()


@pytest.mark.parametrize("workers", [0, 1], ids=["", "thread"])
@pytest.mark.parametrize("shares", [True, False], ids=["", "another prefetcher"])
@pytest.mark.parametrize("given", [0, 1, 3])
def test_a_pass_that_still_reads_changes_no_state_of_the_next(
    given: int, shares: bool, workers: int
) -> None:
    def new() -> Any:
        sampler = SlowStates(range(60), 2)
        options = {"num_workers": workers, "worker_method": "thread"}
        loader = DataLoader(Numbers(60), batch_sampler=sampler, **options)
        return loader, PreDataLoader(loader, queue_size=25)

    loader, ahead = new()
    left = iter(ahead)
    next(left)
    again = ahead if shares else PreDataLoader(loader, queue_size=25)
    batches = iter(again)
    for _ in range(given):
        next(batches)
    state = again.state_dict()
    assert left._thread.thread.is_alive()  # it has read during all of this
    rest = [batch.tolist() for batch in batches]
    left.close()
    _, resumed = new()
    resumed.load_state_dict(state)
    assert [batch.tolist() for batch in resumed] == rest
    assert len(rest) == 30 - given


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("stop", [1, 3, 6])
def test_the_state_of_the_training_loader_continues_beside_a_validation_loader(
    stop: int, shared: bool, workers: int
) -> None:
    """The advice of resume.md for programs with two loaders."""

    def run(stop: int, state: Any = None) -> tuple[list[Any], Any]:
        generator = torch.Generator().manual_seed(3) if shared else None
        options: Any = {"generator": generator, "num_workers": workers}
        train = DataLoader(range(7), 3, shuffle=True, **options)
        if state is not None:
            train.load_state_dict(state)
        validation = DataLoader(range(4), 2, shuffle=True, **options)
        found: list[Any] = []
        for _ in range(2):
            for batch in train:
                found.append((batch.tolist(), random.random()))
                if len(found) == stop:
                    return found, train.state_dict()
            found += [(batch.tolist(), random.random()) for batch in validation]
        return found, None

    seed(0)
    expected, _ = run(0)
    seed(0)
    found, state = run(stop)
    seed(9)
    rest = run(0, state)[0]
    assert found + rest[: len(expected) - stop] == expected
