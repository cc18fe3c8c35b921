"""One way to compare functions: agree first, then take turns.

`compare` calls every contender once and refuses to time them unless their results are
equal. It then times them in rounds: every round times each of them once, in an order of
its own, so that whatever slows the machine for a while slows all of them. What comes
out is a plain record, made for JSON; tables and charts are made from records alone.
"""

from __future__ import annotations

import gc
import math
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

Record = dict[str, Any]
#: Calls a function so many times; returns what a call took, in seconds, by what was
#: watched. One of these is ``seconds``, which decides how often a fast one is called.
Timer = Callable[[Callable[[], Any], int], Mapping[str, float]]

#: However slow a case is, its quartiles are of this many rounds.
MIN_ROUNDS = 5


class Disagreement(AssertionError):
    """Two contenders give different results, so their times mean nothing."""


@dataclass(frozen=True)
class Contender:
    """One function of a comparison.

    Attributes:
        name: as shown in the table.
        call: takes nothing; None if what it needs is not installed.
        kind: ``ours``, ``peer``, or ``limit``: less work than the others do, as a
            yardstick. A limit's result is not compared.
        view: gives the result in the form in which the others give it. It is called
            when results are compared, and never timed.
    """

    name: str
    call: Callable[[], Any] | None
    kind: str = "peer"
    view: Callable[[Any], Any] = lambda result: result


def compare(
    title: str,
    contenders: Sequence[Contender],
    *,
    rounds: int = 30,
    note: str = "",
    clock: Callable[[], float] = time.perf_counter,
    min_seconds: float = 1e-3,
    max_seconds: float = math.inf,
    watch: Callable[[], float] | None = None,
    timer: Timer | None = None,
    differ: Callable[[Any, Any], str] | None = None,
) -> Record:
    """Check that the contenders agree, time them, and return the record of a case.

    Args:
        title: of the case.
        contenders: at least one of kind ``ours`` must be installed.
        rounds: how often each is timed.
        note: what the data are.
        clock: returns seconds; tests pass a fake.
        min_seconds: a fast function is called so often per round that this passes.
        max_seconds: no round starts after this much time, once there are `MIN_ROUNDS`.
        watch: tells the time for ``max_seconds``, where ``clock`` counts something
            else, as contenders that add to it what they have measured themselves.
        timer: watches more than ``clock`` tells. What it returns besides ``seconds``
            gets a place of its own in the rows, made in the same way.
        differ: see `check`.

    Raises:
        Disagreement: before anything is timed.
    """
    nbytes = check(title, contenders, differ)
    found = measure_all(
        contenders, rounds, timer or by(clock), min_seconds, max_seconds, watch or clock
    )
    rows = []
    for contender in contenders:
        row: Record = {"name": contender.name, "kind": contender.kind}
        row["installed"] = contender.name in found
        for what in found.get(contender.name, ()):
            figures = _figures(what, contender.name, contenders, found)
            row |= figures if what == "seconds" else {what: figures}
        rows.append(row)
    done = max((len(times["seconds"]) for times in found.values()), default=0)
    case: Record = {"title": title, "note": note, "rounds": done, "nbytes": nbytes}
    return {**case, "rows": rows}


def _figures(
    what: str,
    name: str,
    contenders: Sequence[Contender],
    found: Mapping[str, Mapping[str, list[float]]],
) -> Record:
    """Return the times of a contender, their summary, and ratios to ours."""
    times = found[name][what]
    ours = [c.name for c in contenders if c.kind == "ours" and c.name in found]
    over = {
        each: ratio(times, found[each][what])
        for each in ours
        if each != name and len(found[each].get(what, ())) == len(times)
    }
    return {"seconds": times, **summarise(times), "over": over}


def check(
    title: str,
    contenders: Sequence[Contender],
    differ: Callable[[Any, Any], str] | None = None,
) -> int:
    """Raise `Disagreement` unless all contenders that are installed agree.

    ``differ`` returns where two results do, and nothing if they do not; by default it
    is `difference`.

    Memory that torch allocates is filled with junk first, so that a function which
    leaves bytes unwritten is caught.

    Returns:
        The bytes of all tensors in a result, for what is measured in bytes.
    """
    first: tuple[str, Any] | None = None
    for contender in contenders:
        if contender.call is None or contender.kind == "limit":
            continue
        with junk_in_new_memory():
            result = contender.view(contender.call())
        if first is None:
            first = contender.name, result
            continue
        where = (differ or difference)(first[1], result)
        if where:
            raise Disagreement(
                f"{title}: {first[0]} and {contender.name} must give equal results, "
                f"but differ{where}."
            )
    return payload(first[1]) if first else 0


