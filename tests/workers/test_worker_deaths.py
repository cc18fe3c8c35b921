"""A dead worker is reported, and its last answers are delivered."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import select
import signal
import subprocess
from typing import Any

import pytest

from pyparallel.workers import _channel, _run, deaths, processes
from pyparallel.workers.interface import Late, WorkerDied
from tests.support.loader.worker_programs import (
    DiesInPickle,
    Program,
    die,
    fork_child,
    is_running,
    memory,
    num_open,
    pool,
    until,
    value_of,
)

pytestmark = [pytest.mark.one_backend, pytest.mark.timeout(120)]

#: The bytes of an answer of `Program.cut`.
NUM_BYTES = 20 + 1 + len(pickle.dumps("cut", pickle.HIGHEST_PROTOCOL))


def test_a_worker_killed_at_any_byte_of_a_message_is_reported() -> None:
    for nbytes in range(NUM_BYTES + 1):
        with pool(2) as workers:
            workers.send(1, "of another")
            assert value_of(workers.receive(1, 60)[1]) == "of another"
            workers.send(1, "again")
            workers.send(0, "first")
            workers.send(0, ("cut", nbytes))
            assert value_of(workers.receive(0, 60)[1]) == "first"
            if nbytes == NUM_BYTES:  # all bytes: the death is that of the next task
                assert value_of(workers.receive(0, 60)[1]) == "cut"
                workers.send(0, "next")
            with pytest.raises(WorkerDied) as caught:
                workers.receive(0, 60)
            found = caught.value
            pid = workers.processes[0].pid
            assert (found.worker, found.pid, found.code) == (0, pid, -signal.SIGKILL)
            until(lambda: arrived(workers, 1))
            assert value_of(workers.receive(1, 60)[1]) == "again"
            assert workers.has_lost()


def arrived(workers: Any, worker: int) -> bool:
    """Return True if an answer of a worker can be delivered without a wait."""
    with contextlib.suppress(WorkerDied):
        workers._wait(0)
    return bool(workers._workers[worker].answers)


ENDS = {
    "exit 0": (("exit", 0), 0),
    "exit 3": (("exit", 3), 3),
    "KILL": (("kill", signal.SIGKILL), -signal.SIGKILL),
    "SEGV": (("kill", signal.SIGSEGV), -signal.SIGSEGV),
    "TERM": (("kill", signal.SIGTERM), -signal.SIGTERM),
    "unpickling": (DiesInPickle(), -signal.SIGKILL),
}


@pytest.mark.parametrize("name", ENDS)
def test_a_task_that_ends_its_worker_is_reported(name: str) -> None:
    task, code = ENDS[name]
    with pool(2) as workers:
        for one in ("before", task, "after"):
            workers.send(1, one)
        assert value_of(workers.receive(1, 60)[1]) == "before"
        with pytest.raises(WorkerDied) as caught:
            workers.receive(1, 60)
        assert (caught.value.worker, caught.value.code) == (1, code)


def wait_for_all(*_: Any) -> None:
    """Wait for all children that have ended, as handlers of SIGCHLD do."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


@pytest.mark.timeout(30)
@pytest.mark.parametrize("handler", [signal.SIG_IGN, wait_for_all])
@pytest.mark.parametrize(
    "method", ["fork", pytest.param("spawn", marks=[pytest.mark.slow])]
)
def test_a_death_without_an_exit_code_is_known_at_once(
    method: str, handler: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "_EXIT_SECONDS", float("inf"))
    before = signal.signal(signal.SIGCHLD, handler)
    try:
        with pool(2, method=method) as workers:
            workers.send(1, ("kill", signal.SIGKILL))
            with pytest.raises(WorkerDied) as caught:
                workers.receive(1, 60)
        is_ignored = handler is signal.SIG_IGN
        assert caught.value.code in ([None] if is_ignored else [None, -signal.SIGKILL])
        assert deaths.exit_text(None) == "exit code unknown"
        assert ("The program ignores SIGCHLD" in deaths.advice(None)) is is_ignored
    finally:
        signal.signal(signal.SIGCHLD, before)
    assert "SIGCHLD" not in deaths.advice(None)
    assert not {*workers.processes} & {*multiprocessing.active_children()}


