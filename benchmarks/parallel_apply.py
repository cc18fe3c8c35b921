"""Calls on two threads: ``python -m benchmarks.parallel_apply --help``.

Compares work that releases the GIL on one thread and on two. It also compares the cost
of a call with torch's function, which starts new threads each time. It writes the
records as JSON, and makes the tables beside them from the JSON alone.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from pyparallel import parallel_apply

from . import command, data, environment, report, torch_on_host
from ._harness import QUICK, Contender, Effort, Record, compare
from .loader import report as loader_report
from .loader.images import Goal
from .report import _head, _ratio, _row, duration

OURS = "ours"
LOOP = "a loop, 1 thread"
INSIDE = "a loop, 2 threads inside of torch"
POOL = "concurrent.futures, kept"
TORCH = "torch, new threads"
TWO = ["cpu", "cpu"]
#: The goal for work: the time of one thread relative to two threads.
SPEED_UP = Goal(LOOP, 1.7)
#: The goal for overhead: the time of torch relative to ours for empty functions.
OVERHEAD = Goal(TORCH, 5.0)


class Comparison(NamedTuple):
    """One comparison; ``kind`` is ``work`` or ``overhead``."""

    title: str
    note: str
    kind: str
    goal: Goal
    contenders: Callable[[], list[Contender]]


def cases(quick: bool) -> list[Comparison]:
    """Return all comparisons."""
    works = [
        ("numpy: sort", "8 arrays of 100,000 doubles", _numbers, np.sort),
        (
            "numpy: Fourier transform of large images",
            "8 images of 512 x 512 doubles",
            partial(_planes, 8, 512),
            _fourier,
        ),
        (
            "numpy: Fourier transform of small images",
            "64 images of 128 x 128 doubles",
            partial(_planes, 64, 128),
            _fourier,
        ),
        ("torch: blur", "8 photographs, 300x200 at most, 15 x 15 taps", _photos, _blur),
    ]
    return [
        *(
            Comparison(title, note, "work", SPEED_UP, _Work(make, function, quick))
            for title, note, make, function in works
        ),
        *(
            Comparison(
                f"{number} calls of nothing",
                f"{number} functions that return their input, one for each thread",
                "overhead",
                OVERHEAD,
                _Nothing(number),
            )
            for number in (2, 4, 8)
        ),
    ]


class _Work(NamedTuple):
    """One function over eight items: in a loop and on two threads."""

    make: Callable[[bool], list[Any]]
    function: Callable[[Any], Any]
    quick: bool

    def __call__(self) -> list[Contender]:
        items, function = self.make(self.quick), self.function
        pool = ThreadPoolExecutor(2)
        parts = items[: len(items) // 2], items[len(items) // 2 :]

        def loop(some: list[Any] = items) -> list[Any]:
            return [function(item) for item in some]

        def inside() -> list[Any]:
            torch.set_num_threads(2)
            try:
                return loop()
            finally:
                torch.set_num_threads(1)

        def threads() -> list[Any]:
            # Tuples are lists of arguments: each module gets its part.
            first, second = torch_on_host.parallel_apply(
                [loop, loop], [(part,) for part in parts], None, TWO
            )
            return [*first, *second]

        found = [
            Contender(OURS, lambda: parallel_apply(function, items, TWO), "ours"),
            Contender(LOOP, loop),
            Contender(POOL, lambda: list(pool.map(function, items))),
            Contender(TORCH, threads),
        ]
        if isinstance(items[0], Tensor):
            found.append(Contender(INSIDE, inside))
        return [each_view(contender) for contender in found]


def each_view(contender: Contender) -> Contender:
    """Convert arrays to tensors, which are compared bit by bit."""

    def view(results: list[Any]) -> list[Tensor]:
        return [torch.as_tensor(result) for result in results]

    return Contender(contender.name, contender.call, contender.kind, view)


class _Nothing(NamedTuple):
    """Empty functions, one on each thread, in torch's form of the call."""

    number: int

    def __call__(self) -> list[Contender]:
        functions, inputs = [_same] * self.number, list(range(self.number))
        devices = ["cpu"] * self.number
        pool = ThreadPoolExecutor(self.number)
        return [
            Contender(
                OURS, lambda: parallel_apply(functions, inputs, None, devices), "ours"
            ),
            Contender(
                TORCH,
                lambda: torch_on_host.parallel_apply(functions, inputs, None, devices),
            ),
            # It passes on no modes and starts no threads.
            Contender(POOL, lambda: list(pool.map(_same, inputs)), "limit"),
        ]


def _same(x: Any) -> Any:
    return x


