"""Calls on two threads: ``python -m benchmarks.parallel_apply --help``.

Compares work that releases the GIL on one thread and on two. It also compares the cost
of a call with torch's function, which starts new threads each time. It writes the
records as JSON, and makes the tables beside them from the JSON alone.
"""

from __future__ import annotations

import argparse
import datetime
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from . import command, environment, parallel_cases, report
from ._harness import Record, compare
from .case import QUICK, Effort
from .loader import report as loader_report
from .report import _head, _ratio, _row, duration

#: For each kind of case: its title and the contenders with a column.
_COLUMNS = {
    "work": (
        "Work: time relative to pyparallel (2.0 = twice as slow)",
        (
            parallel_cases.LOOP,
            parallel_cases.POOL,
            parallel_cases.TORCH,
            parallel_cases.INSIDE,
        ),
    ),
    "overhead": (
        "Empty functions: time relative to pyparallel (2.0 = twice as slow)",
        (parallel_cases.TORCH, parallel_cases.POOL),
    ),
}


def measure(effort: Effort, only: str = "", quick: bool = False) -> Record:
    """Run the cases whose title contains ``only``; return the record of the run."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        record: Record = {"machine": environment.machine(), "cases": []}
        for case in parallel_cases.cases(quick):
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
        for kind, (title, columns) in _COLUMNS.items():
            cases = [case for case in run["cases"] if case["kind"] == kind]
            if cases:
                lines += ["", f"## {title}", "", *_table(cases, columns)]
        lines += ["", *_goals(run["cases"]), ""]
        lines += [*report.loss_table(report.losses(run)), "", *report.machine(run)]
    lines += ["", report.ALL, *map(report.table, results["runs"])]
    return "\n".join(lines)


def _table(cases: Sequence[Record], columns: Sequence[str]) -> Iterator[str]:
    limits = {r["name"] for case in cases for r in case["rows"] if r["kind"] == "limit"}
    titles = [f"*{name}*" if name in limits else name for name in columns]
    yield from _head(["case", "ours", *titles])
    for case in cases:
        rows = {row["name"]: row for row in case["rows"] if row["installed"]}
        ratios = [_ratio(rows.get(name, {}), parallel_cases.OURS) for name in columns]
        yield _row([case["title"], duration(rows["ours"]["median"]), *ratios])


def _goals(cases: Sequence[Record]) -> Iterator[str]:
    yield "Goals:"
    yield ""
    for case in cases:
        for met, text in loader_report.goals(case):
            yield f"- {'met' if met else '**missed**'}: {text}"


def main(arguments: list[str] | None = None) -> None:
    """Measure or read records, write the page, and print the problems found."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.parallel_apply")
    parser.description = __doc__
    parser.add_argument(
        "--only", default="", help="run cases whose title contains this"
    )
    parser.add_argument(
        "--quick", action="store_true", help="a test run without figures"
    )
    parser.add_argument("--json", type=Path, help="file of the records")
    command.add_options(parser)
    args = parser.parse_args(arguments)

    def records() -> Record:
        effort = QUICK if args.quick else Effort(max_seconds=15.0)
        run = measure(effort, args.only, args.quick)
        if not run["cases"]:
            parser.error(f"--only must be part of a case's title, but is {args.only!r}")
        date = datetime.date.today().isoformat()
        return {"date": date, "quick": args.quick, "runs": [run]}

    results, path, _ = command.obtain(args, "parallel-cpu", records)
    command.write_page(path, page(results))
    for line in [] if results["quick"] else complaints(results):
        print(f"Check this: {line}", file=sys.stderr)


if __name__ == "__main__":
    main()
