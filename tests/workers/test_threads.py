"""Workers that are threads: their ends, forks, errors and stacks, without a loader."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
import weakref
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from pyparallel.workers.interface import Late, Woken
from pyparallel.workers.threads import ThreadWorkers
from tests.support.processes import interpreters

pytestmark = [pytest.mark.one_backend, pytest.mark.timeout(120)]


class Program:
    """Runs its tasks, which are functions."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.stopped = threading.Event()

    def start(self, worker: int) -> None:
        self.calls.append(("start", worker))

    def run(self, task: Any) -> Any:
        return task()

    def stop(self) -> None:
        self.stopped.set()

    def end(self) -> None:
        self.calls.append("end")


@pytest.fixture
def pool() -> Iterator[ThreadWorkers]:
    workers = ThreadWorkers([Program() for _ in range(2)])
    yield workers
    workers.close()


def num_threads() -> int:
    return sum("pyparallel-worker" in each.name for each in threading.enumerate())


def test_answers_come_in_the_order_of_the_tasks_of_each_worker(
    pool: ThreadWorkers,
) -> None:
    for i in range(500):
        pool.send(i % 2, lambda i=i: i)
    answers = [pool.receive(i % 2, 10) for i in range(500)]
    assert answers == [(i % 2, i) for i in range(500)]
    assert pool._tokens.qsize() <= 1
    pool.send(1, lambda: "any")
    assert pool.receive(None, 10) == (1, "any")
    with pytest.raises(Late):
        pool.receive(0, 0.01)


def fail() -> None:
    raise SystemExit(7)


def test_an_exception_of_a_program_is_raised_in_its_turn(pool: ThreadWorkers) -> None:
    for task in (lambda: 1, fail, lambda: 3):
        pool.send(0, task)
    assert pool.receive(0, 10) == (0, 1)
    with pytest.raises(SystemExit) as caught:
        pool.receive(0, 10)
    assert caught.value.code == 7
    assert pool.receive(0, 10) == (0, 3)


def test_a_program_that_cannot_start_is_an_error_and_ends() -> None:
    class Bad(Program):
        def start(self, worker: int) -> None:
            raise LookupError("no start")

    pool = ThreadWorkers([Bad()])
    with pytest.raises(LookupError, match="no start"):
        pool.receive(0, 10)
    pool.close()
    assert num_threads() == 0


@pytest.mark.parametrize("call", ["wake", "close"])
def test_another_thread_ends_a_wait(pool: ThreadWorkers, call: str) -> None:
    timer = threading.Timer(0.1, getattr(pool, call))
    timer.start()
    with pytest.raises(Woken):
        pool.receive(0, 60)
    timer.join()


@pytest.mark.parametrize("end", ["close", "garbage", "cycle"])
def test_threads_end_with_their_pool(end: str) -> None:
    programs = [Program() for _ in range(3)]
    pool: Any = ThreadWorkers(programs)
    for worker, program in enumerate(programs):
        pool.send(worker, partial(program.stopped.wait, 60))
        pool.send(worker, lambda: programs[0].calls.append("late"))
    dead = weakref.ref(pool)
    if end == "close":
        pool.close()
    pool.cycle = pool if end == "cycle" else None
    del pool
    gc.collect()
    assert dead() is None and num_threads() == 0
    assert [program.calls[-1] for program in programs] == ["end"] * 3
    assert "late" not in programs[0].calls


def test_a_stuck_thread_keeps_no_one_waiting_and_has_a_stack() -> None:
    released = threading.Event()

    def stuck_here() -> None:
        released.wait(60)

    program = Program()
    pool = ThreadWorkers([program])
    pool.send(0, stuck_here)
    while "stuck_here" not in pool.stack(0):
        time.sleep(0.01)
    assert pool.name(0) == "thread pyparallel-worker-0"
    pool.close()
    assert num_threads() == 1
    released.set()
    pool._threads[0].join(10)
    assert program.calls[-1] == "end"


def test_a_fork_has_no_threads_and_says_so(pool: ThreadWorkers) -> None:
    read, write = os.pipe()
    if not (pid := os.fork()):
        try:
            assert pool.has_lost()
            pool.close()
            pool.receive(0, 1)
        except RuntimeError as error:
            os.write(write, str(error).encode())
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    assert b"must be used in the process that made it" in os.read(read, 1 << 12)
    pool.send(0, lambda: 5)
    assert pool.receive(0, 10) == (0, 5)
    os.close(read)
    os.close(write)


