"""Measure a loader: times, bytes, padding, and a verdict on the bottleneck."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

from ..core.errors import BatchTypeError, LoaderWarning, has_warned, warn_once
from ..core.process import Living
from ..core.text import nbytes_text, percent
from .applied import PREFETCH_FACTOR, padding_advice
from .findings import MUCH_PADDING, SEND_SECONDS, Finding, Load, bottleneck

#: A warning about padding needs at least these numbers of batches and bytes.
_MIN_BATCHES, _MIN_NBYTES = 20, 10_000_000
#: The verdict reports batches outside the ring above this fraction of the batches.
_MANY_MISSES = 0.01
#: The next step for each `RingMiss`.
_MISS_ADVICE = {
    "": "increase ring_slabs or max_ring_bytes",
    "full": "increase ring_slabs, or release batches sooner",
    "large": "increase max_ring_bytes",
    "memory": "the system has no memory for it, so free some",
    "kept": "clone the tensors that collate_fn keeps",
    "unsupported": "in collate_fn, convert sparse, nested and device tensors",
    "off": "the loader has none, so set ring_slabs and max_ring_bytes to None",
}
#: The next step if the work on a batch is too much, by its largest part.
_CHEAPER = {
    "fetch": "make samples cheaper",
    "collate": "make batches smaller, as with images in uint8",
    "pack": "use pyparallel.Collate or pyparallel.collate, which write batches into "
    "the ring",
}


@dataclass(frozen=True)
class LoaderStats:
    """Statistics of a loader since it was made, for all its epochs and iterators.

    Times are wall-clock times in seconds, except CPU times. Workers and threads run at
    the same time as the step, so the times do not add up to a total.

    Attributes:
        batches: the number of batches that the loader returned.
        wait_seconds: the time of the consumer in ``next()``.
        busy_seconds: the time of the consumer between two calls of ``next()``: the
            step. Time between epochs does not count.
        fetch_seconds: the time in the dataset to get samples, summed over workers.
        collate_seconds: the time in ``collate_fn``, summed over workers.
        pack_seconds: the time to write batches into the ring, summed over workers.
        copy_seconds: the time of a `PreDataLoader` to start copies to the device, and
            in its ``transform``.
        nbytes: the bytes of the tensors in all batches.
        padding_nbytes: the bytes of padding in ``stacked_nbytes``.
        stacked_nbytes: the bytes of the tensors that `collate` or `pad_stack` stacked.
        ring_hits: the number of batches that were sent in the ring, or in the message.
        ring_misses: the number of batches that were allocated outside the ring.
        fetch_cpu_seconds: the CPU time in ``fetch_seconds``, of all threads. The rest
            is waiting for a disk, a network, another process or a core. A batch that
            begins soon after a reading of the clock has the share of the last one:
            within 1 ms, or within 20 ms if that batch took less than 1 ms.
        collate_cpu_seconds: the CPU time in ``collate_seconds``, measured in this way.
        pack_cpu_seconds: the CPU time in ``pack_seconds``, measured in this way.
        core_wait_seconds: the time in which workers were ready to run but had no core,
            as counted by Linux. 0 on other systems and without workers.
        gil_wait_seconds: the time in which worker threads waited for the GIL, as
            estimated on Linux. 0 on other systems and without worker threads.
        load_seconds: the time of a `PreDataLoader` to get batches from its loader, in
            its thread, or in the loop itself if its steps take no time.
        first_wait_seconds: the part of ``wait_seconds`` for first batches of epochs.
        num_workers: the number of workers. 0: the loader has no workers.
        cores: the number of cores that the process may use. 0: unknown.
        sample_errors: the number of samples that raised an error and were skipped or
            replaced, with those of a loaded state. See ``on_error`` of `DataLoader`.
        first_waits: the number of waits in ``first_wait_seconds``: begun epochs.
        miss_reason: the most frequent reason of ``ring_misses``: ``"full"``,
            ``"large"``, ``"memory"``, ``"kept"``, ``"unsupported"``, ``"off"``. Empty
            without misses.
        applied: the changes that `verdict` does not recommend, because the loader has
            them, or cannot have them.
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
    gil_wait_seconds: float = 0.0
    load_seconds: float = 0.0
    first_wait_seconds: float = 0.0
    num_workers: int = 0
    cores: int = 0
    sample_errors: int = 0
    first_waits: int = 0
    miss_reason: str = ""
    applied: frozenset[str] = frozenset()

    @property
    def waited(self) -> float:
        """The fraction of the time in which the step waited for a batch. At first 0."""
        total = self.wait_seconds + self.busy_seconds
        return self.wait_seconds / total if total else 0.0

    @property
    def hidden(self) -> float | None:
        """The fraction of the work on batches that was hidden behind the step.

        The work is the time of a `PreDataLoader`'s thread, or of fetch, collate and
        pack. None if it was not measured. 0 if the step waited longer than the work
        took, as for workers to start.
        """
        work = self.load_seconds or self._work_seconds
        if not work:
            return None
        return max(0.0, 1 - self.wait_seconds / (work + self.copy_seconds))

    @property
    def padding_fraction(self) -> float:
        """The fraction of ``stacked_nbytes`` that is padding. 0 without stacking."""
        stacked = self.stacked_nbytes
        return self.padding_nbytes / stacked if stacked else 0.0

    @property
    def verdict(self) -> str:
        """The bottleneck of the loop and the next step to take, in one line.

        ``input-bound`` means that the step waited for more than 10 % of the time.
        """
        if not self.batches:
            return "no batch yet: iterate over the loader"
        found = bottleneck(self.waited)
        advice = self._padding_advice() or "make the step itself faster"
        if found == "input-bound":
            advice = self._input_advice()
        return f"{found}: the step waited {percent(self.waited)} of the time; {advice}"

    @property
    def _work_seconds(self) -> float:
        """The time to make batches, summed over workers."""
        return self.fetch_seconds + self.collate_seconds + self.pack_seconds

    def _padding_advice(self) -> str | None:
        if self.padding_fraction <= MUCH_PADDING:
            return None
        return (
            f"{percent(self.padding_fraction)} of the stacked bytes are padding: "
            f"{padding_advice(self.applied)}"
        )

    def _input_advice(self) -> str:
        """Return the next step for an input-bound loop."""
        making, workers = self._work_seconds, self.num_workers
        if self.copy_seconds > max(making / max(1, workers), self.load_seconds):
            advice = "make the transform cheaper"
            if "pin_memory" not in self.applied:
                advice = f"set pin_memory=True of the loader, or {advice}"
            text = "most of the thread's time goes into copies and the transform"
            return f"{text}: {advice}"
        if workers and self.first_wait_seconds > self.wait_seconds / 2:
            if advice := self._first_batch_advice():
                return advice
        if self.fetch_seconds <= making / 2:  # otherwise the dataset is the bottleneck
            sent = self.ring_hits + self.ring_misses
            if self.ring_misses > _MANY_MISSES * sent:
                return (
                    f"{self.ring_misses} of {sent} batches missed the ring: "
                    f"{_MISS_ADVICE[self.miss_reason]}"
                )
            if padding := self._padding_advice():
                return padding
        if making:
            return self._batch_advice()
        if self.load_seconds:
            return (
                "its thread waits for the wrapped loader, which has no statistics: use "
                "pyparallel.DataLoader there, or run pyparallel profile"
            )
        return "run pyparallel profile to see where the time goes"

    def _first_batch_advice(self) -> str:
        """Return the next step if most of the wait is at the starts of epochs."""
        share = percent(self.first_wait_seconds / self.wait_seconds)
        if self.first_waits == 1:
            return (
                f"{share} of that was for the first batch, while workers started: "
                "measure more batches"
            )
        text = f"{share} of that was for the first batches of epochs"
        if "persistent_workers" not in self.applied:
            return f"{text}: set persistent_workers=True"
        if "next_epoch" not in self.applied:
            return f"{text}: use PreDataLoader(loader, next_epoch=True)"
        return ""

    def _batch_advice(self) -> str:
        """Return the next step if making batches takes too long."""
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
        load = self._load
        number = load.num_needed
        if not workers:
            return f"{most}: make batches in workers, num_workers={number}"
        if "collate_fn" in self.applied and part == "pack":
            part = "collate"  # nothing of the tensors is written twice
        free = "use fewer workers" if load.is_crowded else "free some cores"
        sooner = f"set prefetch_factor={PREFETCH_FACTOR}"
        if "prefetch_factor" in self.applied:
            sooner = "make the slowest samples cheaper"
        return {
            Finding.NO_CORE: f"workers waited for a core "
            f"{percent(load.core_wait / making)} of their time: {free}",
            Finding.GIL: f"worker threads waited for the GIL "
            f"{percent(load.gil_wait / making)} of their time: use "
            "worker_method='multiprocessing'",
            Finding.ONE_THREAD: f"{most}, and one thread computes it: use "
            f"worker_method='multiprocessing', or num_workers={number} if it is native "
            "code that releases the GIL",
            Finding.FEW_WORKERS: f"{most}: use more workers, num_workers={number}",
            Finding.UNEVEN: "workers are fast enough on average, but some batches come "
            f"late: {sooner}",
            Finding.MUCH_WORK: f"{most}, and there are no cores for more workers: "
            f"{_CHEAPER[part]}",
        }[load.finding]

    @property
    def _load(self) -> Load:
        cpu = self.fetch_cpu_seconds + self.pack_cpu_seconds
        cpu += self.collate_cpu_seconds or self.collate_seconds
        return Load(
            self._work_seconds,
            self.busy_seconds,
            cpu,
            self.core_wait_seconds,
            self.gil_wait_seconds,
            self.num_workers,
            self.cores,
            self.applied,
        )

    def __str__(self) -> str:
        """Return the verdict, and a line for each figure with its unit."""
        hidden = "not measured" if self.hidden is None else percent(self.hidden)
        made = {}
        for part in ("fetch", "collate", "pack"):
            cpu = getattr(self, f"{part}_cpu_seconds")
            made[part] = f"{getattr(self, f'{part}_seconds'):.3f} s"
            if cpu:
                made[part] += f", {cpu:.3f} s of it CPU time"
            if self.load_seconds and not self._work_seconds:
                made[part] = "not measured"  # of a loader without stats()
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
        if self.gil_wait_seconds:
            rows["GIL"] = f"{self.gil_wait_seconds:.3f} s of waits of worker threads"
        if self.sample_errors:
            rows["errors"] = f"{self.sample_errors} samples skipped or replaced"
        lines = [f"  {name:<8} {value}" for name, value in rows.items()]
        return "\n".join([self.verdict, *lines])


