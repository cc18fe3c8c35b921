"""Recommend changes to a training loop, each with the figures behind it."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import NamedTuple

from ..core.text import nbytes_text, percent, plural, time_text
from ..loader.applied import PREFETCH_FACTOR, padding_advice
from ..loader.stats import (
    MUCH_GIL_WAIT,
    MUCH_PADDING,
    SEND_SECONDS,
    may_hold_gil,
    suggest_num_workers,
)
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
    found = [
        *(_restarts(summary) or _faster_input(summary)),
        *_earlier_copies(summary),
        *_less_padding(summary),
    ]
    found.sort(key=lambda advice: -(advice.gain or 0))
    return found or [_no_change(summary)]


def _restarts(summary: Summary) -> list[Advice]:
    """Return advice if the loop leaves its iterators for new ones."""
    begins, steps = summary.begins, summary.steps
    if summary.restarts < 2:
        return []
    cost = sum(step.parts["wait"] for step in steps if step.is_first) / len(steps)
    are_new = 2 * sum(event.kind == FIRST_ITER for event in begins) > len(begins) > 0
    title = "Make the iterator once: next(iter(loader)) starts the loader anew"
    change = "call batches = iter(loader) before the loop and next(batches) in it"
    if are_new:
        title = "Make the loader once, before the loop"
        change = "make the loader before the loop"
    return [
        Advice(
            title,
            f"The loop left its loader for a new start {summary.restarts} times in "
            f"{plural(len(steps), 'step')}, which takes {time_text(cost)} of a step. "
            "Each start draws a new order, or gives the first batch again without "
            "shuffle=True. Workers start anew, and the batches that they have prepared "
            f"are lost. Use `for batch in loader`, or {change}.",
            cost,
        )
    ]


def _faster_input(summary: Summary) -> list[Advice]:
    if not summary.is_input_bound:
        return []
    workers, ahead = summary.work("worker"), summary.work("prefetch")
    in_loop = summary.mean["fetch"] + summary.mean["collate"]
    if in_loop > _WORTH * summary.step:
        cpu = summary.cpu([summary.lane], len(summary.steps))[0]
        return [_move_to_workers(summary, in_loop, cpu, "the loop itself")]
    first = _first_batches(summary)
    if first is not None:
        return [first]
    if workers is not None:
        return [_change_workers(summary, workers)]
    if ahead is not None and ahead.per_batch > _busy(summary):
        work, cpu = ahead.per_batch, ahead.cpu
        return [_move_to_workers(summary, work, cpu, "the one prefetch thread")]
    return [
        Advice(
            "Make the loader faster",
            f"A step waits {time_text(summary.mean['wait'])} for its batch. The work "
            "of the loader was not recorded: it is not a torch loader, or its workers "
            "started before the profile.",
            summary.mean["wait"],
        )
    ]


def _busy(summary: Summary) -> float:
    """Return the nanoseconds of a step without its input."""
    return summary.step - summary.input


def _cpu_share(work: float, cpu: float) -> str:
    """Return the share of CPU time in some work as text; empty if not measured."""
    return f", {percent(min(1.0, cpu / work))} of it CPU time" if cpu else ""


def _move_to_workers(summary: Summary, work: float, cpu: float, where: str) -> Advice:
    busy = _busy(summary)
    figures = (
        f"Fetching and collating a batch takes {time_text(work)} in {where}"
        f"{_cpu_share(work, cpu)}, and the rest of a step {time_text(busy)}."
    )
    if work < 1e9 * SEND_SECONDS:
        return Advice(
            "Use larger batches",
            f"{figures} Sending a batch from a worker would take as long.",
        )
    number = suggest_num_workers(work, busy, cpu, 0, summary.cores)
    gain = max(0.0, summary.step - max(busy, work / number))
    return Advice(
        f"Make batches in workers: num_workers={number}",
        f"{figures} {plural(number, 'worker')} would make a batch every "
        f"{time_text(work / number)}.",
        gain,
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
    present, work, busy = len(workers.lanes), workers.per_batch, _busy(summary)
    wait, late = summary.mean["wait"], summary.lateness
    if found := _leave_threads(summary, workers):
        return found
    titles = {
        "pyparallel.DataLoader": "Send batches through shared memory: "
        "pyparallel.DataLoader",
        "PreDataLoader": "Receive batches in a thread: PreDataLoader(loader)",
    }
    if "pack" in workers.parts:  # torch's loader copies batches
        titles.pop("pyparallel.DataLoader")
    if "PreDataLoader" in summary.applied:
        titles.pop("PreDataLoader")
    if titles and late is not None and statistics.fmean(late) < wait / 2:
        title = next(iter(titles.values()))
        return Advice(
            title,
            f"A step waits {time_text(wait)} for its batch, but the batch was ready "
            f"{_lateness(late)}. The rest of the wait is its transfer to the loop.",
            wait - statistics.fmean(late),
        )
    cores = summary.cores
    waited = workers.core_wait + workers.gil_wait
    number = suggest_num_workers(work, busy, workers.cpu, waited, cores)
    figures = (
        f"A batch takes {time_text(work)} of a worker's time"
        f"{_cpu_share(work, workers.cpu)}: one is ready every "
        f"{time_text(work / present)} with {plural(present, 'worker')}. The rest of a "
        f"step takes {time_text(busy)}."
    )
    if work / present <= busy:
        when = "but some batches are late"
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
    if workers.core_wait > work / 2:
        change = "Use fewer workers" if present > cores else "Free some cores"
        return Advice(
            f"{change}: workers wait for a core",
            f"{figures} For {time_text(workers.core_wait)} of a batch its worker was "
            f"runnable, but had none of the {plural(cores, 'core')}. Other programs "
            "use them, or there are too many workers.",
            wait,
        )
    if number > present:
        return _add_workers(summary, workers, number, figures)
    part, ns = max(workers.parts.items(), key=lambda item: item[1])
    return Advice(
        f"Reduce the work on a batch: {part} first",
        f"{figures} More workers on {plural(cores, 'core')} would not help. Most of "
        f"the work is {part}, {time_text(ns)} a batch.",
        wait,
    )


def _add_workers(summary: Summary, workers: Work, number: int, figures: str) -> Advice:
    """Return advice for a loop with too few workers."""
    present, work = len(workers.lanes), workers.per_batch
    title = f"Use more workers: num_workers={number}"
    share = workers.cpu / (work - workers.core_wait - workers.gil_wait or 1)
    if may_hold_gil(summary.applied, present, share):
        title = "Use processes as workers: worker_method='multiprocessing'"
        figures += (
            " One thread computes it. Threads do not share Python code, which holds "
            f"the GIL. If it is native code, use num_workers={number}."
        )
    left = max(_busy(summary), work / number)
    return Advice(
        title,
        f"{figures} {plural(number, 'worker')} would make one every "
        f"{time_text(work / number)}.",
        max(0.0, min(summary.mean["wait"], summary.step - left)),
    )


def _leave_threads(summary: Summary, workers: Work) -> Advice | None:
    """Return advice if worker threads wait for the GIL."""
    work, waited = workers.per_batch, workers.gil_wait
    if workers.core_wait > work / 2:
        return None
    if waited <= MUCH_GIL_WAIT * (work - workers.core_wait):
        return None
    without = (work - waited) / len(workers.lanes)
    return Advice(
        "Use processes as workers: worker_method='multiprocessing'",
        f"A batch takes {time_text(work)} of a worker thread's time. For "
        f"{time_text(waited)} of it, {percent(waited / work)}, the thread waited for "
        "the GIL, which Python code of other threads held. Processes have a GIL each.",
        max(
            0.0, min(summary.mean["wait"], summary.step - max(_busy(summary), without))
        ),
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


def _earlier_copies(summary: Summary) -> list[Advice]:
    copy = summary.mean["copy"] + summary.mean["pack"]
    if copy <= _WORTH * summary.step or "PreDataLoader" in summary.applied:
        return []
    return [
        Advice(
            "Send batches ahead of the step: PreDataLoader(loader, device)",
            f"Opening and sending a batch takes {time_text(copy)} of a step, "
            f"{percent(copy / summary.step)}. A PreDataLoader does it in a thread "
            "during the previous step.",
            copy,
        )
    ]


def _less_padding(summary: Summary) -> list[Advice]:
    stacked, padding = summary.stacked
    if summary.padding_fraction <= MUCH_PADDING:
        return []
    change = padding_advice(summary.applied)
    title = f"Reduce padding: {change}"
    return [
        Advice(
            title,
            f"{percent(summary.padding_fraction)} of the stacked bytes are padding: "
            f"{nbytes_text(padding)} of {nbytes_text(stacked)}. Padding is written, "
            "sent, and computed on, unless the model skips it.",
            summary.padding_fraction * _busy(summary),
        )
    ]


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
