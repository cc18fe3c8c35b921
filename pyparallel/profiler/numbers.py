"""Find the figures of a loop from which `prediction` calculates."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from ..sampler.size_batch_sampler import SizeBatchSampler
from .prediction import Costs, Numbers
from .record import WAIT, Event
from .summary import Step, Summary


def numbers_of(summary: Summary) -> Numbers:
    """Return the figures of a summary."""
    record = summary.record
    known = 0 < summary.loader <= len(record.loaders)
    loader = record.loaders[summary.loader - 1] if known else {}
    applied = summary.applied | ({"slabs"} if loader.get("slabs") else set())
    waits = {
        event.start: event
        for event in record.events
        if event.kind == WAIT and event.loader == summary.loader
    }
    steps = [(step, waits[step.asked]) for step in summary.steps if step.asked in waits]
    trials = [row for row in record.batches if "ours" in row]
    ours = [row["ours"] for row in trials if row["ours"] is not None]
    sizes = [row["sizes"] for row in record.batches]
    padding, by_size = paddings(sizes) if ours else (None, None)
    nbytes = [event.nbytes for _, event in steps if event.nbytes]
    compute = [step.parts["compute"] for step, event in steps if event.nbytes]
    return Numbers(
        _costs(summary, steps, applied),
        statistics.fmean(nbytes) if nbytes else None,
        loader.get("batch_size") or max(map(len, sizes), default=None),
        summary.mean["wait"],
        summary.step,
        padding,
        by_size,
        follows(nbytes, compute),
        statistics.median(ours) if ours else None,
        statistics.median(row["held"] for row in trials) if trials else None,
        record.transports or None,
        applied,
    )


def _costs(
    summary: Summary, steps: Sequence[tuple[Step, Event]], applied: frozenset[str]
) -> Costs:
    mean, count = summary.mean, len(summary.steps)
    work = summary.work("worker") or summary.work("prefetch")
    parts, (cpu, core_wait, _) = mean, summary.cpu([summary.lane], count)
    num_workers = 0
    if work is not None:
        parts, cpu, core_wait = work.parts, work.cpu, work.core_wait
        num_workers = len(work.lanes) if work.lanes[0].startswith("worker") else 0
    made = parts.get("fetch", 0.0) + parts.get("collate", 0.0)
    # The part of the time that remains on a machine without other programs.
    share = _alone(made, cpu, core_wait) / made if made else 1.0
    send = receive = read = 0.0
    if num_workers and summary.record.transports:
        way = "direct" if "collate_fn" in applied else "slabs"
        way = (
            "threads" if "thread" in applied else way if "slabs" in applied else "torch"
        )
        send, receive, read = summary.record.transports[way]
    # The first step of an epoch counts the time since the epoch before.
    inside = [event for step, event in steps if not step.is_first and event.cpu >= 0]
    used = statistics.fmean(event.cpu for event in inside) if inside else 0.0
    waited = statistics.fmean(event.core_wait for event in inside) if inside else 0.0
    compute = max(1.0, _alone(mean["compute"], used, waited) - read)
    cores = summary.record.environment.get("cores", "1")
    return Costs(
        share * parts.get("fetch", 0.0),
        share * parts.get("collate", 0.0),
        *(send, receive, read),
        mean["copy"],
        compute,
        max(0.0, share * made - cpu) if cpu else 0.0,
        max(1.0, (used - read - mean["copy"]) / compute),
        num_workers,
        int(cores) if cores.isdecimal() else 1,
        "PreDataLoader" in applied,
    )


def _alone(wall: float, cpu: float, core_wait: float) -> float:
    """Return the time of some work on a machine without other programs.

    If the work waited for cores for a tenth of its time, the machine is loaded. Then
    all of its waits count as those for cores.
    """
    left = max(0.0, wall - core_wait)
    return min(left, cpu) if cpu and core_wait > wall / 10 else left


def paddings(batches: Sequence[Sequence[Sequence[int]]]) -> tuple[Any, Any]:
    """Return the share of padding in some batches, and in those of `SizeBatchSampler`.

    Args:
        batches: the shape of the largest array of each sample in each batch.
    """
    samples = list(itertools.chain.from_iterable(batches))
    if len(set(map(len, samples))) != 1:
        return None, None
    varies = [len(set(sizes)) > 1 for sizes in zip(*samples, strict=True)]
    if not any(varies):
        return 0.0, 0.0
    sizes = [list(itertools.compress(sample, varies)) for sample in samples]
    try:
        sampler = SizeBatchSampler(
            sizes, max(map(len, batches)), num_replicas=1, rank=0
        )
    except ImportError:  # NumPy is not installed
        return _padding(batches), None
    return _padding(batches), _padding([[samples[i] for i in each] for each in sampler])


def _padding(batches: Iterable[Sequence[Sequence[int]]]) -> float:
    real = padded = 0
    for batch in batches:
        real += sum(map(math.prod, batch))
        padded += len(batch) * math.prod(map(max, zip(*batch, strict=True)))
    return 1 - real / padded if padded else 0.0


def follows(nbytes: Sequence[float], times: Sequence[float]) -> float | None:
    """Return the part of some times that is proportional to the bytes of the batches.

    The slope is the median of those of all pairs, which ignores outliers. The result is
    None if the bytes or the batches are too few to know it.
    """
    if len(nbytes) < 8 or statistics.stdev(nbytes) < 0.02 * statistics.fmean(nbytes):
        return None
    points = sorted(zip(nbytes, times, strict=True))
    slope = statistics.median(
        (y2 - y1) / (x2 - x1)
        for (x1, y1), (x2, y2) in itertools.combinations(points, 2)
        if x2 > x1
    )
    share = slope * statistics.fmean(nbytes) / (statistics.fmean(times) or 1.0)
    return min(1.0, max(0.0, share))
