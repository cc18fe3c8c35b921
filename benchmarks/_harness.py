"""Compare functions: check that their results are equal, then time them in turn.

`compare` calls every contender once and raises an error unless their results are equal.
It then times them in rounds. Every round times each contender once, in a new random
order, so that a temporary slowdown of the machine affects all contenders. The result is
a record for JSON. Tables and charts are made from records alone.
"""

from __future__ import annotations

import gc
import math
import os
import random
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from pyparallel import backend
from pyparallel.backend import _python

Record = dict[str, Any]
#: Calls a function ``repeats`` times; returns the seconds per call for each quantity.
#: The quantity ``seconds`` decides how often a fast function is called.
Timer = Callable[[Callable[[], Any], int], Mapping[str, float]]

#: The minimum number of rounds, also for slow cases that do not ask for more.
MIN_ROUNDS = 5

#: The attributes of `pyparallel.backend` that differ between the backends.
AS_LOADED = {each: getattr(backend, each) for each in ("name", *backend._OPERATORS)}
IN_PYTHON = {
    "name": "python",
    **{each: getattr(_python, each) for each in backend._OPERATORS},
}


class Disagreement(AssertionError):
    """Two contenders give different results, so their times mean nothing."""


class Effort(NamedTuple):
    """The time to measure each comparison.

    Attributes:
        rounds: the number of rounds.
        max_seconds: no round starts after this time, once ``min_rounds`` are done.
        min_seconds: each round repeats a fast function for at least this time.
        min_rounds: at most ``rounds``.
    """

    rounds: int = 30
    max_seconds: float = math.inf
    min_seconds: float = 1e-3
    min_rounds: int = MIN_ROUNDS


FULL = Effort()
#: Enough to prove that a case runs; its figures are meaningless.
QUICK = Effort(rounds=2, max_seconds=1.0, min_seconds=0.0)


class Goal(NamedTuple):
    """A goal for the contender of a case that is ours.

    Attributes:
        peer: must take at least ``factor`` times as long as ours without ``plus``
            seconds; if empty, ours must take at most ``plus`` seconds.
        factor: see ``peer``.
        plus: see ``peer``.
        of: the quantity; see `report.COLUMNS`.
        count: an event to count instead of a time.
        most: the limit of ``count``.
    """

    peer: str = ""
    factor: float = 1
    plus: float = 0
    of: str = "seconds"
    count: str = ""
    most: int = 0


@dataclass(frozen=True)
class Contender:
    """One function of a comparison.

    Attributes:
        name: as shown in the table.
        call: has no arguments; None if its package is not installed.
        kind: ``ours``, ``peer``, or ``limit``: less work than the others, for
            comparison. The result of a limit is not compared.
        view: converts the result to the form of the other results. It is called only
            when results are compared, and is not timed.
        facts: returns more figures for its row, after the measurement.
        close: ends it after the measurement.
        functions: of the backend that its calls use.
    """

    name: str
    call: Callable[[], Any] | None
    kind: str = "peer"
    view: Callable[[Any], Any] = lambda result: result
    facts: Callable[[], Record] | None = None
    close: Callable[[], None] | None = None
    functions: Mapping[str, Any] | None = None


def ours(call: Callable[[], Any], **options: Any) -> list[Contender]:
    """Return ``call`` with the compiled and with the pure Python backend."""
    native = call if AS_LOADED["name"] == "native" else None
    return [
        Contender("ours, native", native, "ours", **options),
        Contender("ours, Python", call, "ours", functions=IN_PYTHON, **options),
    ]


def use_backend(functions: Mapping[str, Any] | None = None) -> None:
    """Make pyparallel use these functions, or again the original ones.

    Workers that are not forked import the backend that the environment names.
    """
    for name, function in (functions or AS_LOADED).items():
        setattr(backend, name, function)
    os.environ["PYPARALLEL_BACKEND"] = backend.name


@dataclass(frozen=True)
class Case:
    """One comparison.

    Attributes:
        title: the title of its table.
        note: a description of the data: synthetic or real.
        contenders: creates the data and the functions.
        goals: the goals of the first contender.
        timer: measures the contenders; by default their time alone.
        differ: returns the place of a difference between two results, or nothing.
        main: the case is also measured with more than one thread.
        finish: adds figures to the record.
        min_rounds: for a slow case with small differences.
    """

    title: str
    note: str
    contenders: Callable[[], Iterable[Contender]]
    goals: Sequence[Goal] = ()
    timer: Timer | None = None
    differ: Callable[[Any, Any], str] | None = None
    main: bool = False
    finish: Callable[[Record], None] = lambda record: None
    min_rounds: int = MIN_ROUNDS


