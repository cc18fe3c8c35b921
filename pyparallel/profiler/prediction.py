"""Predict how much faster a loop becomes with the parts of this package.

Note: [model]. A loop takes the longest of three times for a batch: that of the loop
itself, that of the workers divided by their number, and all CPU time divided by the
cores. Each change replaces a few costs. The quotient of both times is the prediction.
The costs come from the recorded steps, and from measurements by `trial`.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from ..core.text import nbytes_text, percent, plural, time_text
from ..loader.findings import Load
from ..sampler.size_batch_sampler import SizeBatchSampler
from .record import WAIT
from .summary import Step, Summary

#: A smaller gain counts as no gain: the model is not more accurate.
_WORTH = 1.05


class Costs(NamedTuple):
    """The costs of a batch in nanoseconds."""

    fetch: float  # getting the samples from the dataset
    collate: float  # the collate function
    send: float  # of the worker, to send the batch
    receive: float  # of the loop, to receive it
    read: float  # of the loop, to read it for the first time
    copy: float  # of the loop, to send it to the device
    compute: float  # of the loop, all else
    idle: float = 0.0  # the part of ``fetch`` without CPU time, for example for a disk
    threads: float = 1.0  # the cores that ``compute`` uses
    workers: int = 0  # their number; 0: the loop reads the samples
    cores: int = 1  # their number
    is_ahead: bool = False  # a thread receives and copies batches during the step
    gil: float = 0.0  # the time with the GIL held, of all threads

    @property
    def period(self) -> float:
        """The time of a batch: see Note [model]."""
        made, own = self.fetch + self.collate + self.send, self.receive + self.copy
        step = self.compute + self.read
        cpu = made - self.idle + own + self.read + self.compute * self.threads
        if not self.workers:
            made, own = 0.0, own + made
        loop = max(step, own) if self.is_ahead else step + own
        workers = made / max(1, self.workers)
        return max(loop, workers, cpu / self.cores, self.gil)


class Numbers(NamedTuple):
    """The figures of a loop that decide. None: not known."""

    now: Costs  # the costs of a batch
    nbytes: float | None  # the bytes of a batch
    batch_size: int | None  # the samples of a batch
    wait: float  # the nanoseconds in which a step waits
    padding: float | None = None  # the share of padding in the elements of the samples
    padding_by_size: float | None = None  # that of batches by `SizeBatchSampler`
    #: The part of the step that is proportional to the size of its batch.
    follows: float | None = None
    ours: float | None = None  # the nanoseconds of our collate
    held: float | None = None  # the part of a fetch that holds the GIL
    transports: dict[str, list[int]] | None = None  # see `trial.transports`
    applied: frozenset[str] = frozenset()  # the changes that the loop has


class Change(NamedTuple):
    """A change, with the speed of the loop after it and all changes before it."""

    title: str  # the change
    #: The time of a batch now, divided by that after the change. None: not known.
    factor: float | None
    reason: str = ""  # the reason for None, or a condition for the factor
    is_other: bool = False  # it replaces others, and does not count in those after it


def changes(numbers: Numbers) -> list[Change]:
    """Return all changes that the loop has not, in the order of the model."""
    found, costs = [], numbers.now
    for name, change in _CHANGES.items():
        # Workers are a part of the first change.
        if name in numbers.applied and (name != "slabs" or costs.workers):
            continue
        is_other = change is _threads
        if is_other and not costs.workers:
            continue
        title, after, reason = change(numbers, costs)
        factor = None if after is None else numbers.now.period / after.period
        found.append(Change(title, factor, reason, is_other))
        if after is not None and not is_other:
            costs = after
    return found


#: A title; the costs after a change, None if they are not known; and the reason for
#: None, or a condition.
_Made = tuple[str, Costs | None, str]


def _loader(numbers: Numbers, costs: Costs) -> _Made:
    title, work = "slabs: pyparallel.DataLoader", costs.fetch + costs.collate
    if not costs.workers:
        cpu = work - costs.idle
        number = Load(work, costs.compute, cpu, cores=costs.cores).num_needed
        title = f"workers: pyparallel.DataLoader(num_workers={number})"
        costs = costs._replace(workers=number)
    return title, *_sent(numbers, costs, "slabs")


def _collate(numbers: Numbers, costs: Costs) -> _Made:
    title = "collate in the extension: pyparallel.Collate"
    if numbers.ours is None:
        return title, None, "collate_fn does more than to pad and to stack"
    after = costs._replace(collate=min(numbers.ours, costs.collate))
    if costs.workers and "thread" not in numbers.applied:
        after = _sent(numbers, after, "direct")[0] or after
    return title, after, ""


def _prefetch(numbers: Numbers, costs: Costs) -> _Made:
    costs = costs._replace(is_ahead=True)
    sent = _sent(numbers, costs, "ahead") if costs.workers else (costs, "")
    return "prefetch: PreDataLoader", *sent


def _sampler(numbers: Numbers, costs: Costs) -> _Made:
    title = "sampler: SizeBatchSampler"
    before, by_size = numbers.padding, numbers.padding_by_size
    if before is None or by_size is None:
        return title, None, "the padding of the batches is not known"
    left = (1 - before) / (1 - by_size)
    if left >= 1:
        return title, costs, ""
    names = ("collate", "send", "receive", "read", "copy")
    scaled = {name: left * getattr(costs, name) for name in names}
    follows, reason = numbers.follows, ""
    if follows is None:
        follows, reason = 1.0, "if the step's time follows the size of its batch"
    compute = costs.compute * (1 - follows * (1 - left))
    return title, costs._replace(compute=compute, **scaled), reason


def _threads(numbers: Numbers, costs: Costs) -> _Made:
    title, after = "threads instead of processes", _sent(numbers, costs, "threads")[0]
    if numbers.held is None or after is None:
        return title, None, "their waits for the GIL were not measured"
    gil = numbers.held * costs.fetch + costs.compute
    return title, after._replace(gil=gil), ""


#: The changes in the order of the model, by the names of `Numbers.applied`.
_CHANGES: dict[str, Callable[[Numbers, Costs], _Made]] = {
    "slabs": _loader,
    "collate_fn": _collate,
    "PreDataLoader": _prefetch,
    "by size": _sampler,
    "thread": _threads,
}


def _sent(numbers: Numbers, costs: Costs, way: str) -> tuple[Costs | None, str]:
    """Return the costs with a way to send batches; None and the reason without them."""
    if numbers.transports is None:
        return None, "the transport of a batch was not measured"
    send, receive, read = numbers.transports[way]
    return costs._replace(send=send, receive=receive, read=read), ""


def numbers_of(summary: Summary) -> Numbers:
    """Return the figures of a summary."""
    record = summary.record
    loader = summary.options
    applied = summary.applied | ({"slabs"} if loader.get("slabs") else set())
    steps = [step for step in summary.steps if step.mark.kind == WAIT]
    trials = [row for row in record.batches if "ours" in row]
    ours = [row["ours"] for row in trials if row["ours"] is not None]
    sizes = [row["sizes"] for row in record.batches]
    padding, by_size = paddings(sizes) if ours else (None, None)
    nbytes = [step.mark.nbytes for step in steps if step.mark.nbytes]
    compute = [step.parts["compute"] for step in steps if step.mark.nbytes]
    return Numbers(
        _costs(summary, steps, applied),
        statistics.fmean(nbytes) if nbytes else None,
        loader.get("batch_size") or max(map(len, sizes), default=None),
        summary.mean["wait"],
        padding,
        by_size,
        follows(nbytes, compute),
        statistics.median(ours) if ours else None,
        statistics.median(row["held"] for row in trials) if trials else None,
        record.transports or None,
        applied,
    )


def _costs(summary: Summary, steps: Sequence[Step], applied: frozenset[str]) -> Costs:
    mean, num_workers = summary.mean, 0
    work = summary.work("worker") or summary.work("prefetch")
    cpu, core_wait, _ = summary.cpu([summary.lane], len(summary.steps))
    parts = mean
    if work is not None:
        parts, cpu, core_wait = work.parts, work.load.cpu, work.load.core_wait
        num_workers = len(work.lanes) if work.lanes[0].startswith("worker") else 0
    made = parts.get("fetch", 0.0) + parts.get("collate", 0.0)
    # The part of the time that remains on a machine without other programs.
    share = max(0.0, made - core_wait) / made if made else 1.0
    send = receive = read = 0.0
    if num_workers and summary.record.transports:
        way = "direct" if "collate_fn" in applied else "slabs"
        way = (
            "threads" if "thread" in applied else way if "slabs" in applied else "torch"
        )
        send, receive, read = summary.record.transports[way]
    # The first step of an epoch counts the time since the epoch before.
    marks = [step.mark for step in steps if not step.is_first]
    inside = [event for event in marks if event.cpu >= 0]
    used = statistics.fmean(event.cpu for event in inside) if inside else 0.0
    waited = statistics.fmean(event.core_wait for event in inside) if inside else 0.0
    compute = max(1.0, mean["compute"] - waited - read)
    return Costs(
        share * parts.get("fetch", 0.0),
        share * parts.get("collate", 0.0),
        *(send, receive, read),
        mean["copy"],
        compute,
        max(0.0, share * made - cpu) if cpu else 0.0,
        max(1.0, (used - read - mean["copy"]) / compute),
        num_workers,
        summary.cores,
        "PreDataLoader" in applied,
    )


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


def expected(numbers: Numbers) -> list[str]:
    """Return the prediction as lines: the sum, the parts, and the figures."""
    found = changes(numbers)
    counted = [each for each in found if each.factor and not each.is_other]
    reasons = [each.reason for each in found if each.factor is None]
    if not counted:
        why = reasons[0] if reasons else "the loop has all parts"
        return [f"expected with pyparallel: not known, because {why}"]
    factors = [1.0, *(each.factor or 1.0 for each in counted)]
    gains = [after / before for before, after in itertools.pairwise(factors)]
    if factors[-1] < _WORTH:
        text = f"no gain ({factors[-1]:.2f}x), because {_limit(numbers)}"
    else:
        best = counted[gains.index(max(gains))].title.partition(":")[0]
        text = f"{factors[-1]:.1f}x; most of it from: {best}"
    rows = []
    for title, factor, reason, _ in found:
        value = "not known:" if factor is None else f"{factor:.2f}x"
        rows.append(f"  {title:<45} {value} {reason}".rstrip())
    return [f"expected with pyparallel: {text}", *rows, f"  {_figures(numbers)}"]


def _limit(numbers: Numbers) -> str:
    """Return the part of the loop that no change makes shorter."""
    now = numbers.now
    step = now.compute / now.period
    if step >= 0.8 or not now.fetch:
        return f"the step takes {percent(min(1.0, step))} of the time"
    cpu = (now.fetch - now.idle) / (now.period * now.cores)
    read = now.fetch / (now.period * max(1, now.workers))
    return f"reading samples takes {percent(min(1.0, max(read, cpu)))} of the time"


def _figures(numbers: Numbers) -> str:
    now, size = numbers.now, numbers.batch_size

    def known(value: float | None, text: Callable[[float], str]) -> str:
        return "not known" if value is None else text(value)

    transport = None
    if numbers.transports:
        transport = now.send + now.receive + now.read
    figures = {
        "bytes of a batch": known(numbers.nbytes, nbytes_text),
        "reading a sample": known(size and now.fetch / size, time_text),
        "collate": time_text(now.collate),
        "transport": known(transport, time_text),
        "padding": known(numbers.padding, percent),
        "step": time_text(now.compute),
        "wait": time_text(numbers.wait),
    }
    texts = [f"{name} {value}" for name, value in figures.items()]
    return f"{', '.join(texts)}, {plural(now.workers, 'worker')}"
