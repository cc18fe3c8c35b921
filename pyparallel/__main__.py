"""The command line: ``pyparallel COMMAND``, or ``python -m pyparallel COMMAND``."""

from __future__ import annotations

import argparse
import importlib
import io
import os
import sys
from collections.abc import Sequence
from typing import NamedTuple

import pyparallel


class Command(NamedTuple):
    """A command, and the module whose ``main(argv: list[str]) -> int`` runs it."""

    module: str
    summary: str


#: The commands by name. Only the module of the requested command is imported. It
#: parses its own options.
COMMANDS = {
    "doctor": Command("doctor.command", "report the installation and test it"),
    "profile": Command("profiler.command", "run a script and chart its step times"),
}
_DEFAULT = "doctor"


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; return the exit code.

    Args:
        argv: the arguments, a command first; None: those of the process. Options
            without a command go to the doctor.
    """
    try:
        code = _run(list(sys.argv[1:] if argv is None else argv))
    except SystemExit:
        if not _has_lost_output():
            raise
        return 1
    except OSError:
        if not _has_lost_output("\n"):  # the error was another one
            raise
        return 1
    return 1 if _has_lost_output() else code


def _has_lost_output(end: str = "") -> bool:
    """Write the rest of the output. Report an error of this, and return True."""
    try:
        if sys.stdout:  # None: closed before the start
            print(end=end, flush=True)
    except OSError as error:
        # Otherwise the interpreter reports the same error at its exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):  # as in `pyparallel doctor | head`
            text = f"the output cannot be written: {error.strerror}"
            print(f"pyparallel: {text}", file=sys.stderr)
        return True
    return False


def _run(arguments: list[str]) -> int:
    own_options = ("-h", "--help", "--version")
    if not arguments or (arguments[0][:1] == "-" and arguments[0] not in own_options):
        arguments.insert(0, _DEFAULT)
    # All arguments after a command belong to it, also `--help`.
    command = _parser().parse_args(arguments[:1]).command
    module = importlib.import_module(f"pyparallel.{COMMANDS[command].module}")
    if isinstance(sys.stdout, io.TextIOWrapper):  # its encoding may lack characters
        sys.stdout.reconfigure(errors="backslashreplace")
    return int(module.main(arguments[1:]))


def _parser() -> argparse.ArgumentParser:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {found.summary}" for name, found in COMMANDS.items()]
    parser = argparse.ArgumentParser(
        "pyparallel",
        usage="pyparallel [-h] [--version] [COMMAND] [OPTION ...]",
        description="PyTorch data loading for samples of different sizes.",
        epilog="commands:\n" + "\n".join(lines) + f"\n\nThe default is {_DEFAULT}. "
        "Help for a command: pyparallel COMMAND --help",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("command", choices=COMMANDS, help=argparse.SUPPRESS)
    version = f"pyparallel {pyparallel.__version__}"
    parser.add_argument("--version", action="version", version=version)
    return parser


if __name__ == "__main__":
    sys.exit(main())