def payload(result: Any) -> int:
    """Return how many bytes the tensors of a result have."""
    if isinstance(result, torch.Tensor):
        return result.nbytes
    if hasattr(result, "cpu_only"):
        return payload(result.data)
    if isinstance(result, Mapping):
        return sum(map(payload, result.values()))
    return sum(map(payload, result)) if isinstance(result, list | tuple) else 0


def difference(a: Any, b: Any, path: str = "") -> str:
    """Return where two results differ, bit by bit; empty if they do not."""
    if hasattr(a, "cpu_only") and hasattr(b, "cpu_only"):  # two kinds of DataContainer
        return difference(a.data, b.data, path)
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        if a.dtype != b.dtype or a.shape != b.shape:
            shapes = f"{a.dtype} {tuple(a.shape)} and {b.dtype} {tuple(b.shape)}"
            return f" at {path or 'the top'}: {shapes}"
        same = torch.equal(*(x.contiguous().view(-1).view(torch.uint8) for x in (a, b)))
        return "" if same else f" at {path or 'the top'}: values"
    if isinstance(a, Mapping) and isinstance(b, Mapping) and a.keys() == b.keys():
        items = [(f"{path}[{key!r}]", a[key], b[key]) for key in a]
    elif isinstance(a, list | tuple) and type(a) is type(b) and len(a) == len(b):
        items = [(f"{path}[{i}]", a[i], b[i]) for i in range(len(a))]
    else:
        same = type(a) is type(b) and a == b
        return "" if same else f" at {path or 'the top'}: {a!r} and {b!r}"
    return next(filter(None, (difference(x, y, at) for at, x, y in items)), "")


def measure(
    contenders: Sequence[Contender],
    rounds: int,
    clock: Callable[[], float] = time.perf_counter,
    min_seconds: float = 1e-3,
    max_seconds: float = math.inf,
    watch: Callable[[], float] | None = None,
) -> dict[str, list[float]]:
    """Return seconds per call of every installed contender, one figure per round.

    Results are not compared: that is for `compare`, whose arguments these are.
    """
    options = (rounds, by(clock), min_seconds, max_seconds, watch or clock)
    found = measure_all(contenders, *options)
    return {name: times["seconds"] for name, times in found.items()}


def measure_all(
    contenders: Sequence[Contender],
    rounds: int,
    timer: Timer,
    min_seconds: float,
    max_seconds: float,
    watch: Callable[[], float],
) -> dict[str, dict[str, list[float]]]:
    """Return as `measure` does all that ``timer`` watches, by its names."""
    with _quiet():
        calls = {c.name: c.call for c in contenders if c.call is not None}
        repeats = {}
        for name, call in calls.items():
            once = min(timer(call, 1)["seconds"], timer(call, 1)["seconds"])
            repeats[name] = max(
                1, min(10_000, math.ceil(min_seconds / max(once, 1e-9)))
            )
        found: dict[str, dict[str, list[float]]] = {name: {} for name in calls}
        order, shuffle = list(calls), random.Random(0).shuffle
        start = watch()
        for done in range(rounds):
            if done >= MIN_ROUNDS and watch() - start > max_seconds:
                break
            shuffle(order)
            for name in order:
                for what, seconds in timer(calls[name], repeats[name]).items():
                    found[name].setdefault(what, []).append(seconds)
        return found


def by(clock: Callable[[], float]) -> Timer:
    """Return a timer that watches nothing but a clock."""

    def timer(call: Callable[[], Any], repeats: int) -> dict[str, float]:
        start = clock()
        for _ in range(repeats):
            call()
        return {"seconds": (clock() - start) / repeats}

    return timer


def summarise(values: Sequence[float]) -> dict[str, float]:
    """Return the minimum and the three quartiles."""
    if len(values) < 2:
        q1 = median = q3 = values[0]
    else:
        q1, median, q3 = statistics.quantiles(values, n=4, method="inclusive")
    return {"min": min(values), "q1": q1, "median": median, "q3": q3}


def ratio(times: Sequence[float], ours: Sequence[float]) -> dict[str, float]:
    """Return the times of a contender relative to those of pyparallel.

    Returns:
        The ratios of the medians and of the minima, and the quartiles of the ratios of
        all rounds.
    """
    rounds = summarise([time / our for time, our in zip(times, ours, strict=True)])
    of_medians = statistics.median(times) / statistics.median(ours)
    of_minima = min(times) / min(ours)
    spread = {"q1": rounds["q1"], "q3": rounds["q3"]}
    return {"of_medians": of_medians, "of_minima": of_minima, **spread}


@contextmanager
def junk_in_new_memory() -> Iterator[None]:
    """Make torch fill what it allocates with NaN, or the largest integer."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep the garbage collector from running inside a measurement."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
