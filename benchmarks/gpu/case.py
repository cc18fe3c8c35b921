"""A comparison on a device: rotating inputs, three clocks, counts, and goals."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from .. import peers
from .._harness import (
    Contender,
    Effort,
    Record,
    check,
    compare,
    difference,
    junk_in_new_memory,
)
from ..loader.epochs import Counted
from .target import DryRun

#: The measured times and their headings.
COLUMNS = {
    "host": "returns",
    "seconds": "usable",
    "device": "device",
    "queued": "in a row",
}
#: The calls in a row.
_QUEUED = 8


class Goal(NamedTuple):
    """A goal for the contender of a case that is ours.

    Attributes:
        peer: must take at least ``factor`` times as long as ours without ``plus``
            seconds; if empty, ours must take at most ``plus`` seconds.
        factor: see ``peer``.
        plus: see ``peer``.
        of: the column: ``host``, ``seconds``, ``device`` or ``queued``.
        count: an event to count instead of a time.
        most: the limit of ``count``.
    """

    peer: str = ""
    factor: float = 1
    plus: float = 0
    of: str = "seconds"
    count: str = ""
    most: int = 0


class Rotation:
    """Inputs of one form, used in turn, so that the next one is in no cache.

    All contenders of a case share it. It advances between calls.
    """

    def __init__(self, inputs: Sequence[Any]) -> None:
        self._inputs, self._at = list(inputs), 0

    def turn(self) -> None:
        """Advance to the next input."""
        self._at = (self._at + 1) % len(self._inputs)

    @property
    def now(self) -> Any:
        """The input of the next call."""
        return self._inputs[self._at]

    @property
    def num(self) -> int:
        """The number of inputs."""
        return len(self._inputs)


class Made(NamedTuple):
    """Data and functions of a comparison.

    Attributes:
        contenders: the functions; one of them is ours.
        inputs: the inputs of the functions.
        differ: as for `_harness.check`.
        why: the reason for each missing contender, by its name.
    """

    contenders: list[Contender]
    inputs: Rotation
    differ: Callable[[Any, Any], str] = difference
    why: Mapping[str, str] = {}


@dataclass(frozen=True)
class GpuCase:
    """One comparison on a device.

    Attributes:
        title: the title of its table.
        note: a description of the data: synthetic or real.
        make: creates the data and the functions for a target.
        goals: the goals of our contender.
        measure: compares and returns the record, in place of `measure`.
        in_a_row: times calls in a row in place of the time on the device: a copy on a
            stream of its own waits for no event of the current stream, or waits
            longer for it than the copy takes.
    """

    title: str
    note: str
    make: Callable[[DryRun], Any]
    goals: Sequence[Goal] = ()
    measure: Callable[[GpuCase, DryRun, Effort], Record] | None = None
    in_a_row: bool = False


class Clocks:
    """Times a call until it returns, until its result is usable, and on the device.

    One call gives the first two times, on an idle device. Results are freed after the
    clocks have stopped.
    """

    def __init__(self, where: DryRun, turn: Callable[[], None], in_a_row: bool) -> None:
        self._where, self._turn, self._in_a_row = where, turn, in_a_row

    def __call__(self, call: Callable[[], Any], repeats: int) -> dict[str, float]:
        """Return the means of ``repeats`` calls; see `_harness.Timer`."""
        host = usable = 0.0
        for _ in range(repeats):
            self._turn()
            self._where.sync()
            start = time.perf_counter()
            result = call()
            returned = time.perf_counter()
            self._where.sync()
            usable += time.perf_counter() - start
            host += returned - start
            del result
        found = {"seconds": usable / repeats, "host": host / repeats}
        if self._in_a_row:
            return {**found, "queued": self._queued(call)}
        self._turn()
        on_device = self._where.device_seconds(call, found["host"])
        return found if on_device is None else {**found, "device": on_device}

    def _queued(self, call: Callable[[], Any]) -> float:
        """Return the time of one of several calls, without a wait between them."""
        self._where.sync()
        start = time.perf_counter()
        for _ in range(_QUEUED):
            self._turn()
            call()
        self._where.sync()
        return (time.perf_counter() - start) / _QUEUED


def measure(case: GpuCase, where: DryRun, effort: Effort) -> Record:
    """Compare, count, and return the record of a case.

    A failing peer is left out, and the record has the reason. If ours fails, the case
    fails.

    Raises:
        Disagreement: before anything is timed.
    """
    if case.measure is not None:
        record = case.measure(case, where, effort)
    else:
        made = case.make(where)
        contenders, why = without_failures(made.contenders, where)
        # compare checks one input; two inputs also show a result of the previous call.
        for _ in range(min(made.inputs.num - 1, 1)):
            check(case.title, contenders, made.differ)
            made.inputs.turn()
        record = compare(
            case.title,
            contenders,
            note=case.note,
            timer=Clocks(where, made.inputs.turn, case.in_a_row),
            differ=made.differ,
            **effort._asdict(),
        )
        for row, contender in zip(record["rows"], contenders, strict=True):
            if contender.call is not None:
                row["counts"] = where.counts(contender.call)
            if not row["installed"]:
                row["why"] = why.get(contender.name) or made.why.get(contender.name)
                row["why"] = row["why"] or absent(contender.name)
    if where.dry:
        record["title"] += ", a dry run"
        record.pop("must_hide", None)
    record["goals"] = [] if where.dry else [goal._asdict() for goal in case.goals]
    return record


def measure_epochs(case: GpuCase, where: DryRun, effort: Effort) -> Record:
    """Compare the epochs of loaders, and return the record of their case.

    ``case.make(where)`` must return a function that creates the contenders and their
    epochs for a clock. Epochs measure themselves and advance this clock.
    """
    clock = Counted()
    found = case.make(where)(clock)
    options: dict[str, Any] = {**effort._asdict(), "min_seconds": 0.0}
    options |= {"clock": clock, "watch": time.perf_counter}
    try:
        return compare(
            case.title, [each for each, _ in found], note=case.note, **options
        )
    finally:
        for _, epochs in found:
            epochs.close()


def without_failures(
    contenders: Sequence[Contender], where: DryRun
) -> tuple[list[Contender], dict[str, str]]:
    """Return the contenders without the failing peers, and the reasons of failures."""
    found, why = [], {}
    for contender in contenders:
        if contender.call is not None and contender.kind != "ours":
            try:
                with junk_in_new_memory():
                    contender.call()
                    where.sync()
            except Exception as error:  # the other contenders can still be timed
                first = str(error).strip().partition("\n")[0]
                why[contender.name] = f"fails: {type(error).__name__}: {first[:200]}"
                contender = replace(contender, call=None)
        found.append(contender)
    return found, why


def absent(name: str) -> str:
    """Return the reason for a missing contender."""
    for package, error in peers.ABSENT.items():
        if name.startswith(package):
            return f"not installed: {error}"
    return "not installed"


def close_to(tolerance: float) -> Callable[[Any, Any], str]:
    """Return a `difference` for tensors whose values may differ by ``tolerance``.

    Shapes, dtypes and strides must be the same.
    """

    def differ(a: Any, b: Any) -> str:
        if not (isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)):
            pairs = zip(a, b, strict=True)
            return next(filter(None, (differ(x, y) for x, y in pairs)), "")
        forms = [(x.dtype, tuple(x.shape), x.stride()) for x in (a, b)]
        if forms[0] != forms[1]:
            return f": {forms[0]} and {forms[1]}"
        if a.dtype == torch.bool:
            return difference(a, b)
        worst = 0.0
        for x, y in zip(a, b, strict=True):  # by sample: smaller float64 copies
            gap = (x.double() - y.double()).abs().max() if x.numel() else torch.zeros(1)
            if not bool(gap <= tolerance):  # also fails for NaN
                worst = max(worst, float(gap)) if gap == gap else float("nan")
                return f": by {worst:.3g}, where {tolerance:.3g} is allowed"
        return ""

    return differ


def judge(case: Record) -> list[tuple[bool | None, str]]:
    """Return for each goal of a case if it is reached, and a line of text.

    None: it was not measured.
    """
    rows = {row["name"]: row for row in case.get("rows", ()) if row["installed"]}
    ours = [row for row in rows.values() if row["kind"] == "ours"]
    goals = [Goal(**each) for each in case.get("goals", ())]
    return [_count(g, ours) if g.count else _time(g, ours, rows) for g in goals]


def _count(goal: Goal, ours: list[Record]) -> tuple[bool | None, str]:
    name = goal.count.replace("_", " ")
    text = f"at most {goal.most} {name}" if goal.most else f"no {name}"
    number = ours[0].get("counts", {}).get(goal.count) if ours else None
    if number is None:
        return None, f"{text}: not measured"
    return number <= goal.most, f"{text}: {number}"


def _time(
    goal: Goal, ours: list[Record], rows: dict[str, Record]
) -> tuple[bool | None, str]:
    mine = _column(ours[0], goal.of) if ours else None
    where = f"({COLUMNS.get(goal.of, goal.of)})"
    if not goal.peer:
        text = f"at most {goal.plus * 1e6:.4g} us {where}"
        if mine is None:
            return None, f"{text}: not measured"
        median = mine["median"]
        return median <= goal.plus, f"{text}: {median * 1e6:.4g} us"
    less = f" less {goal.plus * 1e6:.4g} us" if goal.plus else ""
    text = f"{goal.peer}: at least {goal.factor:.3g} times ours{less} {where}"
    theirs = _column(rows[goal.peer], goal.of) if goal.peer in rows else None
    if mine is None or theirs is None:
        return None, f"{text}: not measured"
    (over,) = list(theirs["over"].values())[:1] or [None]
    spread = f" ({over['q1']:.3g} - {over['q3']:.3g})" if over else ""
    times = theirs["median"] / mine["median"]
    reached = theirs["median"] + goal.factor * goal.plus >= goal.factor * mine["median"]
    return reached, f"{text}: {times:.3g}{spread}"


def _column(row: Record, name: str) -> Record | None:
    return row if name == "seconds" else row.get(name)
