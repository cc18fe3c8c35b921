"""Starts and ends that fail or are interrupted leave nothing; no worker is left."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import json
import multiprocessing
import os
import random
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from pyparallel.core import signals
from pyparallel.workers import processes
from pyparallel.workers.processes import ProcessWorkers
from tests.support.loader.worker_programs import (
    Program,
    is_running,
    num_open,
    pool,
    until,
    value_of,
)
from tests.support.processes.process_resources import left_behind, resources
from tests.support.repository.folders import ROOT

pytestmark = [pytest.mark.one_backend, pytest.mark.timeout(300)]

METHODS = [
    "fork",
    pytest.param("forkserver", marks=pytest.mark.slow),
    pytest.param("spawn", marks=pytest.mark.slow),
]


def start(method: str = "fork", count: int = 2) -> ProcessWorkers:
    return ProcessWorkers(multiprocessing.get_context(method), Program(), count)


@contextlib.contextmanager
def nothing_left(method: str = "fork") -> Iterator[None]:
    with pool(1, method=method):  # it opens some descriptors once
        pass
    gc.collect()  # what other tests have dropped
    before, open_before = resources(), num_open()
    yield
    gc.collect()
    assert not left_behind(before, 5)
    assert num_open() == open_before


# ------------------------------------------------------------- many, and too many


@pytest.mark.parametrize(
    "rounds", [100, pytest.param(1000, marks=[pytest.mark.slow, pytest.mark.soak])]
)
def test_many_starts_and_ends_leave_nothing(rounds: int) -> None:
    with nothing_left():
        for number in range(rounds):
            workers = start(count=1)
            workers.send(0, number)
            workers.send(0, ("files", ["x"]))
            if number % 4:
                assert value_of(workers.receive(0, 60)[1]) == number
            if number % 3:
                workers.close()
            del workers


@pytest.mark.parametrize("method", METHODS)
def test_a_start_without_free_descriptors_leaves_none(method: str) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with nothing_left(method):
        # A limit of 40 leaves more free than one of 39 only if descriptor 39 is free.
        used, failed = {*map(int, os.listdir("/proc/self/fd"))}, 0
        free = [fd for fd in range(len(used) + 40) if fd not in used]
        for limit in free[: 40 : 1 if method == "fork" else 7]:
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
            try:
                start(method).close()
            except OSError as error:
                assert error.errno == errno.EMFILE
                failed += 1
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert failed >= 3


CALLS = {
    "fork": "os.fork",
    "forkserver": "multiprocessing.forkserver.connect_to_new_process",
    "spawn": "multiprocessing.util.spawnv_passfds",
}


@pytest.mark.parametrize("number", [errno.EAGAIN, errno.ENOMEM])
@pytest.mark.parametrize("method", METHODS)
def test_a_start_without_free_processes_leaves_none(
    method: str, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, _, name = CALLS[method].rpartition(".")
    original, left = getattr(sys.modules[path], name), [0]

    def call(*arguments: Any) -> Any:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(number, os.strerror(number))
        return original(*arguments)

    with nothing_left(method):
        monkeypatch.setattr(CALLS[method], call)
        cores = 2
        monkeypatch.setattr(processes, "cores_allowed", lambda: cores)
        # The last row: the second worker starts later.
        for left[0], cores in ((0, 2), (1, 2), (1, 1)):
            with pytest.raises(OSError) as caught:
                workers: Any = start(method, 2)
                assert method != "fork" and cores == 1
                workers.send(1, 1)
                workers.receive(1, 60)
            assert caught.value.errno == number
            workers = None
            del caught


@pytest.mark.slow
def test_workers_start_one_for_each_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "cores_allowed", lambda: 2)
    with pool(5, method="forkserver") as workers:
        assert sum(each.pid is not None for each in workers.processes) == 2
        workers.send(4, 4)
        assert value_of(workers.receive(4, 60)[1]) == 4
        assert all(each.pid is not None for each in workers.processes)
    with pool(5, method="forkserver") as workers:
        pass  # closed before the others have started


# ------------------------------------------------------------- interrupts


def interrupted(action: Callable[[], Any], seconds: float) -> bool:
    """Return True if a Ctrl-C after these seconds has interrupted the action."""
    inside, arrived = True, threading.Event()

    def handle(number: int, frame: Any) -> None:
        arrived.set()
        if inside:
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, handle)
    timer = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGINT))
    try:
        timer.start()
        action()
    except KeyboardInterrupt:
        return True
    finally:
        inside = False
        until(arrived.is_set, 60)  # a wait may begin just after the signal, and not end
        timer.join()
        signal.signal(signal.SIGINT, before)
    return False


@pytest.mark.parametrize("method", METHODS)
def test_a_ctrl_c_while_workers_start_leaves_nothing(method: str) -> None:
    def use() -> None:
        workers = start(method)
        workers.send(0, 1)
        workers.close()

    with nothing_left(method):
        begin = time.perf_counter()
        use()
        duration = time.perf_counter() - begin
        found: list[bool] = []
        for _ in range(60 if method == "fork" else 20):
            found.append(interrupted(use, duration * random.random()))
        assert sum(found) > len(found) / 4


def test_a_ctrl_c_during_the_work_loses_no_answer_unnoticed() -> None:
    workers, sent, received, kept = start(), 0, 0, 0

    def work() -> None:
        nonlocal sent, received
        while True:
            workers.is_whole = False
            while sent < received + 3:
                workers.send(0, [sent, "x" * (sent % 7) * 20_000])
                sent += 1
            found, _ = value_of(workers.receive(0, 60)[1])
            assert found == received
            received += 1
            workers.is_whole = True

    try:
        for _ in range(40):
            assert interrupted(work, 0.002 + 0.02 * random.random())
            kept += not workers.has_lost()
            if workers.has_lost():
                workers.close()
                workers, sent, received = start(), 0, 0
        assert kept, "most of the time is spent in a wait"
    finally:
        workers.close()


@pytest.mark.parametrize("method", METHODS)
def test_a_ctrl_c_for_all_processes_ends_no_worker(method: str) -> None:
    with pool(3, method=method) as workers:
        for state in ("idle", "busy"):
            for i in range(3):
                workers.send(i, 1)
                workers.receive(i, 60)
                if state == "busy":
                    workers.send(i, ("sleep", 0.2))
            for each in workers.processes:
                for _ in range(3):
                    os.kill(each.pid, signal.SIGINT)
            for i in range(3):
                if state == "busy":
                    assert value_of(workers.receive(i, 60)[1]) is None
                workers.send(i, i)
                assert value_of(workers.receive(i, 60)[1]) == i
        assert not workers.has_lost()


@pytest.mark.parametrize("method", METHODS)
def test_a_signal_of_a_worker_reaches_no_event_loop_of_its_parent(method: str) -> None:
    async def run() -> None:
        loop, found = asyncio.get_running_loop(), []
        for number in (signal.SIGINT, signal.SIGUSR1):
            loop.add_signal_handler(number, found.append, number)
        with pool(1, method=method) as workers:
            for _ in range(2):  # a task arrives after the signal before it
                workers.send(0, 1)
                workers.receive(0, 60)
                os.kill(workers.processes[0].pid, signal.SIGINT)
        os.kill(os.getpid(), signal.SIGUSR1)
        while signal.SIGUSR1 not in found:
            await asyncio.sleep(0.01)
        assert found == [signal.SIGUSR1]

    asyncio.run(run())


def test_handlers_return_although_one_of_them_raises() -> None:
    numbers = (signal.SIGUSR1, signal.SIGUSR2)
    seen: list[int] = []

    def handle(number: int, frame: Any) -> None:
        seen.append(number)
        raise KeyError(number)

    before = [signal.signal(number, handle) for number in numbers]
    try:
        with pytest.raises(KeyError), signals.deferred_signals():
            for number in numbers:
                os.kill(os.getpid(), number)
            assert seen == []
        assert sorted(seen) == sorted(numbers) and not signals._handlers
        assert all(signal.getsignal(number) is handle for number in numbers)
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def test_handlers_of_the_parent_are_not_those_of_the_worker() -> None:
    seen: list[int] = []
    numbers = (signal.SIGTERM, signal.SIGUSR1)
    before = [signal.signal(n, lambda *_: seen.append(1)) for n in numbers]
    try:
        with pool(2) as workers:
            workers.send(0, ("sleep", 60))
            for number in numbers:
                os.kill(os.getpid(), number)
            assert len(seen) == 2
        assert workers.processes[0].exitcode == -signal.SIGTERM
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def no_policy(*_: Any) -> int:
    raise PermissionError("by a filter of system calls")


@pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="policies of Linux")
@pytest.mark.parametrize("method", METHODS)
def test_workers_do_not_interrupt_the_loop_on_its_core(method: str) -> None:
    assert os.sched_getscheduler(0) == os.SCHED_OTHER
    with pool(1, method=method) as workers:
        workers.send(0, ("policy", None))
        assert value_of(workers.receive(0, 60)[1]) == os.SCHED_BATCH


@pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="policies of Linux")
@pytest.mark.parametrize(
    "name, function",
    [
        ("sched_getscheduler", lambda pid: os.SCHED_IDLE),  # the user has set it
        ("sched_getscheduler", no_policy),
        ("sched_setscheduler", no_policy),
    ],
)
def test_a_policy_that_is_set_or_cannot_be_set_stays(
    name: str, function: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, name, function)
    with pool(1) as workers:
        workers.send(0, ("policy", None))
        assert value_of(workers.receive(0, 60)[1]) == os.SCHED_OTHER


# ------------------------------------------------------------- the end of the parent

PARENT = """
import json, multiprocessing, os, signal, sys, threading, time, warnings
from tests.support.loader.worker_programs import Program, ProcessWorkers
warnings.simplefilter("ignore")
def main(method, state):
    made = []
    def make():
        made.append(ProcessWorkers(multiprocessing.get_context(method), Program(), 2))
    if state == "thread":
        thread = threading.Thread(target=make)
        thread.start()
        thread.join()
    else:
        make()
    workers = made[0]
    for i in range(2):
        workers.send(i, 1)
        workers.receive(i, 60)
        if state == "sleep":
            workers.send(i, ("sleep", 60))
        elif state == "native":
            workers.send(i, ("count", None))
    child = None
    if state == "child":
        child = os.fork()
        if not child:
            os.close(1)
            time.sleep(30)
            os._exit(0)
    print(json.dumps([child, *(each.pid for each in workers.processes)]), flush=True)
    if state == "exit":
        sys.exit(3)
    if state == "cycle":
        workers.itself = workers
        return
    time.sleep(100)
