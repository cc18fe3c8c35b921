"""What to change first, each with the figures that say so."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import NamedTuple

from ..core.text import nbytes_text, percent, plural, time_text
from ..loader.stats import MUCH_PADDING, SEND_SECONDS, suggest_num_workers
from .summary import Summary, Work

#: A part of a step is worth a change from this fraction of the step on.
_WORTH = 0.05


class Advice(NamedTuple):
    """One thing to change."""

    title: str
    #: The figures that say so, and what the change is about.
    text: str
    #: Up to so many nanoseconds of a step; None: not known.
    gain: float | None = None


def advise(summary: Summary) -> list[Advice]:
    """Return what to change, the most promising first; never nothing."""
    found = [
        *_more_input(summary),
        *_hidden_copies(summary),
        *_less_padding(summary),
    ]
    found.sort(key=lambda advice: -(advice.gain or 0))
    return found or [_nothing(summary)]


def _more_input(summary: Summary) -> list[Advice]:
    if not summary.is_input_bound:
        return []
    workers, ahead = summary.work("worker"), summary.work("prefetch")
    mine = summary.mean["fetch"] + summary.mean["collate"]
    if mine > _WORTH * summary.step:
        cpu, _ = summary.cpu([summary.lane], len(summary.steps))
        return [_into_workers(summary, mine, cpu, "the loop itself")]
    first = _first_batches(summary)
    if first is not None:
        return [first]
    if workers is not None:
        return [_for_workers(summary, workers)]
    if ahead is not None and ahead.per_batch > _busy(summary):
        work, cpu = ahead.per_batch, ahead.cpu
        return [_into_workers(summary, work, cpu, "the prefetcher's one thread")]
    return [
        Advice(
            "Make the loader faster",
            f"A step waits {time_text(summary.mean['wait'])} for its batch. The work "
            "of the loader was not seen: it is none of torch's, or its workers had "
            "started before.",
            summary.mean["wait"],
        )
    ]


def _busy(summary: Summary) -> float:
    """Return the nanoseconds of a step that is given its batch at once."""
    return summary.step - summary.input


def _cores(summary: Summary) -> int:
    cores = summary.record.environment.get("cores", "1")
    return int(cores) if cores.isdecimal() else 1


def _computing(work: float, cpu: float) -> str:
    """Return the share of some work that is CPU time, if that is known."""
    return f", {percent(min(1.0, cpu / work))} of it CPU time" if cpu else ""


def _into_workers(summary: Summary, work: float, cpu: float, where: str) -> Advice:
    busy = _busy(summary)
    figures = (
        f"Fetching and collating a batch takes {time_text(work)} in {where}"
        f"{_computing(work, cpu)}, and the rest of a step {time_text(busy)}."
    )
    if work < 1e9 * SEND_SECONDS:
        return Advice(
            "Use larger batches",
            f"{figures} A worker would need as long to send a batch.",
        )
    number = suggest_num_workers(work, busy, cpu, 0, _cores(summary))
    gain = max(0.0, summary.step - max(busy, work / number))
    return Advice(
        f"Make batches in workers: num_workers={number}",
        f"{figures} {plural(number, 'worker')} would do it meanwhile: a batch every "
        f"{time_text(work / number)}.",
        gain,
    )


def _first_batches(summary: Summary) -> Advice | None:
    """Return advice if most waiting is for the first batch of an epoch."""
    waits = [(step.is_first, step.parts["wait"]) for step in summary.steps]
    first = [ns for is_first, ns in waits if is_first]
    total = sum(ns for _, ns in waits)
    if not first or sum(first) <= total / 2 or len(first) == len(waits):
        return None
    rest = (total - sum(first)) / (len(waits) - len(first))
    return Advice(
        "Keep workers from epoch to epoch: persistent_workers=True",
        f"The first batch of an epoch takes {time_text(sum(first) / len(first))}, each "
        f"other one {time_text(rest)}. PreDataLoader(..., next_epoch=True) begins the "
        "next epoch as soon as one has ended.",
        sum(first) / len(waits) - rest * len(first) / len(waits),
    )


def _for_workers(summary: Summary, workers: Work) -> Advice:
    have, work, busy = len(workers.lanes), workers.per_batch, _busy(summary)
    wait, late = summary.mean["wait"], summary.lateness
    if late is not None and statistics.fmean(late) < wait / 2:
        title = "Receive batches in a thread: PreDataLoader(loader)"
        if "pack" not in workers.parts:  # torch's loader, which copies them
            title = "Send batches through shared memory: pyparallel.DataLoader"
        return Advice(
            title,
            f"A step waits {time_text(wait)} for its batch, but the batch was ready "
            f"{_lateness(late)}. The rest is the time to send and to receive it.",
            wait - statistics.fmean(late),
        )
    cores = _cores(summary)
    number = suggest_num_workers(work, busy, workers.cpu, workers.core_wait, cores)
    figures = (
        f"A batch takes {time_text(work)} of a worker's time"
        f"{_computing(work, workers.cpu)}: one is ready every {time_text(work / have)} "
        f"with {plural(have, 'worker')}. The rest of a step takes {time_text(busy)}."
    )
    if work / have <= busy:
        when = "so single batches come late"
        if late is not None:
            when = f"but the batch was ready {_lateness(late)}"
        slowest = max(step.parts["wait"] for step in summary.steps)
        return Advice(
            "Let workers run further ahead: prefetch_factor",
            f"{figures} That is enough on average, {when}. The longest wait is "
            f"{time_text(slowest)}. Raise prefetch_factor, and see which samples are "
            "slow.",
            wait,
        )
    if workers.core_wait > work / 2:
        crowd = "Use fewer workers" if have > cores else "Free some cores"
        return Advice(
            f"{crowd}: workers wait for a core",
            f"{figures} For {time_text(workers.core_wait)} of it the worker could run, "
            f"but none of the {plural(cores, 'core')} here was free. Other programs "
            "use them, or there are too many workers.",
            wait,
        )
    if number > have:
        gain = max(0.0, min(wait, summary.step - max(busy, work / number)))
        return Advice(
            f"Use more workers: num_workers={number}",
            f"{figures} {plural(number, 'worker')} would give one every "
            f"{time_text(work / number)}.",
            gain,
        )
    part, ns = max(workers.parts.items(), key=lambda item: item[1])
    return Advice(
        f"Make batches cheaper: {part} comes first",
        f"{figures} More workers on the {plural(cores, 'core')} here would not help. "
        f"Most of the work is {part}, {time_text(ns)} a batch.",
        wait,
    )


def _lateness(late: Sequence[int]) -> str:
    """Return when batches were ready, against when they were asked for."""
    count = sum(ns > 0 for ns in late)
    if not count:
        return "before it was asked for in every step"
    return (
        f"after it was asked for in {count} of {plural(len(late), 'step')}, "
        f"by {time_text(max(late))} at most"
    )


def _hidden_copies(summary: Summary) -> list[Advice]:
    copy = summary.mean["copy"] + summary.mean["pack"]
    if copy <= _WORTH * summary.step or summary.work("prefetch") is not None:
        return []
    return [
        Advice(
            "Send batches ahead of the step: PreDataLoader(loader, device)",
            f"Opening and sending a batch takes {time_text(copy)} of a step, "
            f"{percent(copy / summary.step)}. A PreDataLoader does it in a thread "
            "while the step before runs.",
            copy,
        )
    ]


def _less_padding(summary: Summary) -> list[Advice]:
    stacked, padding = summary.stacked
    if summary.padding_fraction <= MUCH_PADDING:
        return []
    return [
        Advice(
            "Batch samples of like sizes together",
            f"{percent(summary.padding_fraction)} of the stacked bytes are padding: "
            f"{nbytes_text(padding)} of {nbytes_text(stacked)}. All of it is written "
            "and sent, and a model that does not skip it computes on it.",
            summary.padding_fraction * _busy(summary),
        )
    ]


def _nothing(summary: Summary) -> Advice:
    if summary.is_input_bound is None:
        return Advice(
            "Use a loader of torch or pyparallel",
            "Then what the loop waits for can be told from what it computes.",
        )
    compute = summary.mean["compute"]
    return Advice(
        "Nothing in the input",
        f"Compute is {time_text(compute)} of a step, "
        f"{percent(compute / summary.step)}. Batches that were there at once would "
        f"save {time_text(summary.input)} at most.",
    )
