"""Run scripts to the exit of their interpreters, with one import of torch.

One process runs the imports and forks for each script. The child runs the script at the
level of its main module, and its interpreter exits like any other.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path
from types import CodeType
from typing import NamedTuple

from tests.support.loader import loader_processes
from tests.support.repository.folders import ROOT, python_path

#: Seconds until a script is killed by SIGALRM.
LIMIT = 60
PROGRAM = """{imports}
from tests.support.processes import interpreters as _interpreters
exec(_interpreters.fork_for_each({scripts!r}))
"""


class Ended(NamedTuple):
    """The exit code and the output of a script."""

    code: int
    out: str
    err: str


def run(
    imports: str,
    scripts: Sequence[str],
    *options: str,
    within: Sequence[str] = (),
    limit: float = LIMIT,
    **environment: str,
) -> list[Ended]:
    """Return the outcome of each script; each has ended all of its processes.

    Args:
        imports: the code before each script.
        scripts: code that runs one after the other, each in a process of its own.
        options: options of Python.
        within: a command that starts Python.
        limit: the mean seconds of a script and of the imports, until all are killed.
        environment: more variables.
    """
    with tempfile.TemporaryDirectory() as name:
        paths = [f"{name}/{number}.py" for number in range(len(scripts))]
        for path, script in zip(paths, scripts, strict=True):
            Path(path).write_text(script)
        program = PROGRAM.format(imports=imports, scripts=paths)
        modules = python_path(ROOT)
        done = subprocess.run(
            [*within, sys.executable, *options, "-c", program],
            env={**os.environ, "PYTHONPATH": modules, **environment},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=limit * (1 + len(scripts)),
        )
        assert (done.returncode, done.stderr) == (0, ""), done.stderr
        pids, codes = zip(*json.loads(done.stdout), strict=True)
        assert [loader_processes.left(pid) for pid in pids] == [[]] * len(pids)
        outputs = [[Path(path + end).read_text() for path in paths] for end in STREAMS]
        return list(map(Ended, codes, *outputs))


#: The ends of the names of files for the output.
STREAMS = (".out", ".err")


def fork_for_each(paths: Sequence[str]) -> CodeType:
    """Return each script in a child; then print the children's ids and exit codes."""
    ended = []
    for path in paths:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python 3.12 counts threads of NumPy
            pid = os.fork()
        if pid == 0:
            os.setsid()
            signal.alarm(LIMIT)
            for number, end in enumerate(STREAMS, 1):
                with open(path + end, "w") as file:
                    os.dup2(file.fileno(), number)
            return compile(Path(path).read_text(), path, "exec")
        ended.append([pid, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])])
    print(json.dumps(ended), flush=True)
    os._exit(0)
