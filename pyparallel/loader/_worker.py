"""What runs in the workers of a loader: collate, serialize, and errors that arrive."""

from __future__ import annotations

import functools
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
from ..shm.ring import RingMemory, Slab
from ..shm.serialization import RingMiss, SerializedBatch, move_out_of_ring, serialize
from ._worker_status import WorkerStatus
from .tracebacks import LocatingFetcher, hide_frames, rank_text


class WorkerTimings(NamedTuple):
    """What a worker measured while it made a batch, and what it adds to it, pickled."""

    fetch_seconds: float
    collate_seconds: float
    pack_seconds: float
    fetch_cpu_seconds: float
    collate_cpu_seconds: float
    pack_cpu_seconds: float
    core_wait_seconds: float
    stacked_nbytes: int
    padding_nbytes: int
    extra: bytes | None


class _Moment(NamedTuple):
    """A time by two clocks, in seconds."""

    wall: float
    cpu: float


def _now() -> _Moment:
    return _Moment(time.perf_counter(), cpu_seconds())


class WorkerCollate:
    """A collate function whose result is serialized for the journey to the parent.

    Args:
        collate_fn: any.
        ring: where to write; None: into fresh memory.
        first_holder: the number of worker 0 in the ring.
        extra: called after each batch; returns bytes that travel with it, or None.
        states: where workers note that they make a batch; None: nowhere.
    """

    def __init__(
        self,
        collate_fn: Callable[[Any], Any],
        ring: RingMemory | None,
        first_holder: int,
        extra: Callable[[], bytes | None],
        states: WorkerStatus | None = None,
    ) -> None:
        self.collate_fn, self.extra, self.states = collate_fn, extra, states
        self._ring, self._first_holder = ring, first_holder
        #: When the dataset was asked for the samples of this batch.
        self.fetching: _Moment | None = None
        self._core_wait: CoreWait | None = None
        self._core_waited = 0.0

    def begin(self) -> None:
        """Note that the dataset is asked for the samples of a batch."""
        if self._core_wait is None:  # here, so that it is of the thread of the worker
            self._core_wait = CoreWait()
            self._core_waited = self._core_wait.seconds()
        self.fetching = _now()

    def __call__(self, samples: Any) -> SerializedBatch:
        """Return the batch of some samples, written where the parent will read it."""
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
        return self._ring.claim(self._first_holder + info.id)

    def _serialize(self, samples: Any, slab: Slab | None) -> SerializedBatch:
        collating = _now()
        fetching, self.fetching = self.fetching or collating, None
        with allocation.allocate_from(slab), PaddingCounter() as padding:
            batch = self.collate_fn(samples)
        packing = _now()
        with span("pyparallel.pack"):
            miss = None if slab else RingMiss("full" if self._ring else "off", 0)
            message = serialize(batch, slab, miss)
            extra = self.extra()
            del batch
            if slab is not None and not slab.finish():
                if message.miss is None and message.location is not None:
                    message = move_out_of_ring(message, slab)
            if slab is not None and not message.is_in_ring:
                slab.release()
        end = _now()
        timings = WorkerTimings(
            collating.wall - fetching.wall,
            packing.wall - collating.wall,
            end.wall - packing.wall,
            collating.cpu - fetching.cpu,
            packing.cpu - collating.cpu,
            end.cpu - packing.cpu,
            self._core_waits(),
            padding.stacked_nbytes,
            padding.padding_nbytes,
            extra,
        )
        return SerializedBatch(message._replace(timings=timings))

    def _core_waits(self) -> float:
        """Return the seconds without a core since the batch before this one."""
        if self._core_wait is None:
            return 0.0
        before, self._core_waited = self._core_waited, self._core_wait.seconds()
        return self._core_waited - before


