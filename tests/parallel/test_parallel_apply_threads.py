"""The kept threads, and the caller's own part: nested, forked, interrupted, ended."""

from __future__ import annotations

import contextlib
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
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from pyparallel import parallel_apply
from pyparallel.parallel import _thread_pool
from pyparallel.parallel._thread_pool import Place, ThreadPool, Worker
from pyparallel.parallel._thread_pool import _TaskGroup as TaskGroup
from tests.support.loader.prefetch_loaders import until
from tests.support.processes.python_runs import run

pytestmark = pytest.mark.one_backend

HOST = torch.device("cpu")
TWO = ["cpu", "cpu"]
SOON = 30.0


def ours() -> set[threading.Thread]:
    return {t for t in threading.enumerate() if isinstance(t, Worker)}


@pytest.fixture
def pool() -> Iterator[ThreadPool]:
    made = ThreadPool(lambda device: None)
    yield made
    made.close()
    assert not made._workers & ours()


def at_once(number: int, pool: ThreadPool | None = None, own: int = 0) -> set[int]:
    """Return the threads of a call whose items all run at the same time."""
    met, seen = threading.Barrier(number), set[int]()

    def meet(place: Any) -> None:
        met.wait(SOON)
        seen.add(threading.get_ident())

    if pool is None:
        parallel_apply(meet, range(number), TWO)
    else:
        pool.run([HOST] * number, [meet] * number, never, own)
    return seen


def never(*args: Any) -> None:
    raise AssertionError("it ran")


# ------------------------------------------------------------- the caller's own part
class Asleep:
    """The inbox of threads that wake only when the test allows it."""

    def __init__(self, get: Any) -> None:
        self.kept: list[Any] = []
        self.get = get  # for a thread that has only just begun

    def put(self, task: Any) -> None:
        self.kept.append(task)


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


def test_the_caller_runs_items_that_no_thread_began(pool: ThreadPool) -> None:
    asleep, queue = put_to_sleep(pool, 3)
    done: list[int] = []

    class Writes:
        def __init__(self, number: int) -> None:
            self.number = number

        def __call__(self, place: Place) -> None:
            assert place == Place(HOST, None)
            assert threading.current_thread() is threading.main_thread()
            done.append(self.number)

    tasks = [Writes(i) for i in range(4)]
    watched = [weakref.ref(task) for task in tasks]
    pool.run([HOST] * 4, tasks, never, 1)
    assert done == [1, 3, 2, 0], "its own first, then from the end"
    assert len(pool._idle[HOST]) == len(set(pool._idle[HOST])) == 3
    del tasks
    gc.collect()  # items left in an inbox keep nothing alive
    assert len(asleep.kept) == 3 and not any(ref() for ref in watched)
    wake(pool, asleep, queue)  # they come too late, and go on waiting
    assert len(at_once(4, pool)) == 4
    assert done == [1, 3, 2, 0] and len(pool._workers) == 3
    until(lambda: len(pool._idle[HOST]) == 3)


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


class Interrupt(BaseException):
    """Raised by a signal or by a task in the thread of a caller."""


@pytest.mark.parametrize("when", ["before", "during", "after"])
def test_an_interrupt_at_any_moment_loses_nothing(pool: ThreadPool, when: str) -> None:
    """Before the caller's own task, during it, and while it takes another's."""
    asleep, queue = put_to_sleep(pool, 2)
    cancelled: list[bool] = []
    ran: list[int] = []

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
    assert len(at_once(3, pool)) == 3


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
    while frame is not None and frame.f_code is not TaskGroup.wait.__code__:
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


