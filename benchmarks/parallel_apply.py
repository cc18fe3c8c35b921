"""Calls on two threads: ``python -m benchmarks.parallel_apply --help``.

Work that releases the GIL on two threads beside one, and what a call costs beside
torch's, which starts new threads for each. It writes the JSON, the table in the README
and all contenders beside the JSON: the last two from the JSON alone.
"""

from __future__ import annotations

import argparse
import datetime
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from . import command, environment, loader_report, parallel_cases, report
from ._harness import Record, compare
from .case import QUICK, Effort
from .report import _head, _ratio, _row, duration

BEGIN, END = "<!-- parallel table -->", "<!-- end of parallel table -->"
#: Of each kind of case its title, and the contenders with a column.
_COLUMNS = {
    "work": (
        "Work: how many times as long as ours others take",
        (
            parallel_cases.LOOP,
            parallel_cases.POOL,
            parallel_cases.TORCH,
            parallel_cases.INSIDE,
        ),
    ),
    "overhead": (
        "Calls of nothing: how many times as long as ours others take",
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
    """Return what somebody must look at: goals missed, losses nobody explains."""
    cases = [case for run in results["runs"] for case in run["cases"]]
    goals = [
        text for case in cases for met, text in loader_report.goals(case) if not met
    ]
    return [*goals, *report.complaints(results)]


def block(results: Record, name: str) -> str:
    """Return what stands between the markers of the README; see `report.block`."""
    lines = [
        f"{report.links(results, name)}. Ratios of medians, in brackets the quartiles "
        "round by round; *limits* in italics.",
    ]
    for run in results["runs"]:
        for kind, (title, columns) in _COLUMNS.items():
            cases = [case for case in run["cases"] if case["kind"] == kind]
            if cases:
                lines += ["", f"### {title}", "", *_table(cases, columns)]
        lines += ["", *_goals(run["cases"]), ""]
        lines += [f"- {key}: {value}" for key, value in run["machine"].items() if value]
    return "\n".join(lines) + "\n"


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
    """Measure or read records, write the reports, and say what needs a look."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.parallel_apply")
    parser.description = __doc__
    parser.add_argument("--only", default="", help="part of the titles of cases to run")
    parser.add_argument("--quick", action="store_true", help="a smoke run, no figures")
    parser.add_argument("--json", type=Path, help="where the records go")
    command.add_options(parser)
    args = parser.parse_args(arguments)

    def records() -> Record:
        effort = QUICK if args.quick else Effort(max_seconds=15.0)
        run = measure(effort, args.only, args.quick)
        if not run["cases"]:
            parser.error(f"--only must be part of a case's title, but is {args.only!r}")
        date = datetime.date.today().isoformat()
        return {"date": date, "quick": args.quick, "runs": [run]}

    results, path, folder = command.obtain(args, "parallel-cpu", records)
    link = Path(os.path.relpath(path, folder)).with_suffix("").as_posix()
    report.write_block(folder / "README.md", block(results, link), BEGIN, END)
    path.with_suffix(".md").write_text(report.details(results), "utf-8")
    print(report.details(results))
    print(f"Records: {path}\nTable: {folder}", file=sys.stderr)
    for line in [] if results["quick"] else complaints(results):
        print(f"Look at this: {line}", file=sys.stderr)


if __name__ == "__main__":
    main()
