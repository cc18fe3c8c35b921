"""Programs for worker processes, which other start methods than fork import."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import multiprocessing
import os
import pickle
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

from pyparallel.workers import _channel, _run, descriptors
from pyparallel.workers.interface import Outgoing
from pyparallel.workers.processes import ProcessWorkers
from tests.support.processes.process_resources import left_behind, resources

#: The function of the system, also if a test puts another one in its place.
_find_policy: Any = getattr(os, "sched_getscheduler", None)


class Program:
    """Does a task: ``(name of a method, argument)``, or a value to return."""

    def __init__(self, data: Any = None) -> None:
        self.data = data

    def start(self, worker: int) -> None:
        self.worker = worker
        if self.data == "start":
            die()
        if self.data == "fail":
            raise KeyError("a start that fails")

    def answer(self, task: Any) -> Outgoing:
        name, argument = task if isinstance(task, tuple) else ("echo", task)
        found = getattr(self, name)(argument)
        if isinstance(found, Outgoing):
            return found
        return Outgoing(b"a", *descriptors.dump(found))

    def failed(self, error: Exception) -> Outgoing:
        return Outgoing(b"e", repr(error).encode())

    def echo(self, value: Any) -> Any:
        return value

    def where(self, _: Any) -> tuple[int, int]:
        return self.worker, os.getpid()

    def get(self, _: Any) -> Any:
        return self.data

    def policy(self, _: Any) -> int:
        return int(_find_policy(0))

    def large(self, nbytes: int) -> Outgoing:
        return Outgoing(b"a", bytes(nbytes))

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def count(self, _: Any) -> int:  # native code, which runs no handler of Python
        return sum(range(10**13))

    def exit(self, code: int) -> None:
        raise SystemExit(code)

    def kill(self, number: int) -> None:
        faulthandler.disable()  # that of pytest prints 50 lines
        os.kill(os.getpid(), number)

    def last(self, value: Any) -> Outgoing:
        return Outgoing(b"a", pickle.dumps(value), ends=True)

    def files(self, texts: list[str]) -> Outgoing:
        """Send an open file with each text, and nothing else."""
        return Outgoing(b"a", b"", [memory(text) for text in texts])

    def hold(self, _: Any) -> int:
        """Fork a child that lives on, and return its pid."""
        pid = os.fork()
        if not pid:
            time.sleep(60)
            os._exit(0)
        return pid

    def cut(self, nbytes: int) -> str:
        """Die when this number of bytes of the answer has been sent."""
        cut_answer(nbytes)
        return "cut"


def cut_answer(nbytes: int) -> None:
    """Let this worker die when it has sent this number of bytes of its answer."""

    def send(channel: Any, *message: Any) -> None:
        ours, theirs = _channel.pair()
        _channel.Channel(theirs).send(*message[:2])
        frame = ours.recv(1 << 16)
        assert nbytes <= len(frame), "the last byte has been tested"
        channel._socket.sendall(frame[:nbytes])
        die()

    _run._send = send


class DiesInPickle:
    """Kills the process that unpickles it."""

    def __reduce__(self) -> Any:
        return die, ()


class Unloadable:
    """Pickles, and raises when it is unpickled."""

    def __reduce__(self) -> Any:
        return int, ("no number",)


def die(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def memory(text: str) -> int:
    """Return the descriptor of a file with this text."""
    fd = os.memfd_create("test")
    os.write(fd, text.encode())
    return fd


def text_of(fd: int) -> str:
    """Return the text of a file, and close it."""
    text = os.pread(fd, 1 << 16, 0).decode()
    os.close(fd)
    return text


def value_of(answer: Any) -> Any:
    """Return the value of an answer."""
    head, tail, sent = answer
    assert head == b"a", tail
    return descriptors.load(tail, sent)


@contextlib.contextmanager
def pool(
    count: int = 1, program: Any = None, method: str = "fork"
) -> Iterator[ProcessWorkers]:
    """Yield workers, close them, and check that they leave nothing."""
    context = multiprocessing.get_context(method)
    if method != "fork":
        multiprocessing.resource_tracker.ensure_running()
        if method == "forkserver":
            multiprocessing.forkserver.ensure_running()
    gc.collect()  # descriptors of other tests
    before, open_before = resources(), num_open()
    threads = threading.enumerate()  # libraries keep some, of other tests
    workers = ProcessWorkers(context, program or Program(), count)
    try:
        yield workers
    finally:
        workers.close()
    assert num_open() == open_before, (open_before, resources() - before)
    left = left_behind(before, 0)
    assert not left, left
    assert {*threading.enumerate()} <= {*threads}


def fork_child(in_thread: bool) -> int:
    """Fork a process that waits for a minute, also in another thread; return its id."""
    pids: list[int] = []

    def fork() -> None:
        pids.append(os.fork())
        if not pids[-1]:
            threading.Event().wait(60)
            os._exit(0)

    if in_thread:
        forking = threading.Thread(target=fork)
        forking.start()
        forking.join()
    else:
        fork()
    return pids[0]


def num_open() -> int:
    """Return the number of open descriptors."""
    return len(os.listdir("/proc/self/fd"))


def until(condition: Any, seconds: float = 20) -> None:
    """Wait until a condition holds."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "the condition must hold in time"
        time.sleep(0.005)


def is_running(pid: int) -> bool:
    """Return True for a process that is no zombie."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
