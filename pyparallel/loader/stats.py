"""What a loader measures: time waited, time hidden, bytes, padding, and a verdict."""

from __future__ import annotations

import math
import os
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

from ..core.errors import BatchTypeError, LoaderWarning, has_warned, warn_once
from ..core.text import nbytes_text, percent

#: A step that waits for more than this fraction of the time is bound by its input.
INPUT_BOUND = 0.1
#: Advice is given from this fraction of padding bytes on.
MUCH_PADDING = 0.4
#: The fewest batches and bytes of a loader before a warning about padding.
_PADDED_BATCHES, _PADDED_NBYTES = 20, 10_000_000
#: Advice is given from this fraction of batches without a place in the ring on.
MANY_MISSES = 0.01
#: A worker needs up to this time to send a batch: faster batches gain nothing there.
SEND_SECONDS = 1e-3
#: No more workers than this for each core are advised, however little they compute.
_WORKERS_PER_CORE = 8


def suggest_num_workers(
    work: float, busy: float, cpu: float, core_wait: float, cores: int
) -> int:
    """Return the number of workers that have a batch ready in time.

    Workers that compute need a core each, workers that wait for a disk share one. The
    number is at most the one at which the workers use all cores.

    Args:
        work: the time that a worker needs for a batch.
        busy: the time of a step that has its batch at once; in the same unit.
        cpu: the CPU time in ``work``; 0: not known.
        core_wait: the part of ``work`` in which the worker waited for a core.
        cores: that the process may use; 0: not known, as 1.
    """
    cores, share = max(1, cores), 1.0
    if cpu:
        share = min(max(1.0, (work - core_wait) / cpu), _WORKERS_PER_CORE)
    most = math.floor(cores * share)
    needed = work / busy if busy else math.inf
    return max(1, math.ceil(min(needed, most)))


