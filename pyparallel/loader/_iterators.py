"""The iterators of a loader, and what they share: the ring and the meter."""

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
from ..core.errors import BatchValueError, LoaderWarning, warn_once
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
from ..shm.ring import Ring, largest_slab, total_nbytes
from ..shm.serialization import Message, ReceivedBatch, RingMiss
from . import preflight as preflight_module
from . import worker_monitor
from ._dataset_state import worker_report
from ._random_state import SampleTask
from ._worker import WorkerCollate, WorkerInit, WorkerTimings
from ._worker_status import WorkerStatus, starting_workers
from .state_dict import InterceptedAttribute, StatefulIterator, enter
from .stats import Meter, warn_about_padding
from .tracebacks import (
    LocatingFetcher,
    add_note,
    format_indices,
    hide_frames,
    rank_text,
)

#: Slabs beside those of the batches that workers have in hand: what a training loop
#: and a `PreDataLoader` hold at a time.
_SPARE_SLABS = 6
#: Memory that a system may have left that does not tell.
_UNKNOWN_NBYTES = 1 << 30

#: Of torch's own methods. A method with others was put there by another library.
_TORCHS_GLOBALS = vars(dataloader)

#: Classes whose values are leaves without bytes of tensors.
_WITHOUT_TENSORS = frozenset((int, float, bool, str, bytes, type(None)))

#: The header of a ring has no more lines.
_MOST_SLABS = 65536
#: More bytes than any machine's memory, and fewer than an address space.
_MOST_BYTES = 1 << 44

#: How long a worker may not begin the batch that is waited for before a warning.
_IDLE_SECONDS = 60.0


class BatchReceiver:
    """Where batches arrive: a ring that outlives epochs, and a meter.

    It knows nothing of the loader, so that no cycle keeps a dropped loader alive.

    Args:
        ring_slabs: as for `pyparallel.DataLoader`.
        max_ring_bytes: as for `pyparallel.DataLoader`.
    """

    def __init__(self, ring_slabs: int | None, max_ring_bytes: int | None) -> None:
        self.meter = Meter()
        self.ring: Ring | None = None
        self.is_new = True
        self._ring_slabs, self._max_ring_bytes = ring_slabs, max_ring_bytes

    def ring_for(self, num_workers: int, prefetch_factor: int) -> Ring | None:
        """Return the ring; None if there is none to be had."""
        # A forked process creates its own ring.
        if self.ring is None or not self.ring.created_here:
            num_slabs = self._ring_slabs
            if num_slabs is None:
                num_slabs = num_workers * prefetch_factor + _SPARE_SLABS
            self.ring = self._new_ring(min(num_slabs, _MOST_SLABS))
        return self.ring

    def _new_ring(self, num_slabs: int) -> Ring | None:
        limit = self._max_ring_bytes
        if limit is None:
            left = preflight_module.Machine().memory_left()
            limit = (left[0] if left else _UNKNOWN_NBYTES) // 2
        limit = min(limit, _MOST_BYTES)
        if not memfd.is_supported() or not limit or not num_slabs:
            return None
        slab_nbytes = largest_slab(num_slabs, limit)
        if not slab_nbytes:
            warn_once(
                "PP206",
                f"DataLoader: a ring of {num_slabs} slabs must have "
                f"{total_nbytes(num_slabs, 1)} bytes or more, but may have {limit}. "
                "Raise max_ring_bytes, or lower ring_slabs; 0 is no ring. Until then "
                "every batch takes fresh memory.",
                LoaderWarning,
            )
            return None
        try:
            return Ring(num_slabs, slab_nbytes)
        except OSError as error:
            warn_once(
                "PP207",
                "DataLoader: the system must give memory for a ring, but says "
                f"{error.strerror!r}. Raise the limit of open files (ulimit -n) or of "
                "memory. Until then every batch takes fresh memory.",
                LoaderWarning,
            )
            return None

    def preflight(self, loader: Any) -> list[preflight_module.Finding]:
        """Return what this machine is short of for a loader with workers."""
        context = loader.multiprocessing_context
        ring = self.ring_for(loader.num_workers, loader.prefetch_factor or 2)
        return preflight_module.check(
            num_workers=loader.num_workers,
            prefetch_factor=loader.prefetch_factor,
            ring_nbytes=total_nbytes(ring.num_slabs, ring.slab_nbytes) if ring else 0,
            pin_memory=loader.pin_memory,
            start_method=context.get_start_method() if context else None,
        )

    def receive(self, received: ReceivedBatch) -> Any:
        """Return a received batch, counted."""
        batch, message = received.deserialize(), received.message
        timings: WorkerTimings = message.timings
        missed = message.miss is not None or message.unsupported is not None
        self.meter.add(
            batches=1,
            fetch_seconds=timings.fetch_seconds,
            collate_seconds=timings.collate_seconds,
            pack_seconds=timings.pack_seconds,
            fetch_cpu_seconds=timings.fetch_cpu_seconds,
            collate_cpu_seconds=timings.collate_cpu_seconds,
            pack_cpu_seconds=timings.pack_cpu_seconds,
            core_wait_seconds=timings.core_wait_seconds,
            stacked_nbytes=timings.stacked_nbytes,
            padding_nbytes=timings.padding_nbytes,
            nbytes=message.plan.nbytes if message.plan is not None else 0,
            ring_hits=int(message.is_in_ring and not missed),
            ring_misses=int(missed),
        )
        warn_about_padding(self.meter, timings.stacked_nbytes, timings.padding_nbytes)
        # A worker that began while there was no memory for a ring knows of none.
        had_ring = message.miss is None or message.miss.reason != "off"
        if missed and had_ring and self.ring is not None:
            _warn_about_miss(message, self.ring)
        return batch


