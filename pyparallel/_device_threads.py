"""Threads that stay: each serves one device, on a stream of its own.

Note: [lent threads]. A call is lent a thread for each of its jobs, one that waits or a
new one, and has it for itself until its jobs are done. So a device named twice is two
threads, several callers do not wait for each other, and a call inside a job cannot wait
for a thread that waits for it. There are as many threads as have ever been at work at a
time; what is more than `MOST_IDLE` for a device ends.

They are daemons, ended and joined by ``atexit`` (as in `_prefetch_thread`); from then
on jobs run in the thread of their caller. A forked child begins without any.

Note: [streams of jobs]. A job's stream waits for what its caller had queued on the
device; the caller's streams wait for the job. Nothing waits on the host. What the
caller's memory is used for on a job's stream therefore comes before whatever it is
reused for on the caller's, as long as it is not freed before the caller's streams wait:
jobs are held until then. What a job returns belongs to its stream, so the allocator is
told of the caller's. A tensor inside of an object that is no container is not seen
there: it is safe where one stream calls, since the job's stream waits for that one
before it allocates again.
"""

from __future__ import annotations

import atexit
import contextvars
import os
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any, NamedTuple

import torch

from . import _thread_state
from ._device import DeviceApi, torch_device
from ._move import has_streams
from .container import map_tensors

#: How many threads wait for work of one device; each has a stack and a stream.
MOST_IDLE = 32
#: How long the end of the interpreter waits for jobs, in seconds.
EXIT_SECONDS = 5.0

Job = Callable[[], Any]


class _Worker(threading.Thread):
    """One thread, and what it has for good."""

    def __init__(self, owner: Threads, device: torch.device, stream: Any) -> None:
        super().__init__(name=f"pyparallel-{device}", daemon=True)
        self.device, self.stream = device, stream
        self.inbox: SimpleQueue[tuple[Callable[[_Worker], None], _Round] | None]
        self.inbox = SimpleQueue()
        self._owner = owner
        self.start()

    def run(self) -> None:
        while (task := self.inbox.get()) is not None:
            work, of = task
            try:
                work(self)
            finally:
                # Free before its caller goes on, so that the next call finds it; and
                # it holds nothing of the call.
                del work, task
                self._owner._give_back(self)
                of.leave()
                del of


class _Round:
    """Jobs of one call that are not done yet."""

    def __init__(self, num_jobs: int) -> None:
        self._left, self._lock, self._done = (
            num_jobs,
            threading.Lock(),
            threading.Lock(),
        )
        self._done.acquire()

    def leave(self, num_jobs: int = 1) -> None:
        with self._lock:
            self._left -= num_jobs
            if self._left:
                return
        self._done.release()

    def wait(self) -> None:
        """Wait for the last one. The main thread's signals interrupt this."""
        with self._done:
            pass


class _Home(NamedTuple):
    """A stream of the caller, and what was queued on it when it called."""

    stream: Any
    event: Any


