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

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

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
    points = [(n, t) for n, t in zip(sizes, seconds, strict=True) if n > 1]
    fixed, each = _fit_line(*zip(*points, strict=True))
    used = [(n, t) for n, t in points if each * n >= fixed and t > fixed]
    record: Record = {"fixed": fixed, "each": each, "exponent": None}
    if len(used) >= 3:
        record["exponent"] = _slope([(n, t - fixed) for n, t in used])
        record["as_measured"] = _slope(used)
        record["from"], record["to"] = used[0][0], used[-1][0]
    return record


def is_linear(fit: Record) -> bool:
    """Return True if the exponent is within its tolerance."""
    exponent = fit["exponent"]
    return exponent is not None and abs(exponent - LINEAR) <= TOLERANCE


def _fit_line(sizes: Sequence[int], seconds: Sequence[float]) -> tuple[float, float]:
    """Return a >= 0 and b of ``a + b * n``, by least squares of relative errors."""
    # With u = 1/t and v = n/t, this minimises the sum of (a u + b v - 1) ** 2.
    uu = math.fsum(1 / t**2 for t in seconds)
    uv = math.fsum(n / t**2 for n, t in zip(sizes, seconds, strict=True))
    vv = math.fsum((n / t) ** 2 for n, t in zip(sizes, seconds, strict=True))
    u = math.fsum(1 / t for t in seconds)
    v = math.fsum(n / t for n, t in zip(sizes, seconds, strict=True))
    determinant = uu * vv - uv * uv
    fixed = (u * vv - v * uv) / determinant if determinant > 0 else 0.0
    if fixed <= 0:
        return 0.0, v / vv
    return fixed, (v - fixed * uv) / vv


def _slope(points: Sequence[tuple[float, float]]) -> float:
    xs, ys = ([math.log(p[i]) for p in points] for i in (0, 1))
    x, y = math.fsum(xs) / len(xs), math.fsum(ys) / len(ys)
    over = math.fsum((a - x) * (b - y) for a, b in zip(xs, ys, strict=True))
    return over / math.fsum((a - x) ** 2 for a in xs)


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