class WorkerInit:
    """A ``worker_init_fn`` that prepares this process first.

    torch's queue pickles in a thread, whose errors nobody sees: an exception that does
    not pickle would never arrive, and the parent would wait for ever. And torch's
    ``default_collate`` takes shared memory of its own for every tensor, where a part of
    the slab is ready. torch's fetchers call the dataset: the time begins there.
    """

    def __init__(
        self,
        worker_init_fn: Callable[[int], None] | None,
        states: WorkerStatus | None = None,
    ) -> None:
        self.worker_init_fn, self.states = worker_init_fn, states

    def __call__(self, worker_id: int) -> None:
        """Prepare, then do what the user asked for."""
        if self.states is not None:
            self.states.enter(worker_id)
        vars(data_worker)["ExceptionWrapper"] = wrap_exception
        functions = data_collate.default_collate_fn_map
        if functions.get(torch.Tensor) is data_collate.collate_tensor_fn:
            functions[torch.Tensor] = _collate_tensors
        for fetcher in (MapFetcher, IterableFetcher):
            vars_of: Any = fetcher
            vars_of.fetch = _timed(fetcher.fetch)
        kind: Any = DatasetKind
        kind.create_fetcher = staticmethod(_locating(kind.create_fetcher))
        if self.worker_init_fn is not None:
            self.worker_init_fn(worker_id)


def _timed(fetch: Any) -> Any:
    """Return torch's method ``fetch``, which notes its start in `WorkerCollate`."""

    @functools.wraps(fetch)
    def timed(fetcher: Any, index: Any) -> Any:
        packing, info = fetcher.collate_fn, get_worker_info()
        if not isinstance(packing, WorkerCollate):  # of a loader inside the dataset
            return fetch(fetcher, index)
        packing.begin()
        if packing.states is None or info is None:
            return fetch(fetcher, index)
        packing.states.mark(info.id, busy=True)
        try:
            return fetch(fetcher, index)
        finally:
            packing.states.mark(info.id, busy=False)

    return timed


def _locating(create: Any) -> Any:
    """Return torch's function that makes fetchers, whose errors name the samples."""

    def create_fetcher(*arguments: Any) -> Any:
        fetcher = create(*arguments)
        if not isinstance(fetcher.collate_fn, WorkerCollate):
            return fetcher  # of a loader inside the dataset
        return LocatingFetcher(fetcher, note_place)

    return create_fetcher


#: The samples of the error that was raised last in this worker.
_place = ""


def note_place(error: BaseException, place: str) -> None:
    """Let the next `wrap_exception` of this worker name the samples of the error."""
    global _place
    _place = place


def wrap_exception(where: str) -> ExceptionWrapper:
    """Return the current exception, as it arrives at the parent."""
    global _place
    place, _place = _place, ""
    kind, error, trace = sys.exc_info()
    if error is not None:
        hide_frames(error)
        trace = error.__traceback__
    rank = rank_text()
    where = f"{where} ({rank})" if rank else where
    where = f"{where}, {place}" if place else where
    wrapper = ExceptionWrapper((kind, error, trace), where)
    try:
        ForkingPickler.dumps(wrapper)
    except Exception:  # a class that was defined in a function, say
        name = wrapper.exc_type.__qualname__
        wrapper.exc_type = RuntimeError
        wrapper.exc_msg = (
            f"{name}, which does not pickle, was raised.\n{wrapper.exc_msg}"
        )
    return wrapper


def _collate_tensors(
    batch: Sequence[torch.Tensor], *, collate_fn_map: Any = None
) -> torch.Tensor:
    """Do as torch's function, but where `allocation.empty` takes its memory from."""
    if allocation.is_packed_later() and stack.are_plain(batch):
        if all(tensor.shape == batch[0].shape for tensor in batch):
            stacked = stack.stack_equal(batch)
            if stacked is not None:
                return stacked
            return stack.stack(batch, None, [0] * len(batch), "batch[{}]".format)
    torchs: Any = data_collate.collate_tensor_fn
    collated: torch.Tensor = torchs(batch, collate_fn_map=collate_fn_map)
    return collated
