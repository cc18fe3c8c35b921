"""A GPU: ``python -m benchmarks.gpu --help``.

Compares transfers, kernels, pinned rings and the prefetcher with peers and with goals.
The command prints each case and writes the JSON as soon as the case is measured. At the
end it writes the tables beside the JSON.

The exit code is 1 if a case failed: contenders whose results differ are never timed.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .. import command, report
from .._harness import QUICK, Effort, Record
from . import images, overlap, rings, to_host, transfers
from .case import GpuCase, measure
from .target import describe, target

#: The cases of each kind. Each begins with its most important case.
KINDS = (
    transfers.cases,
    images.cases,
    rings.cases,
    images.padding_cases,
    overlap.cases,
    to_host.cases,
)
_GOALS = (
    "*Ours* is the time of pyparallel. *Returns*, *usable* and *device* are the three "
    "clocks of [the benchmark](../gpu.md)."
)


def cases(quick: bool) -> list[GpuCase]:
    """Return all cases: the first of each kind, then the second of each, and so on.

    So a run that is stopped early has measured the most important cases.
    """
    turns = itertools.zip_longest(*(kind(quick) for kind in KINDS))
    return [case for turn in turns for case in turn if case is not None]


def page(results: Record) -> str:
    """Return the page of a record."""
    return report.page("pyparallel and its peers on a GPU", results)


def goals_page() -> str:
    """Return the table of all cases with their goals, in the order of a run."""
    cells = []
    for case in cases(False):
        goals = report.judge({"goals": [goal._asdict() for goal in case.goals]})
        for i, (_, text, _) in enumerate(goals):
            cells.append(["" if i else case.title, text])
    lines = report.grid(["case", "goal"], cells, left=2)
    return "\n".join(["# Goals of the benchmark on a GPU", "", _GOALS, "", *lines, ""])


def run(args: argparse.Namespace, path: Path | None) -> Record:
    """Measure the selected cases; print and write each."""
    where = target(args.device, args.quick)
    quick = args.quick or where.dry
    effort = Effort(max_seconds=args.max_seconds)
    effort = effort._replace(rounds=args.rounds) if args.rounds else effort
    machine, found = describe(where, args.commit), []
    results: Record = {"date": datetime.date.today().isoformat(), "quick": quick}
    results |= {"dry": where.dry, "runs": [{"machine": machine, "cases": found}]}
    print(*(f"{key}: {value}" for key, value in machine.items()), "", sep="\n")
    chosen = [c for c in cases(quick) if any(part in c.title for part in args.only)]
    budget = command.Budget(args.total_seconds, len(chosen))
    for case in chosen:
        print(f"{budget.left:.0f} s left: {case.title} ...", flush=True)
        share = budget.effort(QUICK if quick else effort)
        if budget.left < 0:
            error = f"not run: {args.total_seconds:g} s (--total-seconds) were over"
            record: Record = {"title": case.title, "note": case.note, "error": error}
        else:
            record = measure(case, where, share)
        found.append(record)
        print("\n".join(report.case_table(record)), flush=True)
        for met, goal, figure in report.judge(record):
            print(f"- {report.MARKS[met]}: {goal}: {figure}", flush=True)
        print(flush=True)
        if path is not None:
            command.write_json(results, path)
    return results


def options() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu")
    parser.description = __doc__
    parser.add_argument(
        "--device",
        choices=("cuda", "cpu"),
        default="cuda",
        help="cpu: a small dry run without figures; it writes files only if "
        "--json or --out is given",
    )
    parser.add_argument(
        "--seconds",
        "--max-seconds",
        dest="max_seconds",
        type=float,
        default=8.0,
        help="limit of each comparison; no round starts after it",
    )
    parser.add_argument(
        "--total-seconds",
        type=float,
        default=360.0,
        help="limit of the run: a comparison gets at most an equal share of the rest; "
        "no case starts after the limit, and the run fails",
    )
    parser.add_argument(
        "--cases",
        "--only",
        dest="only",
        nargs="+",
        default=[""],
        metavar="PART",
        help="run cases whose title contains one of these",
    )
    parser.add_argument(
        "--goals",
        action="store_true",
        help="do not measure; write the goals of all cases to results/gpu-goals.md",
    )
    parser.add_argument(
        "--commit", default="", help="the commit, if git does not know it"
    )
    command.add_options(parser)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure or read records, write the reports; return the exit code."""
    parser = options()
    args = parser.parse_args(arguments)
    if not any(part in case.title for part in args.only for case in cases(True)):
        parser.error(f"--cases must be parts of titles of cases, but is {args.only}")
    if args.goals:
        path = (args.out or command.folder(keep=True)) / "results" / "gpu-goals.md"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(goals_page(), encoding="utf-8")
        return 0
    found = _records_path(args)
    if args.records:
        results = json.loads(args.records.read_text(encoding="utf-8"))
    else:
        results = run(args, found)
    if found is not None:
        tables = found.with_suffix(".md")
        tables.write_text(page(results), encoding="utf-8")
        print(f"Records: {found}\nTables: {tables}", file=sys.stderr)
    measured = [case for each in results["runs"] for case in each["cases"]]
    failed = [case for case in measured if "error" in case]
    for case in failed:
        print(f"Failed: {case['title']}: {case['error']}", file=sys.stderr)
    return 1 if failed else 0


def _records_path(args: Any) -> Path | None:
    """Return the path of the records, or None for a dry run that keeps none."""
    if args.records or args.json:
        path: Path = args.records or args.json
        return path
    if args.device == "cpu" and not args.out:
        return None
    whole = args.only == [""] and not args.quick and args.device == "cuda"
    folder = args.out or command.folder(keep=whole)
    return folder / "results" / f"{datetime.date.today().isoformat()}-gpu.json"


if __name__ == "__main__":
    sys.exit(main())
