"""The iterators of a loader are freed without references, and also in cycles."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections import deque
from collections.abc import Iterator
from itertools import islice, product
from typing import Any

import pytest
import torch
from loader_sets import Making, Numbers, Stream, feeders, wait_for

import pyparallel

pytestmark = pytest.mark.timeout(120)


class Stateful(Numbers):
    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


@pytest.fixture(autouse=True)
def _no_collector() -> Iterator[None]:
    """Leave garbage alone until a test collects it."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.collect()


def failing(index: int) -> torch.Tensor:
    if index == 3:
        raise ValueError("no sample 3")
    return torch.ones(3)


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize(
    ("dataset", "how"),
    [
        (Making(failing, 6), "error"),
        *product((Numbers(6), Stateful(6), Stream(6)), ("end", "one")),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_no_cycle_keeps_an_iterator(dataset: Any, how: str, num_workers: int) -> None:
    loader = pyparallel.DataLoader(dataset, num_workers=num_workers)
    batches = iter(loader)
    with pytest.raises(ValueError) if how == "error" else contextlib.nullcontext():
        assert len([*islice(batches, 1 if how == "one" else None)]) in (1, 6)
    workers = getattr(batches, "_workers", [])
    dead, loader_dead = weakref.ref(batches), weakref.ref(loader)
    del batches
    assert dead() is None
    assert [worker.exitcode for worker in workers] == [0] * num_workers
    del loader
    assert loader_dead() is None


def test_a_stream_is_closed_with_its_epoch() -> None:
    closed: list[str] = []

    class Opened(Stream):
        def __iter__(self) -> Iterator[Any]:
            try:
                yield from range(4)
            finally:
                closed.append("closed")

    loader = pyparallel.DataLoader(Opened(4), 2)
    for _ in loader:
        break
    assert closed == ["closed"]


def new_feeders(before: list[Any]) -> list[Any]:
    """Return the threads of queues that a test has left."""
    return [thread for thread in feeders() if thread not in before]


def garbage(num_workers: int = 2) -> tuple[list[Any], list[Any]]:
    """Return workers and queues of an iterator that only a cycle refers to."""
    batches: Any = iter(pyparallel.DataLoader(Numbers(6), num_workers=num_workers))
    for _ in range(num_workers):  # a worker that still starts needs the queues
        next(batches)
    batches.cycle = batches
    return batches._workers, batches._index_queues


def test_the_collector_ends_workers_in_order() -> None:
    before = feeders()
    workers, queues = garbage()
    del queues  # the collector frees the queues too, and calls their finalizers first
    gc.collect()
    assert [worker.exitcode for worker in workers] == [0, 0]  # -SIGTERM: after 5 s each
    assert wait_for(lambda: not new_feeders(before))


#: A number and the indices of a batch, as workers take them.
TASK = (99, [0])


class _Collecting:
    """Runs the collector in the thread that pickles it."""

    def __reduce__(self) -> Any:
        gc.collect()
        return tuple, (TASK,)


class _CollectingWaiters(deque[Any]):
    """Runs the collector in the thread that begins to wait."""

    def append(self, waiter: Any) -> None:
        gc.collect()
        super().append(waiter)


@pytest.mark.parametrize("moment", ["pickling", "waiting"])
def test_the_collector_runs_in_the_feeder_of_the_iterator(moment: str) -> None:
    before = feeders()
    workers, (queue,) = garbage(num_workers=1)
    waits = queue._notempty
    assert wait_for(lambda: waits._waiters)  # the feeder has nothing to do
    if moment == "waiting":
        waits._waiters = _CollectingWaiters(waits._waiters)
        queue.put(TASK)
    else:
        queue.put(_Collecting())
    del queue
    assert wait_for(lambda: workers[0].exitcode is not None)
    assert wait_for(lambda: not new_feeders(before))