class _UnrecordedIterator(InProcessIter):
    """torch's iterator without workers, whose range is free without a profiler.

    torch records a range around each batch, also for no profiler. For cheap datasets
    that is a third of its time.
    """

    def __next__(self) -> Any:
        inherited = InProcessIter.__next__
        if (
            is_profiling()
            or self._IterableDataset_len_called is not None  # torch compares the length
            or getattr(inherited, "__globals__", None) is not _TORCHS_GLOBALS
        ):
            return super().__next__()
        # Profilers that were not started from Python are seen here.
        with RangeInC(self._profile_name):
            batch = self._next_data()  # type: ignore[no-untyped-call]
        self._num_yielded += 1
        return batch


class InProcessIterator(StatefulIterator, _UnrecordedIterator):
    """The iterator of a loader without workers: torch's, measured."""

    _collate_fn = InterceptedAttribute(lambda it, function: it.timed(function))
    _dataset_fetcher = InterceptedAttribute(
        lambda it, fetcher: LocatingFetcher(fetcher, add_note)
    )

    def __init__(self, loader: Any, receiver: BatchReceiver) -> None:
        self._receiver = receiver
        receiver.meter.pause()
        super().__init__(loader)

    def timed(self, collate_fn: Any) -> Any:
        """Return a collate function that measures its time."""
        # The start of `collate_fn` by two clocks, and its time by the first one. A
        # reference to the iterator would be a cycle.
        made: list[Any] = [0, 0.0, 0]
        self._made = made
        clock, cpu_clock = self._receiver.meter.clock, time.process_time

        def collate(samples: Any) -> Any:
            made[0], made[1] = started, _ = clock(), cpu_clock()
            batch = collate_fn(samples)
            made[2] = clock() - started
            return batch

        return collate

    def _next_data(self) -> Any:
        # A cheap dataset takes 20 us for a batch: each call here is a part of that.
        meter = self._receiver.meter
        started, cpu = meter.clock(), time.process_time()
        try:
            with span("pyparallel.wait"), PaddingCounter() as stacked:
                # torch's iterators have no types.
                batch = super()._next_data()  # type: ignore[no-untyped-call]
        except BaseException as error:
            meter.waited(started)
            if isinstance(error, StopIteration):
                meter.pause()
            raise
        padding_nbytes = stacked.padding_nbytes
        collating, collating_cpu, collate_ns = self._made
        meter.made(
            started,
            collating,
            collate_ns,
            collating_cpu - cpu,
            _nbytes(batch),
            stacked.stacked_nbytes,
            padding_nbytes,
        )
        if padding_nbytes:
            warn_about_padding(meter, stacked.stacked_nbytes, padding_nbytes)
        return batch


