"""Threads that stay, lent to one call at a time.

Note: [lent threads]. A call is lent a thread for each of its jobs, one that waits or a
new one, and has it for itself until its jobs are done. So a device named twice is two
threads, several callers do not wait for each other, and a call inside a job cannot wait
for a thread that waits for it. There are as many threads as have ever been at work at a
time; what is more than `MOST_IDLE` for a device ends.

Note: [the caller helps]. A thread that waits takes some 50 us to wake, its caller none.
So the caller does one of the jobs that need no stream, and then every other such job
that no thread has begun: a thread that comes too late finds nothing and waits again.
This takes no thread from a job that waits for another one: what is not begun has one.
Not so in a thread with modes that are not carried: all calls must see the same.

They are daemons, ended and joined by ``atexit`` (as in `prefetch._thread`); from then
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
from contextlib import suppress
from itertools import zip_longest
from queue import SimpleQueue
from typing import Any, NamedTuple

import torch

#: How many threads wait for work of one device; each has a stack and a stream.
MOST_IDLE = 32
#: How long the end of the interpreter waits for jobs, in seconds.
EXIT_SECONDS = 5.0
#: A signal that comes just before a lock is waited for does not end the wait. It is
#: seen when this time is over, in seconds.
SLICE = 1.0


class Place(NamedTuple):
    """Where a task is done: a device, and the stream of a thread if that has any."""

    device: torch.device
    stream: Any


class Worker(threading.Thread):
    """One thread, and the place that it has for good."""

    def __init__(self, owner: Pool, place: Place, inbox: _Inbox) -> None:
        super().__init__(name=f"pyparallel-{place.device}", daemon=True)
        self.place, self.inbox = place, inbox
        self._owner = owner
        self.start()

    def run(self) -> None:
        """Do tasks until there is none."""
        while (given := self.inbox.get()) is not None:
            task = given.begin()
            if task is None:
                continue
            try:
                task(self.place)
            finally:
                # Free before its caller goes on, so that the next call finds it; and
                # it holds nothing of the call.
                del task
                self._owner.give_back(self)
                given.leave()
                del given
        self._owner.forget(self)


_Inbox = SimpleQueue["_Given | None"]
#: What a thread does. It raises nothing in a thread of ours.
Task = Callable[[Place], None]


class _Round:
    """Tasks of one call that are not done yet."""

    def __init__(self) -> None:
        self.open: set[_Given] = set()
        self._lock, self._done = threading.Lock(), threading.Lock()
        self._done.acquire()

    def leave(self, given: _Given) -> None:
        """Count a task as done. To say it twice is to say it once."""
        with self._lock:
            self.open.discard(given)
            if self.open:
                return
        with suppress(RuntimeError):  # it is released already
            self._done.release()

    def wait(self) -> None:
        """Wait for the last one. The main thread's signals interrupt this."""
        while not self._done.acquire(timeout=SLICE):
            pass
        self._done.release()


class _Given:
    """One task of a call. Only one thread can begin it."""

    def __init__(self, task: Task, of: _Round) -> None:
        self._task: Task | None = task
        self._of, self._by = of, dict[str, int]()
        of.open.add(self)

    def begin(self) -> Task | None:
        """Return the task to the first who asks."""
        me = threading.get_ident()
        if self._by.setdefault("thread", me) != me:  # in one go, whatever interrupts
            return None
        task, self._task = self._task, None
        return task

    def is_mine(self) -> bool:
        """Tell whether this thread has begun it."""
        return self._by.get("thread") == threading.get_ident()

    def leave(self) -> None:
        """Say that it is done."""
        self._of.leave(self)


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
        own: int | None = None,
    ) -> None:
        """Have every task done by a thread of its device, and wait.

        Args:
            devices: one for each task.
            tasks: they raise nothing in a thread of ours.
            cancel: called when something, Ctrl-C for one, ends the wait, or a task in
                this thread. Tasks should end soon then, and are waited for; a second
                interrupt is raised at once.
            own: the task that this thread does, which has no stream, before it helps;
                see Note [the caller helps]. None: this thread only waits.
        """
        workers: list[Worker | None] = []
        of = _Round()
        given = [_Given(task, of) for task in tasks]
        try:
            for i, device in enumerate(devices):
                workers.append(None if i == own else self._lend(device))
            for worker, each in zip(workers, given, strict=True):
                if worker is not None:
                    worker.inbox.put(each)
            if own is not None:
                self._help(devices, workers, given, own)
            of.wait()
        except BaseException:
            cancel()
            for worker, each in zip_longest(workers, given):
                # What nobody has begun, put or not, nobody will; what this thread was
                # at is over.
                if not each.is_mine() and each.begin() and worker is not None:
                    self.give_back(worker)
                if each.is_mine():
                    each.leave()
            of.wait()
            raise

    def _help(
        self,
        devices: Sequence[torch.device],
        workers: Sequence[Worker | None],
        given: Sequence[_Given],
        own: int,
    ) -> None:
        """Do one task in this thread, then what no other has begun, the last first."""
        for i in (own, *reversed(range(len(given)))):
            worker = workers[i]
            if worker is not None and worker.place.stream is not None:
                continue
            task = given[i].begin()
            if task is None:
                continue
            if worker is not None:
                self.give_back(worker)
            task(Place(devices[i], None))
            given[i].leave()

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
        worker = Worker(self, Place(device, stream), inbox)
        with self._lock:
            self._workers.add(worker)
        return worker

    def give_back(self, worker: Worker) -> None:
        """Let others have a thread, or end it if there are enough."""
        with self._lock:
            idle = self._idle[worker.place.device]
            if len(idle) < MOST_IDLE:
                idle.append(worker)
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