def _numbers(quick: bool) -> list[Any]:
    random = np.random.default_rng(0)
    return [random.random(1000 if quick else 100_000) for _ in range(8)]


def _planes(number: int, side: int, quick: bool) -> list[Any]:
    random = np.random.default_rng(0)
    side = 16 if quick else side
    return [random.random((side, side)) for _ in range(number)]


def _fourier(plane: Any) -> Any:
    return np.fft.ifft2(np.fft.fft2(plane)).real


def _photos(quick: bool) -> list[Any]:
    found = data.photos(200, 300)[:8]
    if len(found) < 8:  # these packages may be absent
        found = data.random_tensors([(3, 200, 300)] * 8, torch.uint8)
    return [photo[:, :32, :32] if quick else photo for photo in found]


def _blur(photo: Tensor) -> Tensor:
    x = torch.arange(-7.0, 8.0)
    taps = torch.exp(-(x**2) / 18.0)
    row = (taps / taps.sum()).view(1, 1, 1, -1)
    planes = photo.float().unsqueeze(1)
    across = F.conv2d(planes, row, padding=(0, 7))
    return F.conv2d(across, row.transpose(2, 3), padding=(7, 0)).squeeze(1)


#: For each kind of case: its title and the contenders with a column.
_COLUMNS = {
    "work": (
        "Work: time relative to pyparallel (2.0 = twice as slow)",
        (
            LOOP,
            POOL,
            TORCH,
            INSIDE,
        ),
    ),
    "overhead": (
        "Empty functions: time relative to pyparallel (2.0 = twice as slow)",
        (TORCH, POOL),
    ),
}


def measure(effort: Effort, only: str = "", quick: bool = False) -> Record:
    """Run the cases whose title contains ``only``; return the record of the run."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        record: Record = {"machine": environment.machine(), "cases": []}
        for case in cases(quick):
            if only not in case.title:
                continue
            print(f"{case.title} ...", file=sys.stderr, flush=True)
            found = compare(
                case.title, case.contenders(), note=case.note, **effort._asdict()
            )
            record["cases"].append(
                {**found, "kind": case.kind, "goals": [case.goal._asdict()]}
            )
        record["machine"]["load average after"] = environment.load()
        return record
    finally:
        torch.set_num_threads(before)


def complaints(results: Record) -> list[str]:
    """Return the missed goals and the losses without a known reason."""
    cases = [case for run in results["runs"] for case in run["cases"]]
    goals = [
        text for case in cases for met, text in loader_report.goals(case) if not met
    ]
    return [*goals, *report.complaints(results)]


def page(results: Record) -> str:
    """Return the page of a record: the summary, then all contenders."""
    lines = ["# Calls on two threads\n", report.head(results)]
    for run in results["runs"]:
        lines += ["", f"## {report.run_label(run)}"]
        for kind, (title, columns) in _COLUMNS.items():
            cases = [case for case in run["cases"] if case["kind"] == kind]
            if cases:
                lines += ["", f"### {title}", "", *_table(cases, columns)]
        lines += ["", *_goals(run["cases"]), ""]
        lines += [*report.loss_table(report.losses(run)), "", *report.machine(run)]
    lines += ["", report.ALL]
    for run in results["runs"]:
        lines += ["", f"### {report.run_label(run)}: all contenders", report.table(run)]
    return "\n".join(lines)


def _table(cases: Sequence[Record], columns: Sequence[str]) -> Iterator[str]:
    limits = {r["name"] for case in cases for r in case["rows"] if r["kind"] == "limit"}
    titles = [f"*{name}*" if name in limits else name for name in columns]
    yield from _head(["case", "ours", *titles])
    for case in cases:
        rows = {row["name"]: row for row in case["rows"] if row["installed"]}
        ratios = [_ratio(rows.get(name, {}), OURS) for name in columns]
        yield _row([case["title"], duration(rows["ours"]["median"]), *ratios])


def _goals(cases: Sequence[Record]) -> Iterator[str]:
    yield "Goals:"
    yield ""
    for case in cases:
        for met, text in loader_report.goals(case):
            yield f"- {'met' if met else '**missed**'}: {text}"


def main(arguments: list[str] | None = None) -> None:
    """Measure or read records, write the page, and print the problems found."""
    args = command.parser("parallel_apply", __doc__).parse_args(arguments)
    effort = QUICK if args.quick else Effort(max_seconds=10.0)
    run = partial(measure, effort, args.only, args.quick)
    command.report_run(args, "parallel", run, page, complaints, "parallel_apply")


if __name__ == "__main__":
    main()
