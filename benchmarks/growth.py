"""Growth: the increase of time with the number of samples or leaves.

Two functions are fitted to the minima over the rounds. Sizes begin at two samples or
leaves, because a single one needs no padding and takes a shorter path.

1. ``a + b * n``, by least squares of the relative errors, with ``a >= 0``. ``a`` is the
   fixed time of a call, and ``b`` the time of one more sample or leaf.
2. ``(time - a) ~ n ** e``, by least squares in log-log, over the sizes with
   ``b * n >= a``. ``e`` is the exponent. At these sizes the fixed part is at most half
   of the time, and it is subtracted, because it would flatten the curve.

The report also has the exponent without the subtraction, over the same sizes.

Calls are repeated so that caches are warm at the largest size too. Otherwise small
sizes would be timed with warm caches and large sizes with cold caches, and the
difference would look like growth.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from . import report
from ._harness import Contender, Effort, Record
from ._harness import measure as measure_seconds
from .report import duration

#: The expected exponent and its tolerance.
LINEAR, TOLERANCE = 1.0, 0.1

#: The factor by which each contender is called longer at a time than elsewhere.
_LONGER = 15


@dataclass(frozen=True)
class Curves:
    """One curve for each contender.

    Attributes:
        title: the title of the curves.
        note: a description of the data: synthetic or real.
        x: the label of the sizes.
        sizes: the sizes, in ascending order.
        contenders: creates the data and the functions for a size.
    """

    title: str
    note: str
    x: str
    sizes: Sequence[int]
    contenders: Callable[[int], list[Contender]]


def measure(curves: Curves, effort: Effort) -> Record:
    """Time all contenders at all sizes, interleaved; fit and return the record."""
    by_size = [
        (size, each) for size in curves.sizes for each in curves.contenders(size)
    ]
    renamed = [replace(each, name=f"{each.name} {size}") for size, each in by_size]
    longer = effort._replace(min_seconds=_LONGER * effort.min_seconds)
    found = measure_seconds(renamed, longer)
    series = []
    for each in {each.name: each for _, each in by_size}.values():
        row: Record = {"name": each.name, "kind": each.kind}
        row["installed"] = each.call is not None
        if row["installed"]:
            taken = [found[f"{each.name} {size}"]["seconds"] for size in curves.sizes]
            minima = list(map(min, taken))
            row |= {"seconds": minima, "fit": fit(curves.sizes, minima)}
        series.append(row)
    record: Record = {"title": curves.title, "note": curves.note, "x": curves.x}
    done = max(len(times["seconds"]) for times in found.values())
    return {**record, "sizes": list(curves.sizes), "rounds": done, "series": series}


def fit(sizes: Sequence[int], seconds: Sequence[float]) -> Record:
    """Return the fits described above; ``exponent`` is None without three sizes."""
    n, t = np.array([p for p in zip(sizes, seconds, strict=True) if p[0] > 1]).T
    # Relative errors: the sum of ((a + b n) / t - 1) ** 2 is minimal.
    (fixed, each), *_ = np.linalg.lstsq(np.stack([1 / t, n / t], 1), np.ones_like(t))
    if fixed <= 0:
        fixed, each = 0.0, (n / t).sum() / ((n / t) ** 2).sum()
    used = (each * n >= fixed) & (t > fixed)
    record: Record = {"fixed": float(fixed), "each": float(each), "exponent": None}
    if used.sum() >= 3:
        n, t = n[used], t[used]
        record["exponent"] = _slope(n, t - fixed)
        record["as_measured"] = _slope(n, t)
        record["from"], record["to"] = int(n[0]), int(n[-1])
    return record


def _slope(sizes: Any, seconds: Any) -> float:
    return float(np.polyfit(np.log(sizes), np.log(seconds), 1)[0])


def is_linear(fit: Record) -> bool:
    """Return True if the exponent is within its tolerance."""
    exponent = fit["exponent"]
    return exponent is not None and abs(exponent - LINEAR) <= TOLERANCE


def table(growths: Sequence[Record]) -> list[str]:
    """Return the section with the fits; ``(!)`` marks costs that are not linear."""
    if not growths:
        return []
    rows = [
        {**growth, **row}
        for growth in growths
        for row in growth["series"]
        if row["installed"]
    ]

    def part(key: str) -> Callable[[Record], str]:
        return lambda row: duration(row["fit"][key])

    def exponent(row: Record) -> str:
        mark = "" if row["kind"] != "ours" or is_linear(row["fit"]) else " (!)"
        return _number(row["fit"]["exponent"]) + mark

    columns: list[report.Column] = [
        ("cost of", lambda row: row["title"]),
        ("by", lambda row: f"{row['x']}, {row['sizes'][0]} to {row['sizes'][-1]}"),
        ("contender", lambda row: row["name"]),
        ("smallest", lambda row: duration(row["seconds"][0])),
        ("largest", lambda row: duration(row["seconds"][-1])),
        ("fixed", part("fixed")),
        ("each", part("each")),
        ("exponent", exponent),
        ("as measured", lambda row: _number(row["fit"].get("as_measured"))),
        ("from n", lambda row: str(row["fit"].get("from", ""))),
    ]
    return ["### Growth of the cost", "", *report.table(rows, columns, left=3), ""]


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"
