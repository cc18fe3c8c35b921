"""Worker processes answer their tasks in order, and end."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import pickle
import signal
import threading
import time
from typing import Any

import numpy as np
import pytest
import torch

from pyparallel.workers import descriptors
from pyparallel.workers.interface import (
    InlineWorkers,
    Late,
    ProgramError,
    Woken,
    WorkerDied,
)
from pyparallel.workers.processes import ProcessWorkers
from tests.support.loader.worker_programs import (
    Program,
    Unloadable,
    is_running,
    memory,
    pool,
    text_of,
    until,
    value_of,
)

pytestmark = [pytest.mark.one_backend, pytest.mark.timeout(120)]

METHODS = [
    "fork",
    pytest.param("forkserver", marks=pytest.mark.slow),
    pytest.param("spawn", marks=pytest.mark.slow),
]


@pytest.mark.parametrize("method", METHODS)
def test_each_worker_answers_in_the_order_of_its_tasks(method: str) -> None:
    threads = threading.enumerate()
    with pool(3, method=method) as workers:
        for i in range(30):
            workers.send(i % 3, i)
        assert [value_of(workers.receive(i % 3, 60)[1]) for i in range(30)] == [
            *range(30)
        ]
        for i in range(3):
            workers.send(i, ("where", None))
        found = dict(workers.receive(None, 60) for _ in range(3))
        pids = [each.pid for each in workers.processes]
        assert {k: value_of(v) for k, v in found.items()} == {
            i: (i, pid) for i, pid in enumerate(pids)
        }
        assert {*workers.processes} <= {*multiprocessing.active_children()}
        assert all(each.daemon for each in workers.processes)
        assert threading.enumerate() == threads
        assert not workers.has_lost() and all(map(workers.has_begun, range(3)))
    assert [each.pid for each in workers.processes] == pids
    assert {each.exitcode for each in workers.processes} <= {0, -signal.SIGTERM}


#: Values that only a pickle keeps as they are.
TASKS: list[Any] = [
    *([1, 2], (0, [3]), "x", None, {1, 2}, {"a": 1.5}, 10**30, b"x"),
    *([np.int64(3), np.float32(1)], np.arange(3), range(5), slice(1, 2), [147, 140]),
    bytearray(b"x"),
]


@pytest.mark.parametrize("task", TASKS, ids=lambda task: repr(task)[:40])
def test_a_task_arrives_as_it_is(task: Any) -> None:
    with pool() as workers:
        for _ in range(2):
            workers.send(0, ("echo", task))
            found = value_of(workers.receive(0, 60)[1])
            assert repr(found) == repr(task) and type(found) is type(task)


def test_tensors_and_pipes_are_tasks_without_a_thread_that_sends_them() -> None:
    threads = threading.enumerate()
    with pool() as workers:
        reader, writer = multiprocessing.Pipe(duplex=False)
        workers.send(0, ("echo", [torch.arange(3), writer]))
        tensor, again = value_of(workers.receive(0, 60)[1])
        assert threading.enumerate() == threads
        again.send("x")
        assert tensor.tolist() == [0, 1, 2] and reader.recv() == "x"
        del tensor
        for end in (reader, writer, again):
            end.close()


def test_a_task_that_does_not_pickle_is_an_error_of_its_sender() -> None:
    with pool() as workers:
        workers.send(0, 1)
        with pytest.raises(TypeError, match="cannot pickle"):
            workers.send(0, [threading.Lock()])
        workers.send(0, 2)
        assert [value_of(workers.receive(0, 60)[1]) for _ in range(2)] == [1, 2]
        with pytest.raises(Late):
            workers.receive(0, 0.01)
        assert workers.is_whole and not workers.has_lost()


def test_a_task_that_does_not_unpickle_is_an_answer() -> None:
    with pool() as workers:
        for task in (1, Unloadable(), 2):
            workers.send(0, task)
        answers = [workers.receive(0, 60)[1] for _ in range(3)]
        assert [value_of(answers[i]) for i in (0, 2)] == [1, 2]
        assert answers[1][0] == b"e" and b"invalid literal" in answers[1][1]


@pytest.mark.parametrize("method", METHODS[1:])
def test_a_program_that_does_not_pickle_is_an_error_of_the_start(method: str) -> None:
    with pytest.raises((TypeError, AttributeError), match="pickle"):
        with pool(2, Program(threading.Lock()), method):
            pass


PROGRAMS = [
    ("fork", "fail", "KeyError: 'a start that fails'"),
    pytest.param(
        *("forkserver", Unloadable(), "invalid literal for int"), marks=pytest.mark.slow
    ),
]


@pytest.mark.parametrize("method, data, text", PROGRAMS)
def test_a_program_that_does_not_start_is_an_error(
    method: str, data: Any, text: str
) -> None:
    with pool(2, Program(data), method) as workers:
        workers.send(1, 1)
        with pytest.raises(ProgramError, match=text) as caught:
            workers.receive(1, 60)
        assert caught.value.worker == 1
        assert not workers.has_begun(1) and workers.has_lost()


@pytest.mark.slow
def test_programs_are_pickled_at_the_start_with_their_descriptors() -> None:
    data = [torch.arange(4).share_memory_(), "before"]
    with pool(3, Program(data), "forkserver") as workers:
        data[1] = "after"  # a change reaches no worker
        for i in range(3):
            workers.send(i, ("get", None))
        for i in range(3):
            found, text = value_of(workers.receive(i, 60)[1])
            assert found.tolist() == [0, 1, 2, 3] and text == "before"


def test_tasks_and_answers_may_exceed_all_buffers_at_once() -> None:
    tasks = [bytes([i]) * (3 << 20) for i in range(12)]
    with pool(2) as workers:
        for i, task in enumerate(tasks):
            workers.send(i % 2, task)
        for i, task in enumerate(tasks):
            assert value_of(workers.receive(i % 2, 60)[1]) == task


def test_many_workers_start_answer_and_end() -> None:
    with pool(64) as workers:
        for _ in range(4):
            for i in range(64):
                workers.send(i, i)
        found = [workers.receive(None, 60) for _ in range(256)]
        assert sorted(worker for worker, _ in found) == sorted([*range(64)] * 4)
        assert all(value_of(answer) == worker for worker, answer in found)


def test_the_end_waits_for_killed_workers_that_end_late() -> None:
    """On a busy system, a killed process gets no core for a while."""
    with pool(2) as workers:
        for i, made in enumerate(workers.processes):
            workers.send(i, 1)
            workers.receive(i, 60)
            workers.send(i, ("sleep", 60))
            late = threading.Timer(2, made._popen.kill)
            made.terminate, made.kill = (lambda: None), late.start
    assert {made.exitcode for made in workers.processes} == {-signal.SIGKILL}


def test_a_worker_takes_three_descriptors() -> None:
    def used(count: int) -> int:
        with pool(count) as workers:
            workers.send(count - 1, 1)
            workers.receive(count - 1, 60)
            return len(os.listdir("/proc/self/fd"))

    assert used(9) - used(1) <= 3 * 8


def test_answers_carry_descriptors() -> None:
    with pool(2) as workers:
        for i in (0, 1, 0):
            workers.send(i, ("files", [f"{i}.{n}" for n in range(300)]))
        for i in (0, 1, 0):
            _, (_, _, fds) = workers.receive(i, 60)
            assert [text_of(fd) for fd in fds] == [f"{i}.{n}" for n in range(300)]
        workers.send(1, ("files", ["never received"]))


def test_a_timeout_leaves_the_answer_for_later() -> None:
    with pool(2) as workers:
        workers.send(0, ("sleep", 0.2))
        for worker in (0, None):
            with pytest.raises(Late):
                workers.receive(worker, 0.01)
        assert value_of(workers.receive(0, 60)[1]) is None


def test_wake_ends_a_wait_of_another_thread() -> None:
    with pool() as workers:
        for worker in (0, None):
            waker = threading.Timer(0.05, workers.wake)
            waker.start()
            with pytest.raises(Woken):
                workers.receive(worker, None)
            waker.join()
        workers.wake()
        workers.wake()
        with pytest.raises(Woken):  # without a wait before
            workers.receive(0, None)
        workers.send(0, 7)
        assert value_of(workers.receive(0, 60)[1]) == 7


def test_a_close_ends_a_wait_of_another_thread() -> None:
    caught: list[BaseException] = []
    with pool() as workers:

        def receive() -> None:
            try:
                workers.receive(0, None)
            except Woken as error:
                caught.append(error)

        thread = threading.Thread(target=receive)
        thread.start()
        time.sleep(0.05)
        workers.close()
        thread.join(20)
        assert len(caught) == 1
        with pytest.raises(Woken):
            workers.receive(0, None)
        workers.wake()


def test_an_ended_worker_is_no_loss_for_the_others() -> None:
    with pool(2) as workers:
        workers.send(0, 1)
        workers.send(1, 2)
        workers.end(0)
        assert value_of(workers.receive(None, 60)[1]) == 2
        until(lambda: workers.processes[0].exitcode == 0)
        workers.send(1, 3)
        assert value_of(workers.receive(1, 60)[1]) == 3


def test_a_worker_may_end_after_its_answer() -> None:
    with pool(2) as workers:
        workers.send(0, ("last", "bye"))
        assert value_of(workers.receive(0, 60)[1]) == "bye"
        until(lambda: workers.processes[0].exitcode == 0)
        workers.send(1, 3)
        assert value_of(workers.receive(1, 60)[1]) == 3
        workers.send(0, 4)
        with pytest.raises(WorkerDied) as caught:
            workers.receive(0, 60)
        assert caught.value.code == 0


@pytest.mark.parametrize("how", ["close", "garbage", "cycle", "thread"])
def test_workers_end_within_a_second_of_the_last_use(how: str) -> None:
    workers: Any = ProcessWorkers(
        multiprocessing.get_context("fork"), Program(), count=3
    )
    pids = [each.pid for each in workers.processes]
    workers.send(0, ("sleep", 60))
    workers.send(1, ("count", None))
    workers.send(2, 1)
    workers.receive(2, 60)
    start = time.monotonic()
    if how == "close":
        workers.close()
    elif how == "cycle":
        workers.itself = workers
    elif how == "thread":
        thread = threading.Thread(target=workers.close)
        thread.start()
        thread.join()
    del workers
    if how == "cycle":
        gc.collect()
    until(lambda: not any(map(is_running, pids)))
    # Three times the time that the workers have, on a busy machine.
    assert time.monotonic() - start < 3


class Forks:
    """Garbage whose finalizer forks a child. Another thread may do so as well."""

    def __init__(self, pids: list[int]) -> None:
        self.pids, self.pool = pids, None  # older than the pool: it is finalized first

    def __del__(self) -> None:
        pid = os.fork()
        if not pid:
            signal.pause()
        self.pids.append(pid)


def test_a_fork_during_a_garbage_collection_does_not_keep_workers_alive() -> None:
    pids: list[int] = []
    forks: Any = Forks(pids)
    pool: Any = ProcessWorkers(multiprocessing.get_context("fork"), Program(), 2)
    workers = pool.processes
    pool.forks, forks.pool = forks, pool
    del pool, forks
    gc.collect()
    (child,) = pids
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert [worker.exitcode for worker in workers] == [0, 0]  # no signal was needed


def test_a_stack_shows_where_a_worker_is(monkeypatch: pytest.MonkeyPatch) -> None:
    with pool(2) as workers:
        workers.send(1, ("sleep", 60))
        until(lambda: "in sleep" in workers.stack(1))
        assert "in sleep" not in workers.stack(0)
        until(lambda: "in _receive" in workers.stack(0))
        os.kill(workers.processes[0].pid, signal.SIGKILL)
        workers.processes[0].join()
        assert workers.stack(0) == ""
    assert workers.stack(1) == ""


def test_the_stack_of_a_worker_goes_to_no_file_that_takes_its_descriptor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another thread closes the workers meanwhile, and a file gets the number."""
    truncate, opened = os.ftruncate, list[int]()

    def close_first(fd: int, nbytes: int) -> None:
        monkeypatch.undo()
        thread = threading.Thread(target=workers.close)
        thread.start()
        thread.join(20)
        while number not in opened:
            opened.append(memory("kept"))
        truncate(fd, nbytes)

    with pool() as workers:
        number = workers._stacks.fileno()
        monkeypatch.setattr(os, "ftruncate", close_first)
        assert workers.stack(0) == ""
        assert os.pread(number, 4, 0) == b"kept"
        descriptors.close(opened)


