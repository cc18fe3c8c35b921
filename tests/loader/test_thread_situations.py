"""Worker threads in situations that a user meets: each is a function in one table."""

from __future__ import annotations

import asyncio
import copy
import gc
import itertools
import pickle
import sqlite3
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset, get_worker_info

from pyparallel import DataLoader, LoaderWarning
from pyparallel.core import errors
from pyparallel.transfer import debug
from tests.support.loader.loader_sets import Making, wait_for

pytestmark = pytest.mark.timeout(120)

THREADS: dict[str, Any] = {"num_workers": 2, "worker_method": "thread"}
#: The kinds of workers with the rules that hold for each.
KINDS: dict[str, dict[str, Any]] = {
    "none": {},
    "processes": {"num_workers": 2, "multiprocessing_context": "fork"},
    "threads": THREADS,
}


def large(index: int) -> torch.Tensor:
    """Return a sample that is sent in the ring."""
    return torch.full((150, 150), float(index))


def values(batches: Any) -> list[Any]:
    """Return the first number of each sample of large batches."""
    return [batch[:, 0, 0].tolist() for batch in batches]


def are_gone() -> bool:
    return not any("pyparallel-worker" in each.name for each in threading.enumerate())


def loaders_in_threads() -> None:
    def make(index: int) -> int:
        for options in ({}, THREADS):
            assert values(DataLoader(Making(large, 4), 2, **options)) == [
                [0, 1],
                [2, 3],
            ]
        info = get_worker_info()
        assert info is not None and info.dataset is data
        return index

    data = Making(make, 6)
    assert torch.cat(list(DataLoader(data, 2, **THREADS))).tolist() == [*range(6)]


def the_loader_itself_in_its_dataset() -> None:
    begun: list[int] = []

    def make(index: int) -> int:
        if index or begun:
            return index
        begun.append(index)
        return len(list(loader))

    loader = DataLoader(Making(make, 4), None, **THREADS)
    assert list(loader) == [4, 1, 2, 3]


def threads_of_the_dataset() -> None:
    with ThreadPoolExecutor(2) as pool:

        def make(index: int) -> torch.Tensor:
            assert [*pool.map(lambda _: get_worker_info(), range(3))] == [None] * 3
            return pool.submit(large, index).result()

        assert values(DataLoader(Making(make, 6), **THREADS)) == [[i] for i in range(6)]


def event_loops() -> None:
    async def read(index: int) -> int:
        await asyncio.sleep(0)
        return index

    data = Making(lambda index: asyncio.run(read(index)), 6)
    assert list(DataLoader(data, None, **THREADS)) == [*range(6)]


class Base(sqlite3.Connection):
    """A connection with weak references. Only its own thread may use it."""


def connections_of_a_thread() -> None:
    local, made = threading.local(), []

    def connect(worker: int) -> None:
        local.base = sqlite3.connect(":memory:", factory=Base)
        made.append((worker, weakref.ref(local.base)))

    def make(index: int) -> Any:
        return local.base.execute("select ?", (index,)).fetchone()[0]

    loader = DataLoader(
        Making(make, 10), 5, worker_init_fn=connect, persistent_workers=True, **THREADS
    )
    for _ in range(2):
        assert torch.cat(list(loader)).tolist() == [*range(10)]
    assert sorted(worker for worker, _ in made) == [0, 1]
    del loader
    assert wait_for(are_gone)

    def are_closed() -> bool:
        gc.collect()  # a connection refers to itself
        return all(base() is None for _, base in made)

    assert wait_for(are_closed)


class Shards(IterableDataset[int]):
    """As many samples for each worker as its length says."""

    def __init__(self, *lengths: int) -> None:
        self.lengths, self.closed = lengths, []  # type: ignore[var-annotated]

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        assert info is not None
        try:
            yield from range(100 * info.id, 100 * info.id + self.lengths[info.id])
        finally:
            self.closed.append(info.id)


def streams_of_different_lengths() -> None:
    for lengths in ((5, 1), (0, 4), (0, 0), (1, 7)):
        parts = [range(100 * i, 100 * i + n) for i, n in enumerate(lengths)]
        turns = itertools.chain(*itertools.zip_longest(*parts))
        expected = [number for number in turns if number is not None]
        for persistent in (False, True):
            options = {**THREADS, "persistent_workers": persistent}
            loader = DataLoader(Shards(*lengths), None, **options)
            assert [list(loader), list(loader)] == [expected] * 2


def streams_that_are_left() -> None:
    data = Shards(10**6, 10**6)
    batches = iter(DataLoader(data, None, **THREADS))
    assert [next(batches) for _ in range(5)] == [0, 100, 1, 101, 2]
    del batches
    assert wait_for(are_gone)
    gc.collect()
    assert sorted(data.closed) == [0, 1]