@dataclass(frozen=True)
class LoaderStats:
    """What a loader has counted since it was made, over all its epochs and iterators.

    Times are of the wall clock, in seconds, but for CPU times. What happens in workers
    or in a thread happens while the step runs, so the times do not sum to anything.

    Attributes:
        batches: how many were handed out.
        wait_seconds: what the consumer spent in ``next()``.
        busy_seconds: what it spent between one ``next()`` and another: the step.
            Time between epochs is not counted.
        fetch_seconds: the time in the dataset to get samples, summed over workers.
        collate_seconds: the time in ``collate_fn``, summed over workers.
        pack_seconds: the time to write batches into the ring, summed over workers.
        copy_seconds: the time of a `PreDataLoader` to start copies to the device, and
            in its ``transform``.
        nbytes: bytes of the tensors in all batches.
        padding_nbytes: how many of ``stacked_nbytes`` are padding.
        stacked_nbytes: bytes of the tensors that `collate` or `pad_stack` stacked.
        ring_hits: batches that came through the ring.
        ring_misses: batches that found no place in it and took ordinary memory.
        fetch_cpu_seconds: CPU time in ``fetch_seconds``, of all threads. The rest is
            waiting: for a disk, a network, another process, or a core.
        collate_cpu_seconds: CPU time in ``collate_seconds``; 0 without workers, where
            it is not measured.
        pack_cpu_seconds: CPU time in ``pack_seconds``.
        core_wait_seconds: the time for which workers could run but had no core, as
            Linux counts it; 0 elsewhere and without workers.
        load_seconds: the time of a `PreDataLoader`'s thread to get batches from its
            loader.
        first_wait_seconds: the part of ``wait_seconds`` for first batches of epochs.
        num_workers: of the loader; 0: it works in the process.
        cores: that the process may use; 0: not known.
    """

    batches: int = 0
    wait_seconds: float = 0.0
    busy_seconds: float = 0.0
    fetch_seconds: float = 0.0
    collate_seconds: float = 0.0
    pack_seconds: float = 0.0
    copy_seconds: float = 0.0
    nbytes: int = 0
    padding_nbytes: int = 0
    stacked_nbytes: int = 0
    ring_hits: int = 0
    ring_misses: int = 0
    fetch_cpu_seconds: float = 0.0
    collate_cpu_seconds: float = 0.0
    pack_cpu_seconds: float = 0.0
    core_wait_seconds: float = 0.0
    load_seconds: float = 0.0
    first_wait_seconds: float = 0.0
    num_workers: int = 0
    cores: int = 0

    @property
    def waited(self) -> float:
        """The fraction of the time that the step waited for its input; 0 at first."""
        total = self.wait_seconds + self.busy_seconds
        return self.wait_seconds / total if total else 0.0

    @property
    def hidden(self) -> float | None:
        """The fraction of the work on batches that the step did not wait for.

        The work is that of a `PreDataLoader`'s thread, or fetch, collate and pack; None
        if it was not measured. Waiting longer than the work took, as for workers to
        start, hides nothing: 0.
        """
        work = self.load_seconds or self._work_seconds
        if not work:
            return None
        return max(0.0, 1 - self.wait_seconds / (work + self.copy_seconds))

    @property
    def padding_fraction(self) -> float:
        """The fraction of ``stacked_nbytes`` that is padding; 0 without any."""
        stacked = self.stacked_nbytes
        return self.padding_nbytes / stacked if stacked else 0.0

    @property
    def verdict(self) -> str:
        """The bound of the loop, and the next step to take, in one line.

        ``input-bound`` means that the step waited for more than 10 % of the time.
        """
        if not self.batches:
            return "no batch yet: iterate over the loader"
        bound = self.waited > INPUT_BOUND
        kind = "input-bound" if bound else "compute-bound"
        text = f"{kind}: the step waited {percent(self.waited)} of the time"
        if bound:
            return f"{text}; {self._input_advice()}"
        return f"{text}; {self._padding_advice() or 'make the step itself faster'}"

    @property
    def _work_seconds(self) -> float:
        """The time to make batches, summed over workers."""
        return self.fetch_seconds + self.collate_seconds + self.pack_seconds

    def _padding_advice(self) -> str | None:
        if self.padding_fraction <= MUCH_PADDING:
            return None
        return (
            f"{percent(self.padding_fraction)} of the stacked bytes are padding: "
            "batch samples of like sizes together"
        )

    def _input_advice(self) -> str:
        """Return the next step for a loop that waits."""
        making, workers = self._work_seconds, self.num_workers
        if self.copy_seconds > max(making / max(1, workers), self.load_seconds):
            return (
                "most of the thread's time goes into copies and the transform: give "
                "the loader pin_memory=True, or make the transform cheaper"
            )
        if workers and self.first_wait_seconds > self.wait_seconds / 2:
            return (
                f"{percent(self.first_wait_seconds / self.wait_seconds)} of that was "
                "for the first batches of epochs: set persistent_workers=True"
            )
        if self.fetch_seconds <= making / 2:  # else a batch is waited for, not moved
            sent = self.ring_hits + self.ring_misses
            if self.ring_misses > MANY_MISSES * sent:
                return (
                    f"{self.ring_misses} of {sent} batches found no place in the ring: "
                    "raise ring_slabs or max_ring_bytes"
                )
            if padding := self._padding_advice():
                return padding
        if making:
            return self._batch_advice()
        if self.load_seconds:
            return (
                "its thread waits for the loader below, which measures nothing: use "
                "pyparallel.DataLoader there, or run pyparallel profile"
            )
        return "run pyparallel profile to see where the time goes"

    def _batch_advice(self) -> str:
        """Return the next step where making batches takes too long."""
        making, workers = self._work_seconds, self.num_workers
        parts = {
            "fetch": self.fetch_seconds,
            "collate": self.collate_seconds,
            "pack": self.pack_seconds,
        }
        part = max(parts, key=parts.__getitem__)
        most = f"{part} is {percent(parts[part] / making)} of the work on a batch"
        if not workers and making < SEND_SECONDS * self.batches:
            return (
                f"a batch takes {1e6 * making / self.batches:.0f} us, less than a "
                "worker needs to send one: use larger batches"
            )
        cpu = self.fetch_cpu_seconds + self.pack_cpu_seconds
        cpu += self.collate_cpu_seconds or self.collate_seconds
        number = suggest_num_workers(
            making, self.busy_seconds, cpu, self.core_wait_seconds, self.cores
        )
        if not workers:
            return f"{most}: make batches in workers, num_workers={number}"
        if self.core_wait_seconds > making / 2:
            crowd = 0 < self.cores < workers
            return (
                f"workers waited for a core {percent(self.core_wait_seconds / making)}"
                f" of their time: {'use fewer workers' if crowd else 'free some cores'}"
            )
        if number > workers:
            return f"{most}: use more workers, num_workers={number}"
        if making <= workers * self.busy_seconds:
            return (
                "workers are fast enough on average, but some batches come late: raise "
                "prefetch_factor"
            )
        cheaper = {
            "fetch": "make samples cheaper",
            "collate": "make batches smaller, as with images in uint8",
            "pack": "let pyparallel.collate write batches into the ring",
        }[part]
        return f"{most}, and more workers have no cores: {cheaper}"

    def __str__(self) -> str:
        """Return the verdict and every figure with its unit, on lines of their own."""
        hidden = "not measured" if self.hidden is None else percent(self.hidden)
        made = {}
        for part in ("fetch", "collate", "pack"):
            cpu = getattr(self, f"{part}_cpu_seconds")
            made[part] = f"{getattr(self, f'{part}_seconds'):.3f} s"
            if cpu:
                made[part] += f", {cpu:.3f} s of it CPU time"
            if (
                self.load_seconds and not self._work_seconds
            ):  # of a loader without stats()
                made[part] = "not measured"
        rows = {
            "batches": f"{self.batches}, {nbytes_text(self.nbytes)}",
            "wait": f"{self.wait_seconds:.3f} s, {percent(self.waited)} of the time; "
            f"{self.first_wait_seconds:.3f} s for first batches",
            "step": f"{self.busy_seconds:.3f} s",
            "load": f"{self.load_seconds:.3f} s",
            **made,
            "copy": f"{self.copy_seconds:.3f} s",
            "hidden": hidden if self.hidden is None else f"{hidden} of the work",
            "padding": f"{percent(self.padding_fraction)} of "
            f"{nbytes_text(self.stacked_nbytes)} stacked",
            "ring": f"{self.ring_hits} hits, {self.ring_misses} misses",
            "workers": f"{self.num_workers}, {self.core_wait_seconds:.3f} s without a "
            f"core; {self.cores or 'unknown'} cores",
        }
        lines = [f"  {name:<8} {value}" for name, value in rows.items()]
        return "\n".join([self.verdict, *lines])


