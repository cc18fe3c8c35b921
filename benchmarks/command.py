"""Options and paths of all commands."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from . import environment
from ._harness import Record

_HERE = Path(__file__).parent
#: The greatest share of the cores that other processes may use in a kept run.
MOST_LOAD = 0.1
#: The folder of runs whose results are not kept.
_SCRATCH = _HERE.parent / "build" / "benchmarks" / "scratch"


def parser(name: str, about: str | None, only: bool = True) -> argparse.ArgumentParser:
    """Return the parser of a command that measures one run.

    Args:
        name: the name of its module in this package.
        about: its description.
        only: add ``--only`` for a part of a title.
    """
    found = argparse.ArgumentParser(prog=f"python -m benchmarks.{name}")
    found.description = about
    if only:
        text = "run cases whose title contains this"
        found.add_argument("--only", default="", help=text)
    found.add_argument(
        "--quick", action="store_true", help="a test run without figures"
    )
    found.add_argument("--json", type=Path, help="file of the records")
    add_options(found)
    add_load_option(found)
    return found


def report_run(
    args: argparse.Namespace,
    suffix: str,
    measure: Callable[[], Record],
    page: Callable[[Record], str],
    complaints: Callable[[Record], Sequence[str]] = lambda results: (),
    warm: str = "",
) -> tuple[Record, Path]:
    """Measure a run or read records, write the page, and print the problems found.

    Args:
        args: the options of `parser`.
        suffix: the name of the records.
        measure: measures the run.
        page: makes the page of the records.
        complaints: returns the problems.
        warm: the module to run again, with an allocator that keeps freed memory.

    Returns:
        The records, and the folder of the charts.
    """

    def records() -> Record:
        run = measure()
        if isinstance(args.only, str) and not run["cases"]:
            sys.exit(f"--only must be part of a case's title, but is {args.only!r}")
        date = datetime.date.today().isoformat()
        more = _warm_runs(args, warm) if warm and not environment.is_warm() else []
        return {"date": date, "quick": args.quick, "runs": [run, *more]}

    results, path, reports = obtain(args, suffix, records)
    write_page(path, page(results))
    for line in [] if results["quick"] else complaints(results):
        print(f"Check this: {line}", file=sys.stderr)
    return results, reports


def _warm_runs(args: argparse.Namespace, module: str) -> list[Record]:
    """Run a module with an allocator that keeps memory; return its runs."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "records.json"
        command = [sys.executable, "-m", f"benchmarks.{module}", "--only", args.only]
        command += ["--quick"] if args.quick else []
        command += ["--json", str(path), "--out", folder]
        options: Any = {"env": {**os.environ, **environment.WARM}, "cwd": _HERE.parent}
        subprocess.run(command, stdout=subprocess.DEVNULL, check=True, **options)
        runs: list[Record] = json.loads(path.read_text(encoding="utf-8"))["runs"]
        return runs


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add ``--from`` and ``--out``."""
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


def add_load_option(parser: argparse.ArgumentParser) -> None:
    """Add ``--despite-load``."""
    parser.add_argument(
        "--despite-load",
        action="store_true",
        help="keep the results although other processes run; the page says so",
    )


def folder(keep: bool) -> Path:
    """Return the folder of the reports, for kept results or for others."""
    return _HERE if keep else _SCRATCH


def obtain(
    args: argparse.Namespace, suffix: str, measure: Callable[[], dict[str, Any]]
) -> tuple[dict[str, Any], Path, Path]:
    """Return records, the path of their JSON, and the folder of the charts.

    Args:
        args: with ``records``, ``out``, ``json``, ``quick`` and ``only``.
        suffix: the name of the JSON.
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
    path = args.json or reports / "results" / f"{suffix}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
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


def write_page(path: Path, page: str) -> None:
    """Write and print the tables of the records at ``path``."""
    tables = path.with_suffix(".md")
    tables.write_text(page, encoding="utf-8")
    print(page)
    print(f"Records: {path}\nTables: {tables}", file=sys.stderr)
