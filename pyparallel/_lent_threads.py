"""Threads that stay, lent to one call at a time.

Note: [lent threads]. A call is lent a thread for each of its jobs, one that waits or a
new one, and has it for itself until its jobs are done. So a device named twice is two
threads, several callers do not wait for each other, and a call inside a job cannot wait
for a thread that waits for it. There are as many threads as have ever been at work at a
time; what is more than `MOST_IDLE` for a device ends.

They are daemons, ended and joined by ``atexit`` (as in `_prefetch_thread`); from then
on jobs run in the thread of their caller. A forked child begins without any.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any

import torch

#: How many threads wait for work of one device; each has a stack and a stream.
MOST_IDLE = 32
#: How long the end of the interpreter waits for jobs, in seconds.
EXIT_SECONDS = 5.0
#: A signal that comes just before a lock is waited for does not end the wait. It is
#: seen when this time is over, in seconds.
SLICE = 1.0


class Worker(threading.Thread):
    """One thread, and what it has for good: a device, and a stream if that has any."""

    def __init__(
        self, owner: Pool, device: torch.device, stream: Any, inbox: _Inbox
    ) -> None:
        super().__init__(name=f"pyparallel-{device}", daemon=True)
        self.device, self.stream, self.inbox = device, stream, inbox
        self._owner = owner
        self.start()

    def run(self) -> None:
        """Do tasks until there is none."""
        while (given := self.inbox.get()) is not None:
            if not given.begin():
                continue
            of = given.of
            try:
                given.task(self)
            finally:
                # Free before its caller goes on, so that the next call finds it; and
                # it holds nothing of the call.
                del given
                self._owner.give_back(self)
                of.leave()
                del of
        self._owner.forget(self)


_Inbox = SimpleQueue["_Given | None"]
#: What a thread does. It raises nothing.
Task = Callable[[Worker], None]


class _Round:
    """Tasks of one call that are not done yet."""

    def __init__(self, num_tasks: int) -> None:
        self._left = num_tasks
        self._lock, self._done = threading.Lock(), threading.Lock()
        self._done.acquire()

    def leave(self) -> None:
        with self._lock:
            self._left -= 1
            if self._left:
                return
        self._done.release()

    def wait(self) -> None:
        """Wait for the last one. The main thread's signals interrupt this."""
        while not self._done.acquire(timeout=SLICE):
            pass
        self._done.release()


class _Given:
    """One task of a call. Only one can begin it: its thread, or who takes it back."""

    def __init__(self, task: Task, of: _Round) -> None:
        self.task, self.of, self._begun = task, of, threading.Lock()

    def begin(self) -> bool:
        return self._begun.acquire(blocking=False)


def _nothing(worker: Worker) -> None:
    """Do nothing: a thread that has done it is free again."""


class Pool:
    """The threads of all devices.

    Args:
        new_stream: makes the stream of a new thread, or None.
    """

    def __init__(self, new_stream: Callable[[torch.device], Any]) -> None:
        self._new_stream = new_stream
        self._begin()
        _pools.add(self)

    def _begin(self) -> None:
        self._lock = threading.Lock()
        self._idle: defaultdict[torch.device, list[Worker]] = defaultdict(list)
        self._shared: dict[torch.device, _Inbox] = {}
        self._workers: set[Worker] = set()
        self.closed = False

    def do(
        self,
        devices: Sequence[torch.device],
        tasks: Sequence[Task],
        cancel: Callable[[], None],
    ) -> None:
        """Have every task done by a thread of its device, and wait.

        Args:
            devices: one for each task.
            tasks: they raise nothing.
            cancel: called when something, Ctrl-C for one, ends the wait. Tasks should
                end soon then, and are waited for; a second interrupt is raised at once.
        """
        workers: list[Worker] = []
        of = _Round(len(tasks))
        given = [_Given(task, of) for task in tasks]
        try:
            for device in devices:
                workers.append(self._lend(device))
            for worker, each in zip(workers, given, strict=True):
                worker.inbox.put(each)
            of.wait()
        except BaseException:
            cancel()
            for worker, each in zip(workers, given, strict=False):
                if each.begin():  # nobody else will, whether it was put or not
                    worker.inbox.put(_Given(_nothing, of))
            for _ in given[len(workers) :]:
                of.leave()
            of.wait()
            raise

    def _lend(self, device: torch.device) -> Worker:
        with self._lock:
            if self._idle[device]:
                return self._idle[device].pop()  # the warmest one
        stream = self._new_stream(device)
        with self._lock:
            # Threads without streams are all alike, so whoever wakes first does what is
            # next: fewer threads have to wake for short tasks. A worker that is lent
            # then stands for one of those that wait.
            shared = self._shared.setdefault(device, SimpleQueue())
        inbox = shared if stream is None else SimpleQueue()
        worker = Worker(self, device, stream, inbox)
        with self._lock:
            self._workers.add(worker)
        return worker

    def give_back(self, worker: Worker) -> None:
        """Let others have a thread, or end it if there are enough."""
        with self._lock:
            if len(self._idle[worker.device]) < MOST_IDLE:
                self._idle[worker.device].append(worker)
                return
        worker.inbox.put(None)

    def forget(self, worker: Worker) -> None:
        """Let go of a thread that ends."""
        with self._lock:
            self._workers.discard(worker)

    def close(self) -> None:
        """End all threads, and wait for their tasks as long as that is worth it."""
        self.closed = True
        with self._lock:
            workers = list(self._workers)
        deadline = time.monotonic() + EXIT_SECONDS
        for worker in workers:
            worker.inbox.put(None)
        for worker in workers:
            worker.join(max(0.0, deadline - time.monotonic()))


_pools: weakref.WeakSet[Pool] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    for pool in list(_pools):
        pool.close()


def _begin_all() -> None:
    for pool in list(_pools):
        pool._begin()


os.register_at_fork(after_in_child=_begin_all)