IMPORTS = """
import os, sys, threading, time, torch, warnings
from pyparallel import DataLoader
warnings.simplefilter("ignore")  # there are fewer cores
"""
#: Work that would end after the interpreter, and the end of the script.
AT_EXIT = {
    # The calls of eight threads end one after the other.
    "numbers[: 1_000_000 * (1 + index // 1000)].sort()": "del batches",
    "[torch.ones(200_000).sort() for _ in range(10**6)]": "",
    "torch.ones(200_000).sort()": "sys.exit()",
}


COMPUTING = """
class Last:
    def __del__(self, sleep=time.sleep):
        sleep(1.5)  # a thread that returns to Python now aborts the process
last = Last()
begun, numbers = threading.Barrier(9), torch.rand(8_000_000)
class Computes:
    def __len__(self):
        return 10**6
    def __getitem__(self, index):
        if index % 1000 == 0:
            begun.wait()
        {work}
        return index
loader = DataLoader(Computes(), 1000, num_workers=8, worker_method="thread")
batches = iter(loader)
begun.wait()
time.sleep(0.2)  # until all threads are in native code
{end}
"""


@pytest.fixture(scope="module")
def computing() -> dict[str, interpreters.Ended]:
    codes = [COMPUTING.format(work=work, end=end) for work, end in AT_EXIT.items()]
    return dict(zip(AT_EXIT, interpreters.run(IMPORTS, codes), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("work", AT_EXIT)
def test_the_exit_waits_for_a_thread_that_computes(
    work: str, computing: dict[str, interpreters.Ended]
) -> None:
    assert (computing[work].code, computing[work].err) == (0, "")


WAITING = """
from pyparallel.workers.threads import ThreadWorkers
class Program:
    def start(self, worker): pass
    def run(self, task): return task
    def stop(self): pass
    def end(self): os.write(1, b"end ")
pool = ThreadWorkers([Program() for _ in range(4)])
for worker in range(4):
    pool.send(worker, 1)
    pool.receive(worker, 60)
"""
#: Their ends run in the exit.
ENDING = """
from pyparallel.workers import threads
threads._END_SECONDS = 60
begun = threading.Event()
class Program:
    def start(self, worker): pass
    def run(self, task):
        begun.set()
        try:
            time.sleep(0.3)  # until the exit waits
        except SystemExit:
            os.write(1, b"raised ")
    def stop(self): pass
    def end(self): os.write(1, b"end ")
pool = threads.ThreadWorkers([Program()])
pool.send(0, 1)
begun.wait()
"""


STUCK = """
class Stuck:
    def __len__(self):
        return 4
    def __getitem__(self, index):
        print("in", flush=True)
        {wait}
loader = DataLoader(Stuck(), num_workers=2, worker_method="thread")
batches = iter(loader)
time.sleep(0.2)
{end}
"""


WAITS = ["time.sleep(1000)", "threading.Lock().__enter__(); threading.Event().wait()"]
STUCK_ENDS = ["", "del batches", "raise KeyboardInterrupt"]


@pytest.fixture(scope="module")
def exits() -> dict[str, interpreters.Ended]:
    codes = {
        f"{wait}, {end}": STUCK.format(wait=wait, end=end)
        for wait in WAITS
        for end in STUCK_ENDS
    }
    codes |= {"waiting": WAITING, "ending": ENDING}
    # A process that does not end within a minute is killed.
    return dict(zip(codes, interpreters.run(IMPORTS, [*codes.values()]), strict=True))


def test_the_exit_ends_the_programs_of_threads_that_wait(
    exits: dict[str, interpreters.Ended],
) -> None:
    assert exits["waiting"] == interpreters.Ended(0, "end " * 4, "")


def test_the_exit_raises_nothing_in_threads_that_end_by_themselves(
    exits: dict[str, interpreters.Ended],
) -> None:
    assert exits["ending"] == interpreters.Ended(0, "end ", "")


@pytest.mark.parametrize("wait", WAITS)
@pytest.mark.parametrize("end", STUCK_ENDS)
def test_the_exit_does_not_wait_for_a_stuck_thread(
    wait: str, end: str, exits: dict[str, interpreters.Ended]
) -> None:
    done = exits[f"{wait}, {end}"]
    assert done.code != -signal.SIGALRM
    assert done.out.startswith("in")
    if end.startswith("raise"):
        assert "KeyboardInterrupt" in done.err
    else:
        assert (done.code, done.err) == (0, "")
