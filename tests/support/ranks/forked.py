"""Ranks of jobs that fork from a process, which has imported a framework for all.

They get the environment that torchrun gives. It would start several interpreters for
each job, which import for most of the time.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import CodeType
from typing import NamedTuple

from tests.support.processes import interpreters
from tests.support.ranks.torchrun import free_port

#: Seconds until all ranks of a job are killed, and until those that got SIGTERM are.
LIMIT, GRACE = 240.0, 30.0


class Ended(NamedTuple):
    """The exit codes of the ranks of a job, its files then, and its output."""

    codes: list[int]
    files: list[str]
    out: str
    err: str


def run(
    imports: str, jobs: Sequence[tuple[Path, str, Sequence[str], int]]
) -> list[Ended]:
    """Run jobs one after the other, each to its end.

    Args:
        imports: the code before all jobs.
        jobs: the folder of each, its script there, its arguments, and its number of
            ranks; 0 for a process that is no rank.
    """
    scripts = [
        f"import os; os.chdir({str(folder)!r})\n"
        "from tests.support.ranks import forked\n"
        f"exec(forked.rank({name!r}, {list(arguments)}, {world}))"
        for folder, name, arguments, world in jobs
    ]
    settings = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    found = []
    # The collections of each rank would visit, and so copy, all objects of the modules.
    imports += "\nimport gc\ngc.collect()\ngc.freeze()"
    for code, out, err in interpreters.run(imports, scripts, limit=LIMIT, **settings):
        assert code == 0, err
        *lines, last = out.splitlines()
        found.append(Ended(*json.loads(last), "\n".join(lines), err))
    return found


def rank(script: str, arguments: list[str], world: int) -> CodeType:
    """Return the code of a script in each rank. Its parent waits."""
    signal.alarm(0)
    if world > 0:
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        os.environ["WORLD_SIZE"] = str(world)
    if world > 1:
        os.environ |= {"LOCAL_WORLD_SIZE": str(world), "TORCHELASTIC_RUN_ID": "tests"}
    pids = []
    for number in range(max(world, 1)):
        if not (pid := os.fork()):
            if world > 0:
                os.environ |= {"RANK": str(number), "LOCAL_RANK": str(number)}
            sys.argv = [script, *arguments]
            sys.path.insert(0, os.getcwd())
            return compile(Path(script).read_text(), script, "exec")
        pids.append(pid)
    codes = _wait(pids)
    files = [str(path) for path in Path().rglob("*")]
    return compile(f"print({json.dumps([codes, files])!r})", "<codes>", "exec")


def _wait(pids: list[int]) -> list[int]:
    """Wait for ranks as torchrun does: if one fails, the others get SIGTERM."""
    codes: dict[int, int] = {}
    deadline, ends = time.monotonic() + LIMIT, False
    while len(codes) < len(pids):
        for pid in set(pids) - set(codes):
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                codes[pid] = os.waitstatus_to_exitcode(status)
        is_late = time.monotonic() > deadline
        if is_late or (any(codes.values()) and not ends):
            number = signal.SIGKILL if is_late else signal.SIGTERM
            for pid in set(pids) - set(codes):
                os.kill(pid, number)
            deadline, ends = min(deadline, time.monotonic() + GRACE), True
        time.sleep(0.1)
    return [codes[pid] for pid in pids]
