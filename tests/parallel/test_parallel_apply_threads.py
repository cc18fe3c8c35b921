"""Reused threads: nested, shared by callers, forked, interrupted, ended."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pool_threads import HOST, SOON, TWO, ours
from prefetch_loaders import until

import pyparallel
from pyparallel import parallel_apply
from pyparallel.parallel import _device_threads, _thread_pool
from pyparallel.parallel._device_threads import threads
from pyparallel.parallel._thread_pool import Place, ThreadPool
from pyparallel.parallel._thread_pool import _TaskGroup as TaskGroup

pytestmark = pytest.mark.one_backend

PACKAGE = str(Path(pyparallel.__file__).resolve().parent.parent)


@pytest.fixture
def pool() -> Any:
    made = ThreadPool(lambda device: None)
    yield made
    made.close()
    assert not made._workers & ours()


def at_once(number: int, devices: Any = TWO) -> list[int]:
    """Return the threads of a call whose items all run at the same time."""
    met = threading.Barrier(number)

    def meet(i: int) -> int:
        met.wait(SOON)
        return threading.get_ident()

    return parallel_apply(meet, range(number), devices)


def test_threads_are_used_again() -> None:
    first = set(at_once(2))
    assert len(first) == 2
    before = ours()
    for _ in range(20):
        assert len(set(at_once(2))) == 2
    assert ours() == before


def test_a_call_inside_of_a_call_gets_other_threads() -> None:
    def outer(i: int) -> list[list[int]]:
        return [parallel_apply(lambda j: 10 * i + j, range(4), TWO) for _ in range(3)]

    found = parallel_apply(outer, range(4), TWO)
    assert found == [[[10 * i + j for j in range(4)]] * 3 for i in range(4)]


def test_a_nested_call_divides_the_threads_of_the_outer_call() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(8)
    try:
        found = parallel_apply(
            lambda i: (
                parallel_apply(lambda j: torch.get_num_threads(), "abcd".split(), TWO)
                + parallel_apply(lambda j: torch.get_num_threads(), [1, 2], TWO)
                + [torch.get_num_threads()]
            ),
            [1, 2],
            TWO,
        )
        assert found == [[4, 2, 2, 4]] * 2
        assert torch.get_num_threads() == 8
    finally:
        torch.set_num_threads(before)


def test_calls_of_many_threads_do_not_mix() -> None:
    wrong: list[Any] = []

    def caller(k: int) -> None:
        for n in range(30):
            with torch.set_grad_enabled(k % 2 == 0):
                found = parallel_apply(
                    lambda i: (k, i, torch.is_grad_enabled()), range(n % 5), TWO
                )
            expected = [(k, i, k % 2 == 0) for i in range(n % 5)]
            if found != expected:
                wrong.append((found, expected))

    callers = [threading.Thread(target=caller, args=(k,)) for k in range(8)]
    for each in callers:
        each.start()
    for each in callers:
        each.join(SOON)
    assert not wrong and not any(each.is_alive() for each in callers)


def test_callers_do_not_wait_for_each_other() -> None:
    met = threading.Barrier(4)
    results: list[Any] = []

    def caller() -> None:
        results.append(
            parallel_apply(lambda i: bool(met.wait(SOON)) or True, [1, 2], TWO)
        )

    callers = [threading.Thread(target=caller) for _ in range(2)]
    for each in callers:
        each.start()
    for each in callers:
        each.join(SOON)
    assert results == [[True, True]] * 2


def test_threads_keep_nothing_of_a_call_alive() -> None:
    class Thing:
        pass

    things = [Thing() for _ in range(4)]
    found = parallel_apply(lambda thing: [thing], things, TWO)
    watched = [weakref.ref(thing) for thing in things]
    del things, found
    gc.collect()
    # The last thread may be on its way back to waiting.
    until(lambda: not any(ref() for ref in watched))


def test_nothing_of_a_failed_call_is_kept_alive() -> None:
    class Thing:
        pass

    def fail(thing: Thing) -> None:
        raise ValueError("no")

    thing = Thing()
    watched = weakref.ref(thing)
    gc.disable()  # it must not take a collection
    try:
        with contextlib.suppress(ValueError):
            parallel_apply(fail, [thing, thing], TWO)
        del thing
        until(lambda: watched() is None)
    finally:
        gc.enable()


def test_more_threads_than_are_needed_end(
    pool: ThreadPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_thread_pool, "MAX_IDLE", 2)
    met = threading.Barrier(5)
    pool.run([HOST] * 5, [lambda place: met.wait(SOON) and None] * 5, lambda: None)
    until(lambda: len(pool._workers) == 2)
    assert len(pool._idle[HOST]) == 2


class Interrupt(BaseException):
    """A signal raises it in a caller that waits."""


def test_an_interrupt_waits_for_running_calls(pool: ThreadPool) -> None:
    under_way = [threading.Event() for _ in range(2)]
    cancelled, ended = threading.Event(), []

    def task(number: int) -> Callable[[Place], None]:
        def do(place: Place) -> None:
            under_way[number].set()
            assert cancelled.wait(SOON)
            ended.append(number)

        return do

    def handler(number: int, frame: Any) -> None:
        raise Interrupt

    before = signal.signal(signal.SIGUSR1, handler)

    def interrupt() -> None:
        for event in under_way:
            event.wait(SOON)
        os.kill(os.getpid(), signal.SIGUSR1)

    other = threading.Thread(target=interrupt)
    other.start()
    try:
        with pytest.raises(Interrupt):
            pool.run([HOST] * 2, [task(0), task(1)], cancelled.set)
    finally:
        signal.signal(signal.SIGUSR1, before)
        other.join(SOON)
    assert sorted(ended) == [0, 1]
    assert len(pool._idle[HOST]) == 2, "the threads are free again"


def test_an_interrupt_withdraws_items_that_were_not_submitted(
    pool: ThreadPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[int] = []
    begun, cancelled = threading.Event(), threading.Event()

    def first(place: Place) -> None:
        begun.set()
        assert cancelled.wait(SOON)
        ran.append(1)

    one, two = pool._check_out(HOST), pool._check_out(HOST)
    queue = two.inbox

    class Inbox:
        """Of the second thread. What interrupts comes when its task is being put."""

        get = queue.get
        given: Any = None

        def put(self, task: Any) -> None:
            self.given = task
            assert begun.wait(SOON)
            raise Interrupt

    late = Inbox()
    monkeypatch.setattr(two, "inbox", late)
    pool._idle[HOST] = [two, one]  # taken from the end
    with pytest.raises(Interrupt):
        pool.run([HOST] * 2, [first, never], cancelled.set)
    assert ran == [1]
    until(lambda: len(pool._idle[HOST]) == 2)
    two.inbox = queue
    queue.put(late.given)  # nothing is left in it
    queue.put(_thread_pool._PendingTask(lambda place: ran.append(2), TaskGroup()))
    until(lambda: ran == [1, 2])  # and it goes on


def test_after_an_interrupt_no_further_call_begins(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupted(
        devices: Any, jobs: Any, cancel: Callable[[], None], uses: Any
    ) -> None:
        jobs[0]()  # a part that is done already
        cancel()
        for job in jobs[1:]:
            job()
        raise KeyboardInterrupt

    begun: list[int] = []
    monkeypatch.setattr(_device_threads.threads, "run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        parallel_apply(begun.append, range(4), TWO)
    assert begun == [0, 1]


def test_a_thread_that_cannot_start_leaks_nothing(pool: ThreadPool) -> None:
    made: list[torch.device] = []

    def refuse(device: torch.device) -> None:
        made.append(device)
        if len(made) > 1:
            raise RuntimeError("no more")

    pool._new_stream = refuse
    with pytest.raises(RuntimeError, match="no more"):
        pool.run([HOST] * 2, [never, never], lambda: None)
    assert len(pool._idle[HOST]) == 1


def never(*args: Any) -> None:
    raise AssertionError("it ran")


def test_an_error_in_an_internal_job_is_raised(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def job() -> None:
        raise MemoryError("none left")

    with pytest.raises(MemoryError, match="none left"):
        threads.run([HOST] * 2, [job, lambda: 1], lambda: None)
    assert at_once(2)


def test_a_forked_child_has_threads_of_its_own() -> None:
    at_once(2)
    pid = os.fork()
    if not pid:
        code = 1
        try:
            signal.alarm(int(SOON))
            found = parallel_apply(lambda i: i * 2, range(5), TWO)
            code = 0 if found == [0, 2, 4, 6, 8] and len(set(at_once(2))) == 2 else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert len(set(at_once(2))) == 2


def test_a_call_may_fork() -> None:
    # filelock, which torch imports, refuses a fork beside another one.
    alone = threading.Lock()

    def fork(i: int) -> int:
        with alone:
            pid = os.fork()
            if not pid:
                os._exit(7 + i)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    assert parallel_apply(fork, range(2), TWO) == [7, 8]


def run(code: str) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join(filter(None, [PACKAGE, os.environ.get("PYTHONPATH", "")]))
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=100,
    )


EXIT = r"""
import atexit, os, sys, threading, time
TWO = ["cpu", "cpu"]
def late():
    print("late", parallel_apply(lambda i: i + 1, range(3), TWO), flush=True)
atexit.register(late)  # runs after functions that are registered later
from pyparallel import parallel_apply
print(parallel_apply(lambda i: i, range(4), TWO), flush=True)
begun, both = threading.Event(), threading.Barrier(2)
def work(i):  # the caller's part ends first: no thread waits for it
    both.wait(30)
    if i == 1:
        begun.wait(30)
        time.sleep(0.2)
    os.write(1, b"done\n")
    begun.set()
def daemon():
    parallel_apply(work, range(2), TWO)
threading.Thread(target=daemon, daemon=True).start()
begun.wait(30)
sys.exit(5)
"""


@pytest.mark.slow
def test_the_interpreter_exits_with_threads_that_wait_and_threads_that_work() -> None:
    done = run(EXIT)
    assert done.returncode == 5, done.stderr
    assert done.stderr == ""
    lines = done.stdout.splitlines()
    assert lines[0] == "[0, 1, 2, 3]" and sorted(lines[1:]) == [
        "done",
        "done",
        "late [1, 2, 3]",
    ]