class Figures(NamedTuple):
    """Counters of one batch, by the names of `LoaderStats`.

    CPU times include finished child processes. Without workers, the times of packing
    and the waits are 0.
    """

    fetch_seconds: float = 0.0
    collate_seconds: float = 0.0
    pack_seconds: float = 0.0
    fetch_cpu_seconds: float = 0.0
    collate_cpu_seconds: float = 0.0
    pack_cpu_seconds: float = 0.0
    core_wait_seconds: float = 0.0
    gil_wait_seconds: float = 0.0
    stacked_nbytes: int = 0
    padding_nbytes: int = 0
    nbytes: int = 0
    ring_hits: int = 0
    ring_misses: int = 0


#: The positions of `stacked_nbytes` and `padding_nbytes`.
STACKED, PADDING = 8, 9
#: Counters that only the loader that makes the batches has.
_INNER_COUNTERS = (*Figures._fields, "sample_errors")
#: The counters of a wait. `Meter` keeps its times in nanoseconds.
_WAIT_COUNTERS = (
    "wait_ns",
    "busy_ns",
    "first_wait_ns",
    "first_waits",
    "load_ns",
    "batches",
)
#: The counters of a batch that was read ahead.
_READ_COUNTERS = ("load_seconds", "copy_seconds", "nbytes")
#: The most waits that are kept before they are added up. Adding up each one, within the
#: lock, would take longer than to unpack a tiny batch.
_MAX_WAITS = 256


