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
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .. import command
from .._harness import QUICK, Effort, Record
from . import case as gpu_case
from . import images, overlap, padding, report, rings, to_host, transfers
from .target import DryRun, describe, target

#: Modules with cases. Each returns its most important case first.
MODULES = (
    transfers,
    images,
    rings,
    padding,
    overlap,
    to_host,
)


def cases(quick: bool) -> list[gpu_case.GpuCase]:
    """Return all cases: the first of each module, then the second of each, and so on.

    So a run that is stopped early has measured the most important cases.
    """
    turns = itertools.zip_longest(*(module.cases(quick) for module in MODULES))
    return [case for turn in turns for case in turn if case is not None]


def measure_case(case: gpu_case.GpuCase, where: DryRun, effort: Effort) -> Record:
    """Return the record of a case; after a failure, with the reason."""
    try:
        return gpu_case.measure(case, where, effort)
    except Exception as error:  # the other cases can still be measured
        why = f"failed: {type(error).__name__}: {error}"
        return {"title": case.title, "note": case.note, "error": why}


class Run:
    """Measure cases one by one, and write the JSON after each."""

    def __init__(self, results: Record, path: Path | None) -> None:
        self.results, self._path = results, path

    def add(self, record: Record) -> None:
        """Add a case, print it, and write all records."""
        (run,) = self.results["runs"]
        run["cases"].append(record)
        print(report.case_table(record), flush=True)
        if self._path is not None:
            write_json(self.results, self._path)

    @property
    def failed(self) -> list[str]:
        """The cases that failed."""
        return [
            f"{case['title']}: {case['error']}"
            for run in self.results["runs"]
            for case in run["cases"]
            if "error" in case
        ]


def write_json(results: Record, path: Path) -> None:
    """Write records atomically: a reader sees the old or the new file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_suffix(".part")
    beside.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    os.replace(beside, path)


def measure(args: argparse.Namespace, path: Path | None) -> Run:
    """Run the selected cases."""
    where = target(args.device, args.quick)
    quick = args.quick or where.dry
    effort = QUICK if quick else Effort(args.rounds, args.max_seconds)
    machine = describe(where, args.commit)
    date = datetime.date.today().isoformat()
    runs = [{"machine": machine, "cases": []}]
    run = Run({"date": date, "quick": quick, "dry": where.dry, "runs": runs}, path)
    print(*(f"{key}: {value}" for key, value in machine.items()), "", sep="\n")
    chosen = [
        case for case in cases(quick) if any(part in case.title for part in args.only)
    ]
    start = time.monotonic()
    for i, case in enumerate(chosen):
        left = args.total_seconds - (time.monotonic() - start)
        if left < 0:
            error = f"not run: {args.total_seconds:g} s (--total-seconds) were over"
            run.add({"title": case.title, "note": case.note, "error": error})
            continue
        print(f"{args.total_seconds - left:.0f} s: {case.title} ...", flush=True)
        # Slow cases shorten the later ones, so that all cases fit in the time.
        share = min(effort.max_seconds, left / (len(chosen) - i))
        run.add(measure_case(case, where, effort._replace(max_seconds=share)))
    return run


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
    parser.add_argument("--rounds", type=int, default=Effort().rounds)
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
        "--quick", action="store_true", help="a test run without figures"
    )
    parser.add_argument("--json", type=Path, help="file of the records")
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
        page = (args.out or command.folder(keep=True)) / "results" / "gpu-goals.md"
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text(report.goals_page(cases(False)), encoding="utf-8")
        return 0
    path = _records_path(args)
    if args.records:
        run = Run(json.loads(args.records.read_text(encoding="utf-8")), None)
    else:
        run = measure(args, path)
    if path is not None:
        tables = path.with_suffix(".md")
        tables.write_text(report.page(run.results), encoding="utf-8")
        print(f"Records: {path}\nTables: {tables}", file=sys.stderr)
    for line in run.failed:
        print(f"Failed: {line}", file=sys.stderr)
    return 1 if run.failed else 0


def _records_path(args: Any) -> Path | None:
    """Return the path of the records, or None for a dry run that keeps none."""
    whole = args.only == [""] and not args.quick and args.device == "cuda"
    folder = args.out or command.folder(keep=whole or bool(args.records))
    if args.records:
        records: Path = args.records
        return records
    if args.device == "cpu" and not (args.out or args.json):
        return None
    name = f"{datetime.date.today().isoformat()}-gpu.json"
    return args.json or folder / "results" / name


if __name__ == "__main__":
    sys.exit(main())