def an_interrupt_while_a_thread_has_a_slab() -> None:
    released = threading.Event()

    def make(index: int) -> torch.Tensor:
        if index >= 4:
            released.wait(60)
        return large(index)

    def collate(samples: list[torch.Tensor]) -> torch.Tensor:
        batch: torch.Tensor = torch.utils.data.default_collate(samples)
        if batch[0, 0, 0] == 2:
            released.wait(60)
        return batch

    loader = DataLoader(Making(make, 12), 2, collate_fn=collate, **THREADS)
    with pytest.raises(KeyboardInterrupt):
        for batch in loader:
            del batch
            raise KeyboardInterrupt
    released.set()
    ring: Any = loader._receiver.ring
    assert wait_for(lambda: ring.holders() == [0] * ring.num_slabs)
    assert len(list(loader)) == 6
    assert wait_for(are_gone)


def an_error_with_large_local_variables() -> None:
    class Array(np.ndarray[Any, Any]):
        pass

    found: list[Any] = []

    def make(index: int) -> int:
        local = np.zeros(9).view(Array)
        found.append(weakref.ref(local))
        if index == 3:
            raise ValueError("no 3")
        return index

    for persistent in (False, True):
        options = {**THREADS, "persistent_workers": persistent}
        loader = DataLoader(Making(make, 8), None, **options)
        gc.disable()  # the error must not be a part of a cycle
        try:
            try:
                list(loader)
            except ValueError as error:
                notes: Any = getattr(error, "__notes__", ["at index 3"])
                assert "at index 3" in notes[0]
            assert wait_for(lambda: all(array() is None for array in found))
        finally:
            gc.enable()


def a_worker_init_fn_that_fails_once() -> None:
    for kind in ("processes", "threads"):
        for persistent in (False, True):
            is_broken = [True]

            def begin(worker: int, is_broken: list[bool] = is_broken) -> None:
                if worker == 1 and is_broken[0]:
                    raise LookupError("no connection")

            options = {**KINDS[kind], "persistent_workers": persistent}
            loader = DataLoader(Making(large, 8), 2, worker_init_fn=begin, **options)
            batches = iter(loader)
            assert next(batches)[0, 0, 0] == 0
            with pytest.raises(LookupError, match="no connection"):
                next(batches)
            assert next(batches)[0, 0, 0] == 4  # of the other worker
            del batches
            is_broken[0] = False
            assert values(loader) == [[i, i + 1] for i in range(0, 8, 2)]


def a_worker_init_fn_that_changes_the_dataset() -> None:
    class Parted(IterableDataset[int]):
        first = 0

        def __iter__(self) -> Iterator[int]:
            return iter([self.first])

    def divide(worker: int) -> None:  # as in torch's documentation
        info: Any = get_worker_info()
        info.dataset.first = 10 * worker

    for kind in ("processes", "threads"):
        data = Parted()
        loader = DataLoader(data, None, worker_init_fn=divide, **KINDS[kind])
        if kind == "threads":
            with pytest.warns(
                LoaderWarning, match=r"PP221.* set the attribute 'first'"
            ):
                list(loader)
        else:
            assert list(loader) == [0, 10]


def a_sampler_that_changes_its_last_batch() -> None:
    class Reusing:
        def __init__(self, make: Callable[[list[int]], Any]) -> None:
            self.make = make

        def __iter__(self) -> Iterator[Any]:
            batch = self.make([0, 0])
            for first in range(0, 8, 2):
                batch[0], batch[1] = first, first + 1
                yield batch

    for make in (list, np.array, torch.tensor):
        for options in (*KINDS.values(), {**THREADS, "sample_seeds": True}):
            sampler: Any = Reusing(make)
            loader = DataLoader([*range(8)], batch_sampler=sampler, **options)
            found = [batch.tolist() for batch in loader]
            assert found == [[0, 1], [2, 3], [4, 5], [6, 7]]


