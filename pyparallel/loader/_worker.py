"""Code that runs in the workers of a loader.

`WorkerInit` prepares a worker. `WorkerCollate` collates a batch into the ring and
serializes it for the parent. `wrap_exception` makes every error picklable.
"""

from __future__ import annotations

import functools
import os
import sys
import time
from collections.abc import Callable, Sequence
from multiprocessing.reduction import ForkingPickler
from typing import Any, NamedTuple

import torch
from torch.utils.data import get_worker_info

from ..batch import allocation, stack
from ..batch.stack import PaddingCounter
from ..core.cpu_time import CoreWait, cpu_seconds
from ..core.torch_private import (
    DatasetKind,
    ExceptionWrapper,
    IterableFetcher,
    MapFetcher,
    data_collate,
    data_worker,
)
from ..core.tracing import span
from ..shm import memfd
from ..shm.ring import RingMemory, Slab
from ..shm.serialization import RingMiss, SerializedBatch, move_out_of_ring, serialize
from ._sample_reader import NO_SAMPLES
from ._worker_status import WorkerStatus
from .tracebacks import LocatingFetcher, hide_frames, rank_text


class WorkerTimings(NamedTuple):
    """Times and bytes that a worker measured for one batch, and its reports.

    Attributes:
        report: the pickled `WorkerReport`.
        failures: the samples that were skipped or replaced, see `ErrorPolicy`.
    """

    fetch_seconds: float
    collate_seconds: float
    pack_seconds: float
    fetch_cpu_seconds: float
    collate_cpu_seconds: float
    pack_cpu_seconds: float
    core_wait_seconds: float
    stacked_nbytes: int
    padding_nbytes: int
    report: bytes | None
    failures: tuple[Any, ...]


class NoBatch:
    """A message of a worker whose samples raised, so that it has no batch to send.

    Attributes:
        failures: the samples, see `ErrorPolicy`.
        at_end: they follow the last batch of the worker's stream. Otherwise they are
            the samples of a batch that is left out.
        report: the pickled `WorkerReport` after a batch that is left out.
    """

    def __init__(
        self, failures: tuple[Any, ...], *, at_end: bool, report: bytes | None = None
    ) -> None:
        self.failures, self.at_end, self.report = failures, at_end, report


class _Moment(NamedTuple):
    """A reading of the wall clock and the CPU clock, in seconds."""

    wall: float
    cpu: float


def _now() -> _Moment:
    return _Moment(time.perf_counter(), cpu_seconds())


class WorkerCollate:
    """A collate function that writes its batch into the ring and serializes it.

    Args:
        collate_fn: the user's collate function.
        ring: the ring to write to. None: every batch takes new shared memory.
        first_holder: the number of worker 0 in the ring.
        make_report: called after each batch. Returns bytes to send with it, or None.
        status: records which workers are making a batch. None: not recorded.
        policy: the `ErrorPolicy` that reads the samples, None without one.
    """

    def __init__(
        self,
        collate_fn: Callable[[Any], Any],
        ring: RingMemory | None,
        first_holder: int,
        make_report: Callable[[], bytes | None],
        status: WorkerStatus | None = None,
        policy: Any = None,
    ) -> None:
        self.collate_fn, self.status = collate_fn, status
        self._policy = policy
        self._make_report = make_report
        self._ring, self._first_holder = ring, first_holder
        self._fetch_start: _Moment | None = None  # of this batch
        self._core_wait: CoreWait | None = None
        self._core_waited = 0.0

    def start_fetch(self) -> None:
        """Record that torch starts to read the samples of a batch."""
        if self._core_wait is None:  # made here, because it measures the calling thread
            self._core_wait = CoreWait()
            self._core_waited = self._core_wait.seconds()
        self._fetch_start = _now()

    def take_failures(self) -> tuple[Any, ...]:
        """Return the samples that raised since the last call, see `ErrorPolicy`."""
        return () if self._policy is None else self._policy.take_failures()

    def __call__(self, samples: Any) -> SerializedBatch | NoBatch:
        """Return the serialized batch of the samples, in a slab if one is free."""
        if samples is NO_SAMPLES:
            failures = self.take_failures()
            return NoBatch(failures, at_end=False, report=self._make_report())
        slab = self._claim()
        try:
            return self._serialize(samples, slab)
        except BaseException:
            if slab is not None:
                slab.release()
            raise

    def _claim(self) -> Slab | None:
        info = get_worker_info()
        if self._ring is None or info is None:
            return None
        self._ring = self._ring.mapped_here()
        return self._ring.claim(self._first_holder + info.id)

    def _serialize(self, samples: Any, slab: Slab | None) -> SerializedBatch:
        collate_start = _now()
        fetch_start, self._fetch_start = self._fetch_start or collate_start, None
        packs = memfd.is_supported()
        with allocation.allocate_from(slab, packs=packs), PaddingCounter() as padding:
            batch = self.collate_fn(samples)
        pack_start = _now()
        with span("pyparallel.pack"):
            miss = None if slab else RingMiss("full" if self._ring else "off", 0)
            message = serialize(batch, slab, miss)
            report = self._make_report()
            del batch
            if slab is not None and not slab.finish():
                if message.miss is None and message.location is not None:
                    message = move_out_of_ring(message, slab)
            if slab is not None and not message.is_in_ring:
                slab.release()
        end = _now()
        timings = WorkerTimings(
            collate_start.wall - fetch_start.wall,
            pack_start.wall - collate_start.wall,
            end.wall - pack_start.wall,
            collate_start.cpu - fetch_start.cpu,
            pack_start.cpu - collate_start.cpu,
            end.cpu - pack_start.cpu,
            self._core_wait_seconds(),
            padding.stacked_nbytes,
            padding.padding_nbytes,
            report,
            self.take_failures(),
        )
        return SerializedBatch(message._replace(timings=timings))

    def _core_wait_seconds(self) -> float:
        """Return the seconds without a core since the previous batch."""
        if self._core_wait is None:
            return 0.0
        before, self._core_waited = self._core_waited, self._core_wait.seconds()
        return self._core_waited - before


