"""``pyparallel profile``: runs some steps of a script and draws where their time goes.

The exit code is the script's; 1 if it ended well and no step was seen; 127 if there is
no such program.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .._errors import BatchValueError
from . import report
from .record import Record
from .watch import VARIABLE, Settings

_NOTHING = (
    "pyparallel profile: the script must make two steps or more, but none was seen. "
    "Loaders of torch and pyparallel are seen, and collate, scatter and the wrappers, "
    "in every process that imports pyparallel."
)


def main(argv: list[str]) -> int:
    """Profile a command, or draw a record again; return the exit code."""
    options, command = _parse(argv)
    if options.draw is not None:
        return _draw(options.draw, options.out)
    with tempfile.TemporaryDirectory(prefix="pyparallel-profile-") as folder:
        settings = Settings(
            folder,
            options.steps,
            options.warmup,
            synchronize=not options.no_sync,
            leave=not options.keep_going,
        )
        code = _run(command, settings)
        if code is None:
            return 127
        written = report.write(report.gather(Path(folder), code), options.out)
    for each in written:
        print(report.text(each), file=sys.stderr)
    if not written:
        print(_NOTHING, file=sys.stderr)
    return code or int(not written)


def _parse(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Return our options and the command behind ``--``."""
    cut = argv.index("--") if "--" in argv else len(argv)
    parser = argparse.ArgumentParser(
        "pyparallel profile",
        usage="pyparallel profile [OPTION ...] -- COMMAND [ARGUMENT ...]\n"
        "       pyparallel profile [--out FOLDER] --from RECORD.json",
        description="Run some steps of a training script, unchanged, and draw where "
        "their time goes, as pictures and a page.",
        epilog="for example: pyparallel profile -- python train.py --lr 0.1",
    )
    parser.add_argument(
        *("--steps", "-n"),
        type=_at_least(1),
        default=30,
        help="how many steps to look at; %(default)s",
    )
    parser.add_argument(
        "--warmup",
        type=_at_least(0),
        default=5,
        help="how many steps come before them; %(default)s",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("pyparallel-profile"),
        help="the folder of the report; %(default)s",
    )
    parser.add_argument(
        "--keep-going",
        action="store_true",
        help="let the script run to its end; else its next step ends it, as sys.exit()",
    )
    parser.add_argument(
        "--no-sync",
        action="store_true",
        help="do not wait for the device at the end of a step",
    )
    parser.add_argument(
        "--from",
        dest="draw",
        type=Path,
        metavar="RECORD.json",
        help="draw a record once more; nothing is run",
    )
    options, command = parser.parse_args(argv[:cut]), argv[cut + 1 :]
    if bool(command) == (options.draw is not None):
        parser.error("give a command behind --, as in: -- python train.py")
    return options, command


def _at_least(least: int) -> Any:
    def whole(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(
                f"must be a whole number from {least} on, but is {text!r}"
            )
        return int(text)

    return whole


def _run(command: list[str], settings: Settings) -> int | None:
    """Run the script to its end; return its exit code, None if it could not begin.

    Ctrl-C in a terminal reaches the script as well: here it is left to it. What asks
    this process to end is passed on.
    """
    environment = {**os.environ, VARIABLE: json.dumps(asdict(settings))}
    process: subprocess.Popen[bytes] | None = None
    early: list[int] = []

    def pass_on(number: int, _: Any) -> None:
        if process is None:
            early.append(number)
        elif number != signal.SIGINT:
            process.send_signal(number)

    # What is ignored stays so, here and in the script.
    numbers = [
        number
        for number in (signal.SIGINT, signal.SIGTERM)
        if signal.getsignal(number) is not signal.SIG_IGN
    ]
    before = {number: signal.signal(number, pass_on) for number in numbers}
    try:
        process = subprocess.Popen(command, env=environment)
        for number in early:  # an early Ctrl-C had no script that it could reach
            process.send_signal(number)
        code = process.wait()
    except OSError as error:
        print(
            f"pyparallel profile: the command must be a program, but {command[0]!r} is "
            f"not: {error.strerror}. Begin with python or torchrun.",
            file=sys.stderr,
        )
        return None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return code if code >= 0 else 128 - code


def _draw(path: Path, out: Path) -> int:
    """Draw a record that was written before."""
    try:
        record = Record.from_json(path.read_text(encoding="utf-8"), path.name)
        written = report.write([record], out)
    except (OSError, BatchValueError) as error:
        print(f"pyparallel profile: {error}", file=sys.stderr)
        return 2
    for each in written:
        print(report.text(each))
    if not written:
        print(_NOTHING, file=sys.stderr)
    return int(not written)
