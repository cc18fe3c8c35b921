"""Turn the times of a loop into a finding, for `LoaderStats` and for the profiler."""

from __future__ import annotations

import math
from enum import Enum, auto
from typing import NamedTuple

#: A loop is input-bound if its step waits for more than this fraction of the time.
_INPUT_BOUND = 0.1
#: Verdicts and a warning report padding above this fraction of the bytes.
MUCH_PADDING = 0.4
#: Waits for the GIL are reported above this fraction of the time without core waits.
MUCH_GIL_WAIT = 0.25
#: The time in which a worker sends a batch. Workers do not speed up faster batches.
SEND_SECONDS = 1e-3
#: The most workers for each core that a verdict suggests.
_WORKERS_PER_CORE = 8


def bottleneck(waited: float) -> str:
    """Return ``input-bound`` or ``compute-bound``.

    Args:
        waited: the fraction of the time in which the step waited for a batch.
    """
    return "input-bound" if waited > _INPUT_BOUND else "compute-bound"


class Finding(Enum):
    """The reason why batches come late."""

    NO_CORE = auto()  # workers wait for a core
    GIL = auto()  # worker threads wait for the GIL
    ONE_THREAD = auto()  # one thread computes, which may hold the GIL
    FEW_WORKERS = auto()  # there are cores for more workers
    UNEVEN = auto()  # workers are fast enough on average
    MUCH_WORK = auto()  # there are no cores for more workers


class Load(NamedTuple):
    """The work on batches, and the steps that use them. Times have one unit."""

    work: float  # the time of workers for some batches
    busy: float  # the time of their steps, without waits for input
    cpu: float = 0.0  # the CPU time in ``work``; 0: unknown
    core_wait: float = 0.0  # the part of ``work`` in which a worker had no core
    gil_wait: float = 0.0  # the part of ``work`` in which a worker waited for the GIL
    workers: int = 0  # their number
    cores: int = 0  # the number of cores of the process; 0: unknown
    applied: frozenset[str] = frozenset()  # see `LoaderStats.applied`

    @property
    def num_needed(self) -> int:
        """The number of workers that prepare each batch in time.

        Workers that compute need one core each. Workers that wait for a disk share
        cores. The result is at most the number of workers that use all cores.
        """
        share = 1.0
        if self.cpu:
            had_core = self.work - self.core_wait - self.gil_wait
            share = min(max(1.0, had_core / self.cpu), _WORKERS_PER_CORE)
        most = math.floor(max(1, self.cores) * share)
        needed = self.work / self.busy if self.busy else math.inf
        return max(1, math.ceil(min(needed, most)))

    @property
    def is_enough(self) -> bool:
        """True if the workers prepare batches in time on average."""
        return self.work <= self.workers * self.busy

    @property
    def is_crowded(self) -> bool:
        """True if there are more workers than cores."""
        return 0 < self.cores < self.workers

    @property
    def finding(self) -> Finding:
        """The reason why batches come late."""
        with_core = self.work - self.core_wait
        if self.core_wait > self.work / 2:
            return Finding.NO_CORE
        if self.gil_wait > MUCH_GIL_WAIT * with_core:
            return Finding.GIL
        if self.num_needed > self.workers:
            # The only thread does not wait for the GIL, so ``gil_wait`` is 0.
            computes = self.cpu / (with_core - self.gil_wait or 1) > 0.5
            is_thread = "thread" in self.applied and self.workers == 1
            return Finding.ONE_THREAD if is_thread and computes else Finding.FEW_WORKERS
        return Finding.UNEVEN if self.is_enough else Finding.MUCH_WORK