class WorkerInit:
    """A ``worker_init_fn`` that replaces functions of torch in this process.

    - ``ExceptionWrapper``: torch's queue pickles in a thread that drops errors. An
      exception that does not pickle would never arrive, and the parent would wait for
      ever. See `wrap_exception`.
    - ``default_collate`` of tensors: torch allocates shared memory for every tensor,
      although the whole batch is written into one slab or one shared memory.
    - ``fetch`` of torch's fetchers: they call the dataset, so the time starts there.
    - ``create_fetcher``: errors of the dataset name the samples.

    Args:
        worker_init_fn: called after that.
        status: registers this process. None: not registered.
    """

    def __init__(
        self,
        worker_init_fn: Callable[[int], None] | None,
        status: WorkerStatus | None = None,
    ) -> None:
        self.worker_init_fn, self.status = worker_init_fn, status
        self._loader_pid = os.getpid()

    def __call__(self, worker_id: int) -> None:
        """Replace the functions, then call the user's function."""
        if os.getpid() == self._loader_pid:
            raise RuntimeError(
                f"DataLoader: worker {worker_id} must be another process, but runs in "
                f"the loader's process {self._loader_pid}. Remove "
                "multiprocessing_context, or set num_workers=0."
            )
        if self.status is not None:
            self.status.enter(worker_id)
        vars(data_worker)["ExceptionWrapper"] = wrap_exception
        functions = data_collate.default_collate_fn_map
        if functions.get(torch.Tensor) is data_collate.collate_tensor_fn:
            functions[torch.Tensor] = _collate_tensors
        for fetcher in (MapFetcher, IterableFetcher):
            untyped: Any = fetcher
            untyped.fetch = _measure_fetch(fetcher.fetch)
        kind: Any = DatasetKind
        kind.create_fetcher = staticmethod(_locate_errors(kind.create_fetcher))
        if self.worker_init_fn is not None:
            self.worker_init_fn(worker_id)


def _measure_fetch(fetch: Any) -> Any:
    """Wrap torch's method ``fetch`` so that `WorkerCollate` knows when it starts."""

    @functools.wraps(fetch)
    def measured(fetcher: Any, index: Any) -> Any:
        collate, info = fetcher.collate_fn, get_worker_info()
        if not isinstance(collate, WorkerCollate):  # of a loader inside the dataset
            return fetch(fetcher, index)
        collate.start_fetch()
        worker, status = (-1, None) if info is None else (info.id, collate.status)
        if status is not None:
            status.mark(worker, busy=True)
        try:
            return fetch(fetcher, index)
        except StopIteration:  # torch sends the end without these
            if failures := collate.take_failures():
                fetcher.ended = True  # some iterators begin again after their end
                return NoBatch(failures, at_end=True)
            raise
        except Exception:
            collate.take_failures()  # of a batch that is not sent
            raise
        finally:
            if status is not None:
                status.mark(worker, busy=False)

    return measured


def _locate_errors(create: Any) -> Any:
    """Wrap torch's function that makes fetchers so that their errors name samples."""

    def create_fetcher(*arguments: Any) -> Any:
        fetcher = create(*arguments)
        if not isinstance(fetcher.collate_fn, WorkerCollate):
            return fetcher  # of a loader inside the dataset
        return LocatingFetcher(fetcher, record_location)

    return create_fetcher


#: The samples of the last error in this worker.
_location = ""


def record_location(error: BaseException, location: str) -> None:
    """Record the samples of an error for the next `wrap_exception`."""
    global _location
    _location = location


def wrap_exception(where: str) -> ExceptionWrapper:
    """Return the current exception in a form that pickles."""
    global _location
    location, _location = _location, ""
    kind, error, trace = sys.exc_info()
    if error is not None:
        hide_frames(error)
        trace = error.__traceback__
    rank = rank_text()
    where = f"{where} ({rank})" if rank else where
    where = f"{where}, {location}" if location else where
    wrapper = ExceptionWrapper((kind, error, trace), where)
    try:
        ForkingPickler.dumps(wrapper)
    except Exception:  # such as a class that a function defines
        name = wrapper.exc_type.__qualname__
        wrapper.exc_type = RuntimeError
        wrapper.exc_msg = (
            f"{name}, which does not pickle, was raised.\n{wrapper.exc_msg}"
        )
    return wrapper


def _collate_tensors(
    batch: Sequence[torch.Tensor], *, collate_fn_map: Any = None
) -> torch.Tensor:
    """Stack tensors as torch does, but in memory of `allocation.empty`."""
    if allocation.is_packed_later() and stack.are_plain(batch):
        if all(tensor.shape == batch[0].shape for tensor in batch):
            stacked = stack.stack_equal(batch)
            if stacked is not None:
                return stacked
            return stack.stack(batch, None, [0] * len(batch), "batch[{}]".format)
    if allocation.is_packed_later() and not any(t.requires_grad for t in batch):
        if all(t.layout is torch.strided and not t.is_nested for t in batch):
            return torch.stack(tuple(batch))  # torch's function, without shared memory
    original: Any = data_collate.collate_tensor_fn
    collated: torch.Tensor = original(batch, collate_fn_map=collate_fn_map)
    return collated
