"""Recommend changes to a training loop, each with the figures behind it."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import NamedTuple

from ..core.text import nbytes_text, percent, plural, time_text
from ..loader.applied import PREFETCH_FACTOR, padding_advice
from ..loader.findings import MUCH_PADDING, SEND_SECONDS, Finding, Load
from .record import FIRST_ITER
from .summary import Summary, Work

#: Parts below this fraction of a step are not worth a change.
_WORTH = 0.05


class Advice(NamedTuple):
    """One recommended change."""

    title: str  # the change
    text: str  # the figures behind it
    #: The most nanoseconds that it can save in a step; None if not known.
    gain: float | None = None


def advise(summary: Summary) -> list[Advice]:
    """Return at least one recommendation, sorted by decreasing gain."""
    inputs = _restarts(summary) or _faster_input(summary)
    parts = (inputs, _earlier_copies(summary), _less_padding(summary))
    found = [advice for advice in parts if advice is not None]
    found.sort(key=lambda advice: -(advice.gain or 0))
    return found or [_no_change(summary)]


def _restarts(summary: Summary) -> Advice | None:
    """Return advice if the loop leaves its iterators for new ones."""
    begins, steps = summary.begins, summary.steps
    if summary.restarts < 2:
        return None
    cost = sum(step.parts["wait"] for step in steps if step.is_first) / len(steps)
    are_new = 2 * sum(event.kind == FIRST_ITER for event in begins) > len(begins) > 0
    title = "Make the iterator once: next(iter(loader)) starts the loader anew"
    change = "call batches = iter(loader) before the loop and next(batches) in it"
    if are_new:
        title = "Make the loader once, before the loop"
        change = "make the loader before the loop"
    return Advice(
        title,
        f"The loop left its loader for a new start {summary.restarts} times in "
        f"{plural(len(steps), 'step')}, which takes {time_text(cost)} of a step. Each "
        "start draws a new order, or gives the first batch again without shuffle=True. "
        "Workers start anew, and the batches that they have prepared are lost. Use "
        f"`for batch in loader`, or {change}.",
        cost,
    )


def _faster_input(summary: Summary) -> Advice | None:
    if not summary.is_input_bound:
        return None
    workers, ahead = summary.work("worker"), summary.work("prefetch")
    in_loop = summary.mean["fetch"] + summary.mean["collate"]
    if in_loop > _WORTH * summary.step:
        cpu = summary.cpu([summary.lane], len(summary.steps))[0]
        return _move_to_workers(summary, in_loop, cpu, "the loop itself")
    if first := _first_batches(summary):
        return first
    if workers is not None:
        return _change_workers(summary, workers)
    if ahead is not None and ahead.load.work > summary.busy:
        work, cpu = ahead.load.work, ahead.load.cpu
        return _move_to_workers(summary, work, cpu, "the one prefetch thread")
    return Advice(
        "Make the loader faster",
        f"A step waits {time_text(summary.mean['wait'])} for its batch. The work of "
        "the loader was not recorded: it is not a torch loader, or its workers started "
        "before the profile.",
        summary.mean["wait"],
    )


def _saved(summary: Summary, period: float) -> float:
    """Return the nanoseconds that a step saves if a batch is ready in each period."""
    return max(0.0, summary.step - max(summary.busy, period))


def _cpu_share(work: float, cpu: float) -> str:
    """Return the share of CPU time in some work as text; empty if not measured."""
    return f", {percent(min(1.0, cpu / work))} of it CPU time" if cpu else ""


def _move_to_workers(summary: Summary, work: float, cpu: float, where: str) -> Advice:
    figures = (
        f"Fetching and collating a batch takes {time_text(work)} in {where}"
        f"{_cpu_share(work, cpu)}, and the rest of a step {time_text(summary.busy)}."
    )
    if work < 1e9 * SEND_SECONDS:
        return Advice(
            "Use larger batches",
            f"{figures} Sending a batch from a worker would take as long.",
        )
    number = Load(work, summary.busy, cpu, cores=summary.cores).num_needed
    return Advice(
        f"Make batches in workers: num_workers={number}",
        f"{figures} {plural(number, 'worker')} would make a batch every "
        f"{time_text(work / number)}.",
        _saved(summary, work / number),
    )


def _first_batches(summary: Summary) -> Advice | None:
    """Return advice if most of the wait is for the first batches of epochs."""
    waits = [(step.is_first, step.parts["wait"]) for step in summary.steps]
    first = [ns for is_first, ns in waits if is_first]
    total = sum(ns for _, ns in waits)
    if not first or sum(first) <= total / 2 or len(first) == len(waits):
        return None
    title = "Keep workers from epoch to epoch: persistent_workers=True"
    has_none = summary.options.get("num_workers") == 0
    if "persistent_workers" in summary.applied or has_none:
        title = "Start the next epoch early: PreDataLoader(loader, next_epoch=True)"
        if "next_epoch" in summary.applied:
            return None
    rest = (total - sum(first)) / (len(waits) - len(first))
    return Advice(
        title,
        f"A step waits {time_text(sum(first) / len(first))} for the first batch of an "
        f"epoch, and {time_text(rest)} for each other one. PreDataLoader(..., "
        "next_epoch=True) starts the next epoch as soon as one has ended.",
        sum(first) / len(waits) - rest * len(first) / len(waits),
    )


def _change_workers(summary: Summary, workers: Work) -> Advice:
    load, wait = workers.load, summary.mean["wait"]
    if load.finding is Finding.GIL:
        return _leave_threads(summary, load)
    if found := _faster_transfer(summary, workers):
        return found
    work, period, cores = (
        load.work,
        load.work / load.workers,
        plural(load.cores, "core"),
    )
    figures = (
        f"A batch takes {time_text(work)} of a worker's time"
        f"{_cpu_share(work, load.cpu)}: one is ready every {time_text(period)} with "
        f"{plural(load.workers, 'worker')}. The rest of a step takes "
        f"{time_text(load.busy)}."
    )
    if load.is_enough:
        when, late = "but some batches are late", summary.lateness
        if late is not None:
            when = f"but the batch was ready {_lateness(late)}"
        slowest = max(step.parts["wait"] for step in summary.steps)
        title = f"Let workers run further ahead: prefetch_factor={PREFETCH_FACTOR}"
        if "prefetch_factor" in summary.applied:
            title = "Look for slow samples"
        return Advice(
            title,
            f"{figures} That is enough on average, {when}. The longest wait is "
            f"{time_text(slowest)}.",
            wait,
        )
    if load.finding is Finding.NO_CORE:
        change = "Use fewer workers" if load.is_crowded else "Free some cores"
        return Advice(
            f"{change}: workers wait for a core",
            f"{figures} For {time_text(load.core_wait)} of a batch its worker was "
            f"runnable, but had none of the {cores}. Other programs use them, or there "
            "are too many workers.",
            wait,
        )
    if load.finding in (Finding.FEW_WORKERS, Finding.ONE_THREAD):
        return _add_workers(summary, load, figures)
    part, ns = max(workers.parts.items(), key=lambda item: item[1])
    return Advice(
        f"Reduce the work on a batch: {part} first",
        f"{figures} More workers on {cores} would not help. Most of the work is "
        f"{part}, {time_text(ns)} a batch.",
        wait,
    )


def _faster_transfer(summary: Summary, workers: Work) -> Advice | None:
    """Return advice if most of the wait is for batches that are ready."""
    wait, late = summary.mean["wait"], summary.lateness
    if late is None or statistics.fmean(late) >= wait / 2:
        return None
    if "pack" not in workers.parts:  # torch's loader copies batches
        title = "Send batches through shared memory: pyparallel.DataLoader"
    elif "PreDataLoader" not in summary.applied:
        title = "Receive batches in a thread: PreDataLoader(loader)"
    else:
        return None
    return Advice(
        title,
        f"A step waits {time_text(wait)} for its batch, but the batch was ready "
        f"{_lateness(late)}. The rest of the wait is its transfer to the loop.",
        wait - statistics.fmean(late),
    )


def _add_workers(summary: Summary, load: Load, figures: str) -> Advice:
    """Return advice for a loop with too few workers."""
    number = load.num_needed
    title = f"Use more workers: num_workers={number}"
    if load.finding is Finding.ONE_THREAD:
        title = "Use processes as workers: worker_method='multiprocessing'"
        figures += (
            " One thread computes it. Threads do not share Python code, which holds "
            f"the GIL. If it is native code, use num_workers={number}."
        )
    period = load.work / number
    return Advice(
        title,
        f"{figures} {plural(number, 'worker')} would make one every "
        f"{time_text(period)}.",
        min(summary.mean["wait"], _saved(summary, period)),
    )


def _leave_threads(summary: Summary, load: Load) -> Advice:
    """Return advice for worker threads that wait for the GIL."""
    work, waited = load.work, load.gil_wait
    return Advice(
        "Use processes as workers: worker_method='multiprocessing'",
        f"A batch takes {time_text(work)} of a worker thread's time. For "
        f"{time_text(waited)} of it, {percent(waited / work)}, the thread waited for "
        "the GIL, which Python code of other threads held. Processes have a GIL each.",
        min(summary.mean["wait"], _saved(summary, (work - waited) / load.workers)),
    )


def _lateness(late: Sequence[int]) -> str:
    """Return the times at which batches were ready, relative to the requests."""
    count = sum(ns > 0 for ns in late)
    if not count:
        return "before the request in every step"
    return (
        f"after the request in {count} of {plural(len(late), 'step')}, by "
        f"{time_text(max(late))} at most"
    )


def _earlier_copies(summary: Summary) -> Advice | None:
    copy = summary.mean["copy"] + summary.mean["pack"]
    if copy <= _WORTH * summary.step or "PreDataLoader" in summary.applied:
        return None
    return Advice(
        "Send batches ahead of the step: PreDataLoader(loader, device)",
        f"Opening and sending a batch takes {time_text(copy)} of a step, "
        f"{percent(copy / summary.step)}. A PreDataLoader does it in a thread during "
        "the previous step.",
        copy,
    )


def _less_padding(summary: Summary) -> Advice | None:
    stacked, padding = summary.stacked
    if summary.padding_fraction <= MUCH_PADDING:
        return None
    return Advice(
        f"Reduce padding: {padding_advice(summary.applied)}",
        f"{percent(summary.padding_fraction)} of the stacked bytes are padding: "
        f"{nbytes_text(padding)} of {nbytes_text(stacked)}. Padding is written, sent, "
        "and computed on, unless the model skips it.",
        summary.padding_fraction * summary.busy,
    )


def _no_change(summary: Summary) -> Advice:
    if summary.is_input_bound is None:
        return Advice(
            "Use a loader of torch or pyparallel",
            "Then the report distinguishes waiting for batches from computing.",
        )
    compute = summary.mean["compute"]
    return Advice(
        "No change of the input",
        f"Compute is {time_text(compute)} of a step, "
        f"{percent(compute / summary.step)}. Faster input would save "
        f"{time_text(summary.input)} at most.",
    )
