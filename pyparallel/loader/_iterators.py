"""The iterators of a loader, on top of torch's two iterators.

`InProcessIterator` works without workers, `WorkersIterator` with workers. Both measure
their batches with the meter of a `BatchReceiver`.
"""

from __future__ import annotations

import contextlib
import operator
import os
import pickle
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import dataloader

from ..batch import pytree
from ..batch.container import DataContainer
from ..batch.stack import PaddingCounter
from ..core.errors import LoaderWarning, warn_once
from ..core.torch_private import (
    MP_STATUS_CHECK_INTERVAL,
    DatasetKind,
    InProcessIter,
    RangeInC,
    WorkersIter,
    forget_workers,
    is_profiling,
)
from ..core.tracing import span
from ..shm import memfd, pinning
from . import worker_monitor
from ._batch_receiver import BatchReceiver
from ._dataset_state import worker_report
from ._random_state import SampleTask
from ._sample_reader import NO_SAMPLES
from ._worker import NoBatch, WorkerCollate, WorkerInit
from ._worker_status import WorkerStatus, starting_workers
from .preflight import check_workers_are_processes, start_method_of
from .sample_errors import Failure
from .state_dict import InterceptedAttribute, StatefulIterator, wrap_worker_init
from .stats import warn_about_padding
from .tracebacks import (
    LocatingFetcher,
    add_note,
    format_indices,
    hide_frames,
    rank_text,
)

#: The globals of torch's methods. Methods of other libraries have other globals.
_TORCH_GLOBALS = vars(dataloader)

#: Classes of leaves that contain no tensors.
_WITHOUT_TENSORS = frozenset((int, float, bool, str, bytes, type(None)))

#: A warning follows if a worker does not begin the next batch for this time.
_IDLE_SECONDS = 60.0


class _UnrecordedIterator(InProcessIter):
    """torch's iterator without workers, which records no range without a profiler.

    torch records a range around each batch, even if no profiler runs. For cheap
    datasets, this takes a third of the time.
    """

    def __next__(self) -> Any:
        inherited = InProcessIter.__next__
        if (
            is_profiling()
            or self._IterableDataset_len_called is not None  # torch checks the length
            or getattr(inherited, "__globals__", None) is not _TORCH_GLOBALS
        ):
            return super().__next__()
        # This range is for profilers that Python did not start.
        with RangeInC(self._profile_name):
            batch = self._next_data()  # type: ignore[no-untyped-call]
        self._num_yielded += 1
        return batch


class InProcessIterator(StatefulIterator, _UnrecordedIterator):
    """The iterator of a loader without workers. Measures torch's iterator."""

    _collate_fn = InterceptedAttribute(lambda it, value: it.measure_collate(value))
    _dataset_fetcher = InterceptedAttribute(
        lambda it, fetcher: LocatingFetcher(fetcher, add_note)
    )

    def __init__(self, loader: Any, receiver: BatchReceiver) -> None:
        self._receiver = receiver
        receiver.meter.pause()
        super().__init__(loader)

    def measure_collate(self, collate_fn: Any) -> Any:
        """Wrap the collate function to measure its time."""
        # The start of `collate_fn` by both clocks, and its duration by the first one.
        # In a list, because a reference to the iterator would be a cycle.
        times: list[Any] = [0, 0.0, 0]
        self._collate_times = times
        clock, cpu_clock = self._receiver.meter.clock, time.process_time

        def collate(samples: Any) -> Any:
            if samples is NO_SAMPLES:
                return samples
            times[0], times[1] = start, _ = clock(), cpu_clock()
            batch = collate_fn(samples)
            times[2] = clock() - start
            return batch

        return collate

    def _next_data(self) -> Any:
        # A batch of a cheap dataset takes 20 us, so each call here counts.
        meter = self._receiver.meter
        start, cpu = meter.clock(), time.process_time()
        try:
            with span("pyparallel.wait"), PaddingCounter() as stacked:
                # torch's iterators are untyped.
                batch = super()._next_data()  # type: ignore[no-untyped-call]
                while batch is NO_SAMPLES:
                    self._leave_batch_out()
                    batch = super()._next_data()  # type: ignore[no-untyped-call]
        except BaseException as error:
            meter.count_wait(start)
            if isinstance(error, StopIteration):
                meter.pause()
                if self._progress.policy is not None:  # after the last sample
                    self._count_failures(self._progress.policy.take_failures())
                self._progress.check_end()
            raise
        if self._progress.policy is not None:
            self._count_failures(self._progress.policy.take_failures())
        padding_nbytes = stacked.padding_nbytes
        collate_start, collate_cpu, collate_ns = self._collate_times
        meter.count_batch(
            start,
            collate_start,
            collate_ns,
            collate_cpu - cpu,
            _nbytes(batch),
            stacked.stacked_nbytes,
            padding_nbytes,
        )
        if padding_nbytes:
            warn_about_padding(meter, stacked.stacked_nbytes, padding_nbytes)
        return batch

    def _leave_batch_out(self) -> None:
        """Count a batch whose samples all failed."""
        progress: Any = self._progress
        self._dataset.restore()
        self._count_failures(progress.policy.take_failures())
        progress.leave_out()
        progress.count_local_batch()


