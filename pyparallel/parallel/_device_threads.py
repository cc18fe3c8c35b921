"""Run jobs on the threads of devices, with their caller's modes and their own streams.

Note: [streams of jobs]. A job's stream waits for the work that its caller has queued on
the device, and the caller's streams wait for the job. The host does not wait.

The arguments belong to the caller's streams. Their memory can be reused there only
after the caller's streams wait for the job, because the jobs are kept until then. A
backward pass runs later on the job's stream and then frees the tensors that the forward
pass saved, without a wait. So the arguments are recorded on the job's stream too.

The results belong to the job's stream, so they are recorded on the caller's stream.
Tensors inside objects that are not containers are not found. They are safe if all calls
come from one stream, because the job's stream waits for it before it allocates again.
"""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from ..batch.container import map_tensors
from ..core import thread_state
from ..core.devices import HOST
from ..core.errors import add_note
from ..transfer.device import TorchDevice, keep_parts, torch_device
from ..transfer.to_device import has_streams
from ._thread_pool import Place, Task, ThreadPool

Job = Callable[[], Any]


def _has_streams(device: torch.device) -> bool:
    """Return True if work on ``device`` is queued on streams."""
    return device.type != "cpu" and has_streams(device)


class DeviceThreads:
    """The threads of all devices.

    Args:
        api: functions of devices with streams.
        has_streams: returns True for a device with streams.
    """

    def __init__(
        self,
        api: TorchDevice = torch_device,
        has_streams: Callable[[torch.device], bool] = _has_streams,
    ) -> None:
        self._api, self._has_streams = api, has_streams
        self.pool = ThreadPool(lambda d: api.new_stream(d) if has_streams(d) else None)

    def run(
        self,
        devices: Sequence[torch.device],
        jobs: Sequence[Job],
        cancel: Callable[[], None],
        uses: Callable[[int], Any] = lambda i: (),
    ) -> list[Any]:
        """Run each job on a thread of its device and return the results in order.

        Jobs run with the modes and context variables of this thread. A single job runs
        in this thread, on its current stream. So do all jobs in a transform of
        ``torch.func`` and in a trace. Of several jobs this thread runs the first one
        without a stream, unless it has modes that other threads do not get.

        Args:
            devices: the device of each job. A device may be used by several jobs.
            jobs: functions. Tensors of their device are found in containers of their
                results.
            cancel: see `ThreadPool.run`.
            uses: returns the tensors that job ``i`` reads, in containers. The thread of
                the job calls it, and only for a device with streams.

        Raises:
            RuntimeError: a stream is under graph capture. No job has run.
            BaseException: the error of a job, after all jobs have ended. An error of
                the job in this thread cancels the other jobs.

        Stream: see Note [streams of jobs].
        """
        state = thread_state.capture()
        if len(jobs) == 1 or self.pool.closed or thread_state.is_transformed():
            both = zip(devices, jobs, strict=True)
            return [self._run_here(device, job, state) for device, job in both]
        caller_streams = self._caller_streams(dict.fromkeys(devices))
        group = _JobGroup(self._api, state, devices, caller_streams, uses)
        tasks = [group.task(i, job) for i, job in enumerate(jobs)]
        own = None
        if thread_state.is_capturable():
            own = next(
                (i for i, d in enumerate(devices) if d not in caller_streams), None
            )
        try:
            self.pool.run(devices, tasks, cancel, own)
        finally:
            group.end()
        for error in group.errors:
            raise error
        if group.caller_streams:
            for device, result in zip(devices, group.results, strict=True):
                if device in group.caller_streams:
                    _record_stream(
                        self._api, result, device, group.caller_streams[device].stream
                    )
        return group.results

    def _run_here(
        self, device: torch.device, job: Job, state: thread_state.ThreadState
    ) -> Any:
        """Run a job in this thread and restore the modes of the thread after it."""
        with thread_state.preserved(state):
            if not self._has_streams(device):
                return contextvars.copy_context().run(job)
            with self._api.using(self._api.current_stream(device)):
                return contextvars.copy_context().run(job)

    def _caller_streams(
        self, devices: Iterable[torch.device]
    ) -> dict[torch.device, _CallerStream]:
        """Return the caller's stream of each device with streams."""
        streams: dict[torch.device, Any] = {}
        for device in devices:
            if not self._has_streams(device):
                continue
            stream = streams[device] = self._api.current_stream(device)
            if self._api.is_capturing(stream):
                raise RuntimeError(
                    f"parallel_apply: the current stream of {device} must not be under "
                    "graph capture, but is. Use one device: its calls run in the "
                    "caller's thread and on the caller's stream."
                )
        return {
            d: _CallerStream(stream, self._api.record(stream))
            for d, stream in streams.items()
        }


def _record_stream(
    api: TorchDevice, tree: Any, device: torch.device, stream: Any
) -> None:
    """Record tensors on a stream other than their own, which reads them."""
    map_tensors(lambda tensor: keep_parts(api, device, tensor, stream), tree)


class _CallerStream(NamedTuple):
    """A current stream of the caller, and an event at the time of the call."""

    stream: Any
    event: Any