def test_a_process_with_the_number_of_an_ended_worker_is_not_stopped() -> None:
    script = ["sh", "-c", "sleep 60 > /dev/null & echo $!"]
    other = int(subprocess.run(script, stdout=subprocess.PIPE, check=True).stdout)
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        with pool(2) as workers:
            workers.send(1, ("kill", signal.SIGKILL))
            with pytest.raises(WorkerDied):
                workers.receive(1, 60)
            workers.processes[1]._popen.pid = other  # the system gives numbers again
        assert not {*workers.processes} & {*multiprocessing.active_children()}
        assert is_running(other)
    finally:
        signal.signal(signal.SIGCHLD, before)
        os.kill(other, signal.SIGKILL)


def test_a_death_is_known_while_another_worker_is_waited_for() -> None:
    with pool(2) as workers:
        workers.send(0, ("sleep", 60))
        workers.send(1, "arrived")
        workers.send(1, ("kill", signal.SIGKILL))
        with pytest.raises(WorkerDied) as caught:
            workers.receive(0, 60)
        assert caught.value.worker == 1
        assert value_of(workers.receive(1, 60)[1]) == "arrived"


#: The tasks that end a worker after an answer, and whether this answer says so.
LAST_TASKS: dict[str, tuple[list[Any], bool]] = {
    "last answer": ([("last", "arrived")], True),
    "exit": (["arrived", ("exit", 0)], False),
    "kill": (["arrived", ("kill", signal.SIGKILL)], False),
}


@pytest.mark.parametrize("tasks, announced", LAST_TASKS.values(), ids=LAST_TASKS)
def test_what_has_arrived_is_delivered_before_a_death(
    tasks: list[Any], announced: bool
) -> None:
    """Worker 1 answers and ends, and has one more task. Worker 0 answers later."""
    for asked in (0, None):
        with pool(2) as workers:
            for task in (*tasks, "never answered"):
                workers.send(1, task)
            workers.send(0, ("sleep", 60))
            until(lambda: arrived(workers, 1) and workers._workers[1].has_ended)
            found: list[Any] = []
            with pytest.raises((WorkerDied, Late)) as caught:
                while True:
                    found.append(value_of(workers.receive(asked, 0.05)[1]))
            delivers = asked is None
            assert found == (["arrived"] if delivers else [])
            assert caught.type is (Late if announced and not delivers else WorkerDied)
            if announced and not delivers:
                assert value_of(workers.receive(1, 60)[1]) == "arrived"
            with pytest.raises(WorkerDied):
                workers.receive(asked, 60)


def test_unread_answers_of_others_are_delivered_before_a_death() -> None:
    with pool(2) as workers:
        workers.send(1, ("kill", signal.SIGKILL))
        with pytest.raises(WorkerDied):
            workers.receive(1, 60)
        workers.send(0, "arrived")
        end = workers._workers[0].channel.fd
        until(lambda: select.select([end], [], [], 0)[0])
        number, answer = workers.receive(None, 60)
        assert (number, value_of(answer)) == (0, "arrived")
        with pytest.raises(WorkerDied):
            workers.receive(None, 60)


def test_a_worker_without_tasks_may_end() -> None:
    with pool(2) as workers:
        os.kill(workers.processes[1].pid, signal.SIGKILL)
        until(lambda: not is_running(workers.processes[1].pid))
        workers.send(0, 1)
        assert value_of(workers.receive(None, 60)[1]) == 1
        assert workers.has_lost()
        workers.send(1, 2)  # also a send to a dead worker does not fail
        with pytest.raises(WorkerDied):
            workers.receive(0, 60)


