"""What to change first, each with the figures that say so."""

from __future__ import annotations

import math
from typing import NamedTuple

from .._stats import INPUT_BOUND, MUCH_PADDING, nbytes_text
from .summary import Summary, Work


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


def time_text(ns: float) -> str:
    """Return a time with a unit in which it has three figures or so."""
    ms = ns / 1e6
    if ms >= 1000:
        return f"{ms / 1e3:.2f} s"
    if ms >= 100:
        return f"{ms:.0f} ms"
    if ms >= 10:
        return f"{ms:.1f} ms"
    if ms >= 0.1:
        return f"{ms:.2f} ms"
    return f"{ns / 1e3:.0f} us"


def percent(fraction: float) -> str:
    """Return a fraction as a whole number of percent."""
    return f"{100 * fraction:.0f} %"


def _more_input(summary: Summary) -> list[Advice]:
    if not summary.is_input_bound:
        return []
    workers, ahead = summary.work("worker"), summary.work("prefetch")
    mine = {part: summary.mean[part] for part in ("fetch", "collate")}
    if sum(mine.values()) > INPUT_BOUND * summary.step:
        return [_into_workers(summary, sum(mine.values()), "the loop itself")]
    first = _first_batches(summary)
    if first is not None:
        return [first]
    if workers is not None:
        return [_for_workers(summary, workers)]
    if ahead is not None and ahead.per_batch > _busy(summary):
        return [_into_workers(summary, ahead.per_batch, "the prefetcher's one thread")]
    return [
        Advice(
            "Make the loader faster",
            f"A step waits {time_text(summary.mean['wait'])} for its batch. What the "
            "loader does meanwhile was not seen: it is none of torch's, or its workers "
            "did not import pyparallel.",
            summary.mean["wait"],
        )
    ]


def _busy(summary: Summary) -> float:
    """Return the nanoseconds of a step that is given its batch at once."""
    return summary.step - summary.input


def _cores(summary: Summary) -> int:
    cores = summary.record.environment.get("cores", "1")
    return int(cores) if cores.isdecimal() else 1


def _workers_for(work: float, busy: float, cores: int) -> int:
    """Return how many workers have a batch ready in time, or as many as there are."""
    return max(1, min(cores, math.ceil(work / busy) if busy else cores))


def _into_workers(summary: Summary, work: float, where: str) -> Advice:
    busy = _busy(summary)
    number = _workers_for(work, busy, _cores(summary))
    gain = max(0.0, summary.step - max(busy, work / number))
    return Advice(
        f"Make batches in workers: num_workers={number}",
        f"Fetching and collating a batch takes {time_text(work)} in {where}, and the "
        f"rest of a step {time_text(busy)}. {plural(number, 'worker')} would do it "
        f"meanwhile: a batch every {time_text(work / number)}.",
        gain,
    )


def plural(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


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
    number = _workers_for(work, busy, _cores(summary))
    wait = summary.mean["wait"]
    figures = (
        f"A batch takes {time_text(work)} of a worker's time: one is ready every "
        f"{time_text(work / have)} with {plural(have, 'worker')}. The rest of a step "
        f"takes {time_text(busy)}."
    )
    if work / have <= busy:
        slowest = max(step.parts["wait"] for step in summary.steps)
        return Advice(
            "Let workers run further ahead: prefetch_factor",
            f"{figures} That is enough on average, but some batches come late: the "
            f"longest wait is {time_text(slowest)}. Raise prefetch_factor, and see "
            "which samples are slow.",
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
        f"{figures} More workers than the {_cores(summary)} cores here would not help. "
        f"Most of the work is {part}, {time_text(ns)} a batch.",
        wait,
    )


def _hidden_copies(summary: Summary) -> list[Advice]:
    copy = summary.mean["copy"] + summary.mean["pack"]
    if copy <= INPUT_BOUND * summary.step or summary.work("prefetch") is not None:
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