class WorkersIterator(StatefulIterator, WorkersIter):
    """The iterator of a loader with workers: torch's, with serialized batches."""

    # What torch hands to its workers is wrapped where torch sets it.
    _collate_fn = InterceptedAttribute(lambda it, function: it.packing(function))
    _worker_init_fn = InterceptedAttribute(lambda it, function: it.preparing(function))

    def __init__(self, loader: Any, receiver: BatchReceiver) -> None:
        self._pid = os.getpid()
        self._receiver = receiver
        receiver.meter.pause()
        self._ring = receiver.ring_for(loader.num_workers, loader.prefetch_factor)
        if receiver.is_new:
            receiver.is_new = False
            for finding in filter(operator.attrgetter("warns"), loader.preflight()):
                warn_once("PP209", finding.text, LoaderWarning, finding.name)
        self._first_holder, self._pins_ring = 0, False
        self._drawn: dict[int, Any] = {}  # indices by the number of their task
        if self._ring is not None:
            self._first_holder = self._ring.new_holders(loader.num_workers)
            pinner = pinning.accelerator_pinner() if loader.pin_memory else None
            if pinner is not None:
                self._ring.pin(pinner)
                self._pins_ring = True
        self._states: WorkerStatus | None = None
        self._idle_since: float | None = None  # while the next batch is waited for
        if memfd.is_supported():
            with contextlib.suppress(OSError):  # no descriptor is left
                self._states = WorkerStatus()
        with starting_workers(self._states):
            super().__init__(loader)
        worker_monitor.take_over(self)

    def packing(self, collate_fn: Any) -> WorkerCollate:
        """Return what workers collate with."""
        return WorkerCollate(
            collate_fn, self._ring, self._first_holder, worker_report, self._states
        )

    def preparing(self, worker_init_fn: Any) -> WorkerInit:
        """Return what workers begin with."""
        return WorkerInit(enter(self, worker_init_fn), self._states)

    def pending(self, worker: int) -> list[Any]:
        """Return the indices of each batch of a worker that has not arrived."""
        if self._dataset_kind != DatasetKind.Map:
            return []
        drawn = self._drawn.copy()  # in one step: another thread may draw
        tasks = [
            drawn[number]
            for number, (by, *received) in list(self._task_info.items())
            if by == worker and not received and number in drawn
        ]
        return [
            task.indices if isinstance(task, SampleTask) else task for task in tasks
        ]

    def _next_index(self) -> Any:
        if self._turn:
            for _ in range(self._turn):
                next(self._worker_queue_idx_cycle)
            self._turn = 0
        index = super()._next_index()  # type: ignore[no-untyped-call]
        if len(self._drawn) > 2 * self._prefetch_factor * self._num_workers:
            self._drawn = {
                number: self._drawn[number]
                for number in self._task_info
                if number in self._drawn
            }
        self._drawn[self._send_idx] = index
        return index

    def _try_get_data(self, timeout: float = MP_STATUS_CHECK_INTERVAL) -> Any:
        # In slices, each of which ends with a look at the workers.
        deadline = time.monotonic() + timeout
        while True:
            left = max(0.0, deadline - time.monotonic())
            wait = min(worker_monitor.SLICE, left)
            found = super()._try_get_data(wait)  # type: ignore[no-untyped-call]
            self._warn_if_idle(found[0])
            if found[0] or left <= worker_monitor.SLICE:
                return found

    def __next__(self) -> Any:
        try:
            return super().__next__()
        except Exception as error:
            worker_monitor.clear_error_frames(error, self)
            hide_frames(error)
            raise

    def _warn_if_idle(self, arrived: bool) -> None:
        """Warn of a worker that has not begun the next batch for a minute."""
        states, (worker, *_) = self._states, self._task_info.get(self._rcvd_idx, (0,))
        if arrived or states is None or states.is_busy(worker):
            self._idle_since = None
        elif self._idle_since is None:
            self._idle_since = time.monotonic()
        elif not self._timeout and time.monotonic() - self._idle_since >= _IDLE_SECONDS:
            found = self.unfinished()
            warn_once("PP214", f"DataLoader: {found}", LoaderWarning, found[:40])

    def unfinished(self) -> str:
        """Return what the worker of the next batch does, and advice."""
        states, (worker, *_) = self._states, self._task_info.get(self._rcvd_idx, (0,))
        process = self._workers[worker]
        rank, pending = rank_text(), self.pending(worker)
        batch = (
            f"the batch of indices {format_indices(pending[0])}"
            if pending
            else "its batch"
        )
        text = f"worker {worker} (pid {process.pid}{', ' if rank else ''}{rank})"
        if states is None or states.is_busy(worker):
            return (
                f"{text} has not finished {batch}. Raise timeout, or look for what "
                "blocks in the dataset."
            )
        stack = states.stack(worker, process.pid)
        return (
            f"{text} is alive but has not begun {batch}. It may wait for a lock that a "
            'thread held during fork: use multiprocessing_context="forkserver", or '
            "start the workers before the threads."
            + (f" The stack of the worker:\n{stack}" if stack else "")
        )

    def has_lost_worker(self) -> bool:
        """Tell whether a worker has died; then all others are ended, too."""
        if self._pid != os.getpid():  # they work for the process that was forked
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
                # torch's iterators have no types.
                received: ReceivedBatch = super()._next_data()  # type: ignore[no-untyped-call]
                batch = self._receiver.receive(received)
        except StopIteration:
            meter.pause()
            raise
        extra = received.message.timings.extra
        if extra is not None:
            self._progress.dataset.extra = pickle.loads(extra)
        return batch

    def _shutdown_workers(self) -> None:
        if not hasattr(self, "_pins_ring"):
            return
        if not hasattr(self, "_shutdown"):
            self._unpin_ring()  # nothing was started
            return
        if self._pid != os.getpid():  # nor by this process: it only knows their ids
            if self._worker_pids_set:
                forget_workers(self)
            return
        if worker_monitor.serves_queue():  # and the garbage collector runs in it
            threading.Thread(target=self._end, name="pyparallel-end").start()
            return
        self._end()

    def _end(self) -> None:
        """End the workers, and free what they held."""
        super()._shutdown_workers()
        ring = getattr(self, "_ring", None)
        if ring is None or not ring.created_here:
            return
        for i, worker in enumerate(getattr(self, "_workers", ())):
            if not worker.is_alive():  # else it may be writing
                ring.reclaim(self._first_holder + i)
        self._unpin_ring()

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        """End the workers, unless the interpreter ends: then its exit handlers did.

        Note: [interpreter exit]. After the exit handlers, the interpreter clears the
        globals of all modules and drops the remaining objects. No code of this package
        runs then. ``weakref.finalize`` calls nothing after the exit handlers. This
        method is torch's and must check for itself, without a global.
        """
        if not is_finalizing():
            super().__del__()

    def _unpin_ring(self) -> None:
        if self._ring is not None and self._pins_ring:
            self._pins_ring = False
            self._ring.unpin()


