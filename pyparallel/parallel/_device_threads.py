"""Jobs on threads of devices, with the modes of their caller and streams of their own.

Note: [streams of jobs]. A job's stream waits for what its caller had queued on the
device; the caller's streams wait for the job. Nothing waits on the host. What the
caller's memory is used for on a job's stream therefore comes before whatever it is
reused for on the caller's, as long as it is not freed before the caller's streams wait:
jobs are held until then. But a backward pass runs on the job's stream later, and gives
back what the forward pass saved when nobody waits: so the allocator is told of that
stream too. What a job returns belongs to the job's stream, so the allocator is told of
the caller's. A tensor inside of an object that is no container is not seen there: it is
safe where one stream calls, since the job's stream waits for that one before it
allocates again.
"""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch

from ..batch.container import map_tensors
from ..core import thread_state
from ..core.devices import HOST
from ..transfer.device import DeviceApi, torch_device
from ..transfer.to_device import has_streams
from ._thread_pool import Place, Pool, Task

Job = Callable[[], Any]


def _queues(device: torch.device) -> bool:
    """Tell whether work on ``device`` is queued, on streams of one's own."""
    return device.type != "cpu" and has_streams(device)


class Threads:
    """The threads of all devices.

    Args:
        api: of devices with streams.
        queues: tells which devices those are.
    """

    def __init__(
        self,
        api: DeviceApi = torch_device,
        queues: Callable[[torch.device], bool] = _queues,
    ) -> None:
        self._api, self._queues = api, queues
        self.pool = Pool(lambda d: api.new_stream(d) if queues(d) else None)

    def run(
        self,
        devices: Sequence[torch.device],
        jobs: Sequence[Job],
        cancel: Callable[[], None],
        uses: Callable[[int], Any] = lambda i: (),
    ) -> list[Any]:
        """Run every job on a thread of its device; return what they return, in order.

        Jobs have the modes and the context variables of this thread. One alone runs in
        this thread, on its current stream; of several this thread does the first one
        that needs no stream, unless it has modes that are not carried.

        Args:
            devices: one for each job; any may be there more than once.
            jobs: they return tensors of their device, in containers, or anything.
            cancel: see `Pool.do`.
            uses: gives the tensors that job ``i`` is given, in containers. It is asked
                by the job's thread, and where there are streams only.

        Raises:
            RuntimeError: a stream is under graph capture; nothing has run.
            BaseException: what a job raised, when all are done. What it raises in this
                thread cancels the others.

        Stream: see Note [streams of jobs].
        """
        state = thread_state.take()
        if len(jobs) == 1 or self.pool.closed:
            both = zip(devices, jobs, strict=True)
            return [self._here(device, job, state) for device, job in both]
        homes = self._homes(dict.fromkeys(devices))
        call = _Call(self._api, state, devices, homes, uses)
        tasks = [call.task(i, job) for i, job in enumerate(jobs)]
        own = None
        if thread_state.is_plain():
            own = next((i for i, d in enumerate(devices) if d not in homes), None)
        try:
            self.pool.do(devices, tasks, cancel, own)
        finally:
            call.end()
        for error in call.errors:
            raise error
        if call.homes:
            for device, result in zip(devices, call.results, strict=True):
                if device in call.homes:
                    _keep(self._api, result, device, call.homes[device].stream)
        return call.results

    def _here(
        self, device: torch.device, job: Job, state: thread_state.ThreadState
    ) -> Any:
        """Run a job in this thread, which has its modes already, and keeps them."""
        with thread_state.kept(state):
            if not self._queues(device):
                return contextvars.copy_context().run(job)
            with self._api.using(self._api.current_stream(device)):
                return contextvars.copy_context().run(job)

    def _homes(self, devices: Iterable[torch.device]) -> dict[torch.device, _Home]:
        """Return the caller's stream of every device that has any."""
        streams: dict[torch.device, Any] = {}
        for device in devices:
            if not self._queues(device):
                continue
            stream = streams[device] = self._api.current_stream(device)
            if self._api.is_capturing(stream):
                raise RuntimeError(
                    f"parallel_apply: the current stream of {device} must not be under "
                    "graph capture, but is. Use one device: its calls run in the "
                    "thread and on the stream of their caller."
                )
        return {
            d: _Home(stream, self._api.record(stream)) for d, stream in streams.items()
        }


def _keep(api: DeviceApi, tree: Any, device: torch.device, stream: Any) -> None:
    """Tell the allocator that a stream reads tensors that belong to another one."""

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if api.holds(device, tensor) and tensor.layout is torch.strided:
            api.keep(tensor, stream)
        return tensor

    map_tensors(keep, tree)


class _Home(NamedTuple):
    """A stream of the caller, and what was queued on it when it called."""

    stream: Any
    event: Any


class _Call:
    """What the jobs of one call have in common."""

    def __init__(
        self,
        api: DeviceApi,
        state: thread_state.ThreadState,
        devices: Sequence[torch.device],
        homes: dict[torch.device, _Home],
        uses: Callable[[int], Any],
    ) -> None:
        self._uses, self._caller = uses, threading.get_ident()
        self._api, self._state, self._devices = api, state, devices
        self.homes = homes
        self._twice = {d for d in homes if devices.count(d) > 1}
        # The threads inside of operators are divided among the jobs that compute on
        # the host: together they take as many as their caller would.
        self._num_threads = torch.get_num_threads()
        on_host = devices.count(HOST)
        self._host_threads = max(1, self._num_threads // max(1, on_host))
        self._has_set_threads = False
        self.results: list[Any] = [None] * len(devices)
        self.errors: list[BaseException] = []
        self._done: dict[int, Any] = {}

    def task(self, i: int, job: Job) -> Task:
        """Return job ``i`` as a thread does it."""
        context = contextvars.copy_context()

        def task(place: Place) -> None:
            if threading.get_ident() == self._caller:
                with thread_state.kept(self._state):
                    self.results[i] = context.run(self._do, i, job, place)
                return
            try:
                self.results[i] = context.run(self._do, i, job, place)
            except BaseException as error:
                self.errors.append(error)

        return task

    def end(self) -> None:
        """Let the caller's streams wait; also after an error, which ends no copy."""
        for i, event in self._done.items():
            self._api.wait(self.homes[self._devices[i]].stream, event)
        if self._has_set_threads:  # what threads start with that others start later
            torch.set_num_threads(self._num_threads)

    def _do(self, i: int, job: Job, place: Place) -> Any:
        device = place.device
        wanted = self._host_threads if device == HOST else self._num_threads
        if torch.get_num_threads() != wanted:
            self._has_set_threads = True
            torch.set_num_threads(wanted)
        state = self._state
        if device in self._twice:
            # A cast that one stream has queued must not be read by another.
            state = state._replace(cache=False)
        if place.stream is None and thread_state.take() == state:
            return job()  # what it may leave behind, the next one sees here
        with thread_state.entered(state):
            if place.stream is None:
                return job()
            with self._api.using(place.stream):
                self._api.wait(place.stream, self.homes[device].event)
                try:
                    _keep(self._api, self._uses(i), device, place.stream)
                    return job()
                finally:
                    self._done[i] = self._api.record(place.stream)


#: Those of the process.
threads = Threads()
