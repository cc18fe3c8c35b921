"""PreDataLoader returns batches in order, ahead of time, with figures and states."""

from __future__ import annotations

import copy
import gc
import multiprocessing
import random
import re
import threading
import time
from collections import namedtuple
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

import pyparallel
from pyparallel import DataContainer as DC
from pyparallel import LoaderStats, PreDataLoader
from pyparallel.loader import _progress, _random_state
from pyparallel.prefetch import iterator
from tests.support.loader.prefetch_loaders import (
    Gate,
    Numbers,
    firsts,
    passes,
    prefetch_threads,
    until,
)

Pair = namedtuple("Pair", ["left", "right"])
pytestmark = [pytest.mark.one_backend, pytest.mark.tsan]

ALL = [0, 2, 4, 6, 8, 10]


class Stream(IterableDataset):
    def __iter__(self):
        yield from (torch.full((3,), i) for i in range(12))


def test_no_more_than_queue_size_batches_are_fetched_ahead() -> None:
    gate = Gate()
    gate.let(100)
    with passes(gate, queue_size=3) as pre:
        it = iter(pre)
        assert next(it) == 0
        until(lambda: len(it._thread.items) == 3)
        until(lambda: it._thread._activity[0] == "waiting for the consumer")
        assert gate.asked == 4  # one returned, three in the queue
        assert next(it) == 1
        until(lambda: gate.asked == 5)


class Meeting:
    """Lets code of a pass wait until its loop has received the first batch."""

    def __init__(self) -> None:
        self.event = multiprocessing.get_context("fork").Event()

    def __call__(self) -> None:
        assert self.event.wait(20), "the loop did not receive the first batch"


class Met(torch.utils.data.Dataset[int]):
    """Numbers. Those after the first one wait for the meeting, if there is one."""

    def __init__(self, meeting: Meeting | None) -> None:
        self.meeting = meeting

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> int:
        if not index:
            time.sleep(0.2)  # the loop waits
        elif self.meeting is not None:
            self.meeting()
        return index


class MetSampler(torch.utils.data.Sampler[int]):
    """Numbers. It waits for the meeting while `next` returns the second batch."""

    def __init__(self, meeting: Meeting, num_ahead: int) -> None:
        self.meeting, self.num_ahead = meeting, num_ahead

    def __iter__(self) -> Iterator[int]:
        yield from range(self.num_ahead)
        time.sleep(0.2)  # the second batch arrives
        yield self.num_ahead
        self.meeting()
        yield from range(self.num_ahead + 1, 12)


@pytest.mark.parametrize("kind", ["multiprocessing", "thread", "inline"])
@pytest.mark.parametrize("place", ["dataset", "sampler", "transform"])
def test_no_batch_waits_for_code_of_the_user(place: str, kind: str) -> None:
    meeting = Meeting()
    options: dict[str, Any] = {"batch_size": None}
    if kind != "inline":
        options |= {"num_workers": 2, "worker_method": kind}
    if kind == "multiprocessing":
        options |= {"multiprocessing_context": "fork"}
    dataset = Met(meeting if place == "dataset" else None)
    if place == "sampler":
        options["sampler"] = MetSampler(meeting, 4 if "num_workers" in options else 0)

    def transform(batch: int) -> int:
        if batch and place == "transform":
            meeting()
        return batch

    loader = pyparallel.DataLoader(dataset, **options)
    with passes(loader, transform=transform if place == "transform" else None) as pre:
        batches = iter(pre)
        first = next(batches)
        meeting.event.set()
        assert [first, *batches] == list(range(12))


# The interface beside iteration.


def test_next_has_its_own_iterator_and_restarts_after_the_end() -> None:
    with passes([1, 2]) as pre:
        assert [pre.next(), next(pre)] == [1, 2]
        with pytest.raises(StopIteration):
            pre.next()
        assert pre.next() == 1
        assert list(pre) == [1, 2]  # a pass apart
        assert pre.next() == 2


def test_an_ended_iterator_stays_at_its_end() -> None:
    batch = {"pair": Pair(1, 2.5), "bytes": b"raw", "container": DC([torch.ones(2)])}
    it = iter(PreDataLoader([batch], device="cpu"))
    assert next(it) is batch
    for _ in range(3):
        assert next(it, "end") == "end"


