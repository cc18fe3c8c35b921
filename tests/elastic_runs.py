"""Jobs under torchrun: `start` and `finish` them, and what they leave behind."""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import fresh
import psutil
import torch

import pyparallel

HERE = Path(__file__).resolve().parent
# The job must import the package that is tested, wherever that is.
PACKAGE = Path(pyparallel.__file__).resolve().parents[1]
PATHS = [str(PACKAGE), str(HERE), str(HERE.parent / "examples")]
#: Seconds that a job may take on a busy machine.
LIMIT = 200


def start(
    log: Path, *arguments: str, within: Sequence[str] = (), interface: str = "lo"
) -> subprocess.Popen[bytes]:
    """Start torchrun with one job; ``within`` is a command that starts it elsewhere."""
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([*PATHS, os.environ.get("PYTHONPATH", "")]),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": interface,
        # See docs/distributed.md.
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }
    command = [sys.executable, "-m", "torch.distributed.run", *arguments]
    with log.open("wb") as file:
        return subprocess.Popen(
            [*within, *command], env=environment, stdout=file, stderr=file
        )


def finish(*agents: subprocess.Popen[bytes]) -> list[int]:
    """Wait for all; return their exit codes. Nothing of theirs is left behind."""
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
    """Return after which steps each rank began, one for each time it was started."""
    text = "\n".join(log.read_text() for log in logs)
    found: dict[int, list[int]] = {}
    for rank, step in re.findall(r"^rank (\d+) begins after step (\d+)$", text, re.M):
        found.setdefault(int(rank), []).append(int(step))
    return found


def trained(checkpoint: Path) -> dict[str, Any]:
    """Return the state of model, optimizer and schedule, and how far they are."""
    state = torch.load(checkpoint, weights_only=True)
    return {"parts": state["parts"], "progress": state["progress"]}


def undisturbed(folder: Path) -> dict[str, Any]:
    """Return what two processes that nobody disturbs have trained."""
    done = in_two(f"undisturbed({{rank}}, {str(folder)!r})")
    assert [code for code, _ in done] == [0, 0], done
    return trained(folder / "undisturbed.pt")


def in_two(call: str) -> list[tuple[int | None, str]]:
    """Call a function of ``elastic_ranks`` in two processes, with their ``{rank}``."""
    codes = [f"import elastic_ranks as r; r.{call.format(rank=n)}" for n in (0, 1)]
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        return list(pool.map(lambda code: fresh.run(code, PATHS), codes))


def differences(one: Any, other: Any, path: str = "") -> list[str]:
    """Return where two states differ in the least bit."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        same = one.dtype == other.dtype and torch.equal(one, other)
        return [] if same else [path]
    if type(one) is not type(other):
        return [path]
    if isinstance(one, dict):
        keys = [path] if list(one) != list(other) else []
        both = [key for key in one if key in other]
        pairs = [(one[key], other[key], f"{path}.{key}") for key in both]
        return keys + [name for pair in pairs for name in differences(*pair)]
    if isinstance(one, list) and len(one) == len(other):
        pairs = [(*pair, f"{path}[{i}]") for i, pair in enumerate(zip(one, other))]  # noqa: B905  # equally long
        return [name for pair in pairs for name in differences(*pair)]
    return [] if one == other else [path]
