"""Loops of frameworks get torch's order, and leave the generators as torch would.

A pass draws its order from a generator, which several passes share. Frameworks begin a
pass early, leave one before its end, or begin another one meanwhile. So each loop is
run with torch's loader, with ours, and with a `PreDataLoader` around both.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from itertools import islice, product
from typing import Any

import pytest
import torch
from torch.utils.data import (
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

import pyparallel
from pyparallel import PreDataLoader, SizeBatchSampler

pytestmark = [pytest.mark.one_backend, pytest.mark.usefixtures("forked")]

SIZE, BATCH = 10, 2
STEPS, EPOCHS = SIZE // BATCH, 3
#: A loop gets the loaders of training and of validation, and yields its batches.
Loop = Callable[[Any, Any], Iterator[Any]]


# ------------------------------------------------------------------------- the loops
def to_the_end(train: Any, _: Any) -> Iterator[Any]:
    for _epoch in range(EPOCHS):
        yield from train


def counts_as_transformers(train: Any, _: Any) -> Iterator[Any]:
    """Ask for no end, and drop an iterator after the next pass has begun."""
    for _epoch in range(EPOCHS):
        batches = iter(train)
        for _step in range(len(train)):
            yield next(batches)


def begins_twice_as_lightning(train: Any, val: Any) -> Iterator[Any]:
    """Check one batch, begin a pass too many, and validate before the end."""
    yield from islice(val, 1)
    batches = iter(train)
    for _epoch in range(EPOCHS):
        batches = iter(train)
        left = len(train)
        while left:
            yield next(batches)
            left -= 1
        yield from islice(val, len(val))


def reads_ahead_as_accelerate(train: Any, _: Any) -> Iterator[Any]:
    for _epoch in range(EPOCHS):
        batches = iter(train)
        current = next(batches, None)
        while current is not None:
            following = next(batches, None)
            yield current
            current = following


def restarts_as_mmengine(train: Any, _: Any) -> Iterator[Any]:
    """One iterator that begins anew at its end, for a number of iterations."""
    batches = iter(train)
    for _step in range(EPOCHS * STEPS + 1):
        try:
            yield next(batches)
        except StopIteration:
            batches = iter(train)
            yield next(batches)


def accumulates(train: Any, _: Any) -> Iterator[Any]:
    for _epoch in range(EPOCHS):
        batches = iter(train)
        while group := list(islice(batches, 2)):
            yield from group


def zips(train: Any, _: Any) -> Iterator[Any]:
    for _epoch in range(EPOCHS):
        for _step, batch in zip(range(len(train)), train, strict=False):
            yield batch


def enumerates_to(stop: int) -> Loop:
    def breaks(train: Any, _: Any) -> Iterator[Any]:
        for _epoch in range(EPOCHS):
            assert stop < len(train)
            for step, batch in enumerate(train):
                yield batch
                if step == stop:
                    break

    breaks.__name__ = f"breaks_after_batch_{stop}"
    return breaks


def keeps_passes(train: Any, _: Any) -> Iterator[Any]:
    """Keep passes that have begun, or that were left after a batch."""
    kept = [iter(train), iter(train)]
    for stop in (0, 1, STEPS - 2, STEPS - 1):
        kept.append(batches := iter(train))
        yield from islice(batches, stop)
    yield from train


def reads_two_passes(train: Any, _: Any) -> Iterator[Any]:
    for _epoch in range(EPOCHS):
        for pair in zip(train, train, strict=True):
            yield from pair


def validates_in_mid_epoch(train: Any, val: Any) -> Iterator[Any]:
    for _epoch in range(EPOCHS):
        for step, batch in enumerate(train):
            yield batch
            if step == 1:
                yield from val


def validates_after_the_last_batch(train: Any, val: Any) -> Iterator[Any]:
    for _epoch in range(EPOCHS):
        for step, batch in enumerate(train):
            yield batch
            if step == len(train) - 1:
                yield from val


def draws_before_its_steps(train: Any, _: Any) -> Iterator[Any]:
    """Draw from the global generators between ``iter()`` and the steps."""
    for _epoch in range(EPOCHS):
        batches = iter(train)
        yield torch.rand(1), random.random()
        yield next(batches)
        yield torch.rand(1), random.random()
        yield from batches


LOOPS: list[Loop] = [
    to_the_end,
    counts_as_transformers,
    begins_twice_as_lightning,
    reads_ahead_as_accelerate,
    restarts_as_mmengine,
    accumulates,
    zips,
    *map(enumerates_to, (0, 2, 3, 4)),
    keeps_passes,
    reads_two_passes,
    validates_in_mid_epoch,
    validates_after_the_last_batch,
    draws_before_its_steps,
]


# ------------------------------------------------------------------------ the orders
class OfEpoch(Sampler[int]):
    """Counts its epochs, when one begins or when it ends."""

    def __init__(self, *, at_end: bool) -> None:
        self.at_end, self.epoch = at_end, 0

    def __len__(self) -> int:
        return SIZE

    def __iter__(self) -> Iterator[int]:
        order = list(range(SIZE))
        random.Random(self.epoch).shuffle(order)
        self.epoch += not self.at_end
        yield from order
        self.epoch += self.at_end


DATA = range(SIZE)
#: The arguments of the loader of training, with a generator of the program.
ORDERS: dict[str, Callable[[torch.Generator], dict[str, Any]]] = {
    "shuffle": lambda g: {"shuffle": True, "generator": g},
    "global": lambda g: {"shuffle": True},
    "sampler": lambda g: {"sampler": RandomSampler(DATA, generator=g)},
    "twice": lambda g: {"sampler": RandomSampler(DATA, num_samples=20, generator=g)},
    "replacement": lambda g: {"sampler": RandomSampler(DATA, True, generator=g)},
    "subset": lambda g: {"sampler": SubsetRandomSampler(DATA, g), "generator": g},
    "weights": lambda g: {
        "sampler": WeightedRandomSampler([1.0] * SIZE, SIZE, generator=g)
    },
    "counts at its start": lambda g: {"sampler": OfEpoch(at_end=False)},
    "counts at its end": lambda g: {"sampler": OfEpoch(at_end=True)},
    "sizes": lambda g: {
        "batch_sampler": SizeBatchSampler([1 + i % 4 for i in DATA], batch_size=BATCH)
    },
}
WORKERS: dict[str, dict[str, Any]] = {
    "none": {},
    "processes": {"num_workers": 2},
    "persistent": {"num_workers": 2, "persistent_workers": True},
}
#: Loops that never call ``len()``: the end of an unknown sampler comes early.
WITHOUT_LENGTH = [keeps_passes, reads_two_passes]


def cases() -> Iterator[Any]:
    """Yield loops, orders and workers, as parameters of a test."""
    for loop, order in product(LOOPS, ORDERS):
        if order != "counts at its end" or loop not in WITHOUT_LENGTH:
            yield pytest.param(loop, order, "none", id=f"{loop.__name__}-{order}")
    for loop, order in product(LOOPS, ("shuffle", "twice", "counts at its end")):
        name = f"{loop.__name__}-{order}-processes"
        if order == "shuffle" or loop not in WITHOUT_LENGTH:
            quick = order == "shuffle"
            marks = () if quick else pytest.mark.slow
            yield pytest.param(loop, order, "processes", id=name, marks=marks)
    for loop in LOOPS:
        if loop is not reads_two_passes:  # torch has one iterator for both
            name = f"{loop.__name__}-shuffle-persistent"
            yield pytest.param(
                loop, "shuffle", "persistent", id=name, marks=pytest.mark.slow
            )


@pytest.mark.parametrize("workers", ["none", "processes"])
@pytest.mark.parametrize("order", ["shuffle", "global"])
@pytest.mark.parametrize("cls", [pyparallel.DataLoader, torch.utils.data.DataLoader])
def test_a_pass_that_is_dropped_at_once_draws_nothing(
    cls: Any, order: str, workers: str
) -> None:
    """Lightning checks by ``iter()`` that an object of another class is iterable."""

    def check_first(train: Any, _: Any) -> Iterator[Any]:
        if isinstance(train, PreDataLoader):
            iter(train)
        yield from to_the_end(train, _)

    options = WORKERS[workers]
    expected = run(check_first, order, lambda each: each, cls, options)
    assert run(check_first, order, ahead, cls, options) == expected


def plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, torch.Tensor) else value


def run(
    loop: Loop, order: str, wrap: Callable[[Any], Any], cls: Any, workers: Any
) -> tuple[list[Any], list[int], list[int]]:
    """Return the batches of a loop, and the states of the generators after it."""
    torch.manual_seed(5)
    random.seed(5)
    generator = torch.Generator().manual_seed(1)
    options = ORDERS[order](generator)
    if "batch_sampler" not in options:
        options["batch_size"] = BATCH
    train = wrap(cls(DATA, **options, **workers))
    # It shuffles nothing, but draws a base seed for its workers in each pass.
    shared = options.get("generator")
    val = wrap(cls(range(100, 104), BATCH, generator=shared, **workers))
    received = [plain(each) for each in loop(train, val)]
    after = torch.get_rng_state().tolist(), generator.get_state().tolist()
    return received, *after


def ahead(loader: Any) -> Any:
    return PreDataLoader(loader, "cpu")


def nested(loader: Any) -> Any:
    return PreDataLoader(PreDataLoader(loader))


#: The ways to read a loader, and arguments that replace processes.
WAYS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "ours": (lambda each: each, pyparallel.DataLoader, {}),
    "ours ahead": (ahead, pyparallel.DataLoader, {}),
    "torch's ahead": (ahead, torch.utils.data.DataLoader, {}),
    "nested": (nested, pyparallel.DataLoader, {}),
    "threads ahead": (ahead, pyparallel.DataLoader, {"worker_method": "thread"}),
}


@pytest.mark.parametrize("loop, order, workers", list(cases()))
def test_a_loop_gets_the_order_of_torch(loop: Loop, order: str, workers: str) -> None:
    options = WORKERS[workers]
    expected = run(loop, order, lambda x: x, torch.utils.data.DataLoader, options)
    wrong = {}
    for way, (wrap, cls, more) in WAYS.items():
        if more and workers != "processes":
            continue
        found = run(loop, order, wrap, cls, {**options, **more})
        if found != expected:
            wrong[way] = [a == b for a, b in zip(found, expected, strict=True)]
    assert not wrong
