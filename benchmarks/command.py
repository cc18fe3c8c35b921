"""Questions: the measurements of a command, its processes, its records and its page."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from . import environment, report
from ._harness import QUICK, Case, Effort, Record, measure_case, use_backend

_HERE = Path(__file__).parent
#: The greatest share of the cores that other processes may use in a kept run.
MOST_LOAD = 0.1
#: The folder of runs whose results are not kept.
_SCRATCH = _HERE.parent / "build" / "benchmarks" / "scratch"


@dataclass(frozen=True)
class Question:
    """A question that a user asks, and the way to its answer.

    Attributes:
        name: of the command and of the records.
        title: of the page.
        cases: returns the comparisons for the options.
        effort: the rounds of a comparison.
        parts: other measurements by name, made once; they use the options and the
            effort, and their results are entries of the run.
        malloc: the modes of the allocator; each has its own process.
        threaded: the cases are measured with each number of torch's threads.
        page: options of `report.page`.
    """

    name: str
    title: str
    cases: Callable[[argparse.Namespace], Iterable[Case]]
    effort: Effort
    parts: Mapping[str, Callable[[argparse.Namespace, Effort], Any]] = field(
        default_factory=dict
    )
    malloc: Sequence[str] = ("default",)
    threaded: bool = False
    page: Mapping[str, Any] = field(default_factory=dict)

    def page_of(self, results: Record) -> str:
        """Return the page of a record."""
        return report.page(self.title, results, **self.page)


class Budget:
    """A time that several comparisons share: slow ones shorten the later ones."""

    def __init__(self, seconds: float, num: int) -> None:
        self._end, self._num = time.monotonic() + seconds, num

    @property
    def left(self) -> float:
        """The seconds until the end."""
        return self._end - time.monotonic()

    def effort(self, effort: Effort) -> Effort:
        """Return the effort of the next comparison."""
        share = max(0.0, self.left) / max(1, self._num)
        self._num -= 1
        return effort._replace(max_seconds=min(effort.max_seconds, share))


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that all commands have."""
    parser.add_argument(
        "--from",
        dest="records",
        type=Path,
        help="do not measure; write the reports of this JSON",
    )
    parser.add_argument(
        "--out",
        type=Path,
        help="folder for charts and results; benchmarks/ by default, and "
        "build/benchmarks/scratch with --quick or --only",
    )
    parser.add_argument("--json", type=Path, help="file of the records")
    parser.add_argument("--rounds", type=int, help="rounds of each comparison")
    parser.add_argument(
        "--quick", action="store_true", help="a test run without figures"
    )


def folder(keep: bool) -> Path:
    """Return the folder of the reports, for kept results or for others."""
    return _HERE if keep else _SCRATCH


# ------------------------------------------------------------------------- measurement
def measure(question: Question, args: argparse.Namespace) -> Record:
    """Measure in one process for each mode of the allocator; return all records."""
    modes = args.malloc or question.malloc
    args = argparse.Namespace(**{**vars(args), "seconds": args.seconds / len(modes)})
    here = "warm" if environment.is_warm() else "default"
    runs: list[Record] = []
    for mode in modes:
        print(f"--- {question.name}, malloc: {mode}", file=sys.stderr, flush=True)
        # In the last mode only: page faults would add growth of the kernel's.
        whole = mode == modes[-1] and not args.only_cases
        if mode == here:
            runs += _runs(question, args, whole)
        else:
            runs += _child(question, args, mode, whole)
    if not any(run["cases"] or run.keys() & question.parts for run in runs):
        sys.exit(f"--only must be part of a case's title, but is {args.only!r}")
    date = datetime.date.today().isoformat()
    return {"date": date, "quick": args.quick, "runs": runs}


def _runs(question: Question, args: argparse.Namespace, whole: bool) -> list[Record]:
    """Return a run for each number of threads, in this process."""
    numbers = args.threads if question.threaded else [1]
    before, runs = torch.get_num_threads(), []
    effort = question.effort
    if args.rounds:
        effort = effort._replace(rounds=args.rounds)
    if args.max_seconds:
        effort = effort._replace(max_seconds=args.max_seconds)
    effort = QUICK if args.quick else effort
    try:
        for number in numbers:
            torch.set_num_threads(number)
            run: Record = {"machine": environment.machine(), "cases": []}
            first = number == numbers[0]
            # Cases that are selected by name run with every number of threads.
            chosen = [
                case
                for case in question.cases(args)
                if args.only in case.title and (args.only or first or case.main)
            ]
            budget = Budget(args.seconds / len(numbers), len(chosen))
            for case in chosen:
                _say(f"{case.title}, {number} thread{'s' * (number > 1)}")
                run["cases"].append(measure_case(case, budget.effort(effort)))
            for name, part in question.parts.items() if first and whole else ():
                if args.only in name:
                    _say(name)
                    run[name] = part(args, effort)
            run["machine"]["load average after"] = environment.load()
            runs.append(run)
    finally:
        torch.set_num_threads(before)
        use_backend()
    return runs