def test_attributes_are_those_of_the_loader(loader: Any) -> None:
    plain = loader(drop_last=True)
    pre = PreDataLoader(plain)
    assert pre.sampler is plain.sampler and pre.dataset is plain.dataset
    assert pre.batch_size == 2 and pre.drop_last and pre.device is None
    assert len(pre) == 6
    with pytest.raises(AttributeError, match=r"^'DataLoader' object has no attribute"):
        pre.nonesuch  # noqa: B018
    assert not prefetch_threads()  # nothing starts before iteration


def test_a_loader_that_is_its_own_iterator_has_one_iterator_at_a_time() -> None:
    with passes(iter(range(10)), queue_size=1) as pre:
        first = iter(pre)
        assert next(first) == 0
        until(lambda: len(first._thread.items) == 1)
        second = iter(pre)
        assert next(first, "end") == "end"
        assert list(second) == [2, 3, 4, 5, 6, 7, 8, 9]  # fetched batches are lost


def test_passes_over_another_pre_data_loader_are_independent() -> None:
    with passes([1, 2]) as inner, passes(inner) as pre:
        assert [(a, b) for a in pre for b in pre] == [(1, 1), (1, 2), (2, 1), (2, 2)]


def test_persistent_workers_serve_one_pass_at_a_time(loader: Any) -> None:
    plain = loader(2, persistent_workers=True)
    with passes(plain) as pre:
        first = iter(pre)
        next(first)
        assert firsts(pre) == ALL
        assert next(first, "end") == "end"
        plain._iterator = None


def test_threads_that_share_a_pass_get_every_batch_once() -> None:
    got: list[list[int]] = [[], [], []]
    with passes(list(range(500))) as pre:
        it = iter(pre)
        consumers = [
            threading.Thread(target=lambda mine=mine: mine.extend(it)) for mine in got
        ]
        for consumer in consumers:
            consumer.start()
        for consumer in consumers:
            consumer.join(30)
        assert sorted([*got[0], *got[1], *got[2]]) == list(range(500))
        assert all(mine == sorted(mine) for mine in got)


def test_the_next_epoch_is_prefetched_only_on_request() -> None:
    starts: list[int] = []

    def epoch() -> Any:
        starts.append(len(starts))
        return iter([1, 2])

    with passes(epoch) as pre:
        assert list(pre) == [1, 2] and starts == [0]
    with passes(epoch, next_epoch=True) as pre:
        assert list(pre) == [1, 2]
        until(lambda: starts == [0, 1, 2])
        assert list(pre) == [1, 2]
        until(lambda: starts == [0, 1, 2, 3])


def test_a_next_epoch_that_cannot_start_is_an_error_of_its_iter() -> None:
    with passes([1, 2], next_epoch=True) as pre:
        it = iter(pre)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(iterator._exiting, "is_set", lambda: True)
            assert list(it) == [1, 2]
            with pytest.raises(RuntimeError) as caught:
                iter(pre)
        assert str(caught.value) == iterator._TOO_LATE
        assert list(pre) == [1, 2]


def test_a_loader_without_length_works_and_has_no_len() -> None:
    with passes(DataLoader(Stream(), batch_size=2, num_workers=1)) as pre:
        assert firsts(pre) == ALL
        with pytest.raises(TypeError):
            len(pre)


#: Arguments, and the error of the constructor.
REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"transform": 3}, TypeError, "transform must be a function of "),
    ({"device": 2.5}, TypeError, "a device must be an index, a stri"),
    ({"device": "sofa"}, ValueError, "a device must be -1 or name a"),
    ({"device": 99}, RuntimeError, "device cuda:99 must be a device of this machine"),
    ({"device": "meta"}, RuntimeError, "device meta must be a device of this machine"),
]


@pytest.mark.parametrize("options, error, message", REFUSED, ids=str)
def test_wrong_arguments_are_refused_at_once(
    options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=f"^PreDataLoader: {re.escape(message)}"):
        PreDataLoader(**{"loader": [1], **options})


