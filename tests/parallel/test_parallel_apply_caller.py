"""The caller's thread runs one part, and parts that no other thread has begun."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from pool_threads import HOST, SOON, TWO, ours
from prefetch_loaders import until
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from pyparallel import parallel_apply
from pyparallel.parallel._thread_pool import Place, ThreadPool, _TaskGroup

pytestmark = pytest.mark.one_backend


class Asleep:
    """The inbox of threads that wake only when the test allows it."""

    def __init__(self, get: Any) -> None:
        self.kept: list[Any] = []
        self.get = get  # for a thread that has only just begun

    def put(self, task: Any) -> None:
        self.kept.append(task)


@pytest.fixture
def pool() -> Iterator[ThreadPool]:
    made = ThreadPool(lambda device: None)
    yield made
    made.close()
    assert not made._workers & ours()


def put_to_sleep(pool: ThreadPool, number: int) -> tuple[Asleep, Any]:
    """Give ``number`` threads of the host an inbox where they do not look."""
    workers = [pool._check_out(HOST) for _ in range(number)]
    queue = workers[0].inbox
    asleep = Asleep(queue.get)
    for worker in workers:
        worker.inbox = asleep  # type: ignore[assignment]  # looks like a queue
        pool.check_in(worker)
    return asleep, queue


def wake(pool: ThreadPool, asleep: Asleep, queue: Any) -> None:
    for worker in pool._workers:
        worker.inbox = queue
    for task in asleep.kept:
        queue.put(task)


def writes(done: list[int], number: int) -> Callable[[Place], None]:
    def task(place: Place) -> None:
        assert place == Place(HOST, None)
        assert threading.current_thread() is threading.main_thread()
        done.append(number)

    return task


def never() -> None:
    raise AssertionError("nothing was interrupted")


def test_the_caller_runs_items_that_no_thread_began(pool: ThreadPool) -> None:
    asleep, queue = put_to_sleep(pool, 3)
    done: list[int] = []
    pool.run([HOST] * 4, [writes(done, i) for i in range(4)], never, 1)
    assert done == [1, 3, 2, 0], "its own first, then from the end"
    assert len(asleep.kept) == 3
    assert len(pool._idle[HOST]) == len(set(pool._idle[HOST])) == 3
    wake(pool, asleep, queue)  # they come too late, and go on waiting
    met = threading.Barrier(4)
    pool.run([HOST] * 4, [lambda place: met.wait(SOON) and None] * 4, never, 0)
    assert done == [1, 3, 2, 0]
    assert len(pool._workers) == 3
    until(lambda: len(pool._idle[HOST]) == 3)


def test_items_left_in_an_inbox_keep_nothing_alive(pool: ThreadPool) -> None:
    class Thing:
        def __call__(self, place: Place) -> None:
            pass

    asleep, queue = put_to_sleep(pool, 1)
    things = [Thing(), Thing()]
    watched = [weakref.ref(thing) for thing in things]
    pool.run([HOST] * 2, things, never, 0)
    del things
    gc.collect()
    assert [ref() for ref in watched] == [None, None] and asleep.kept
    wake(pool, asleep, queue)


def test_a_part_with_a_stream_is_left_to_its_thread() -> None:
    device = torch.device("cuda:0")
    pool = ThreadPool(lambda d: "a stream" if d == device else None)
    seen: dict[int, tuple[bool, Place]] = {}
    late = threading.Event()

    def task(number: int) -> Callable[[Place], None]:
        def do(place: Place) -> None:
            mine = threading.current_thread() is threading.main_thread()
            seen[number] = mine, place
            if number == 1:  # the caller has finished its own parts by then
                assert late.wait(SOON)
            if number == 2:
                late.set()

        return do

    try:
        pool.run([device, device, HOST], [task(i) for i in range(3)], never, 2)
    finally:
        pool.close()
    assert seen == {
        0: (False, Place(device, "a stream")),
        1: (False, Place(device, "a stream")),
        2: (True, Place(HOST, None)),
    }


@pytest.mark.parametrize("when", ["before", "during", "after"])
def test_an_interrupt_at_any_moment_loses_nothing(pool: ThreadPool, when: str) -> None:
    """Before the caller's own task, during it, and while it takes another's."""
    asleep, queue = put_to_sleep(pool, 2)
    cancelled: list[bool] = []
    ran: list[int] = []

    class Interrupt(BaseException):
        pass

    def own(place: Place) -> None:
        ran.append(0)
        if when == "during":
            raise Interrupt

    def other(place: Place) -> None:
        ran.append(1)
        raise Interrupt

    if when == "before":
        asleep.put = lambda task: (_ for _ in ()).throw(Interrupt())  # type: ignore[method-assign]  # of this one only
    with pytest.raises(Interrupt):
        pool.run([HOST] * 3, [own, other, other], lambda: cancelled.append(True), 0)
    assert cancelled == [True]
    assert ran == {"before": [], "during": [0], "after": [0, 1]}[when]
    assert len(pool._idle[HOST]) == len(set(pool._idle[HOST])) == 2
    wake(pool, asleep, queue)
    met = threading.Barrier(3)
    pool.run([HOST] * 3, [lambda place: met.wait(SOON) and None] * 3, never, 0)


def test_ctrl_c_in_the_callers_part_ends_the_call() -> None:
    begun: list[int] = []
    other, cancelled = threading.Event(), threading.Event()

    def call(i: int) -> None:
        begun.append(i)
        if i == 0:
            assert other.wait(SOON)
            try:
                signal.raise_signal(signal.SIGINT)
            finally:
                cancelled.set()
        if i == 2:
            other.set()
            assert cancelled.wait(SOON)
            until(waits)
            begun.append(20)

    with pytest.raises(KeyboardInterrupt) as caught:
        parallel_apply(call, range(4), TWO)
    assert sorted(begun) == [0, 2, 20], "running calls ended, no other call began"
    assert caught.value.__notes__ == ["in item 0 on device cpu"]


def waits() -> bool:
    """Return True if the main thread waits for parts of other threads."""
    frame: Any = sys._current_frames()[threading.main_thread().ident or 0]
    while frame is not None and frame.f_code is not _TaskGroup.wait.__code__:
        frame = frame.f_back
    return frame is not None


def test_a_second_ctrl_c_does_not_wait() -> None:
    other, free = threading.Event(), threading.Event()
    ended = threading.Event()

    def call(i: int) -> None:
        if i == 0:
            assert other.wait(SOON)
            signal.raise_signal(signal.SIGINT)
        if i == 1:
            other.set()
            until(waits)
            os.kill(os.getpid(), signal.SIGINT)
            assert free.wait(SOON)
            ended.set()

    with pytest.raises(KeyboardInterrupt):
        parallel_apply(call, range(2), TWO)
    assert not ended.is_set()
    free.set()
    assert ended.wait(SOON)


class Counting(TorchDispatchMode):
    """A mode that torch keeps for a thread, and that is not carried."""

    count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def threads_at_once() -> set[int]:
    met = threading.Barrier(2)

    def meet(i: int) -> int:
        met.wait(SOON)
        return threading.get_ident()

    return set(parallel_apply(meet, range(2), TWO))


def test_all_calls_see_equal_modes_that_are_not_passed_on() -> None:
    me = threading.get_ident()
    assert me in threads_at_once()
    ones = [torch.ones(2)] * 4
    with Counting() as mode:
        found = parallel_apply(torch.square, ones, TWO)
        assert me not in threads_at_once()
    assert mode.count == 0 and torch.equal(torch.cat(found), torch.ones(8))
    with torch.device("meta"):
        assert me not in threads_at_once()

    packed: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        packed.append(tensor)
        return tensor

    x = torch.ones(2, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        torch.exp(x)
        assert len(packed) == 1, "the test would see nothing"
        parallel_apply(torch.exp, [x] * 4, TWO)
        assert me not in threads_at_once()
    assert len(packed) == 1
    assert me in threads_at_once()


def test_the_caller_has_the_number_of_operator_threads_of_the_others() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(6)
    try:
        found = parallel_apply(lambda i: torch.get_num_threads(), range(3), TWO + TWO)
        assert found == [2, 2, 2]
        assert torch.get_num_threads() == 6
    finally:
        torch.set_num_threads(before)
