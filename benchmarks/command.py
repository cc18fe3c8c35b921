"""Options and paths of all commands."""

from __future__ import annotations

import argparse
import datetime
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ._harness import Record

_HERE = Path(__file__).parent
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
    return found


def report_run(
    args: argparse.Namespace,
    suffix: str,
    measure: Callable[[], Record],
    page: Callable[[Record], str],
    complaints: Callable[[Record], Sequence[str]] = lambda results: (),
) -> tuple[Record, Path]:
    """Measure a run or read records, write the page, and print the problems found.

    Returns:
        The records, and the folder of the charts.
    """

    def records() -> Record:
        run = measure()
        if isinstance(args.only, str) and not run["cases"]:
            sys.exit(f"--only must be part of a case's title, but is {args.only!r}")
        date = datetime.date.today().isoformat()
        return {"date": date, "quick": args.quick, "runs": [run]}

    results, path, reports = obtain(args, suffix, records)
    write_page(path, page(results))
    for line in [] if results["quick"] else complaints(results):
        print(f"Check this: {line}", file=sys.stderr)
    return results, reports


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


def folder(keep: bool) -> Path:
    """Return the folder of the reports, for kept results or for others."""
    return _HERE if keep else _SCRATCH


def obtain(
    args: argparse.Namespace, suffix: str, measure: Callable[[], dict[str, Any]]
) -> tuple[dict[str, Any], Path, Path]:
    """Return records, the path of their JSON, and the folder of the charts.

    Args:
        args: with ``records``, ``out``, ``json``, ``quick`` and ``only``.
        suffix: the end of the JSON's name, after the date.
        measure: makes the records, if the options name no file.
    """
    reports = args.out or folder(keep=not (args.quick or args.only))
    if args.records:
        path = args.records
        return json.loads(path.read_text(encoding="utf-8")), path, reports
    results = measure()
    path = args.json or reports / "results" / f"{results['date']}-{suffix}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    return results, path, reports


def write_page(path: Path, page: str) -> None:
    """Write and print the tables of the records at ``path``."""
    tables = path.with_suffix(".md")
    tables.write_text(page, encoding="utf-8")
    print(page)
    print(f"Records: {path}\nTables: {tables}", file=sys.stderr)
