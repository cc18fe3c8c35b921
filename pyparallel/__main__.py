"""The command line: ``pyparallel COMMAND``, or ``python -m pyparallel COMMAND``."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from typing import NamedTuple

import pyparallel


class Command(NamedTuple):
    """A command, and the module whose ``main(argv: list[str]) -> int`` runs it."""

    module: str
    summary: str


#: Each command by its name. Only the module of the one that is asked for is imported;
#: it reads its own options.
COMMANDS = {
    "doctor": Command(
        "doctor.command", "report what is installed here, and whether it works"
    ),
    "profile": Command("profiler.command", "run a script and draw its steps' time"),
}
_DEFAULT = "doctor"


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; return the exit code.

    Args:
        argv: the arguments, a command first; None: those of the process. Options
            without a command are the doctor's.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    ours = ("-h", "--help", "--version")
    if not arguments or (arguments[0][:1] == "-" and arguments[0] not in ours):
        arguments.insert(0, _DEFAULT)
    # What follows a command belongs to it, `--help` too.
    chosen = _parser().parse_args(arguments[:1]).command
    module = importlib.import_module(f"pyparallel.{COMMANDS[chosen].module}")
    try:
        code = int(module.main(arguments[1:]))
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # `pyparallel doctor | head` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _parser() -> argparse.ArgumentParser:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {found.summary}" for name, found in COMMANDS.items()]
    parser = argparse.ArgumentParser(
        "pyparallel",
        usage="pyparallel [-h] [--version] [COMMAND] [OPTION ...]",
        description="Ragged samples go to the device in one copy.",
        epilog="commands:\n" + "\n".join(lines) + f"\n\nWithout one: {_DEFAULT}. "
        "Each has its own help: pyparallel COMMAND --help",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("command", choices=COMMANDS, help=argparse.SUPPRESS)
    version = f"pyparallel {pyparallel.__version__}"
    parser.add_argument("--version", action="version", version=version)
    return parser


if __name__ == "__main__":
    sys.exit(main())