def a_loop_that_is_left_within_a_large_batch() -> None:
    read: list[int] = []

    def make(index: int) -> int:
        read.append(index)
        time.sleep(0.01)
        return index

    class Stream(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return map(make, range(10_000))

    batches = [[*range(10_000)] for _ in range(2)]
    for data, options in (
        (Making(make, 10_000), {"batch_sampler": batches}),
        (Making(make, 10_000), {"batch_sampler": batches, "sample_seeds": True}),
        (Making(make, 10_000), {"batch_sampler": batches, "on_error": "skip"}),
        (Stream(), {"batch_size": 10_000}),
    ):
        read.clear()
        given: Any = options
        iterator = iter(DataLoader(data, **given, **THREADS))
        assert wait_for(lambda: len(read) > 2)
        del iterator
        assert wait_for(are_gone)
        assert len(read) < 5000
        assert all(len(batch) == 10_000 for batch in batches)  # the user's


def errors_in_no_order() -> None:
    def make(index: int) -> int:
        if index == 5:
            raise ValueError
        return index

    batches = iter(DataLoader(Making(make, 20), None, in_order=False, **THREADS))
    found: list[int] = []
    with pytest.raises(ValueError):
        found.extend(iter(lambda: next(batches), None))
    found.extend(batches)
    assert sorted({*found, 5}) == [*range(20)]


def persistent_threads_with_errors_that_are_skipped() -> None:
    def make(index: int) -> torch.Tensor:
        if index % 3 == 1:
            raise ValueError(index)
        return large(index)

    options = {**THREADS, "persistent_workers": True}
    loader = DataLoader(Making(make, 12), 4, on_error="skip", **options)
    for _ in range(3):
        assert values(loader) == [[0, 2, 3], [5, 6], [8, 9, 11]]
    assert (len(loader.sample_errors), loader.stats().sample_errors) == (4, 12)


def persistent_threads_and_set_epoch() -> None:
    data: Any = [*range(16)]
    found: list[Any] = []
    for options in ({}, {**THREADS, "persistent_workers": True}):
        sampler: Any = torch.utils.data.DistributedSampler(data, 2, 0, seed=3)
        loader = DataLoader(data, 4, sampler=sampler, **options)
        found.append([])
        for epoch in range(3):
            sampler.set_epoch(epoch)
            found[-1].append([batch.tolist() for batch in loader])
    assert found[0] == found[1] and found[0][0] != found[0][1]


def a_timeout_that_is_caught() -> None:
    released = threading.Event()

    def make(index: int) -> int:
        if index == 2:
            released.wait(60)
        return index

    batches = iter(DataLoader(Making(make, 8), None, timeout=0.3, **THREADS))
    assert [next(batches), next(batches)] == [0, 1]
    with pytest.raises(RuntimeError, match="DataLoader timed out"):
        next(batches)
    released.set()
    assert list(batches) == [*range(2, 8)]


def an_exit_in_the_dataset_of_persistent_threads() -> None:
    for error in (SystemExit(4), KeyboardInterrupt()):

        def make(index: int, error: BaseException = error) -> int:
            if index == 3:
                raise error
            return index

        options = {**THREADS, "persistent_workers": True}
        loader = DataLoader(Making(make, 6), None, **options)
        for _ in range(2):
            with pytest.raises(type(error)) as caught:
                list(loader)
            assert caught.value is error
        error.__traceback__ = None
        del caught


def batches_of_any_objects() -> None:
    def lazily(samples: list[Any]) -> Any:
        return (sample for sample in samples)

    data = Making(lambda index: (lambda: index, threading.Lock()), 4)
    found = [
        [each() for each, _ in batch]
        for batch in DataLoader(data, 2, collate_fn=lazily, **THREADS)
    ]
    assert found == [[0, 1], [2, 3]]


def copies_of_a_loader_that_runs() -> None:
    loader = DataLoader([*range(6)], 2, **THREADS)
    batches = iter(loader)
    next(batches)
    for other in (copy.copy(loader), pickle.loads(pickle.dumps(loader))):
        assert len(list(other)) == 3
    assert len(list(batches)) == 2
    assert all(torch.equal(*pair) for pair in zip(loader, loader, strict=True))


def debug_mode() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(debug, "poison_enabled", True)
        for number, batch in enumerate(DataLoader(Making(large, 40), 2, **THREADS)):
            assert batch[:, 3, 3].tolist() == [2 * number, 2 * number + 1]


def an_epoch_of_many_batches() -> None:
    loader = DataLoader(range(6000), **THREADS)
    sizes = []
    for number, _ in enumerate(loader):
        if number % 1500 == 1400:
            gc.collect()
            sizes.append(len(gc.get_objects()))
    assert number == 5999 and sizes[-1] - sizes[0] < 500


def a_loop_in_another_thread() -> None:
    found: list[Any] = []
    thread = threading.Thread(
        target=lambda: found.extend(values(DataLoader(Making(large, 6), **THREADS)))
    )
    thread.start()
    thread.join()
    assert found == [[i] for i in range(6)]


def an_iterator_that_its_own_thread_drops() -> None:
    kept: list[Any] = []

    def make(index: int) -> int:
        if index == 2:
            assert wait_for(lambda: len(kept) == 1)
            kept.clear()
        return index

    batches = iter(DataLoader(Making(make, 10), None, **THREADS))
    kept.append(batches)
    del batches
    assert wait_for(lambda: not kept and are_gone())


def batches_that_outlive_the_loader() -> None:
    loader = DataLoader(Making(large, 8), 2, **THREADS)
    batches = list(loader)
    del loader
    gc.collect()
    assert values(batches) == [[i, i + 1] for i in range(0, 8, 2)]


def modes_of_the_loop() -> None:
    def make(index: int) -> list[bool]:
        return [torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")]

    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        found = list(DataLoader(Making(make, 3), None, **THREADS))
    assert found == [[False, True]] * 3


HERE = sys.modules[__name__]
HELPERS = {"large", "values", "are_gone"}
SITUATIONS = [
    name
    for name, value in vars(HERE).items()
    if getattr(value, "__module__", "") == __name__ and name.islower()
]


@pytest.mark.filterwarnings(r"ignore:\[PP2(01|15)\]")
@pytest.mark.parametrize("name", sorted({*SITUATIONS} - HELPERS))
def test_a_situation(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(errors, "_warned", set())
    situation: Callable[[], None] = getattr(HERE, name)
    situation()
