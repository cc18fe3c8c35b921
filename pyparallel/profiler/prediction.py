"""Predict how much faster a loop becomes with the parts of this package.

Note: [model]. A loop takes the longest of three times for a batch: that of the loop
itself, that of the workers divided by their number, and all CPU time divided by the
cores. Each change replaces a few costs. The quotient of both times is the prediction.
The costs come from the recorded steps, from trials on their samples (`trial`), and from
a measurement of the transport of equal batches on this machine (`probe`).
"""

from __future__ import annotations

from typing import NamedTuple

from ..loader.stats import suggest_num_workers


class Costs(NamedTuple):
    """The costs of a batch in nanoseconds.

    Attributes:
        fetch: getting the samples from the dataset.
        collate: the collate function.
        send: of the worker, to send the batch.
        receive: of the loop, to receive it.
        read: of the loop, to read it for the first time.
        copy: of the loop, to send it to the device.
        compute: of the loop, all else.
        idle: the part of ``fetch`` without CPU time, for example for a disk.
        threads: the cores that ``compute`` uses.
        workers: their number; 0: the loop reads the samples.
        cores: their number.
        is_ahead: a thread receives and copies batches during the step.
        gil: the time with the GIL held, of all threads.
    """

    fetch: float
    collate: float
    send: float
    receive: float
    read: float
    copy: float
    compute: float
    idle: float = 0.0
    threads: float = 1.0
    workers: int = 0
    cores: int = 1
    is_ahead: bool = False
    gil: float = 0.0

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
    """The figures of a loop that decide. None: not known.

    Attributes:
        now: the costs of a batch.
        nbytes: the bytes of a batch.
        batch_size: the samples of a batch.
        wait: the nanoseconds in which a step waits.
        step: the nanoseconds of a step.
        padding: the share of padding in the elements of the samples.
        padding_by_size: that of batches by `SizeBatchSampler`.
        follows: the part of the step that is proportional to the size of its batch.
        ours: the nanoseconds of our collate.
        held: the part of a fetch that holds the GIL.
        transports: see `probe.transports`.
        applied: the changes that the loop has.
    """

    now: Costs
    nbytes: float | None
    batch_size: int | None
    wait: float
    step: float
    padding: float | None = None
    padding_by_size: float | None = None
    follows: float | None = None
    ours: float | None = None
    held: float | None = None
    transports: dict[str, list[int]] | None = None
    applied: frozenset[str] = frozenset()


class Change(NamedTuple):
    """A change, with the speed of the loop after it and all changes before it.

    Attributes:
        title: the change.
        factor: the time of a batch now, divided by that after the change. None: not
            known.
        reason: the reason for None, or a condition for the factor.
        is_other: it replaces others, and does not count in those after it.
    """

    title: str
    factor: float | None
    reason: str = ""
    is_other: bool = False


def changes(numbers: Numbers) -> list[Change]:
    """Return all changes that the loop has not, in the order of the model."""
    found, costs = [], numbers.now
    for change in (_loader, _collate, _prefetch, _sampler, _threads):
        made = change(numbers, costs)
        if made is None:
            continue
        title, after, reason = made
        factor = None if after is None else numbers.now.period / after.period
        is_other = change is _threads
        found.append(Change(title, factor, reason, is_other))
        if after is not None and not is_other:
            costs = after
    return found


#: A title, the costs after a change, or None and the reason.
_Made = tuple[str, Costs | None, str] | None


def _known(title: str, after: Costs | None, reason: str) -> _Made:
    return title, after, "" if after is not None else reason


_NOT_MEASURED = "the transport of a batch was not measured"
_FOLLOWS = "if the step's time follows the size of its batch"


def _loader(numbers: Numbers, costs: Costs) -> _Made:
    if "slabs" in numbers.applied and costs.workers:
        return None
    title, work = "slabs: pyparallel.DataLoader", costs.fetch + costs.collate
    if not costs.workers:
        cpu = work - costs.idle
        number = suggest_num_workers(work, costs.compute, cpu, 0, costs.cores)
        title = f"workers: pyparallel.DataLoader(num_workers={number})"
        costs = costs._replace(workers=number)
    return _known(title, _sent(numbers, costs, "slabs"), _NOT_MEASURED)


def _collate(numbers: Numbers, costs: Costs) -> _Made:
    if "collate_fn" in numbers.applied:
        return None
    after = None
    if numbers.ours is not None:
        after = costs._replace(collate=min(numbers.ours, costs.collate))
        if costs.workers and "thread" not in numbers.applied:
            after = _sent(numbers, after, "direct") or after
    title = "collate in the extension: pyparallel.Collate"
    return _known(title, after, "collate_fn does more than to pad and to stack")


def _prefetch(numbers: Numbers, costs: Costs) -> _Made:
    if "PreDataLoader" in numbers.applied:
        return None
    after = _sent(numbers, costs, "ahead") if costs.workers else costs
    after = after and after._replace(is_ahead=True)
    return _known("prefetch: PreDataLoader", after, _NOT_MEASURED)


def _sampler(numbers: Numbers, costs: Costs) -> _Made:
    title = "sampler: SizeBatchSampler"
    before, by_size = numbers.padding, numbers.padding_by_size
    if "by size" in numbers.applied:
        return None
    if before is None or by_size is None:
        return title, None, "the padding of the batches is not known"
    left = (1 - before) / (1 - by_size)
    if left >= 1:
        return title, costs, ""
    names = ("collate", "send", "receive", "read", "copy")
    scaled = {name: left * getattr(costs, name) for name in names}
    follows = 1.0 if numbers.follows is None else numbers.follows
    after = costs._replace(compute=costs.compute * (1 - follows * (1 - left)), **scaled)
    return title, after, "" if numbers.follows is not None else _FOLLOWS


def _threads(numbers: Numbers, costs: Costs) -> _Made:
    if "thread" in numbers.applied or not costs.workers:
        return None
    title, after = "threads instead of processes", _sent(numbers, costs, "threads")
    if numbers.held is None or after is None:
        return title, None, "their waits for the GIL were not measured"
    gil = numbers.held * costs.fetch + costs.compute
    return title, after._replace(gil=gil), ""


def _sent(numbers: Numbers, costs: Costs, way: str) -> Costs | None:
    """Return the costs with a way to send batches; None if it was not measured."""
    if numbers.transports is None:
        return None
    send, receive, read = numbers.transports[way]
    return costs._replace(send=send, receive=receive, read=read)