class Meter:
    """Counts the statistics of a loader, from any thread: see `LoaderStats`.

    A pickled or deep copy of a meter is a new meter with empty counters.

    Args:
        clock: returns the time in nanoseconds. Must be monotonic.
    """

    def __init__(self, clock: Callable[[], int] = time.perf_counter_ns) -> None:
        self.clock = clock
        self._lock = threading.Lock()
        numbers = asdict(LoaderStats()).items()
        self._counts = {k: v for k, v in numbers if isinstance(v, int | float)}
        self._counts |= dict.fromkeys(_WAIT_COUNTERS, 0)
        #: Waits that are not in the counters yet: `_WAIT_COUNTERS`, and the figures.
        self._waits: list[tuple[Any, ...]] = []
        #: The same for batches that were read ahead: `_READ_COUNTERS`.
        self._reads: list[tuple[Any, ...]] = []
        #: The number of batches that missed the ring, by the reason of `RingMiss`.
        self.misses: Counter[str] = Counter()
        #: See `LoaderStats.applied`.
        self.applied: frozenset[str] = frozenset()
        self._thread = _ThreadTimes()
        _meters.add(self)

    def __reduce__(self) -> tuple[type[Meter], tuple[()]]:
        """Pickle as a new meter: locks and thread-local times cannot be copied."""
        return type(self), ()

    def add(self, **counters: float) -> None:
        """Add numbers to the counters of these names.

        Raises:
            TypeError: `LoaderStats` has no such counter. Nothing is added.
        """
        counts = self._counts
        if not counters.keys() <= counts.keys():
            raise BatchTypeError(
                "Meter.add: the names must be counters of LoaderStats, but one is "
                f"{next(name for name in counters if name not in counts)!r}."
            )
        with self._lock:
            for name, number in counters.items():
                counts[name] += number

    def padding_totals(self) -> tuple[int, int, int]:
        """Return the number of batches, the bytes stacked, and the bytes of padding."""
        with self._lock:
            counts = self._add_waits()
        batches, stacked = counts["batches"], counts["stacked_nbytes"]
        return int(batches), int(stacked), int(counts["padding_nbytes"])

    def _add_waits(self) -> dict[str, float]:
        """Add all waits and reads to the counters, and return a copy of them."""
        *columns, figures = _take_columns(self._waits) or [()]
        columns += zip(*filter(None, figures), strict=True)
        names = (*_WAIT_COUNTERS, *Figures._fields)
        for name, column in zip(names, columns, strict=False):
            self._counts[name] += sum(column)
        columns = _take_columns(self._reads)
        for name, column in zip(_READ_COUNTERS, columns, strict=False):
            self._counts[name] += sum(column)
        return dict(self._counts)

    def count_read(self, load_seconds: float, copy_seconds: float, nbytes: int) -> None:
        """Count a batch that a thread has read ahead, before the wait for it."""
        self._reads.append((load_seconds, copy_seconds, nbytes))  # atomic

    def count_wait(
        self,
        start: int,
        batches: int = 0,
        figures: tuple[float, ...] = (),
        *,
        is_read: bool = False,
    ) -> int:
        """Count a wait of this thread's consumer that ends now. Return that time.

        The time of the same thread between two waits counts as busy. Do not nest waits
        of one meter.

        Args:
            start: the reading of ``clock`` at the start of the wait.
            batches: the number of batches that the consumer gets after it.
            figures: the `Figures` of that batch, or their values.
            is_read: the consumer of a `PreDataLoader` has read that batch itself.
        """
        thread = self._thread
        last_end, thread.last_end = thread.last_end, (now := self.clock())
        wait = now - start
        load = wait if is_read else 0
        if last_end is not None:
            numbers = wait, start - last_end, 0, 0, load, batches, figures
        else:
            numbers = wait, 0, wait, 1, load, batches, figures
        self._waits.append(numbers)  # atomic
        if len(self._waits) >= _MAX_WAITS:
            with self._lock:
                self._add_waits()
        return now

    def pause(self) -> None:
        """Do not count the time until this thread's next wait as busy.

        Iterators call this at their start and end, so that the time between two epochs,
        such as validation, does not count as a step.
        """
        self._thread.last_end = None

    def snapshot(
        self,
        inner: LoaderStats | None = None,
        inner_before: LoaderStats | None = None,
    ) -> LoaderStats:
        """Return the current statistics.

        Args:
            inner: statistics of the loader that this one wraps. They provide the
                counters that only that loader has: fetch, collate, pack, bytes,
                padding, the ring and its workers.
            inner_before: statistics of that loader when counting began here.
        """
        with self._lock:
            counts = self._add_waits()
        for name in ("wait", "busy", "first_wait", "load"):
            counts[f"{name}_seconds"] += counts.pop(f"{name}_ns") / 1e9
        # Counters of integer fields are integers, but the dict has one type for all.
        stats = LoaderStats(**counts, applied=self.applied)  # type: ignore[arg-type]
        if misses := self.misses.most_common(1):
            stats = replace(stats, miss_reason=misses[0][0])
        if inner is None:
            return stats
        old = inner_before or LoaderStats()
        counted = {k: getattr(inner, k) - getattr(old, k) for k in _INNER_COUNTERS}
        fixed = ("num_workers", "cores", "miss_reason")
        copied = {k: getattr(inner, k) for k in fixed}
        return replace(stats, applied=self.applied | inner.applied, **copied, **counted)