def _nbytes(batch: Any) -> int:
    """Return the bytes of all tensors in a batch."""
    try:
        return _sum_nbytes(batch, 0)
    except BatchValueError:  # a nest that is a cycle, which is torch's to refuse
        return 0


def _sum_nbytes(batch: Any, depth: int) -> int:
    cls = type(batch)
    # For the nests of most batches a walk with a list of leaves takes twice as long.
    if cls is dict or cls is list or cls is tuple:
        if depth > pytree.MAX_DEPTH:
            raise pytree.nesting_error("the batch")
        found = 0
        for value in batch.values() if cls is dict else batch:
            if type(value) not in _WITHOUT_TENSORS:
                found += _sum_nbytes(value, depth + 1)
        return found
    if isinstance(batch, torch.Tensor):
        return batch.numel() * batch.element_size()
    if isinstance(batch, DataContainer):
        return _sum_nbytes(batch.data, depth + 1)
    leaves, _ = pytree.flatten(batch)
    if len(leaves) == 1 and leaves[0] is batch:
        return 0
    return sum(_sum_nbytes(leaf, depth + 1) for leaf in leaves)


def _warn_about_miss(message: Message, ring: Ring) -> None:
    """Warn once, with the number to raise, of batches that missed the ring."""
    miss = message.miss or RingMiss("unsupported", 0)
    nbytes = miss.nbytes
    texts = {
        "full": (
            "PP201",
            f"a batch must find one of {ring.num_slabs} slabs free, but all were in "
            "use. Raise ring_slabs, or let go of batches earlier",
        ),
        "large": (
            "PP202",
            f"a batch of {nbytes} bytes must fit a slab, but slabs have "
            f"{ring.slab_nbytes} (max_ring_bytes / ring_slabs, in whole pages). Raise "
            f"max_ring_bytes to {total_nbytes(ring.num_slabs, nbytes)}",
        ),
        "memory": (
            "PP203",
            f"a slab must get {nbytes} bytes of memory, but the system has no more. "
            "Lower max_ring_bytes, or free memory",
        ),
        "kept": (
            "PP204",
            "no tensor of a batch must be kept in the worker that made it, but one "
            "was. Clone what collate_fn keeps",
        ),
        "unsupported": (
            "PP205",
            "tensors of a batch must be dense CPU tensors without gradient, but some "
            "are not: they cross as torch sends them. Convert them in collate_fn",
        ),
    }
    rest = "Until then such batches take memory that is slow to write."
    code, found = texts[miss.reason]
    text = f"DataLoader: {found}. {rest}"
    warn_once(code, text, LoaderWarning)