def test_all_calls_see_equal_modes_that_are_not_passed_on() -> None:
    me = threading.get_ident()
    assert me in at_once(2)
    ones = [torch.ones(2)] * 4
    with Counting() as mode:
        found = parallel_apply(torch.square, ones, TWO)
        assert me not in at_once(2)
    assert mode.count == 0 and torch.equal(torch.cat(found), torch.ones(8))
    with torch.device("meta"):
        assert me not in at_once(2)

    packed: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        packed.append(tensor)
        return tensor

    x = torch.ones(2, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        torch.exp(x)
        assert len(packed) == 1, "the test would see nothing"
        parallel_apply(torch.exp, [x] * 4, TWO)
        assert me not in at_once(2)
    assert len(packed) == 1
    assert me in at_once(2)


def sum_of_squares(x: Tensor) -> Tensor:
    return torch.stack(parallel_apply(torch.square, list(x.unbind()), TWO)).sum()


def traced(x: Tensor) -> Tensor:
    found = torch.jit.trace(sum_of_squares, (torch.ones(3),), check_trace=False)(x)
    assert isinstance(found, Tensor)
    return found


def forward(x: Tensor) -> Tensor:
    found = torch.func.jvp(sum_of_squares, (x,), (torch.ones(3),))[1]
    assert isinstance(found, Tensor)
    return found


@pytest.mark.parametrize(
    ("transformed", "expected"),
    [
        (torch.func.grad(sum_of_squares), [2.0, 4.0, 6.0]),
        (torch.func.hessian(sum_of_squares), [[2.0, 0, 0], [0, 2.0, 0], [0, 0, 2.0]]),
        (lambda x: torch.func.vmap(sum_of_squares)(x[None]), [14.0]),
        (forward, 12.0),
        (traced, 14.0),
    ],
    ids=["grad", "hessian", "vmap", "jvp", "trace"],
)
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_transforms_and_traces_include_every_call(
    transformed: Callable[[Tensor], Tensor], expected: Any
) -> None:
    x = torch.arange(1.0, 4.0)
    assert [transformed(x).tolist() for _ in range(20)] == [expected] * 20


# ------------------------------------------------------------------ threads are kept
def test_threads_are_used_again() -> None:
    assert len(at_once(2)) == 2
    before = ours()
    for _ in range(20):
        assert len(at_once(2)) == 2
    assert ours() == before


def test_a_nested_call_divides_the_threads_of_the_outer_call() -> None:
    def outer(i: int) -> list[int]:
        inner = parallel_apply(lambda j: torch.get_num_threads(), range(2), TWO)
        return [*inner, torch.get_num_threads()]

    before = torch.get_num_threads()
    torch.set_num_threads(8)
    try:
        assert parallel_apply(outer, range(2), TWO) == [[2, 2, 4]] * 2
        assert torch.get_num_threads() == 8
    finally:
        torch.set_num_threads(before)


def test_calls_of_many_threads_run_together_and_do_not_mix() -> None:
    wrong: list[Any] = []
    met = threading.Barrier(16)

    def caller(k: int) -> None:
        parallel_apply(lambda i: met.wait(SOON), range(2), TWO)
        for n in range(30):
            with torch.set_grad_enabled(k % 2 == 0):
                found = parallel_apply(
                    lambda i: (k, i, torch.is_grad_enabled()), range(n % 5), TWO
                )
            expected = [(k, i, k % 2 == 0) for i in range(n % 5)]
            if found != expected:
                wrong.append((found, expected))
        ended.append(k)

    ended: list[int] = []
    callers = [threading.Thread(target=caller, args=(k,)) for k in range(8)]
    for each in callers:
        each.start()
    for each in callers:
        each.join(SOON)
    assert not wrong and sorted(ended) == list(range(8))


def test_nothing_of_a_failed_call_is_kept_alive() -> None:
    class Thing:
        pass

    def fail(thing: Thing) -> None:
        raise ValueError("no")

    thing = Thing()
    watched = weakref.ref(thing)
    gc.disable()  # it must not take a collection
    try:
        parallel_apply(lambda each: [each], [thing, thing], TWO)
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
    assert len(at_once(6, pool)) == 6
    until(lambda: len(pool._workers) == 2)
    assert len(pool._idle[HOST]) == 2


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


def test_a_forked_child_has_threads_of_its_own() -> None:
    at_once(2)
    pid = os.fork()
    if not pid:
        code = 1
        try:
            signal.alarm(int(SOON))
            found = parallel_apply(lambda i: i * 2, range(5), TWO)
            code = 0 if found == [0, 2, 4, 6, 8] and len(at_once(2)) == 2 else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert len(at_once(2)) == 2


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
    done = run(EXIT, PYTHONWARNINGS="error")
    assert done.returncode == 5, done.stderr
    assert done.stderr == ""
    lines = done.stdout.splitlines()
    assert lines[0] == "[0, 1, 2, 3]" and sorted(lines[1:]) == [
        "done",
        "done",
        "late [1, 2, 3]",
    ]