if __name__ == "__main__":
    main(*sys.argv[1:])
"""


def is_soon(end: Callable[[], float]) -> bool:
    """Return True if one of three ends takes less than a second: others are busy."""
    return any(end() < 1 for _ in range(3))


def ended_after(pids: list[int]) -> float:
    begin = time.monotonic()
    until(lambda: not any(map(is_running, pids)))
    return time.monotonic() - begin


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
@pytest.mark.parametrize("state", ["idle", "sleep", "native", "thread", "child"])
def test_workers_end_with_a_killed_parent(
    method: str, state: str, tmp_path: Any
) -> None:
    def end() -> float:
        child, pids, process = run_parent(method, state, tmp_path)
        time.sleep(0.5)
        assert all(map(is_running, pids)), "they outlive the thread that started them"
        process.kill()
        process.wait()
        seconds = ended_after(pids)
        process.stdout.close()
        process.stderr.close()
        if child:
            assert is_running(child)
            os.kill(child, signal.SIGKILL)
        return seconds

    assert is_soon(end)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
@pytest.mark.parametrize("state", ["exit", "cycle"])
def test_workers_end_with_the_interpreter(
    method: str, state: str, tmp_path: Any
) -> None:
    def end() -> float:
        _, pids, process = run_parent(method, state, tmp_path)
        _, errors = process.communicate(timeout=60)
        assert (process.returncode, errors) == (3 if state == "exit" else 0, "")
        return ended_after(pids)

    assert is_soon(end)


def run_parent(method: str, state: str, folder: Any) -> Any:
    """Return its child, its workers and the process."""
    path = folder / "parent.py"
    path.write_text(PARENT, encoding="utf-8")
    process = subprocess.Popen(
        [sys.executable, str(path), method, state],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT)])},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    child, *pids = json.loads(process.stdout.readline())
    return child, pids, process


@pytest.mark.parametrize("state", ["idle", "sleep", "count"])
def test_forked_workers_end_with_a_killed_fork(state: str) -> None:
    def end() -> float:
        reader, writer = os.pipe()
        parent = os.fork()
        if not parent:
            with contextlib.suppress(BaseException):
                workers = start()
                workers.send(0, 1)
                workers.receive(0, 60)
                if state != "idle":
                    workers.send(0, (state, 60))
                pids = [each.pid for each in workers.processes]
                os.write(writer, json.dumps(pids).encode())
                time.sleep(60)
            os._exit(1)
        pids = json.loads(os.read(reader, 999))
        time.sleep(0.2)
        os.kill(parent, signal.SIGKILL)
        os.waitpid(parent, 0)
        seconds = ended_after(pids)
        os.close(reader)
        os.close(writer)
        return seconds

    assert is_soon(end)
