"""The whole benchmark: ``python -m benchmarks --help``.

The command measures in one process for each mode of the allocator and writes the
records as JSON. It makes the tables and the charts from the JSON alone.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from . import collate, command, report
from .environment import MALLOC, cores

_HERE = Path(__file__).parent


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Run one process for each mode of the allocator; return all their records."""
    results: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "quick": args.quick,
        "runs": [],
        "growth": [],
    }
    for mode in args.malloc:
        sections = ["cases"]
        if not args.only and mode == args.malloc[-1]:
            # In the last mode only: page faults would add growth of the kernel's.
            sections.append("growth")
        for key, records in _child(args, mode, sections).items():
            results[key] += records
    return results


def _child(args: argparse.Namespace, mode: str, sections: list[str]) -> dict[str, Any]:
    print(f"--- malloc: {mode}", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "records.json"
        command = [sys.executable, "-m", "benchmarks.collate", "--json", str(path)]
        command += ["--rounds", str(args.rounds), "--only", args.only, "--main-only"]
        command += ["--max-seconds", str(args.max_seconds)]
        command += ["--threads", *map(str, args.threads), "--sections", *sections]
        command += ["--quick"] if args.quick else []
        kept = {k: v for k, v in os.environ.items() if not k.startswith("MALLOC_")}
        environment = {**kept, **MALLOC[mode]}
        # The tables of all processes are written at the end.
        options: Any = {"env": environment, "cwd": _HERE.parent}
        done = subprocess.run(command, stdout=subprocess.DEVNULL, **options)
        if done.returncode:  # the process has printed the reason
            sys.exit(done.returncode)
        return json.loads(path.read_text(encoding="utf-8"))


def _draw(results: dict[str, Any], folder: Path) -> None:
    try:
        from . import charts
    except ImportError as error:
        print(f"No charts: {error}. Install matplotlib.", file=sys.stderr)
        return
    charts.draw(results, folder)


def main(arguments: list[str] | None = None) -> None:
    """Measure or read records, write the reports, and print the problems found."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    collate.add_options(parser, sorted({1, min(2, cores())}))
    modes = list(MALLOC)
    parser.add_argument("--malloc", nargs="+", choices=modes, default=modes)
    parser.add_argument("--no-charts", action="store_true")
    command.add_options(parser)
    command.add_load_option(parser)
    args = parser.parse_args(arguments)
    results, path, folder = command.obtain(args, "collate", partial(measure, args))
    command.write_page(path, report.page(results))
    if not args.no_charts:
        _draw(results, folder / "charts")
    for line in [] if results.get("quick") else report.complaints(results):
        print(f"Check this: {line}", file=sys.stderr)


if __name__ == "__main__":
    main()