#: What only the loader that makes the batches can count.
_INNER_COUNTERS = (
    *("fetch_seconds", "collate_seconds", "pack_seconds", "core_wait_seconds"),
    *("fetch_cpu_seconds", "collate_cpu_seconds", "pack_cpu_seconds"),
    *("nbytes", "padding_nbytes", "stacked_nbytes", "ring_hits", "ring_misses"),
)


class Meter:
    """Counts what a loader does, from any thread; see `LoaderStats`.

    A copy of a meter, pickled or deep, is a new one that has counted nothing.

    Args:
        clock: the time in nanoseconds; never goes back.
    """

    def __init__(self, clock: Callable[[], int] = time.perf_counter_ns) -> None:
        self.clock = clock
        self._lock = threading.Lock()
        self._counts: dict[str, float] = asdict(LoaderStats())
        self._wait = self._busy = self._first_wait = 0
        self._mine = _Times()
        _meters.add(self)

    def __reduce__(self) -> tuple[type[Meter], tuple[()]]:
        """Pickle as a new meter: a lock and the times of threads have no copy."""
        return type(self), ()

    def add(self, **counters: float) -> None:
        """Add numbers to the counters of these names.

        Raises:
            TypeError: `LoaderStats` has no such counter; nothing is added.
        """
        counts = self._counts
        for name in counters:
            if name not in counts:
                raise BatchTypeError(
                    "Meter.add must be given counters of LoaderStats, but is given "
                    f"{name!r}."
                )
        with self._lock:
            for name, number in counters.items():
                counts[name] += number

    def padding(self) -> tuple[int, int, int]:
        """Return the number of batches, the bytes stacked, and the bytes of padding."""
        counts = self._counts
        with self._lock:
            found = (
                counts["batches"],
                counts["stacked_nbytes"],
                counts["padding_nbytes"],
            )
        return int(found[0]), int(found[1]), int(found[2])

    def made(
        self,
        started: int,
        collating: int,
        collate_ns: int,
        fetch_cpu_seconds: float,
        nbytes: int,
        stacked_nbytes: int,
        padding_nbytes: int,
    ) -> None:
        """Count a batch that this thread made while its consumer waited.

        It does as `waiting` and `add` do, in one call.

        Args:
            started: the reading of ``clock`` when the wait began. It ends now.
            collating: the reading when the samples were there.
            collate_ns: the time of ``collate_fn``.
            fetch_cpu_seconds: as in `LoaderStats`, of this batch, and so are the rest.
            nbytes: of this batch.
            stacked_nbytes: of this batch.
            padding_nbytes: of this batch.
        """
        mine, counts = self._mine, self._counts
        before, mine.ended = mine.ended, (now := self.clock())
        took = now - started
        with self._lock:
            self._wait += took
            if before is not None:
                self._busy += started - before
            else:
                self._first_wait += took
            counts["batches"] += 1
            counts["fetch_seconds"] += (collating - started) * 1e-9
            counts["fetch_cpu_seconds"] += fetch_cpu_seconds
            counts["collate_seconds"] += collate_ns * 1e-9
            counts["nbytes"] += nbytes
            if stacked_nbytes:
                counts["stacked_nbytes"] += stacked_nbytes
                counts["padding_nbytes"] += padding_nbytes

    def waited(self, started: int) -> None:
        """Count a wait of this thread's consumer that ends now.

        Args:
            started: the reading of ``clock`` when it began.
        """
        mine = self._mine
        before, mine.ended = mine.ended, (now := self.clock())
        with self._lock:
            self._wait += now - started
            if before is not None:
                self._busy += started - before
            else:
                self._first_wait += now - started

    def waiting(self) -> _Waiting:
        """Return a context manager for the block in which the consumer waits.

        What the same thread does between two such blocks is counted as busy. Blocks
        of one meter are not nested.
        """
        return _Waiting(self)

    def pause(self) -> None:
        """Do not count as busy what this thread does from here to its next wait.

        Called where an iterator starts and where it ends, so that what happens between
        two epochs, as validation, is not taken for a step.
        """
        self._mine.ended = None

    def snapshot(
        self, below: LoaderStats | None = None, before: LoaderStats | None = None
    ) -> LoaderStats:
        """Return the counters as they are now.

        Args:
            below: those of a loader that this one wraps. What only that one can count
                is taken from there: fetch, collate, pack, bytes, padding, the ring and
                its workers.
            before: those of that loader when counting began here.
        """
        with self._lock:
            counts = dict(self._counts)
            wait, busy, first_wait = self._wait, self._busy, self._first_wait
        counts["wait_seconds"] += wait / 1e9
        counts["busy_seconds"] += busy / 1e9
        counts["first_wait_seconds"] += first_wait / 1e9
        # Counts are whole where the fields are; one dict has no such type.
        stats = LoaderStats(**counts)  # type: ignore[arg-type]
        if below is None:
            return stats
        before = before or LoaderStats()
        counted = {k: getattr(below, k) - getattr(before, k) for k in _INNER_COUNTERS}
        return replace(
            stats, num_workers=below.num_workers, cores=below.cores, **counted
        )


