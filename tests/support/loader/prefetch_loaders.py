"""Datasets and loaders for prefetching, and a check for leaked resources."""

from __future__ import annotations

import gc
import itertools
import multiprocessing
import os
import signal
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import psutil
import torch
from torch.utils.data import DataLoader, Dataset

import pyparallel
from pyparallel import PreDataLoader
from pyparallel.prefetch import iterator
from tests.support.processes.process_resources import SERVER, TRACKER

NUM_ITEMS = 12
#: The limit in seconds for events that torch alone handles after five seconds, or with
#: the fixture ``patient`` after sixty.
SOON = 30.0


class TwoArguments(Exception):
    """An exception that cannot be created from a message, and does not pickle."""

    def __init__(self, code: int, where: str) -> None:
        super().__init__(f"{code} at {where}")
        self.lock = threading.Lock()


class Numbers(Dataset):
    """``torch.full((3,), i)``; the item ``bad`` calls a function instead."""

    def __init__(self, bad: int = -1, act: Callable[[], Any] | None = None) -> None:
        self.bad, self.act = bad, act

    def __len__(self) -> int:
        return NUM_ITEMS

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == self.bad and self.act is not None:
            self.act()
        return torch.full((3,), index)


class Raise:
    """Raises an error that is created in the worker and need not be pickled."""

    def __init__(self, cls: type[BaseException], *args: Any) -> None:
        self.cls, self.args = cls, args

    def __call__(self) -> None:
        raise self.cls(*self.args)


def of_worker(name: str) -> Any:
    """Return a variable of torch's loop in the current worker."""
    frame: Any = sys._getframe()
    while frame.f_code.co_name != "_worker_loop":
        frame = frame.f_back
    return frame.f_locals[name]


def die_with_the_lock() -> None:
    """Get killed between batches, where torch's worker looks for an end."""
    of_worker("done_event")._cond.acquire()
    os.kill(os.getpid(), signal.SIGKILL)


def die_in_a_message() -> None:
    """Get killed in the middle of a message of torch's worker."""
    messages = of_worker("data_queue")
    messages._wlock.acquire()
    os.write(messages._writer.fileno(), struct.pack("!i", 1000) + bytes(10))
    os.kill(os.getpid(), signal.SIGKILL)


#: The classes of loaders that a `PreDataLoader` reads.
LOADERS: dict[str, Any] = {"torch": DataLoader, "ours": pyparallel.DataLoader}


def loader(
    num_workers: int = 0, dataset: Any = None, kind: str = "torch", **options: Any
) -> Any:
    options = {"batch_size": 2, "num_workers": num_workers, **options}
    return LOADERS[kind](dataset or Numbers(), **options)


def firsts(batches: Any) -> list[int]:
    """Return the first number of every batch of ``Numbers``."""
    return [int(batch[0, 0]) for batch in batches]


def until(condition: Callable[[], Any], seconds: float = 30) -> None:
    """Wait for a condition; fail if it does not come."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition did not become true"
        time.sleep(0.002)


def interrupt_each_line(
    base: type[BaseException],
    start: Callable[[], Any],
    value: Callable[[Any], int],
    is_counted: Callable[[Any], bool] = lambda frame: True,
) -> tuple[list[list[int]], list[int]]:
    """Interrupt ``next()`` of passes at each line of their module in turn.

    Args:
        base: the base of the error.
        start: begins a pass.
        value: returns the number of a batch.
        is_counted: returns False for the frames whose line is not interrupted.

    Returns:
        The batches of interrupted passes after that, and those of the last pass.
    """

    class Interrupt(base):  # type: ignore[misc, valid-type]  # a base at run time
        pass

    def trace(frame: Any, event: str, arg: Any) -> Any:
        nonlocal lines_left
        if frame.f_code.co_filename != iterator.__file__:
            return None
        if event == "line" and is_counted(frame):
            lines_left -= 1
            if lines_left == 0:
                raise Interrupt
        return trace

    rests: list[list[int]] = []
    for number in itertools.count(1):
        it = start()
        lines_left, before = number, sys.gettrace()
        try:
            sys.settrace(trace)
            first = next(it)
        except Interrupt:
            sys.settrace(before)
            rests.append([*map(value, it)])
        else:
            sys.settrace(before)
            return rests, [value(first), *map(value, it)]
    raise AssertionError


def prefetch_threads() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name == "pyparallel-prefetch"]


def children() -> list[int]:
    kept = {SERVER._forkserver_pid, TRACKER._pid}
    return [x.pid for x in psutil.Process().children() if x.pid not in kept]


def num_fds() -> int:
    return len(os.listdir("/proc/self/fd"))


@contextmanager
def nothing_left(more_fds: int = 2) -> Iterator[None]:
    """Check that a block leaves no thread, process or file descriptor behind.

    The first pass may create two descriptors that torch keeps for all passes.
    """
    if multiprocessing.get_start_method() == "forkserver":
        SERVER.ensure_running()  # its descriptors stay, too
    gc.collect()
    before = set(children()), num_fds()
    yield
    gc.collect()
    until(lambda: not prefetch_threads())
    until(lambda: set(children()) <= before[0])
    until(lambda: num_fds() <= before[1] + more_fds)


class Gate:
    """A loader that returns each number only when the test allows it."""

    def __init__(self, length: int = 100) -> None:
        self.length = length
        self.open = threading.Semaphore(0)
        self.asked = 0  # the number of requested items

    def let(self, count: int) -> None:
        self.open.release(count)

    def __iter__(self) -> Iterator[int]:
        for i in range(self.length):
            self.asked = i + 1
            assert self.open.acquire(timeout=30)
            yield i


@contextmanager
def passes(*args: Any, more_fds: int = 2, **options: Any) -> Iterator[PreDataLoader]:
    """Make a PreDataLoader and close it; check for leaked resources."""
    with nothing_left(more_fds), PreDataLoader(*args, **options) as pre:
        yield pre