def test_the_thread_has_the_modes_of_the_call_of_iter() -> None:
    seen: list[Any] = []

    def epoch() -> Any:
        while True:
            yield (
                torch.is_grad_enabled(),
                torch.is_inference_mode_enabled(),
                torch.is_autocast_enabled("cpu"),
                torch.get_autocast_dtype("cpu"),
                torch.get_default_device().type,
            )

    pre = PreDataLoader(epoch)
    seen.append(next(iter(pre)))
    with torch.no_grad():
        seen.append(next(iter(pre)))
    with torch.inference_mode():
        seen.append(next(iter(pre)))
    with torch.autocast("cpu", torch.float16), torch.device("meta"):
        seen.append(next(iter(pre)))
    usual = torch.bfloat16
    assert seen == [
        (True, False, False, usual, "cpu"),
        (False, False, False, usual, "cpu"),
        (False, True, False, usual, "cpu"),
        (True, False, True, torch.float16, "meta"),
    ]
    gc.collect()
    until(lambda: not prefetch_threads())


@pytest.mark.parametrize("num_workers, seen", [(0, 0), (0, 1), (2, 0), (2, 4), (2, 6)])
def test_our_loader_continues_with_the_batch_that_was_not_seen(
    num_workers: int, seen: int
) -> None:
    def make() -> pyparallel.DataLoader:
        generator = torch.Generator().manual_seed(3)
        return pyparallel.DataLoader(
            Numbers(), 2, shuffle=True, generator=generator, num_workers=num_workers
        )

    with passes(make(), queue_size=3) as pre:
        expected = [firsts(pre) for _ in range(2)]
    with passes(make(), queue_size=3) as pre:
        it = pre._start_pass(is_ahead=True)  # it reads before the loop asks
        got = [int(next(it)[0, 0]) for _ in range(seen)]
        until(lambda: len(it._thread.items) >= min(2, 7 - seen))
        state = pre.state_dict()
    with passes(make(), queue_size=3) as resumed:
        resumed.load_state_dict(state)
        got += firsts(resumed)
        assert [got, firsts(resumed)] == expected


