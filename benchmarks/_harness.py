"""One way to compare functions: agree first, then take turns.

`compare` calls every contender once and refuses to time them unless their results are
equal. It then times them in rounds: every round times each of them once, in an order of
its own, so that whatever slows the machine for a while slows all of them. What comes
out is a plain record, made for JSON, and the table is made from the record alone.
"""

from __future__ import annotations

import gc
import math
import os
import platform
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

Record = dict[str, Any]


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
    """

    name: str
    call: Callable[[], Any] | None
    kind: str = "peer"


def compare(
    title: str,
    contenders: Sequence[Contender],
    *,
    rounds: int = 30,
    note: str = "",
    clock: Callable[[], float] = time.perf_counter,
    min_seconds: float = 1e-3,
) -> Record:
    """Check that the contenders agree, time them, and return the record of a case.

    Args:
        title: of the case.
        contenders: at least one of kind ``ours`` must be installed.
        rounds: how often each is timed.
        note: what the data are.
        clock: returns seconds; tests pass a fake.
        min_seconds: a fast function is called so often per round that this passes.

    Raises:
        Disagreement: before anything is timed.
    """
    check(title, contenders)
    with _quiet():
        seconds = measure(contenders, rounds, clock, min_seconds)
    ours = [c.name for c in contenders if c.kind == "ours" and c.name in seconds]
    rows = []
    for contender in contenders:
        row: Record = {"name": contender.name, "kind": contender.kind}
        times = seconds.get(contender.name)
        row["installed"] = times is not None
        if times is not None:
            row |= {"seconds": times, **summarise(times)}
            row["over"] = {
                name: ratio(times, seconds[name])
                for name in ours
                if name != contender.name
            }
        rows.append(row)
    return {"title": title, "note": note, "rounds": rounds, "rows": rows}


def check(title: str, contenders: Sequence[Contender]) -> None:
    """Raise `Disagreement` unless all contenders that are installed agree.

    Memory that torch allocates is filled with junk first, so that a function which
    leaves bytes unwritten is caught.
    """
    first: tuple[str, Any] | None = None
    for contender in contenders:
        if contender.call is None or contender.kind == "limit":
            continue
        with _junk_in_new_memory():
            result = contender.call()
        if first is None:
            first = contender.name, result
            continue
        where = difference(first[1], result)
        if where:
            raise Disagreement(
                f"{title}: {first[0]} and {contender.name} must give equal results, "
                f"but differ{where}."
            )


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
    clock: Callable[[], float],
    min_seconds: float,
) -> dict[str, list[float]]:
    """Return seconds per call of every installed contender, one figure per round."""
    calls = {c.name: c.call for c in contenders if c.call is not None}
    repeats = {}
    for name, call in calls.items():
        once = min(_time(call, 1, clock), _time(call, 1, clock))
        repeats[name] = max(1, min(10_000, math.ceil(min_seconds / max(once, 1e-9))))
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    order, shuffle = list(calls), random.Random(0).shuffle
    for _ in range(rounds):
        shuffle(order)
        for name in order:
            seconds[name].append(_time(calls[name], repeats[name], clock))
    return seconds


def _time(call: Callable[[], Any], repeats: int, clock: Callable[[], float]) -> float:
    start = clock()
    for _ in range(repeats):
        call()
    return (clock() - start) / repeats


def summarise(values: Sequence[float]) -> dict[str, float]:
    """Return the minimum and the three quartiles."""
    if len(values) < 2:
        q1 = median = q3 = values[0]
    else:
        q1, median, q3 = statistics.quantiles(values, n=4, method="inclusive")
    return {"min": min(values), "q1": q1, "median": median, "q3": q3}


def ratio(times: Sequence[float], ours: Sequence[float]) -> dict[str, float]:
    """Return how many times as long as ours: of medians, and quartiles over rounds."""
    rounds = summarise([time / our for time, our in zip(times, ours, strict=True)])
    of_medians = statistics.median(times) / statistics.median(ours)
    return {"of_medians": of_medians, "q1": rounds["q1"], "q3": rounds["q3"]}


def losses(record: Record) -> list[str]:
    """Return a line for every peer that is faster than one of ours (by medians)."""
    return [
        f"{case['title']}: {row['name']} takes {over['of_medians']:.3g} of {name}"
        for case in record["cases"]
        for row in case["rows"]
        if row["kind"] == "peer" and row["installed"]
        for name, over in row["over"].items()
        if over["of_medians"] < 1
    ]


def table(record: Record) -> str:
    """Return the whole record as markdown."""
    lines = [f"{key}: {value}  " for key, value in record["machine"].items()]
    for case in record["cases"]:
        head = f"**{case['title']}** ({case['note']}; {case['rounds']} rounds)"
        here = [row for row in case["rows"] if row["installed"]]
        ours = [row["name"] for row in here if row["kind"] == "ours"]
        titles = ["", "min", "median", "quartiles", *(f"/ {name}" for name in ours)]
        lines += ["", head, "", _row(titles)]
        lines += [_row(["---"] + ["---:"] * (len(titles) - 1))]
        lines += [_row(_cells(row, ours)) for row in case["rows"]]
    slower = losses(record)
    lines += ["", "Peers that are faster than ours, by medians:", ""]
    lines += [f"- {line}" for line in slower] or ["- none"]
    return "\n".join(lines) + "\n"


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _cells(row: Record, ours: Sequence[str]) -> list[str]:
    name = f"*{row['name']}*" if row["kind"] == "limit" else row["name"]
    name = f"**{name}**" if row["kind"] == "ours" else name
    if not row["installed"]:
        return [name, "not installed", *[""] * (2 + len(ours))]
    times = [duration(row[key]) for key in ("min", "median")]
    cells = [name, *times, f"{duration(row['q1'])} - {duration(row['q3'])}"]
    for other in ours:
        over = row["over"].get(other)
        if over:
            spread = f"({over['q1']:.3g} - {over['q3']:.3g})"
            cells.append(f"{over['of_medians']:.3g} {spread}")
        else:
            cells.append("1")
    return cells


def duration(seconds: float) -> str:
    """Return seconds for people, with three digits."""
    for unit, factor in (("s", 1.0), ("ms", 1e3), ("us", 1e6)):
        if seconds * factor >= 1 or unit == "us":
            value = seconds * factor
            return f"{value:.{max(0, 2 - int(math.log10(max(value, 1))))}f} {unit}"
    raise AssertionError("unreachable")


def machine(*packages: str) -> dict[str, str]:
    """Describe where the figures come from."""
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        lines = cpuinfo.read_text().splitlines()
        names = [line.split(":", 1)[1] for line in lines if line.startswith("model n")]
        model = names[0].strip() if names else model
    malloc = [f"{k}={v}" for k, v in sorted(os.environ.items()) if "MALLOC_" in k]
    return {
        "cpu": f"{model}, {len(os.sched_getaffinity(0))} cores for this process",
        "load average": load(),
        "threads": str(torch.get_num_threads()),
        "malloc": " ".join(malloc) or "default",
        "python": platform.python_version(),
        "torch": torch.__version__,
        **{package: _version(package) for package in packages},
    }


def load() -> str:
    """Return the load average: a busy machine measures badly, and it should show."""
    return "{:.2f} {:.2f} {:.2f}".format(*os.getloadavg())


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


@contextmanager
def _junk_in_new_memory() -> Iterator[None]:
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