def _say(text: str) -> None:
    print(f"{text} ...", file=sys.stderr, flush=True)


def _child(
    question: Question, args: argparse.Namespace, mode: str, whole: bool
) -> list[Record]:
    """Return the runs of another process, with a mode of the allocator."""
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "records.json"
        command = [sys.executable, "-m", "benchmarks", question.name, *_options(args)]
        command += ["--malloc", mode, "--no-charts"]
        command += ["--out", scratch, "--json", str(path)]
        command += ["--only-cases"] * (not whole)
        kept = {k: v for k, v in os.environ.items() if not k.startswith("MALLOC_")}
        options: Any = {
            "env": {**kept, **environment.MALLOC[mode]},
            "cwd": _HERE.parent,
        }
        done = subprocess.run(command, stdout=subprocess.DEVNULL, **options)
        if done.returncode:  # the process has printed the reason
            sys.exit(done.returncode)
        runs: list[Record] = json.loads(path.read_text(encoding="utf-8"))["runs"]
        return runs


def _options(args: argparse.Namespace) -> Iterator[str]:
    """Yield the options that another process needs."""
    yield from ("--only", args.only, "--minutes", str(args.seconds / 60))
    for name in ("rounds", "max_seconds"):
        if value := getattr(args, name):
            yield from (f"--{name.replace('_', '-')}", str(value))
    for name in ("threads", "workers"):
        yield from (f"--{name}", *map(str, getattr(args, name)))
    yield from ["--quick"] * args.quick


# ----------------------------------------------------------------------------- records
def obtain(
    args: argparse.Namespace, name: str, measure: Callable[[], Record]
) -> tuple[Record, Path, Path]:
    """Return records, the path of their JSON, and the folder of the charts.

    Args:
        args: with ``records``, ``out``, ``json``, ``quick`` and ``only``.
        name: the name of the JSON.
        measure: makes the records, if the options name no file.
    """
    keep = not (args.quick or args.only)
    reports = args.out or folder(keep)
    if args.records:
        path = args.records
        return json.loads(path.read_text(encoding="utf-8")), path, reports
    guarded = keep and not (args.out or args.despite_load)
    before = environment.OtherLoad()
    if guarded:
        time.sleep(2)
        _check_load(before.share(), "Wait until the machine is quiet")
    during = environment.OtherLoad()
    results = measure()
    share = during.share()
    others = f"{share * 100:.0f} % of the cores"
    for run in results["runs"]:
        flag = ", with --despite-load" if args.despite_load else ""
        run["machine"]["other processes"] = others + flag
    if guarded and share > MOST_LOAD:
        reports = folder(keep=False)
    path = args.json or reports / "results" / f"{name}.json"
    write_json(results, path)
    if guarded:
        _check_load(share, f"The records are in {path}. Run it again")
    return results, path, reports


def _check_load(share: float, advice: str) -> None:
    if share > MOST_LOAD:
        sys.exit(
            f"benchmarks: other processes must use at most {MOST_LOAD * 100:.0f} % of "
            f"the cores, but use {share * 100:.0f} %. {advice}, or pass "
            "--despite-load; the page then says so."
        )


def write_json(results: Record, path: Path) -> None:
    """Write records atomically: a reader sees the old or the new file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_suffix(".part")
    beside.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    os.replace(beside, path)


def write_page(path: Path, page: str) -> None:
    """Write and print the tables of the records at ``path``."""
    tables = path.with_suffix(".md")
    tables.write_text(page, encoding="utf-8")
    print(page)
    print(f"Records: {path}\nTables: {tables}", file=sys.stderr)


def answer(question: Question, args: argparse.Namespace) -> None:
    """Measure or read records, write the page and the charts, and name problems."""
    results, path, reports = obtain(
        args, question.name, lambda: measure(question, args)
    )
    page = question.page_of(results)
    write_page(path, page)
    if not args.no_charts:
        try:
            from . import charts
        except ImportError as error:
            print(f"No charts: {error}. Install matplotlib.", file=sys.stderr)
        else:
            charts.draw(question.name, results, reports / "charts")
    for line in [] if results.get("quick") else report.complaints(page):
        print(f"Check this: {line}", file=sys.stderr)
