"""``pyparallel profile``: runs some steps of a script and draws where their time goes.

The exit code is the script's; 1 if it ended well, or was given up, and no step was
seen; 127 if there is no such program.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import threading
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..core.errors import BatchValueError
from . import report
from .record import Record
from .recorder import VARIABLE, Settings

_NOTHING = (
    "pyparallel profile: the script must make two steps or more, but none was seen. "
    "Iterate over a loader of torch, torchdata or pyparallel, or call collate, scatter "
    "or a wrapper. Python with -E, -I or -S is not looked into."
)
_LATE = (
    "pyparallel profile: the script must begin its first step within {:g} s, but has "
    "not, {}. If it only starts slowly, raise --patience. Else iterate over a loader "
    "of torch, torchdata or pyparallel, or call collate, scatter or a wrapper."
)
#: A script that is given up may take this time to end, in seconds.
_GRACE = 10.0
#: In the place of the exit code of a script that was given up: no signal has this one.
_GIVEN_UP = -1000
#: The folder of the `sitecustomize` that Python imports as it starts.
_STARTUP = Path(__file__).resolve().parent / "startup"


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
        code = _run(command, settings, options.patience)
        if code is None:
            return 127
        written = report.write(report.gather(Path(folder), code), options.out)
        failed = [p.read_text(encoding="utf-8") for p in Path(folder).glob("*.failed")]
    for each in written:
        print(report.text(each), file=sys.stderr)
    if failed:
        print(
            "pyparallel profile: pyparallel must be installed for the Python of the "
            f"script, but cannot be imported: {failed[0]}",
            file=sys.stderr,
        )
    elif not written and code != _GIVEN_UP:
        print(_NOTHING, file=sys.stderr)
    return int(not written) if code == _GIVEN_UP else code or int(not written)


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
        "--patience",
        type=_seconds,
        default=300.0,
        metavar="SECONDS",
        help="end a script that has not begun a step by then; %(default)g",
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


def _seconds(text: str) -> float:
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not 0 < found <= threading.TIMEOUT_MAX:
        raise argparse.ArgumentTypeError(
            f"must be a number of seconds above 0, but is {text!r}"
        )
    return found


def _run(command: list[str], settings: Settings, patience: float) -> int | None:
    """Run the script to its end; return its exit code, None if it could not begin.

    `_GIVEN_UP` takes the place of the exit code of a script that was given up.

    Ctrl-C in a terminal reaches the script as well: here it is left to it. What asks
    this process to end is passed on.
    """
    paths = filter(None, (str(_STARTUP), os.environ.get("PYTHONPATH")))
    environment = {
        **os.environ,
        VARIABLE: json.dumps(asdict(settings)),
        "PYTHONPATH": os.pathsep.join(paths),
    }
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
        code = _wait(process, settings, patience)
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
    return code if code >= 0 or code == _GIVEN_UP else 128 - code


def _wait(process: subprocess.Popen[bytes], settings: Settings, patience: float) -> int:
    """Return the exit code of a script, or `_GIVEN_UP` if it was ended here."""
    try:
        return process.wait(patience)
    except subprocess.TimeoutExpired:
        pass
    if any(Path(settings.folder).glob("*.jsonl")):
        return process.wait()
    fate = "so it was ended" if settings.leave else "and goes on"
    print(_LATE.format(patience, fate), file=sys.stderr, flush=True)
    if not settings.leave:
        return process.wait()
    process.terminate()
    try:
        process.wait(_GRACE)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    return _GIVEN_UP


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
