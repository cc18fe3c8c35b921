"""Jobs under torchrun: `start` and `finish` them, and read their results."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import torch

import pyparallel
from tests.support.processes import forkserver
from tests.support.ranks.torchrun import free_port
from tests.support.repository.folders import ROOT, SUPPORT, python_path

# The job must import the tested package.
PACKAGE = Path(pyparallel.__file__).resolve().parents[1]
PATHS = [str(PACKAGE), str(ROOT), str(ROOT / "examples")]
JOB = SUPPORT / "ranks" / "elastic_job.py"
#: The limit of a job on a busy machine, in seconds.
LIMIT = 400


@dataclasses.dataclass
class Command:
    """A command of the documentation: its variables and the options of torchrun."""

    variables: dict[str, str]
    options: list[str]

    def changed(self, *pairs: tuple[str, str]) -> Command:
        """Return the command with texts replaced."""
        variables, options = dict(self.variables), list(self.options)
        for old, new in pairs:
            variables = {k: v.replace(old, new) for k, v in variables.items()}
            options = [each.replace(old, new) for each in options]
        return Command(variables, options)


def documented() -> list[Command]:
    """Return the commands of ``docs/distributed.md`` that start the example."""
    text = (ROOT / "docs" / "distributed.md").read_text(encoding="utf-8")
    found = []
    for block in re.findall(r"```sh\n(.*?)```", text, re.DOTALL):
        words = shlex.split(block.replace("\\\n", " "), comments=True)
        first, last = words.index("torchrun"), words.index("examples/resume.py")
        assert words[0] == "export" and words[last + 1].endswith("/last.pt")
        variables = dict(word.split("=") for word in words[1:first])
        found.append(Command(variables, words[first + 1 : last]))
    return found


def start(
    command: Command,
    log: Path,
    checkpoint: Path,
    faults: str = "",
    within: Sequence[str] = (),
) -> subprocess.Popen[bytes]:
    """Start the example with faults; ``within`` is a command that starts it elsewhere.

    A file beside the log records each fault.
    """
    job = [str(JOB), faults, str(log.parent), str(checkpoint)]
    return launch(command, log, job, within)


def launch(
    command: Command, log: Path, job: Sequence[str], within: Sequence[str] = ()
) -> subprocess.Popen[bytes]:
    """Start a script with arguments under torchrun; ``within`` is as in `start`."""
    environment = {
        **os.environ,
        "PYTHONPATH": python_path(*PATHS),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        **command.variables,
    }
    torchrun = [sys.executable, "-m", "torch.distributed.run", *command.options]
    with log.open("wb") as file:
        return subprocess.Popen(
            [*within, *torchrun, *job], env=environment, stdout=file, stderr=file
        )


def finish(*agents: subprocess.Popen[bytes]) -> list[int]:
    """Wait for all jobs, and return their exit codes; no process is left."""
    deadline = time.monotonic() + LIMIT
    started = [psutil.Process(agent.pid) for agent in agents]
    try:
        for agent in agents:
            with contextlib.suppress(subprocess.TimeoutExpired):
                agent.wait(max(0.0, deadline - time.monotonic()))
    finally:
        for agent, process in zip(agents, started, strict=True):
            if agent.poll() is None:
                for child in [*process.children(recursive=True), process]:
                    with contextlib.suppress(psutil.NoSuchProcess):
                        child.kill()
    return [agent.wait() for agent in agents]


def beginnings(*logs: Path) -> dict[int, list[int]]:
    """Return the steps after which each rank started, one for each start."""
    text = "\n".join(log.read_text() for log in logs)
    found: dict[int, list[int]] = {}
    # Both ranks write to one log, and a line's end may follow the other's line.
    for rank, step in re.findall(r"rank (\d+) begins after step (\d+)(?!\d)", text):
        found.setdefault(int(rank), []).append(int(step))
    return found


def trained(checkpoint: Path) -> dict[str, Any]:
    """Return the state of model, optimizer and schedule, and the progress."""
    state = torch.load(checkpoint, weights_only=True)
    return {"parts": state["parts"], "progress": state["progress"]}


def undisturbed(folder: Path) -> dict[str, Any]:
    """Return the results of an uninterrupted run of two processes."""
    done = in_two(f"undisturbed({{rank}}, {str(folder)!r})")
    assert [code for code, _ in done] == [0, 0], done
    return trained(folder / "undisturbed.pt")


def unstopped(folder: Path) -> tuple[list[torch.Tensor], str]:
    """Return the parameters and the output of an example of a sharded model."""
    folder.mkdir()
    done = in_two(f"sharded({{rank}}, {str(folder)!r}, {free_port()})")
    assert [code for code, _ in done] == [0, 0], done
    return torch.load(folder / "trained.pt"), "".join(text for _, text in done)


def in_two(call: str) -> list[tuple[int | None, str]]:
    """Call a function of ``elastic_ranks`` in two processes, with their ``{rank}``."""
    codes = [
        f"from tests.support.ranks import elastic_ranks as r; r.{call.format(rank=n)}"
        for n in (0, 1)
    ]
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        return list(pool.map(lambda code: forkserver.run(code, PATHS, LIMIT), codes))