class _Times(threading.local):
    """When the last wait of this thread ended; None: what follows is no step."""

    ended: int | None = None


class _Waiting:
    """One wait of one thread."""

    __slots__ = ("_meter", "_started")

    def __init__(self, meter: Meter) -> None:
        self._meter = meter

    def __enter__(self) -> None:
        self._started = self._meter.clock()

    def __exit__(self, *error: Any) -> None:
        self._meter.waited(self._started)


_meters: weakref.WeakSet[Meter] = weakref.WeakSet()


def _unlock_after_fork() -> None:
    """Give meters new locks: the thread that held one does not exist in the child."""
    for meter in list(_meters):
        meter._lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_unlock_after_fork)


def warn_about_padding(meter: Meter, stacked_nbytes: int, padding_nbytes: int) -> None:
    """Warn if much of the stacked bytes of a loader is padding.

    Args:
        meter: of the loader, with this batch in it.
        stacked_nbytes: of this batch.
        padding_nbytes: of this batch.
    """
    if padding_nbytes <= MUCH_PADDING * stacked_nbytes or has_warned("PP211"):
        return
    batches, stacked, padding = meter.padding()
    if batches < _PADDED_BATCHES or stacked < _PADDED_NBYTES:
        return
    if padding <= MUCH_PADDING * stacked:
        return
    warn_once(
        "PP211",
        f"DataLoader: at most {percent(MUCH_PADDING)} of the stacked bytes should "
        f"be padding, but {percent(padding / stacked)} of {nbytes_text(stacked)} in "
        f"{batches} batches are. Batch samples of like sizes together, or leave them "
        "ragged: DataContainer(..., ragged=True).",
        LoaderWarning,
    )
