"""Options and paths of all commands."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

_HERE = Path(__file__).parent
#: The folder of runs whose results are not kept.
_SCRATCH = _HERE.parent / "build" / "benchmarks" / "scratch"


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