class Threads:
    """The threads of all devices.

    Args:
        api: of devices with streams.
        queues: tells which devices those are.
    """

    def __init__(
        self,
        api: DeviceApi = torch_device,
        queues: Callable[[torch.device], bool] | None = None,
    ) -> None:
        self._api = api
        self._queues = queues or _queues
        self._begin()
        _all.add(self)

    def _begin(self) -> None:
        self._lock = threading.Lock()
        self._idle: defaultdict[torch.device, list[_Worker]] = defaultdict(list)
        self._workers: set[_Worker] = set()
        self._closed = False

    def run(
        self,
        devices: Sequence[torch.device],
        jobs: Sequence[Job],
        cancel: Callable[[BaseException], None],
    ) -> list[Any]:
        """Run every job on a thread of its device; return what they return, in order.

        Jobs have the modes and the context variables of this thread. One alone runs in
        this thread, on its current stream.

        Args:
            devices: one for each job; any may be there more than once.
            jobs: they return tensors of their device, in containers, or anything.
            cancel: called when something, Ctrl-C for one, ends the wait for the jobs:
                they should end soon. They are waited for then; a second interrupt is
                raised at once.

        Raises:
            RuntimeError: a stream is under graph capture; nothing has run.
            BaseException: what a job raised, when all are done.

        Stream: see Note [streams of jobs].
        """
        state = _thread_state.take()
        if len(jobs) == 1 or self._closed:
            return [
                self._here(device, job, state)
                for device, job in zip(devices, jobs, strict=True)
            ]
        homes = self._homes(devices)
        num_threads = torch.get_num_threads()
        on_host = sum(device.type == "cpu" for device in devices)
        call = _Call(self._api, state, homes, num_threads, max(1, on_host), devices)
        tasks = [call.task(i, job) for i, job in enumerate(jobs)]
        try:
            self._do(devices, tasks, cancel)
        finally:
            # Also after an error: what is queued still reads the caller's memory.
            for i, done in call.events.items():
                self._api.wait(homes[devices[i]].stream, done)
            if call.has_set_threads:  # for threads that others start later
                torch.set_num_threads(num_threads)
        for error in call.errors:
            raise error
        for device, home in homes.items():
            results = [
                r for d, r in zip(devices, call.results, strict=True) if d == device
            ]
            self._keep(results, device, home.stream)
        return call.results

    def _do(
        self,
        devices: Sequence[torch.device],
        tasks: Sequence[Callable[[_Worker], None]],
        cancel: Callable[[BaseException], None],
    ) -> None:
        """Have every task done by a thread, and wait."""
        workers: list[_Worker] = []
        of = _Round(len(tasks))
        given = 0
        try:
            for device in devices:
                workers.append(self._lend(device))
            for worker, task in zip(workers, tasks, strict=True):
                worker.inbox.put((task, of))
                given += 1
            of.wait()
        except BaseException as error:
            cancel(error)
            for worker in workers[given:]:
                self._give_back(worker)
            if given:
                if given < len(tasks):
                    of.leave(len(tasks) - given)
                of.wait()
            raise

    def _here(
        self, device: torch.device, job: Job, state: _thread_state.ThreadState
    ) -> Any:
        """Run a job in this thread, which has its modes already, and keeps them."""
        with _thread_state.entered(state):
            if not self._queues(device):
                return contextvars.copy_context().run(job)
            with self._api.using(self._api.current_stream(device)):
                return contextvars.copy_context().run(job)

    def _homes(self, devices: Sequence[torch.device]) -> dict[torch.device, _Home]:
        """Return the caller's stream of every device that has any."""
        homes: dict[torch.device, Any] = {}
        for device in devices:
            if device not in homes and self._queues(device):
                stream = self._api.current_stream(device)
                if self._api.is_capturing(stream):
                    raise RuntimeError(
                        f"parallel_apply: the current stream of {device} must not be "
                        "under graph capture, but it is. Capture what is called, or "
                        "use one device: that runs in the thread of its caller."
                    )
                homes[device] = stream
        return {
            d: _Home(stream, self._api.record(stream)) for d, stream in homes.items()
        }

    def _keep(self, result: Any, device: torch.device, home: Any) -> None:
        api = self._api

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            if api.holds(device, tensor):
                api.keep(tensor, home)
            return tensor

        map_tensors(keep, result)

    def _lend(self, device: torch.device) -> _Worker:
        with self._lock:
            if self._idle[device]:
                return self._idle[device].pop()  # the warmest one
        stream = self._api.new_stream(device) if self._queues(device) else None
        worker = _Worker(self, device, stream)
        with self._lock:
            self._workers.add(worker)
        return worker

    def _give_back(self, worker: _Worker) -> None:
        with self._lock:
            if len(self._idle[worker.device]) < MOST_IDLE:
                self._idle[worker.device].append(worker)
                return
            self._workers.discard(worker)
        worker.inbox.put(None)

    def close(self) -> None:
        """End all threads, and wait for their jobs as long as that is worth it."""
        self._closed = True
        with self._lock:
            workers = list(self._workers)
        deadline = time.monotonic() + EXIT_SECONDS
        for worker in workers:
            worker.inbox.put(None)
        for worker in workers:
            worker.join(max(0.0, deadline - time.monotonic()))


class _Call:
    """What the jobs of one call have in common."""

    def __init__(
        self,
        api: DeviceApi,
        state: _thread_state.ThreadState,
        homes: dict[torch.device, _Home],
        num_threads: int,
        on_host: int,
        devices: Sequence[torch.device],
    ) -> None:
        self._api, self._state, self._homes = api, state, homes
        # The threads inside of operators are divided among the jobs that compute on
        # the host: together they take as many as their caller would.
        self._host_threads = max(1, num_threads // on_host)
        self._num_threads = num_threads
        self._twice = {d for d in homes if devices.count(d) > 1}
        self.results: list[Any] = [None] * len(devices)
        self.events: dict[int, Any] = {}
        self.errors: list[BaseException] = []
        self.has_set_threads = False

    def task(self, i: int, job: Job) -> Callable[[_Worker], None]:
        """Return job ``i`` as a worker does it. It raises nothing."""
        context = contextvars.copy_context()

        def task(worker: _Worker) -> None:
            try:
                self.results[i] = context.run(self._do, i, job, worker)
            except BaseException as error:
                self.errors.append(error)

        return task

    def _do(self, i: int, job: Job, worker: _Worker) -> Any:
        device = worker.device
        on_host = device.type == "cpu"
        wanted = self._host_threads if on_host else self._num_threads
        if torch.get_num_threads() != wanted:
            self.has_set_threads = True
            torch.set_num_threads(wanted)
        state = self._state
        if device in self._twice:
            # A cast that one stream has queued must not be read by another.
            state = state._replace(cache=False)
        with _thread_state.entered(state):
            if worker.stream is None:
                return job()
            with self._api.using(worker.stream):
                self._api.wait(worker.stream, self._homes[device].event)
                try:
                    return job()
                finally:
                    self.events[i] = self._api.record(worker.stream)


def _queues(device: torch.device) -> bool:
    """Tell whether work on ``device`` is queued, on streams of one's own."""
    return device.type != "cpu" and has_streams(device)


_all: weakref.WeakSet[Threads] = weakref.WeakSet()
#: Those of the process.
threads = Threads()


@atexit.register
def _close_all() -> None:
    for each in list(_all):
        each.close()


def _begin_all() -> None:
    for each in list(_all):
        each._begin()


os.register_at_fork(after_in_child=_begin_all)
