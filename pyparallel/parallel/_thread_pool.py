"""A pool of threads that calls check out and keep until their tasks are done.

Note: [checked out threads]. A call checks out one thread for each of its tasks, an idle
or a new one, and checks it in when the task is done. So a device that is named twice
has two threads, several callers do not wait for each other, and a call inside a task
cannot wait for the thread that runs the task. The number of threads is the largest
number of tasks that ever ran at a time; for each device at most `MAX_IDLE` stay idle.

Note: [the caller helps]. An idle thread takes about 50 us to wake up. So the caller
runs one of the tasks without a stream itself, and then each such task that no thread
has claimed yet. A thread that wakes up later finds no task and waits again. Tasks may
wait for each other, because each unclaimed task has a thread. The caller does not help
if its thread has modes that other threads do not get, because all tasks must run with
the same modes.

The threads are daemons, which end at the exit (Note [exit] in ``core/process.py``).
Later tasks run in the thread of their caller. A forked child starts without threads.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import zip_longest
from queue import SimpleQueue
from typing import Any, NamedTuple

import torch

from ..core.process import Living

#: Idle threads to keep for each device; each has a stack and a stream.
MAX_IDLE = 32
#: Seconds that the exit of the interpreter waits for tasks.
EXIT_SECONDS = 5.0
#: Seconds between checks for signals. A signal that arrives just before a wait does
#: not interrupt it.
SLICE = 1.0


class Place(NamedTuple):
    """The device of a task, and the stream of its thread, or None without streams."""

    device: torch.device
    stream: Any


class Worker(threading.Thread):
    """A thread of the pool, which keeps its device and stream."""

    def __init__(self, owner: ThreadPool, place: Place, inbox: _Inbox) -> None:
        super().__init__(name=f"pyparallel-{place.device}", daemon=True)
        self.place, self.inbox = place, inbox
        self._owner = owner
        self.start()

    def run(self) -> None:
        """Run tasks until the inbox returns None."""
        while (pending := self.inbox.get()) is not None:
            task = pending.claim()
            if task is None:
                continue
            try:
                task(self.place)
            finally:
                # The thread is idle before its caller continues, so that the next call
                # finds it, and it keeps no reference to the call.
                del task
                self._owner.check_in(self)
                pending.mark_done()
                del pending
        self._owner.remove(self)


_Inbox = SimpleQueue["_PendingTask | None"]
#: A task must not raise in a thread of the pool.
Task = Callable[[Place], None]


class _TaskGroup:
    """The tasks of one call that are not done yet."""

    def __init__(self) -> None:
        self.pending: set[_PendingTask] = set()
        self._lock, self._done = threading.Lock(), threading.Lock()
        self._done.acquire()

    def mark_done(self, task: _PendingTask) -> None:
        """Mark a task as done; repeated calls have no effect."""
        with self._lock:
            self.pending.discard(task)
            if self.pending:
                return
        with suppress(RuntimeError):  # the lock is released already
            self._done.release()

    def wait(self) -> None:
        """Wait for all tasks. Signals interrupt this in the main thread."""
        while not self._done.acquire(timeout=SLICE):
            pass
        self._done.release()


class _PendingTask:
    """A task of a call, which only one thread can claim."""

    def __init__(self, task: Task, group: _TaskGroup) -> None:
        self._task: Task | None = task
        self._group, self._claimed_by = group, dict[str, int]()
        group.pending.add(self)

    def claim(self) -> Task | None:
        """Claim the task for this thread; return None if another thread has it."""
        me = threading.get_ident()
        if self._claimed_by.setdefault("thread", me) != me:  # atomic, also with signals
            return None
        task, self._task = self._task, None
        return task

    def is_claimed_here(self) -> bool:
        """Return True if this thread has claimed the task."""
        return self._claimed_by.get("thread") == threading.get_ident()

    def mark_done(self) -> None:
        """Mark the task as done in its group."""
        self._group.mark_done(self)


class ThreadPool:
    """The threads of all devices.

    Args:
        new_stream: returns the stream of a new thread for a device, or None.
    """

    def __init__(self, new_stream: Callable[[torch.device], Any]) -> None:
        self._new_stream = new_stream
        self._reset()
        _pools.add(self)

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._idle: defaultdict[torch.device, list[Worker]] = defaultdict(list)
        self._shared: dict[torch.device, _Inbox] = {}
        self._workers: set[Worker] = set()
        self.closed = False

    def run(
        self,
        devices: Sequence[torch.device],
        tasks: Sequence[Task],
        cancel: Callable[[], None],
        own: int | None = None,
    ) -> None:
        """Run each task on a thread of its device and wait for all of them.

        Args:
            devices: the device of each task.
            tasks: functions that do not raise in a thread of the pool.
            cancel: called when an error ends the wait or a task in this thread, such as
                a KeyboardInterrupt. Tasks should then end soon. They are waited for; a
                second interrupt is raised at once.
            own: index of a task without a stream, which this thread runs before it
                helps; see Note [the caller helps]. None: this thread only waits.
        """
        workers: list[Worker | None] = []
        group = _TaskGroup()
        pending = [_PendingTask(task, group) for task in tasks]
        try:
            for i, device in enumerate(devices):
                workers.append(None if i == own else self._check_out(device))
            for worker, each in zip(workers, pending, strict=True):
                if worker is not None:
                    worker.inbox.put(each)
            if own is not None:
                self._help(devices, workers, pending, own)
            group.wait()
        except BaseException:
            cancel()
            for worker, each in zip_longest(workers, pending):
                # This thread claims the tasks that no thread has begun, so that none
                # runs any more. The task that it was running has ended.
                if not each.is_claimed_here() and each.claim() and worker is not None:
                    self.check_in(worker)
                if each.is_claimed_here():
                    each.mark_done()
            group.wait()
            raise

    def _help(
        self,
        devices: Sequence[torch.device],
        workers: Sequence[Worker | None],
        pending: Sequence[_PendingTask],
        own: int,
    ) -> None:
        """Run one task in this thread, then unclaimed ones, starting with the last."""
        for i in (own, *reversed(range(len(pending)))):
            worker = workers[i]
            if worker is not None and worker.place.stream is not None:
                continue
            task = pending[i].claim()
            if task is None:
                continue
            if worker is not None:
                self.check_in(worker)
            task(Place(devices[i], None))
            pending[i].mark_done()

    def _check_out(self, device: torch.device) -> Worker:
        with self._lock:
            if self._idle[device]:
                return self._idle[device].pop()  # the most recently used one
        stream = self._new_stream(device)
        with self._lock:
            # Threads without streams are interchangeable and share an inbox. The first
            # thread that wakes up takes the next task, so short tasks wake fewer
            # threads. A checked out worker then only counts as one of them.
            shared = self._shared.setdefault(device, SimpleQueue())
        inbox = shared if stream is None else SimpleQueue()
        worker = Worker(self, Place(device, stream), inbox)
        with self._lock:
            self._workers.add(worker)
        return worker

    def check_in(self, worker: Worker) -> None:
        """Make a thread idle, or end it if there are enough idle threads."""
        with self._lock:
            idle = self._idle[worker.place.device]
            if len(idle) < MAX_IDLE:
                idle.append(worker)
                return
        worker.inbox.put(None)

    def remove(self, worker: Worker) -> None:
        """Remove a thread that ends."""
        with self._lock:
            self._workers.discard(worker)

    def close(self) -> None:
        """End all threads and wait up to `EXIT_SECONDS` for their tasks."""
        self.closed = True
        with self._lock:
            workers = list(self._workers)
        deadline = time.monotonic() + EXIT_SECONDS
        for worker in workers:
            worker.inbox.put(None)
        for worker in workers:
            worker.join(max(0.0, deadline - time.monotonic()))


_pools: Living[ThreadPool] = Living(ThreadPool._reset, at_exit=ThreadPool.close)
