"""``pyparallel profile``: run some steps of a script and report where their time goes.

The exit code is that of the script. It is 1 if no step was recorded, although the
script succeeded or was stopped after ``--patience``; 127 if there is no such program.
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
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from ..core.errors import BatchValueError
from . import report
from .record import Record
from .recorder import VARIABLE, Settings
from .trial import transports

_NO_STEPS = (
    "pyparallel profile: the script must run at least two steps, but none was "
    "recorded. Iterate over a loader of torch, torchdata or pyparallel, or call "
    "collate, scatter or a wrapper. Start Python without -E, -I and -S."
)
_LATE = (
    "pyparallel profile: the script must begin its first step within {:g} s, but did "
    "not. {} If it starts slowly, increase --patience. Otherwise iterate over a loader "
    "of torch, torchdata or pyparallel, or call collate, scatter or a wrapper."
)
_ENDLESS = (
    "pyparallel profile: the script must end after its recorded steps, but still runs. "
    "Its loop is in a thread or a process pool, or it catches SystemExit. Press Ctrl-C "
    "to get the report now."
)
#: Seconds between SIGTERM and SIGKILL for a script that is stopped, and between the
#: last recorded step and `_ENDLESS`.
_GRACE = 10.0
#: Replaces the exit code of a script that was stopped; no signal has this number.
_STOPPED = -1000
#: The folder of the `sitecustomize` that Python imports at its start.
_STARTUP = Path(__file__).resolve().parent / "startup"


def main(argv: list[str]) -> int:
    """Profile a command, or report a record again; return the exit code."""
    options, command = _parse(argv)
    if options.record is not None:
        return _report(options.record, options.out)
    try:  # before the script, whose steps would be lost
        options.out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=options.out):
            pass
    except OSError as error:
        print(f"pyparallel profile: {error}", file=sys.stderr)
        return 2
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
        records = map(_probed, report.gather(Path(folder), code))
        written = report.write(list(records), options.out)
        failed = [p.read_text(encoding="utf-8") for p in Path(folder).glob("*.failed")]
    for each in written:
        print(report.text(each), file=sys.stderr)
    if failed:
        print(
            "pyparallel profile: pyparallel must be installed for the Python of the "
            f"script, but cannot be imported: {failed[0]}",
            file=sys.stderr,
        )
    elif not written and code != _STOPPED:
        print(_NO_STEPS, file=sys.stderr)
    return int(not written) if code == _STOPPED else code or int(not written)


def _probed(record: Record) -> Record:
    """Return a record with the transport of its batches, measured here."""
    layouts = [row["layout"] for row in record.batches if row.get("layout")]
    return replace(record, transports=transports(layouts[0])) if layouts else record


def _parse(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Return the options and the command after ``--``."""
    cut = argv.index("--") if "--" in argv else len(argv)
    parser = argparse.ArgumentParser(
        "pyparallel profile",
        usage="pyparallel profile [OPTION ...] -- COMMAND [ARGUMENT ...]\n"
        "       pyparallel profile [--out FOLDER] --from RECORD.json",
        description="Run some steps of an unchanged training script, and report where "
        "their time goes: an HTML page, charts, and a trace for Perfetto.",
        epilog="example: pyparallel profile -- python train.py --lr 0.1",
    )
    parser.add_argument(
        *("--steps", "-n"),
        type=_whole_number(1),
        default=30,
        help="number of steps to record (default: %(default)s)",
    )
    parser.add_argument(
        "--warmup",
        type=_whole_number(0),
        default=5,
        help="number of steps to skip before them (default: %(default)s)",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("pyparallel-profile"),
        help="folder of the report (default: %(default)s)",
    )
    parser.add_argument(
        "--keep-going",
        action="store_true",
        help="run the script to its end instead of ending it after the last step",
    )
    parser.add_argument(
        "--patience",
        type=_seconds,
        default=300.0,
        metavar="SECONDS",
        help="stop a script without a step after this time (default: %(default)g)",
    )
    parser.add_argument(
        "--no-sync",
        action="store_true",
        help="do not wait for the device at the end of each step",
    )
    parser.add_argument(
        "--from",
        dest="record",
        type=Path,
        metavar="RECORD.json",
        help="report an existing record again, without running a script",
    )
    options, command = parser.parse_args(argv[:cut]), argv[cut + 1 :]
    if bool(command) == (options.record is not None):
        parser.error("give a command after --, for example: -- python train.py")
    return options, command


def _whole_number(least: int) -> Any:
    def parse(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(
                f"must be an integer of at least {least}, but is {text!r}"
            )
        return int(text)

    return parse


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
    """Run the script to its end.

    Ctrl-C in a terminal reaches the script as well, so SIGINT is not forwarded. SIGTERM
    is forwarded.

    Returns:
        The exit code; `_STOPPED` if the script was stopped; None if it did not start.
    """
    paths = filter(None, (str(_STARTUP), os.environ.get("PYTHONPATH")))
    environment = {
        **os.environ,
        VARIABLE: json.dumps(asdict(settings)),
        "PYTHONPATH": os.pathsep.join(paths),
    }
    process: subprocess.Popen[bytes] | None = None
    early: list[int] = []

    def forward(number: int, _: Any) -> None:
        if process is None:
            early.append(number)
        elif number != signal.SIGINT:
            process.send_signal(number)

    # Ignored signals stay ignored, here and in the script.
    numbers = [
        number
        for number in (signal.SIGINT, signal.SIGTERM)
        if signal.getsignal(number) is not signal.SIG_IGN
    ]
    before = {number: signal.signal(number, forward) for number in numbers}
    try:
        process = subprocess.Popen(command, env=environment)
        for number in early:  # an early Ctrl-C did not reach the script
            process.send_signal(number)
        code = _wait(process, settings, patience)
    except OSError as error:
        print(
            f"pyparallel profile: the command must begin with a program, but "
            f"{command[0]!r} cannot be started: {error.strerror}. Begin it with python "
            "or torchrun.",
            file=sys.stderr,
        )
        return None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return code if code >= 0 or code == _STOPPED else 128 - code


def _wait(process: subprocess.Popen[bytes], settings: Settings, patience: float) -> int:
    """Return the exit code of a script, or `_STOPPED` if it was stopped here."""
    try:
        return process.wait(patience)
    except subprocess.TimeoutExpired:
        pass
    if any(Path(settings.folder).glob("*.jsonl")):
        return _wait_for_end(process, settings)
    fate = "It was stopped." if settings.leave else "It continues."
    print(_LATE.format(patience, fate), file=sys.stderr, flush=True)
    if not settings.leave:
        return process.wait()
    process.terminate()
    try:
        process.wait(_GRACE)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    return _STOPPED


def _wait_for_end(process: subprocess.Popen[bytes], settings: Settings) -> int:
    """Return the exit code of a script that has begun its steps."""
    is_over = False
    while settings.leave and not is_over:
        is_over = any(Path(settings.folder).glob("*.stopped"))
        try:
            return process.wait(_GRACE)
        except subprocess.TimeoutExpired:
            pass
    if is_over:
        print(_ENDLESS, file=sys.stderr, flush=True)
    return process.wait()


def _report(path: Path, out: Path) -> int:
    """Report an existing record."""
    try:
        record = Record.from_json(path.read_text(encoding="utf-8"), path.name)
        written = report.write([record], out, path.stem)
    except (OSError, UnicodeDecodeError, BatchValueError) as error:
        print(f"pyparallel profile: {error}", file=sys.stderr)
        return 2
    for each in written:
        print(report.text(each))
    if not written:
        print(_NO_STEPS, file=sys.stderr)
    return int(not written)
