"""Counts, profiles and states of PreDataLoader."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from prefetch_loaders import Numbers, firsts, loader, passes, until

import pyparallel
from pyparallel import LoaderStats, PreDataLoader

pytestmark = pytest.mark.one_backend


class Counter:
    """A loader that can resume: its state is the number of returned batches."""

    def __init__(self) -> None:
        self.position = 0

    def __iter__(self) -> Iterator[int]:
        while self.position < 10:
            self.position += 1
            yield self.position - 1
        self.position = 0

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


def test_the_state_is_that_of_the_batch_returned_last() -> None:
    with passes(Counter(), queue_size=4) as pre:
        assert pre.state_dict() == {"position": 0}
        it = iter(pre)
        for i in range(3):
            assert next(it) == i
            until(lambda: len(it._thread.items) == 4)
            assert pre.loader.position > i + 1  # the loader is further
            assert pre.state_dict() == {"position": i + 1}
        state = pre.state_dict()
    with passes(Counter(), queue_size=4) as resumed:
        resumed.load_state_dict(state)
        assert resumed.state_dict() == state
        assert list(resumed) == [3, 4, 5, 6, 7, 8, 9]
        assert resumed.state_dict() == {"position": 0}
        assert list(resumed) == list(range(10))


@pytest.mark.parametrize("num_workers, seen", [(0, 1), (2, 4), (2, 6)])
def test_our_loader_continues_with_the_batch_that_was_not_seen(
    num_workers: int, seen: int
) -> None:
    def make() -> pyparallel.DataLoader:
        random = torch.Generator().manual_seed(3)
        return pyparallel.DataLoader(
            Numbers(), 2, shuffle=True, generator=random, num_workers=num_workers
        )

    with passes(make(), queue_size=3) as pre:
        expected = [firsts(pre) for _ in range(2)]
    with passes(make(), queue_size=3) as pre:
        it = iter(pre)
        got = [int(next(it)[0, 0]) for _ in range(seen)]
        until(lambda: len(it._thread.items) >= min(3, 7 - seen))
        state = pre.state_dict()
    with passes(make(), queue_size=3) as resumed:
        resumed.load_state_dict(state)
        got += firsts(resumed)
        assert [got, firsts(resumed)] == expected


def test_an_unavailable_state_is_an_error_of_state_dict() -> None:
    plain = pyparallel.DataLoader(Numbers(), 2, num_workers=1, in_order=False)
    with passes(plain) as pre:
        assert len(firsts(pre)) == 6
        with pytest.raises(
            RuntimeError, match=r"^DataLoader\.state_dict must know the"
        ):
            pre.state_dict()


def test_loading_a_state_ends_running_iterators() -> None:
    with passes(Counter()) as pre:
        it = iter(pre)
        assert [next(it), next(it)] == [0, 1]
        pre.load_state_dict({"position": 7})
        assert next(it, "end") == "end"
        assert list(pre) == [7, 8, 9]


@pytest.mark.parametrize("name", ["state_dict", "load_state_dict"])
def test_a_loader_without_state_is_named(name: str) -> None:
    arguments = [{}] if name.startswith("load") else []
    with pytest.raises(AttributeError) as caught:
        getattr(PreDataLoader([1]), name)(*arguments)
    assert str(caught.value) == (
        f"PreDataLoader.{name}: the loader must have a method {name}(), but list has "
        "none. Use pyparallel.DataLoader, or torchdata's StatefulDataLoader."
    )


def test_batches_waits_and_fetches_are_counted() -> None:
    its: list[Any] = []

    def slow() -> Any:
        for i in range(4):
            until(lambda: its[-1:] and its[-1]._thread.changed._waiters)
            time.sleep(0.02)  # while the consumer waits
            yield i

    with passes(slow) as pre:
        assert pre.stats() == LoaderStats()
        begun = time.perf_counter()
        its.append(iter(pre))
        assert list(its[0]) == [0, 1, 2, 3]
        stats = pre.stats()
        seconds = time.perf_counter() - begun
        assert stats.batches == 4 and stats.nbytes == 0
        assert 0.08 <= stats.load_seconds <= seconds  # no sleep is any shorter
        assert 0.08 <= stats.wait_seconds <= seconds
        its.append(iter(pre))
        assert list(its[1]) == [0, 1, 2, 3]
        assert pre.stats().batches == 8


def test_profilers_see_waits_and_transforms() -> None:
    with torch.profiler.profile() as profile:
        with passes(loader(), transform=lambda batch: batch + 1) as pre:
            assert firsts(pre) == [1, 3, 5, 7, 9, 11]
    names = [event.name for event in profile.events()]
    assert names.count("pyparallel.wait") == 7


def test_a_transform_on_the_host_runs_in_the_thread_in_order() -> None:
    names: list[str] = []

    def transform(batch: torch.Tensor) -> dict[str, torch.Tensor]:
        names.append(threading.current_thread().name)
        return {"twice": batch * 2}

    with passes(loader(), "cpu", transform=transform) as pre:
        assert [int(batch["twice"][0, 0]) for batch in pre] == [0, 4, 8, 12, 16, 20]
    assert set(names) == {"pyparallel-prefetch"}