def test_a_stack_shows_a_worker_that_hangs_at_its_start() -> None:
    lock = threading.Lock()
    lock.acquire()

    class Hanging(Program):
        def start(self, worker: int) -> None:
            lock.acquire()

    with pool(1, Hanging()) as workers:
        until(lambda: "in start" in workers.stack(0))
        assert not workers.has_begun(0)


def test_workers_belong_to_the_process_that_made_them() -> None:
    with pool(2) as workers:
        pids = [each.pid for each in workers.processes]
        reader, writer = os.pipe()
        pid = os.fork()
        if not pid:
            found = [workers.has_lost()]
            with contextlib.suppress(RuntimeError):
                workers.receive(0, 1)
            for call in (workers.send, workers.receive):
                with pytest.raises(RuntimeError, match="in the process that made it"):
                    call(0, 1)
            workers.close()
            workers.wake()
            left = len(multiprocessing.active_children())
            os.write(writer, pickle.dumps([*found, left]))
            os._exit(0)
        os.waitpid(pid, 0)
        assert pickle.loads(os.read(reader, 999)) == [True, 0]
        os.close(reader)
        os.close(writer)
        assert all(map(is_running, pids)) and not workers.has_lost()
        workers.send(0, 5)
        assert value_of(workers.receive(0, 60)[1]) == 5


def test_the_calling_thread_is_a_worker_too() -> None:
    class Doubling:
        def start(self, worker: int) -> None:
            self.started = worker

        def run(self, task: int) -> int:
            return task * 2

    workers = InlineWorkers(Doubling())
    assert workers.answer(2) == 4
    assert not workers.has_lost() and not workers.packs and workers.processes == []
    assert workers.stack(0) == "" and workers.has_begun(0)
    workers.wake()
    workers.end(0)
    workers.close()
