"""A comparison on a device: rotating inputs, three clocks and counts."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch

from .. import peers
from .._harness import (
    Case,
    Contender,
    Effort,
    Goal,
    Record,
    check,
    difference,
    junk_in_new_memory,
    measure_case,
)
from ..loader.epochs import timed
from .target import DryRun

#: The calls in a row.
_QUEUED = 8


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

    def of(self, function: Callable[[Any], Any] | None, part: Any = None) -> Any:
        """Return a call of a function with the input, or with a part of it."""
        if function is None:
            return None
        if part is None:
            return lambda: function(self.now)
        return lambda: function(self.now[part])


class Made(NamedTuple):
    """Data and functions of a comparison.

    Attributes:
        contenders: the functions; one of them is ours.
        inputs: the inputs of the functions.
        differ: as for `_harness.check`.
    """

    contenders: list[Contender]
    inputs: Rotation
    differ: Callable[[Any, Any], str] = difference


@dataclass(frozen=True)
class GpuCase:
    """One comparison on a device.

    Attributes:
        title: the title of its table.
        note: a description of the data: synthetic or real.
        make: creates the data and the functions for a target; a list has loaders, whose
            epochs are timed.
        goals: the goals of our contender.
        in_a_row: times calls in a row in place of the time on the device: a copy on a
            stream of its own waits for no event of the current stream, or waits
            longer for it than the copy takes.
        finish: as of `Case`.
    """

    title: str
    note: str
    make: Callable[[DryRun], Made | list[Contender]]
    goals: Sequence[Goal] = ()
    in_a_row: bool = False
    finish: Callable[[Record], None] = lambda record: None


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
    """Compare, count, and return the record of a case, or the reason of its failure.

    A failing peer is left out, and the record has the reason. If ours fails, or if
    results differ, the case fails.
    """
    title = f"{case.title}, a dry run" if where.dry else case.title
    goals = () if where.dry else case.goals
    whole = Case(title, case.note, list, goals, timed, finish=case.finish)
    why: dict[str, str] = {}
    try:
        made = case.make(where)
        if isinstance(made, Made):
            contenders = [_counted(c, where, why) for c in made.contenders]
            # The harness checks one input; two show a result of the previous call.
            check(title, contenders, made.differ)
            made.inputs.turn()
            timer = Clocks(where, made.inputs.turn, case.in_a_row)
            whole = replace(whole, timer=timer, differ=made.differ)
        else:  # epochs are long, and measure themselves
            contenders = made
            longer = 2 * effort.max_seconds
            effort = effort._replace(max_seconds=longer, min_seconds=0.0)
        whole = replace(whole, contenders=partial(list, contenders))
        record = measure_case(whole, effort)
    except Exception as error:  # the other cases can still be measured
        text = f"failed: {type(error).__name__}: {error}"
        return {"title": title, "note": case.note, "error": text}
    for row in record["rows"]:
        if not row["installed"]:
            row["why"] = why.get(row["name"]) or _absent(row["name"])
    if where.dry:
        record.pop("must_hide", None)
    return record


def _counted(contender: Contender, where: DryRun, why: dict[str, str]) -> Contender:
    """Return a contender that counts its calls; a peer that fails has no call."""
    call = contender.call
    if call is None:
        return contender
    if contender.kind != "ours":
        try:
            with junk_in_new_memory():
                call()
                where.sync()
        except Exception as error:  # the other contenders can still be timed
            first = str(error).strip().partition("\n")[0]
            why[contender.name] = f"fails: {type(error).__name__}: {first[:200]}"
            return replace(contender, call=None)
    return replace(contender, facts=lambda: {"counts": where.counts(call)})


def _absent(name: str) -> str:
    """Return the reason for a missing contender."""
    for package, error in peers.ABSENT.items():
        if name.startswith(package):
            return f"not installed: {error}"
    return "not on this machine"


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
        for x, y in zip(a, b, strict=True):  # by sample: smaller float64 copies
            gap = (x.double() - y.double()).abs().max() if x.numel() else torch.zeros(1)
            if not bool(gap <= tolerance):  # also fails for NaN
                return f": by {float(gap):.3g}, where {tolerance:.3g} is allowed"
        return ""

    return differ
