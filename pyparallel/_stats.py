"""What a loader measures: time waited, time hidden, bytes, padding, and a verdict."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

from ._errors import BatchTypeError

#: A step that waits for more than this fraction of the time is bound by its input.
INPUT_BOUND = 0.05
#: Advice is given from this fraction of padding bytes on.
MUCH_PADDING = 0.4
#: Advice is given from this fraction of batches without a place in the ring on.
MANY_MISSES = 0.01


@dataclass(frozen=True)
class LoaderStats:
    """What a loader has counted since it was made, over all its epochs and iterators.

    Times are of the wall clock, in seconds. What happens in workers or in a thread
    happens while the step runs, so the times do not sum to anything.

    Attributes:
        batches: how many were handed out.
        wait_seconds: what the consumer spent in ``next()``.
        busy_seconds: what it spent between one ``next()`` and another: the step.
            Time between epochs is not counted.
        fetch_seconds: what getting batches from the loader below took (dataset and
            collate) in a background thread, or in the process itself.
        collate_seconds: what ``collate_fn`` took, summed over workers.
        pack_seconds: what writing batches into the ring took, summed over workers.
        copy_seconds: what copies to the device took.
        nbytes: bytes of the tensors in all batches.
        padding_nbytes: how many of ``stacked_nbytes`` are padding.
        stacked_nbytes: bytes of the tensors that `collate` or `pad_stack` stacked.
        ring_hits: batches that came through the ring.
        ring_misses: batches that found no place in it and took ordinary memory.
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

    @property
    def waited(self) -> float:
        """The fraction of the time that the step waited for its input; 0 at first."""
        total = self.wait_seconds + self.busy_seconds
        return self.wait_seconds / total if total else 0.0

    @property
    def hidden(self) -> float | None:
        """The fraction of fetch and copy that the step did not wait for.

        None if fetch was not measured: nothing ran in the background. Waiting longer
        than fetch and copy took, as for workers to start, hides nothing: 0.
        """
        if not self.fetch_seconds:
            return None
        work = self.fetch_seconds + self.copy_seconds
        return max(0.0, 1 - self.wait_seconds / work)

    @property
    def padding_fraction(self) -> float:
        """The fraction of ``stacked_nbytes`` that is padding; 0 without any."""
        stacked = self.stacked_nbytes
        return self.padding_nbytes / stacked if stacked else 0.0

    @property
    def verdict(self) -> str:
        """What bounds the loop, and what the numbers advise, if they do, in one line.

        ``input-bound`` means that the step waited for more than 5 % of the time.
        """
        if not self.batches:
            return "no batch yet"
        bound = self.waited > INPUT_BOUND
        kind = "input-bound" if bound else "compute-bound"
        text = f"{kind}: the step waited {_percent(self.waited)} of the time"
        sent = self.ring_hits + self.ring_misses
        if bound and self.ring_misses > MANY_MISSES * sent:
            return (
                f"{text}; {self.ring_misses} of {sent} batches found no place in the "
                "ring: raise ring_slabs or max_ring_bytes"
            )
        if self.padding_fraction > MUCH_PADDING:
            padding = _percent(self.padding_fraction)
            return (
                f"{text}; {padding} of the stacked bytes are padding: batch samples "
                "of like sizes together"
            )
        return text

    def __str__(self) -> str:
        """Return the verdict and every figure with its unit, on lines of their own."""
        hidden = "not measured" if self.hidden is None else _percent(self.hidden)
        rows = {
            "batches": f"{self.batches}, {nbytes_text(self.nbytes)}",
            "wait": f"{self.wait_seconds:.3f} s, {_percent(self.waited)} of the time",
            "step": f"{self.busy_seconds:.3f} s",
            "fetch": f"{self.fetch_seconds:.3f} s",
            "collate": f"{self.collate_seconds:.3f} s",
            "pack": f"{self.pack_seconds:.3f} s",
            "copy": f"{self.copy_seconds:.3f} s",
            "hidden": f"{hidden} of fetch and copy" if self.fetch_seconds else hidden,
            "padding": f"{_percent(self.padding_fraction)} of "
            f"{nbytes_text(self.stacked_nbytes)} stacked",
            "ring": f"{self.ring_hits} hits, {self.ring_misses} misses",
        }
        lines = [f"  {name:<8} {value}" for name, value in rows.items()]
        return "\n".join([self.verdict, *lines])


#: What only the loader that makes the batches can count.
_FROM_BELOW = (
    *("collate_seconds", "pack_seconds", "nbytes", "padding_nbytes"),
    *("stacked_nbytes", "ring_hits", "ring_misses"),
)


class Meter:
    """Counts what a loader does, from any thread; see `LoaderStats`.

    A copy of a meter, pickled or deep, is a new one that has counted nothing.

    Args:
        clock: the time in nanoseconds; never goes back.
    """

    def __init__(self, clock: Callable[[], int] = time.perf_counter_ns) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._counts: dict[str, float] = asdict(LoaderStats())
        self._wait = self._busy = 0
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
                is taken from there: collate, pack, bytes, padding and the ring.
            before: those of that loader when counting began here.
        """
        with self._lock:
            counts = dict(self._counts)
            wait, busy = self._wait, self._busy
        counts["wait_seconds"] += wait / 1e9
        counts["busy_seconds"] += busy / 1e9
        # Counts are whole where the fields are; one dict has no such type.
        stats = LoaderStats(**counts)  # type: ignore[arg-type]
        if below is None:
            return stats
        before = before or LoaderStats()
        return replace(
            stats, **{k: getattr(below, k) - getattr(before, k) for k in _FROM_BELOW}
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
        self._started = self._meter._clock()

    def __exit__(self, *error: Any) -> None:
        meter, started = self._meter, self._started
        mine, now = meter._mine, meter._clock()
        before = mine.ended
        mine.ended = now
        with meter._lock:
            meter._wait += now - started
            if before is not None:
                meter._busy += started - before


_meters: weakref.WeakSet[Meter] = weakref.WeakSet()


def _unlock_after_fork() -> None:
    """Give meters new locks: the thread that held one does not exist in the child."""
    for meter in list(_meters):
        meter._lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_unlock_after_fork)


def _percent(fraction: float) -> str:
    return f"{100 * fraction:.0f} %"


def nbytes_text(nbytes: float) -> str:
    """Return a number of bytes in the largest decimal unit of which it has 1."""
    for unit in ("bytes", "KB", "MB", "GB"):
        if nbytes < 1000:
            return f"{nbytes:.0f} {unit}" if unit == "bytes" else f"{nbytes:.1f} {unit}"
        nbytes /= 1000
    return f"{nbytes:.1f} TB"
