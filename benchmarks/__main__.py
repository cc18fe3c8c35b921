"""Measure the answers to questions: ``python -m benchmarks --help``.

Each command measures, writes its records as JSON, and makes the tables and the charts
from the JSON alone. ``all`` runs the first five commands and ``summary``, which writes
the figures of the READMEs and measures nothing.
"""

from __future__ import annotations

import argparse
import importlib
import time
from collections.abc import Sequence

from . import command, environment

#: The modules of the commands with a `command.Question`, ``QUESTION``.
QUESTIONS = {
    "collate": "collate",
    "loader": "loader.question",
    "parallel": "parallel",
    "sampler": "sampler",
    "training": "training.question",
}
#: Modules with a function ``main`` without options.
OTHERS = ("summary", "static_batches")


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    found = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    names = ["all", *QUESTIONS, *OTHERS]
    found.add_argument(
        "names", nargs="+", choices=names, metavar="NAME", help=str(names)
    )
    found.add_argument(
        "--skip", nargs="+", default=[], choices=names[1:], help="not these of all"
    )
    found.add_argument(
        "--only",
        default="",
        help="run cases and parts whose title contains this; keep no results",
    )
    found.add_argument(
        "--max-seconds",
        type=float,
        help="limit of each comparison; no round starts after it",
    )
    found.add_argument(
        "--minutes",
        type=float,
        default=float("inf"),
        help="limit of all comparisons together; each gets an equal share of the rest",
    )
    found.add_argument(
        "--threads",
        type=int,
        nargs="+",
        default=sorted({1, min(2, environment.cores())}),
        help="torch's threads, for collate",
    )
    found.add_argument(
        "--workers", type=int, nargs="+", default=[1, 2], help="of loaders of images"
    )
    found.add_argument("--malloc", nargs="+", choices=list(environment.MALLOC))
    found.add_argument("--only-cases", action="store_true", help=argparse.SUPPRESS)
    found.add_argument("--no-charts", action="store_true")
    found.add_argument(
        "--despite-load",
        action="store_true",
        help="keep the results although other processes run; the page says so",
    )
    command.add_options(found)
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Run commands in turn."""
    args = parser().parse_args(arguments)
    names = [*QUESTIONS, "summary"] if args.names == ["all"] else args.names
    names = [name for name in names if name not in args.skip]
    if args.records and len(names) > 1:
        parser().error("--from needs one command")
    measured = [name for name in names if name in QUESTIONS]
    end = time.monotonic() + 60 * args.minutes
    for name in names:
        module = importlib.import_module(f"benchmarks.{QUESTIONS.get(name, name)}")
        if name in QUESTIONS:
            args.seconds = (end - time.monotonic()) / len(measured)
            measured.remove(name)
            command.answer(module.QUESTION, args)
        else:
            module.main()


if __name__ == "__main__":
    main()
