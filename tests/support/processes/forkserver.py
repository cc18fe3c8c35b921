"""Run programs in separate processes that do not import torch first.

The import takes most of the time of a short program. So a fork server has imported
torch, and no other package: see ``set_forkserver_preload`` in ``conftest.py``.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import sys
import tempfile
import types
import warnings
from collections.abc import Sequence


def run(code: str, path: Sequence[str], seconds: float = 100) -> tuple[int | None, str]:
    """Run a program as ``python -W error -c`` does; return its exit code and output.

    Args:
        code: the program.
        path: the first folder of the search for modules.
        seconds: the time until it is killed, with the exit code of the signal.
    """
    context = multiprocessing.get_context("forkserver")
    with tempfile.NamedTemporaryFile("r") as out:
        arguments = (code, list(path), out.name, dict(os.environ))
        process = context.Process(target=_execute, args=arguments)
        process.start()
        process.join(seconds)
        if process.is_alive():
            process.kill()
            process.join()
        return process.exitcode, without_gloo(out.read())


def without_gloo(output: str) -> str:
    """Remove the lines that gloo of torch 2.8 prints for each group.

    It prints a line in pieces, so the lines of several ranks may be mixed.
    """
    piece = re.compile(r"\d*(\[Gloo\] Rank | is connected | peer ranks|Expected |$)")
    kept, unfinished = [], 0
    for line in output.splitlines(keepends=True):
        is_piece = piece.match(line) is not None
        unfinished += is_piece and line.count("[Gloo] Rank ")
        if is_piece and unfinished:
            unfinished -= 1
        else:
            kept.append(line)
    return "".join(kept)


def _execute(code: str, path: list[str], out: str, environment: dict[str, str]) -> None:
    """Run in the new process, after setting its output, environment and modules."""
    with open(out, "w") as file:
        for number in (1, 2):
            os.dup2(file.fileno(), number)
    sys.stdout, sys.stderr = (open(number, "w", closefd=False) for number in (1, 2))
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:0] = path
    warnings.simplefilter("error")
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    exec(compile(code, "<string>", "exec"), main.__dict__)