def measure_case(case: Case, effort: Effort) -> Record:
    """Compare the contenders of a case, and end them; return its record."""
    contenders = list(case.contenders())
    effort = effort._replace(min_rounds=max(effort.min_rounds, case.min_rounds))
    try:
        record = compare(
            case.title, contenders, effort, case.note, case.timer, case.differ
        )
        for row, contender in zip(record["rows"], contenders, strict=True):
            if contender.call is not None and contender.facts is not None:
                use_backend(contender.functions)
                row.update(contender.facts())
    finally:
        use_backend()
        for contender in contenders:
            if contender.close is not None:
                contender.close()
    record["goals"] = [goal._asdict() for goal in case.goals]
    case.finish(record)
    return record


def compare(
    title: str,
    contenders: Sequence[Contender],
    effort: Effort = FULL,
    note: str = "",
    timer: Timer | None = None,
    differ: Callable[[Any, Any], str] | None = None,
) -> Record:
    """Check that the contenders agree, time them, and return the record of a case.

    Args:
        title: of the case.
        contenders: at least one of kind ``ours`` must be installed.
        effort: the rounds.
        note: a description of the data.
        timer: measures more than the time. Each quantity besides ``seconds`` gets its
            own entry in the rows, of the same form.
        differ: see `check`.

    Raises:
        Disagreement: before anything is timed.
    """
    nbytes = check(title, contenders, differ)
    found = measure(contenders, effort, timer)
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
    """Return times, their summary, and their ratios to those of ours that are not 0."""
    times = found[name][what]
    ours = [c.name for c in contenders if c.kind == "ours" and c.name in found]
    over = {
        each: ratio(times, found[each][what])
        for each in ours
        if each != name
        and len(found[each].get(what, ())) == len(times)
        and all(found[each][what])
    }
    return {"seconds": times, **summarise(times), "over": over}


def check(
    title: str,
    contenders: Sequence[Contender],
    differ: Callable[[Any, Any], str] | None = None,
) -> int:
    """Raise `Disagreement` unless all contenders that are installed agree.

    ``differ`` returns the place of a difference between two results, or an empty
    string; by default it is `difference`.

    torch fills new memory with junk during the calls, so that the check detects a
    function that leaves bytes unwritten.

    Returns:
        The bytes of all tensors in a result, for figures in bytes per second.
    """
    first: tuple[str, Any] | None = None
    for contender in contenders:
        if contender.call is None or contender.kind == "limit":
            continue
        use_backend(contender.functions)
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
    """Return the bytes of all tensors in a result."""
    if isinstance(result, torch.Tensor):
        return result.nbytes
    if hasattr(result, "cpu_only"):
        return payload(result.data)
    if isinstance(result, Mapping):
        return sum(map(payload, result.values()))
    return sum(map(payload, result)) if isinstance(result, list | tuple) else 0


def difference(a: Any, b: Any, path: str = "") -> str:
    """Return the first place where two results differ in a bit, or an empty string."""
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
    contenders: Sequence[Contender], effort: Effort, timer: Timer | None = None
) -> dict[str, dict[str, list[float]]]:
    """Return the seconds per call of every installed contender, for each quantity.

    Each round gives one figure. The results are not compared. The arguments are those
    of `compare`.
    """
    timer = timer or by(time.perf_counter)
    with _quiet():
        repeats: dict[str, int] = {}
        calls = {each.name: each for each in contenders if each.call is not None}
        for name, each in calls.items():
            use_backend(each.functions)
            wanted = 1
            if effort.min_seconds:
                once = min(timer(each.call, 1)["seconds"] for _ in range(2))
                wanted = math.ceil(effort.min_seconds / max(once, 1e-9))
            repeats[name] = max(1, min(10_000, wanted))
        found: dict[str, dict[str, list[float]]] = {name: {} for name in calls}
        order, shuffle = list(calls), random.Random(0).shuffle
        start = time.monotonic()
        for done in range(effort.rounds):
            if (
                done >= effort.min_rounds
                and time.monotonic() - start > effort.max_seconds
            ):
                break
            shuffle(order)
            for name in order:
                use_backend(calls[name].functions)
                taken = timer(calls[name].call, repeats[name])
                for what, seconds in taken.items():
                    found[name].setdefault(what, []).append(seconds)
    use_backend()
    return found


def by(clock: Callable[[], float]) -> Timer:
    """Return a timer that measures only ``seconds``, with a clock."""

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
    """Make torch fill new tensors with NaN, or with the largest integer."""
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