class Drawing(torch.utils.data.Sampler[int]):
    """Draws from all global random states with each index."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[int]:
        for _ in range(self.length):
            torch.rand(1), np.random.rand()
            yield random.randrange(self.length)

    def __len__(self) -> int:
        return self.length


def drawn() -> tuple[Any, ...]:
    """Draw as a step does, from all global random states."""
    return float(torch.rand(1)), random.random(), float(np.random.rand())


SAMPLERS: dict[str, Callable[[], Any]] = {
    "in order": lambda: {},
    "shuffled": lambda: {"shuffle": True},
    "a generator": lambda: {"shuffle": True, "generator": torch.Generator()},
    "replacement": lambda: {
        "sampler": torch.utils.data.RandomSampler(
            range(12), True, generator=torch.Generator()
        )
    },
    "subset": lambda: {"sampler": torch.utils.data.SubsetRandomSampler(range(12))},
    "sizes": lambda: {"batch_sampler": pyparallel.SizeBatchSampler([1, 2] * 6, 2)},
    "another": lambda: {"sampler": Drawing(12)},
}


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("name", SAMPLERS)
def test_steps_and_samplers_draw_as_in_a_run_that_was_not_stopped(
    name: str, num_workers: int
) -> None:
    def make() -> Any:
        torch.manual_seed(1), random.seed(1), np.random.seed(1)
        options = {"batch_size": 2} if name != "sizes" else {}
        return passes(
            pyparallel.DataLoader(
                Numbers(), num_workers=num_workers, **options, **SAMPLERS[name]()
            ),
            queue_size=1,
        )

    # Where the fetch draws, the order of its draws and those of a step is undefined.
    steps_draw = num_workers > 0 and name != "another"
    expected, found = [], []
    with make() as pre:
        it = iter(pre)
        for number, batch in enumerate(it):
            expected.append((batch.tolist(), drawn() if steps_draw else ()))
            if number == 2:
                until(lambda: len(it._thread.items) == 1)
                state = pre.state_dict()
        expected += [(batch.tolist(), ()) for batch in pre]
    with make() as pre:
        drawn()
        pre.load_state_dict(state)
        for batch in pre:
            found.append((batch.tolist(), drawn() if steps_draw else ()))
        found += [(batch.tolist(), ()) for batch in pre]
    assert found == expected[3:]


def test_random_states_are_copied_only_where_a_fetch_may_draw(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    copied = []
    raw_states = _random_state.raw_states
    monkeypatch.setattr(
        _random_state, "raw_states", lambda: copied.append(1) or raw_states()
    )
    for sampler, number in ((None, 0), (Drawing(12), 6)):
        loader = pyparallel.DataLoader(Numbers(), 2, num_workers=1, sampler=sampler)
        with passes(loader) as pre:
            it = iter(pre)
            batches = [next(it)]
            copied.clear()
            batches += it
            assert len(copied) >= number - 2 if number else len(copied) <= 1


def test_a_pass_that_ended_before_its_first_batch_is_not_lost() -> None:
    with passes(pyparallel.DataLoader(Numbers(), 2)) as pre:
        it = pre._start_pass(is_ahead=True)
        until(lambda: len(it._thread.items) == 2)
        it.close()
        pre.load_state_dict(pre.state_dict())
        assert firsts(pre) == ALL


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_loader_that_is_read_ahead_refuses_its_state(num_workers: int) -> None:
    def refuses() -> bool:
        with pytest.raises(RuntimeError) as caught:
            plain.state_dict()
        return str(caught.value) == (
            "DataLoader.state_dict: a PreDataLoader reads this loader ahead, so its "
            "position includes batches that the loop has not received. Use "
            "PreDataLoader.state_dict()."
        )

    def left(state: Any) -> list[int]:
        other = pyparallel.DataLoader(Numbers(), 2, num_workers=num_workers)
        other.load_state_dict(state)
        return firsts(other)

    plain = pyparallel.DataLoader(Numbers(), 2, num_workers=num_workers)
    with passes(plain, queue_size=10, more_fds=20) as pre:
        it = iter(pre)
        next(it)
        num_ahead = 6 if num_workers else 5  # with the end, or before it
        until(lambda: len(it._thread.items) == num_ahead)
        assert refuses()
        assert left(pre.state_dict()) == ALL[1:]
        assert left(copy.copy(plain).state_dict()) == ALL
        it.close()
        assert refuses()
        assert firsts(pre) == ALL
        assert left(plain.state_dict()) == ALL  # the next epoch
        next(iter(pre))
        assert refuses()
        direct = iter(plain)
        next(direct)
        assert left(plain.state_dict()) == ALL[1:]
        del direct
        plain.load_state_dict(pre.state_dict())
        assert left(plain.state_dict()) == ALL[1:]


@pytest.mark.parametrize("next_epoch", [False, True])
@pytest.mark.parametrize("moment", ["end", "iter", "break", "load"])
def test_a_state_before_a_batch_has_the_number_of_its_pass(
    moment: str, next_epoch: bool
) -> None:
    def make(**options: Any) -> tuple[PreDataLoader, DistributedSampler[Any]]:
        sampler: DistributedSampler[Any] = DistributedSampler(range(8), 1, 0)
        plain = pyparallel.DataLoader(range(8), 2, sampler=sampler)
        return PreDataLoader(plain, **options), sampler

    orders = []
    for epoch in (0, 1):
        pre, sampler = make()
        sampler.set_epoch(epoch)
        orders.append([batch.tolist() for batch in pre])
    pre, sampler = make(next_epoch=next_epoch)
    for number, _ in enumerate(pre):
        if number == (1 if moment == "break" else 3):
            sampler.set_epoch(1)  # with next_epoch this is the last moment
        if (moment, number) == ("break", 1):
            break
    if moment in ("iter", "break"):
        iter(pre)
    if moment == "load":
        state = pre.state_dict()
        sampler.set_epoch(0)
        pre.load_state_dict(state)
        sampler.set_epoch(1)
    again, _ = make()
    again.load_state_dict(pre.state_dict())
    assert orders[0] != [batch.tolist() for batch in again] == orders[1]
    pre.close()


def test_an_unavailable_state_is_an_error_of_state_dict() -> None:
    plain = pyparallel.DataLoader(Numbers(), 2, num_workers=1, in_order=False)
    with passes(plain) as pre:
        assert len(firsts(pre)) == 6
        with pytest.raises(
            RuntimeError, match=r"^DataLoader\.state_dict must know the"
        ):
            pre.state_dict()


def test_loading_a_state_ends_running_iterators() -> None:
    with passes(pyparallel.DataLoader(Numbers(), 2)) as pre:
        it = iter(pre)
        next(it)
        pre.load_state_dict(pre.state_dict())
        assert next(it, "end") == "end"
        assert firsts(pre) == ALL[1:]


@pytest.mark.parametrize("wrap", [lambda loader: loader, PreDataLoader])
def test_a_pass_continues_after_a_state_was_refused(wrap: Any) -> None:
    pre = PreDataLoader(wrap(pyparallel.DataLoader(range(8), 2)))
    batches = iter(pre)
    found = [next(batches).tolist()]
    state = pre.state_dict()
    for bad in (None, [state], {**state, "epochs": "{}"[:1]}, {"version": 4}):
        with pytest.raises(
            ValueError, match=r"^DataLoader\.load_state_dict: the state"
        ):
            pre.load_state_dict(bad)
    assert pre.state_dict() == state
    assert [*found, *(batch.tolist() for batch in batches)] == [
        [first, first + 1] for first in range(0, 8, 2)
    ]


@pytest.mark.parametrize("name", ["state_dict", "load_state_dict"])
def test_a_loader_without_state_is_named(name: str) -> None:
    arguments = [{}] if name.startswith("load") else []
    with pytest.raises(AttributeError) as caught:
        getattr(PreDataLoader([1]), name)(*arguments)
    assert str(caught.value) == (
        f"PreDataLoader.{name}: the loader must have a method {name}(), but list has "
        "none. Use pyparallel.DataLoader, or torchdata's StatefulDataLoader, without "
        "another library's wrapper."
    )


def test_profiles_and_figures_have_waits_and_loads() -> None:
    threads: set[str] = set()

    def transform(batch: torch.Tensor) -> torch.Tensor:
        threads.add(threading.current_thread().name)
        time.sleep(0.02)
        return batch + 1

    with torch.profiler.profile() as profile:
        inner = torch.utils.data.DataLoader(Numbers(), 2)  # without stats()
        with passes(inner, "cpu", transform=transform) as pre:
            assert pre.stats() == LoaderStats(applied=pre.stats().applied)
            begun = time.perf_counter()
            assert firsts(pre) == [1, 3, 5, 7, 9, 11]
            seconds = time.perf_counter() - begun
            stats = pre.stats()
    assert threads == {"pyparallel-prefetch"}
    assert [event.name for event in profile.events()].count("pyparallel.wait") == 7
    assert (stats.batches, stats.nbytes) == (6, 0)
    assert 0 < stats.load_seconds <= seconds - 0.12  # no sleep is any shorter
    assert 0 < stats.wait_seconds <= seconds


def test_a_pass_makes_a_state_only_when_it_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made, checked = [], []
    make = _progress._encode
    must_be_resumable = pyparallel.DataLoader._must_be_resumable

    def count_made(state: dict[str, Any]) -> Any:
        made.append(state)
        return make(state)

    def count_checked(loader: Any, method: str) -> None:
        checked.append(method)
        must_be_resumable(loader, method)

    monkeypatch.setattr(_progress, "_encode", count_made)
    monkeypatch.setattr(pyparallel.DataLoader, "_must_be_resumable", count_checked)
    loader = PreDataLoader(pyparallel.DataLoader(torch.arange(20)))
    batches = iter(loader)
    first = [next(batches).item() for _ in range(9)]
    assert not made
    state = loader.state_dict()
    assert len(made) == 1 and first == list(range(9))
    assert [batch.item() for batch in batches] == list(range(9, 20))
    assert checked == ["state_dict"]
    loader.load_state_dict(state)
    assert [batch.item() for batch in loader] == list(range(9, 20))


@pytest.mark.parametrize("timeout", [np.float32(60), np.int8(60), torch.tensor(60.0)])
def test_a_timeout_may_be_a_scalar_of_numpy_or_torch(timeout: Any) -> None:
    with PreDataLoader([1, 2], timeout=timeout) as pre:
        assert [*pre] == [1, 2]
        assert type(vars(pre)["timeout"]) in (int, float) and pre.timeout == 60