class _JobGroup:
    """The jobs of one call, their results and their errors."""

    def __init__(
        self,
        api: TorchDevice,
        state: thread_state.ThreadState,
        devices: Sequence[torch.device],
        caller_streams: dict[torch.device, _CallerStream],
        uses: Callable[[int], Any],
    ) -> None:
        self._uses, self._caller = uses, threading.get_ident()
        self._api, self._state, self._devices = api, state, devices
        self.caller_streams = caller_streams
        self._repeated = {d for d in caller_streams if devices.count(d) > 1}
        # The threads of torch's operators are divided among the jobs on the host:
        # together they use the caller's number of threads.
        self._num_threads = torch.get_num_threads()
        on_host = devices.count(HOST)
        self._host_threads = max(1, self._num_threads // max(1, on_host))
        self._has_set_threads = False
        self.results: list[Any] = [None] * len(devices)
        self.errors: list[BaseException] = []
        self._done: dict[int, Any] = {}

    def task(self, i: int, job: Job) -> Task:
        """Return job ``i`` as a task of the thread pool."""
        context = contextvars.copy_context()

        def task(place: Place) -> None:
            if threading.get_ident() == self._caller:
                with thread_state.preserved(self._state):
                    self.results[i] = context.run(self._run_job, i, job, place)
                return
            try:
                self.results[i] = context.run(self._run_job, i, job, place)
            except BaseException as error:
                self.errors.append(error)

        return task

    def end(self) -> None:
        """Let the caller's streams wait for the jobs, also after an error."""
        for i, event in self._done.items():
            self._api.wait(self.caller_streams[self._devices[i]].stream, event)
        if self._has_set_threads:  # new threads inherit the latest number
            torch.set_num_threads(self._num_threads)

    def _run_job(self, i: int, job: Job, place: Place) -> Any:
        device = place.device
        num_threads = self._host_threads if device == HOST else self._num_threads
        if torch.get_num_threads() != num_threads:
            self._has_set_threads = True
            torch.set_num_threads(num_threads)
        state = self._state
        if device in self._repeated:
            # One stream must not read an autocast result that another one computes.
            state = state._replace(cache=False)
        if place.stream is None and thread_state.capture() == state:
            return job()  # the next job compares the modes again
        with thread_state.applied(state):
            if place.stream is None:
                return job()
            with self._api.using(place.stream):
                self._api.wait(place.stream, self.caller_streams[device].event)
                try:
                    _record_stream(self._api, self._uses(i), device, place.stream)
                    return job()
                finally:
                    self._done[i] = self._api.record(place.stream)


#: The threads of this process.
threads = DeviceThreads()


class Call(NamedTuple):
    """A call of a function, for the item or replica of this number."""

    number: int
    fn: Callable[..., Any]
    args: Sequence[Any]
    kwargs: Mapping[str, Any]


def run_calls(
    devices: Sequence[torch.device], parts: Sequence[Sequence[Call]], num_calls: int
) -> list[Any]:
    """Run the calls of each part on its device and return all results in order.

    Raises:
        BaseException: the error of the first call, by number, that raised. Later calls
            that have not begun are skipped.
    """
    if not parts:
        return []
    failure, caller = _FirstError(num_calls), threading.get_ident()

    def job(part: Sequence[Call], device: torch.device) -> Callable[[], list[Any]]:
        def run_part() -> list[Any]:
            results = []
            for call in part:
                if call.number >= failure.first:
                    break
                try:
                    results.append(call.fn(*call.args, **call.kwargs))
                except BaseException as error:
                    failure.add(call.number, error, device)
                    # Ctrl-C: no further call of any number begins.
                    if (
                        isinstance(error, KeyboardInterrupt)
                        and threading.get_ident() == caller
                    ):
                        raise
            return results

        return run_part

    jobs = [job(part, device) for part, device in zip(parts, devices, strict=True)]

    def uses(i: int) -> Any:
        return [(call.args, call.kwargs, module_tensors(call.fn)) for call in parts[i]]

    try:
        done = threads.run(devices, jobs, failure.stop, uses)
        if failure.error is not None:
            raise failure.error
    finally:
        failure.error = None  # its traceback refers to this frame
    return [result for part in done for result in part]


def module_tensors(fn: Any) -> list[torch.Tensor]:
    """Return the parameters and buffers of a module or replica, or of its method."""
    module = fn if isinstance(fn, nn.Module) else getattr(fn, "__self__", None)
    if not isinstance(module, nn.Module):
        return []
    tensors = [*module.parameters(), *module.buffers()]
    for each in module.modules():  # a replica's parameters are plain tensors
        tensors += each.__dict__.get("_former_parameters", {}).values()
    return tensors


class _FirstError:
    """The error of the first call, by number, that failed."""

    def __init__(self, num_calls: int) -> None:
        self.first = num_calls
        self.error: BaseException | None = None
        self._lock = threading.Lock()

    def add(self, number: int, error: BaseException, device: torch.device) -> None:
        with self._lock:
            if number < self.first:
                self.first, self.error = number, error
                add_note(error, f"in item {number} on device {device}")

    def stop(self) -> None:
        """Skip all calls that have not begun."""
        with self._lock:
            self.first = -1