class _ThreadTimes(threading.local):
    """The end of this thread's last wait. None: no step follows it."""

    last_end: int | None = None


def _take_columns(rows: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """Empty a list of rows, to which other threads append. Return its columns."""
    taken = rows[:]
    del rows[: len(taken)]
    return [*zip(*taken, strict=True)]


def _renew_lock(meter: Meter) -> None:
    meter._lock = threading.Lock()


_meters: Living[Meter] = Living(in_child=_renew_lock)


def warn_about_padding(meter: Meter, stacked: float, padding: float) -> None:
    """Warn if a large fraction of the stacked bytes of a loader is padding.

    Its meter has counted this batch, with these bytes.
    """
    if padding <= MUCH_PADDING * stacked or has_warned("PP211"):
        return
    batches, stacked, padding = meter.padding_totals()
    if batches < _MIN_BATCHES or stacked < _MIN_NBYTES:
        return
    if padding <= MUCH_PADDING * stacked:
        return
    advice = padding_advice(meter.applied)
    advice = f"{advice[0].upper()}{advice[1:]}."
    if "by size" not in meter.applied:
        kind = "SizeBatcher(stream, size_of, batch_size)"
        if "stream" not in meter.applied:
            kind = "batch_sampler=SizeBatchSampler(sizes, batch_size)"
        advice = (
            f"Batch samples of similar sizes together: {kind}. Or leave them ragged: "
            "Concat(), or DataContainer(..., ragged=True)."
        )
    warn_once(
        "PP211",
        f"DataLoader: {percent(padding / stacked)} of the {nbytes_text(stacked)} "
        f"stacked in {batches} batches are padding, which costs memory and computing "
        f"time. {advice}",
        LoaderWarning,
    )
