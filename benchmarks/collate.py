"""Measure in this process: ``python -m benchmarks.collate --help``.

``python -m benchmarks`` runs this once for each mode of the allocator.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from . import (
    cases_images,
    cases_leaves,
    cases_preprocess,
    environment,
    growth,
    report,
)
from ._harness import QUICK, Case, Effort, Record, compare
from .backends import AS_LOADED, use_backend

SECTIONS = ("cases", "growth")


def cases(quick: bool) -> list[Case]:
    """Return all cases; with ``quick``, small versions only, to prove that they run."""
    modules = (cases_images, cases_leaves, cases_preprocess)
    return [case for module in modules for case in module.cases(quick)]


def measure(
    threads: int,
    effort: Effort,
    only: str = "",
    quick: bool = False,
    main_only: bool = False,
) -> Record:
    """Run the cases whose title contains ``only``; return the record of the run."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        record: Record = {"machine": environment.machine(), "cases": []}
        for case in cases(quick):
            if only not in case.title or (main_only and not case.main):
                continue
            _say(f"{case.title}, {threads} threads")
            comparison = compare(
                case.title, case.contenders(), note=case.note, **effort._asdict()
            )
            comparison["nbytes"] *= case.copies
            record["cases"].append(comparison)
        record["machine"]["load average after"] = environment.load()
        return record
    finally:
        torch.set_num_threads(before)
        use_backend(AS_LOADED)


def measure_growth(effort: Effort, quick: bool) -> list[Record]:
    """Measure how the time grows; return the records, the one of the threads last."""

    def records() -> Iterator[Record]:
        for each in growth.growths(quick):
            _say(each.title)
            yield growth.measure(each, effort)
        _say("threads")
        yield from growth.measure_threads(quick, effort)

    return _with_one_thread(records)


def _with_one_thread(records: Callable[[], Iterator[Record]]) -> list[Record]:
    """Collect records, and add the allocator to each."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    mode = "warm" if environment.is_warm() else "default"
    try:
        return [{**record, "malloc": mode} for record in records()]
    finally:
        torch.set_num_threads(before)
        use_backend(AS_LOADED)


def _say(text: str) -> None:
    print(f"{text} ...", file=sys.stderr, flush=True)


def add_options(parser: argparse.ArgumentParser, threads: list[int]) -> None:
    """Add the options that the main command passes to every process."""
    parser.add_argument(
        "--threads", type=int, nargs="+", default=threads, help="torch's threads"
    )
    parser.add_argument("--rounds", type=int, default=Effort().rounds)
    parser.add_argument(
        "--max-seconds",
        type=float,
        default=6.0,
        help="limit of each comparison; no round starts after it",
    )
    parser.add_argument(
        "--only", default="", help="run cases whose title contains this"
    )
    parser.add_argument("--json", type=Path, help="file of the records")
    parser.add_argument(
        "--quick", action="store_true", help="a test run without figures"
    )


def effort(args: argparse.Namespace) -> Effort:
    """Return the effort that the options select."""
    return QUICK if args.quick else Effort(args.rounds, args.max_seconds)


def main(arguments: list[str] | None = None) -> None:
    """Measure, print the tables, and write the JSON file of the options."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.collate")
    add_options(parser, [1])
    parser.add_argument(
        "--warm-malloc",
        action="store_true",
        help="restart with an allocator that keeps freed memory (glibc)",
    )
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=["cases"])
    parser.add_argument(
        "--main-only",
        action="store_true",
        help="run only the main cases with all numbers of threads but the first",
    )
    args = parser.parse_args(arguments)
    if args.warm_malloc and not environment.is_warm():
        command = [sys.executable, "-m", "benchmarks.collate", *sys.argv[1:]]
        os.execve(sys.executable, command, {**os.environ, **environment.WARM})
    results: Record = {"runs": []}
    if "cases" in args.sections:
        for num in args.threads:
            # Cases that are selected by name run with every number of threads.
            more = args.main_only and not args.only and num != args.threads[0]
            run = measure(num, effort(args), args.only, args.quick, more)
            results["runs"].append(run)
        if not any(run["cases"] for run in results["runs"]):
            parser.error(f"--only must be part of a case's title, but is {args.only!r}")
    if "growth" in args.sections:
        results["growth"] = measure_growth(effort(args), args.quick)
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    print("\n".join(map(report.table, results["runs"])))


if __name__ == "__main__":
    main()
