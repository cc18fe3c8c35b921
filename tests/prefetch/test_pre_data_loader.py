"""PreDataLoader returns the loader's batches in order, ahead of time."""

from __future__ import annotations

import gc
import re
import threading
from collections import namedtuple
from typing import Any

import pytest
import torch
from prefetch_loaders import (
    Gate,
    Numbers,
    firsts,
    loader,
    nothing_left,
    passes,
    prefetch_threads,
    until,
)
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from pyparallel import DataContainer as DC
from pyparallel import PreDataLoader

Pair = namedtuple("Pair", ["left", "right"])
pytestmark = pytest.mark.tsan

ALL = [0, 2, 4, 6, 8, 10]


class Stream(IterableDataset):
    def __iter__(self):
        yield from (torch.full((3,), i) for i in range(12))


@pytest.mark.parametrize("num_workers, queue_size", [(0, 1), (2, 2), (2, 50)])
def test_every_epoch_has_all_batches_in_order(
    num_workers: int, queue_size: int
) -> None:
    with passes(loader(num_workers), queue_size=queue_size) as pre:
        assert [firsts(pre) for _ in range(2)] == [ALL, ALL]
        assert len(pre) == 6


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


def test_attributes_are_those_of_the_loader() -> None:
    plain = loader(drop_last=True)
    pre = PreDataLoader(plain)
    assert pre.sampler is plain.sampler and pre.dataset is plain.dataset
    assert pre.batch_size == 2 and pre.drop_last and pre.device is None
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


def test_a_generator_is_not_closed_by_a_break() -> None:
    numbers = (i for i in range(10))
    for _ in PreDataLoader(numbers, queue_size=1):
        break
    assert list(numbers)[-1] == 9


def test_persistent_workers_serve_one_pass_at_a_time_and_live_on() -> None:
    plain = loader(2, persistent_workers=True)
    with passes(plain) as pre:
        first = iter(pre)
        assert int(next(first)[0, 0]) == 0
        workers = [worker.pid for worker in plain._iterator._workers]
        assert firsts(pre) == ALL
        assert next(first, "end") == "end"
        for _ in range(3):
            for _ in pre:
                break
        assert firsts(pre) == ALL
        assert firsts(plain) == ALL  # the loader itself is as it was
        assert [worker.pid for worker in plain._iterator._workers] == workers
        del plain._iterator
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


# Defects of the published class of this name, which this class does not have.


def test_set_epoch_before_the_loop_is_seen() -> None:
    sampler = DistributedSampler(Numbers(), num_replicas=2, rank=0, seed=3)
    plain = loader(sampler=sampler)
    with passes(plain) as pre:
        orders = []
        for epoch in range(4):
            pre.sampler.set_epoch(epoch)
            orders.append(firsts(pre))
            assert orders[-1] == firsts(plain)
        assert len(set(map(tuple, orders))) == 4


def test_an_empty_loader_ends_at_once_and_does_not_spin() -> None:
    with passes([]) as pre:
        for _ in range(3):
            assert list(pre) == []
            with pytest.raises(StopIteration):
                pre.next()
        until(lambda: not prefetch_threads())


def test_a_loader_that_is_freed_ends_its_threads() -> None:
    with nothing_left():
        for _ in range(5):
            pre = PreDataLoader(list(range(100)))
            assert pre.next() == 0
        assert len(prefetch_threads()) == 1
        del pre


def test_two_iterators_have_two_cursors() -> None:
    with passes(list(range(4))) as pre:
        first, second = iter(pre), iter(pre)
        assert first is not pre and iter(first) is first
        assert [next(first), next(first), next(second)] == [0, 1, 0]
        assert [list(second), list(first)] == [[1, 2, 3], [2, 3]]


def test_a_loader_without_length_works_and_has_no_len() -> None:
    with passes(DataLoader(Stream(), batch_size=2, num_workers=1)) as pre:
        assert firsts(pre) == ALL
        with pytest.raises(TypeError):
            len(pre)


#: Arguments, and the error of the constructor.
REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"loader": 5}, TypeError, "loader must be iterable, or a funct"),
    ({"queue_size": 0}, ValueError, "queue_size must be an integer "),
    ({"queue_size": 1.5}, TypeError, "queue_size must be an integer "),
    ({"timeout": -1}, ValueError, "timeout must be a number of seco"),
    ({"timeout": float("nan")}, ValueError, "timeout must be a number of seco"),
    ({"timeout": "1"}, TypeError, "timeout must be a number of seco"),
    ({"timeout": True}, TypeError, "timeout must be a number of seco"),
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