#: The steps of a worker, in this order.
STEPS = {
    **{name: (_run, name) for name in ("work", "restore_handlers", "_end_with_parent")},
    "stacks": (deaths, "enter"),
    "ends": (_run, "close_in_children"),
    "channel": (_run, "Channel"),
    "prepare": (_run, "_prepare"),
    "first message": (_run, "_send"),
    "first task": (_run, "_receive"),
    "task": (_run, "_answer"),
}


@pytest.mark.parametrize("step", STEPS)
def test_a_worker_killed_at_any_step_of_its_start_is_reported(
    step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if step == "work":
        monkeypatch.setattr("pyparallel.workers.processes.work", die)
    else:
        monkeypatch.setattr(*STEPS[step], die)
    with pool(2) as workers:
        workers.send(1, 1)
        with pytest.raises(WorkerDied) as caught:
            workers.receive(1, 60)
        assert caught.value.code == -signal.SIGKILL


@pytest.mark.slow
@pytest.mark.parametrize("method", ["forkserver", "spawn"])
@pytest.mark.parametrize("step", ["load", "start", "answer"])
def test_deaths_of_imported_programs_are_reported(method: str, step: str) -> None:
    data = {"load": DiesInPickle(), "start": "start", "answer": None}[step]
    with pool(3, Program(data), method) as workers:
        workers.send(2, ("kill", signal.SIGKILL))
        with pytest.raises(WorkerDied):
            workers.receive(2, 60)


def test_a_child_of_a_worker_does_not_hide_its_death() -> None:
    with pool(2) as workers:
        workers.send(0, ("hold", None))
        child = value_of(workers.receive(0, 60)[1])
        workers.send(0, ("kill", signal.SIGKILL))
        with pytest.raises(WorkerDied) as caught:
            workers.receive(0, 60)
        assert caught.value.code == -signal.SIGKILL
        assert is_running(child)
        os.kill(child, signal.SIGKILL)


class Copying(Program):
    """Its child keeps every descriptor of the worker, as a fork in C would."""

    def hold(self, _: Any) -> int:
        _channel._ends.clear()
        return super().hold(_)


def test_a_death_is_known_by_its_exit_code_alone() -> None:
    with pool(2, Copying()) as workers:
        workers.send(0, ("hold", None))
        child = value_of(workers.receive(0, 60)[1])
        workers.send(0, ("kill", signal.SIGKILL))
        with pytest.raises(WorkerDied) as caught:
            workers.receive(0, 20)
        assert caught.value.code == -signal.SIGKILL and is_running(child)
        os.kill(child, signal.SIGKILL)


@pytest.mark.parametrize("thread", [False, True])
def test_a_child_of_the_parent_does_not_keep_its_workers(thread: bool) -> None:
    with pool(2) as workers:
        child = fork_child(thread)
        workers.send(1, ("kill", signal.SIGKILL))
        with pytest.raises(WorkerDied):
            workers.receive(1, 60)
        workers.close()
        # It ended at the end of its file, and not by a signal.
        assert workers.processes[0].exitcode == 0
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_an_answer_that_is_never_received_leaks_nothing() -> None:
    before = num_open()
    with contextlib.suppress(WorkerDied), pool(1) as workers:
        workers.send(0, ("files", ["x"] * 9))
        workers.send(0, ("kill", signal.SIGKILL))
        _, (_, _, fds) = workers.receive(0, 60)
        for fd in fds:
            os.close(fd)
        workers.receive(0, 60)
    assert num_open() == before
    os.close(memory("x"))


def test_exit_codes_have_names_and_advice() -> None:
    assert deaths.exit_text(3) == "exit code 3"
    assert deaths.exit_text(None) == "exit code unknown"
    assert deaths.exit_text(-9) == "exit code -9, SIGKILL"
    assert deaths.exit_text(-99) == "exit code -99"
    assert "dmesg" in deaths.advice(-9)
    assert "faulthandler" in deaths.advice(-11)
    assert "traceback" in deaths.advice(1) and "traceback" in deaths.advice(None)
