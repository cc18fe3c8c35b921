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
    arguments = list(sys.argv[1:] if argv is None else argv)
    own_options = ("-h", "--help", "--version")
    if not arguments or (arguments[0][:1] == "-" and arguments[0] not in own_options):
        arguments.insert(0, _DEFAULT)
    # All arguments after a command belong to it, also `--help`.
    command = _parser().parse_args(arguments[:1]).command
    module = importlib.import_module(f"pyparallel.{COMMANDS[command].module}")
    if isinstance(sys.stdout, io.TextIOWrapper):  # its encoding may lack characters
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        code = int(module.main(arguments[1:]))
        if sys.stdout:  # None: closed before the start
            sys.stdout.flush()
        return code
    except BrokenPipeError:  # as in `pyparallel doctor | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


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