class WorkersIterator(StatefulIterator, WorkersIter):
    """The iterator of a loader with workers, which serialize batches into the ring."""

    # torch sends these functions to its workers, so wrap them when torch sets them.
    _collate_fn = InterceptedAttribute(lambda it, value: it.wrap_collate(value))
    _worker_init_fn = InterceptedAttribute(lambda it, value: it.wrap_init(value))

    def __init__(self, loader: Any, receiver: BatchReceiver) -> None:
        check_workers_are_processes(loader)  # the context may be another one now
        self._pid = os.getpid()
        self._receiver = receiver
        receiver.meter.pause()
        self._ring = receiver.ring_for(loader.num_workers, loader.prefetch_factor)
        if receiver.is_new:
            receiver.is_new = False
            for finding in filter(operator.attrgetter("warns"), loader.preflight()):
                warn_once("PP209", finding.text, LoaderWarning, finding.name)
        self._first_holder = 0
        self._sent: dict[int, Any] = {}  # tasks by number
        if self._ring is not None:
            self._first_holder = self._ring.new_holders(loader.num_workers)
            pinner = pinning.accelerator_pinner() if loader.pin_memory else None
            if pinner is not None:
                self._ring.pin(pinner)
        self._status: WorkerStatus | None = None
        self._idle_since: float | None = None  # during a wait for the next batch
        if memfd.is_supported():
            with contextlib.suppress(OSError):  # no file descriptor is left
                self._status = WorkerStatus()
        with starting_workers(self._status):
            super().__init__(loader)
        self._start_method = start_method_of(loader)
        worker_monitor.take_over(self)

    def wrap_collate(self, collate_fn: Any) -> WorkerCollate:
        """Return the collate function of the workers."""
        return WorkerCollate(
            *(collate_fn, self._ring, self._first_holder, worker_report, self._status),
            self._progress.policy,
        )

    def wrap_init(self, worker_init_fn: Any) -> Any:
        """Return the ``worker_init_fn`` of the workers."""
        if "_worker_init_fn" in vars(self):  # torch wraps ours for a DataPipe
            return worker_init_fn
        return WorkerInit(wrap_worker_init(self, worker_init_fn), self._status)

    def pending(self, worker: int) -> list[Any]:
        """Return the indices of each batch of a worker that has not arrived."""
        if self._dataset_kind != DatasetKind.Map:
            return []
        # Atomic copies, because another thread may send tasks.
        sent, known = self._sent.copy(), self._task_info.copy()
        tasks = [
            sent[number]
            for number, (by, *received) in known.items()
            if by == worker and not received and number in sent
        ]
        return [
            task.indices if isinstance(task, SampleTask) else task for task in tasks
        ]

    def _reset(self, loader: Any, first_iter: bool = False) -> None:
        self._end_failures: tuple[Failure, ...] = ()
        super()._reset(loader, first_iter)

    def _next_index(self) -> Any:
        if self._turn:
            for _ in range(self._turn):
                next(self._worker_queue_idx_cycle)
            self._turn = 0
        index = super()._next_index()  # type: ignore[no-untyped-call]
        if len(self._sent) > 2 * self._prefetch_factor * self._num_workers:
            self._sent = {
                number: self._sent[number]
                for number in self._task_info
                if number in self._sent
            }
        self._sent[self._send_idx] = index
        return index

    def _try_get_data(self, timeout: float = MP_STATUS_CHECK_INTERVAL) -> Any:
        # Wait in slices, and check the workers after each.
        deadline = time.monotonic() + timeout
        while True:
            left = max(0.0, deadline - time.monotonic())
            wait = min(worker_monitor.SLICE, left)
            found = super()._try_get_data(wait)  # type: ignore[no-untyped-call]
            self._warn_if_idle(arrived=found[0])
            if found[0] or left <= worker_monitor.SLICE:
                return found

    def __next__(self) -> Any:
        self._check_process()
        handled = sys.exc_info()[1]
        try:
            return super().__next__()
        except Exception as error:
            worker_monitor.clear_error_frames(error, self, handled)
            hide_frames(error)
            raise

    def _check_process(self) -> None:
        """Raise RuntimeError in a process that was forked after the workers started.

        It shares their queues with its parent, so it would take batches of the parent.
        """
        if os.getpid() != self._pid:
            raise RuntimeError(
                "DataLoader: an iterator with workers must be used in the process that "
                f"made it, pid {self._pid}, but this is pid {os.getpid()}, to which "
                "its batches do not belong. Call iter() of the loader in this process."
            )

    def _warn_if_idle(self, *, arrived: bool) -> None:
        """Warn if a worker has not begun the next batch for a minute."""
        # No task, while a new epoch waits for the last tasks of an old one.
        status, task = self._status, self._task_info.get(self._rcvd_idx)
        if arrived or status is None or task is None or status.is_busy(task[0]):
            self._idle_since = None
        elif self._idle_since is None:
            self._idle_since = time.monotonic()
        elif not self._timeout and time.monotonic() - self._idle_since >= _IDLE_SECONDS:
            text = self.describe_late()
            warn_once("PP214", f"DataLoader: {text}", LoaderWarning, text[:40])

    def describe_late(self) -> str:
        """Return the state of the worker that makes the next batch, and advice."""
        status, (worker, *_) = self._status, self._task_info.get(self._rcvd_idx, (0,))
        process = self._workers[worker]
        rank, pending = rank_text(), self.pending(worker)
        batch = (
            f"the batch of indices {format_indices(pending[0])}"
            if pending
            else "its batch"
        )
        text = f"worker {worker} (pid {process.pid}{', ' if rank else ''}{rank})"
        if status is None or status.is_busy(worker):
            return (
                f"{text} has not finished {batch}. Increase timeout, or look for a "
                "call in the dataset that blocks."
            )
        stack = status.stack(worker, process.pid)
        advice = (
            "It may wait for a lock that a thread held during fork: use "
            'multiprocessing_context="forkserver", or start the workers before the '
            "threads."
            if self._start_method == "fork"
            else f"With {self._start_method} it first imports the main module and "
            "unpickles the dataset. Look for a slow import, or for a call in "
            "worker_init_fn that blocks."
        )
        return f"{text} is alive but has not begun {batch}. {advice}" + (
            f" The stack of the worker:\n{stack}" if stack else ""
        )

    def has_lost_worker(self) -> bool:
        """Return True if a worker has died. This ends the other workers, too."""
        if self._pid != os.getpid():  # a fork: the workers belong to its parent
            return True
        lost = self._shutdown or not all(worker.is_alive() for worker in self._workers)
        if lost:
            self._shutdown_workers()
        return lost

    def _next_data(self) -> Any:
        meter = self._receiver.meter
        self._idle_since = None
        try:
            with (
                meter.waiting(),
                span("pyparallel.wait"),
                worker_monitor.ExplainedErrors(self),
            ):
                # torch's iterators are untyped.
                received = super()._next_data()  # type: ignore[no-untyped-call]
                while isinstance(received, NoBatch):
                    self._count_no_batch(received)
                    received = super()._next_data()  # type: ignore[no-untyped-call]
                batch = self._receiver.receive(received)
        except StopIteration:
            meter.pause()
            # Not earlier: the workers of a resumed epoch send them again.
            failures, self._end_failures = self._end_failures, ()
            self._count_failures(failures)
            self._progress.check_end()
            raise
        timings = received.message.timings
        if timings.failures:
            self._count_failures(timings.failures)
        if timings.report is not None:
            self._progress.dataset.report = pickle.loads(timings.report)
        return batch

    def _count_no_batch(self, message: NoBatch) -> None:
        if message.at_end:
            self._end_failures += message.failures
            return
        progress = self._progress
        self._count_failures(message.failures)
        progress.leave_out()
        if message.report is not None:
            progress.dataset.report = pickle.loads(message.report)
        progress.count_batch(self._rcvd_idx)

    def _shutdown_workers(self) -> None:
        if not hasattr(self, "_first_holder"):  # no worker was started
            return
        if self._pid != os.getpid():  # the workers belong to the parent of this fork
            if self._worker_pids_set:
                forget_workers(self)
            return
        if worker_monitor.serves_queue():  # the garbage collector runs in its thread
            threading.Thread(target=self._end, name="pyparallel-end").start()
            return
        self._end()

    def _end(self) -> None:
        """End the workers, and free their slabs."""
        super()._shutdown_workers()
        ring = getattr(self, "_ring", None)
        if ring is None or not ring.created_here:
            return
        for i, worker in enumerate(getattr(self, "_workers", ())):
            if not worker.is_alive():  # a live worker may be writing
                ring.reclaim(self._first_holder + i)

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        """End the workers, unless exit handlers of the interpreter have done so.

        Note: [interpreter exit]. After the exit handlers, the interpreter clears the
        globals of all modules and drops the remaining objects. No code of this package
        runs then. ``weakref.finalize`` calls nothing after the exit handlers. This
        method overrides torch's, so it must check this itself, without a global.
        """
        if not is_finalizing():
            super().__del__()


def _nbytes(batch: Any) -> int:
    """Return the bytes of all tensors in a batch."""
    try:
        return _sum_nbytes(batch, 0)
    except Exception:  # a reference cycle, or an object that fails to be read
        return 0


def _sum_nbytes(batch: Any, depth: int) -> int:
    cls = type(batch)
    # Faster for most batches: `pytree.flatten` takes twice as long.
    if cls is dict or cls is list or cls is tuple:
        if depth > pytree.MAX_DEPTH:
            raise pytree.nesting_error("the batch")
        total = 0
        for value in batch.values() if cls is dict else batch:
            if type(value) not in _WITHOUT_TENSORS:
                total += _sum_nbytes(value, depth + 1)
        return total
    if isinstance(batch, torch.Tensor):
        return batch.numel() * batch.element_size()
    if isinstance(batch, DataContainer):
        return _sum_nbytes(batch.data, depth + 1)
    leaves, _ = pytree.flatten(batch)
    if len(leaves) == 1 and leaves[0] is batch:
        return 0
    return sum(_sum_nbytes(leaf, depth + 1) for leaf in leaves)
