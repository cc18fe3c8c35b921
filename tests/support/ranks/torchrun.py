"""Run a script like a user, and end all of its processes."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pyparallel
from tests.support.processes import forkserver
from tests.support.repository.folders import ROOT, python_path


def free_port() -> int:
    """Return a free port of this machine outside the range of ephemeral ports."""
    while True:
        with socket.socket() as found, contextlib.suppress(OSError):
            found.bind(("127.0.0.1", random.randrange(20_000, 30_000)))
            port: int = found.getsockname()[1]
            return port


def python(
    script: Path, *arguments: str, options: tuple[str, ...] = (), limit: int = 240
) -> subprocess.CompletedProcess[str]:
    """Run a script for at most ``limit`` seconds, and return its outcome."""
    package = Path(pyparallel.__file__).parents[1]
    settings = {
        "PYTHONPATH": python_path(package, ROOT),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    command = [sys.executable, *options, str(script), *arguments]
    with subprocess.Popen(
        command,
        env=os.environ | settings,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            out, err = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            process.terminate()  # torchrun ends its processes, in other sessions
            out, err = process.communicate(timeout=60)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    out = forkserver.without_gloo(out)
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def torchrun(
    script: Path, *arguments: str, processes: int = 2, limit: int = 240
) -> subprocess.CompletedProcess[str]:
    """Do the same in several processes of one group."""
    options = ("-m", "torch.distributed.run", "--standalone")
    number = f"--nproc_per_node={processes}"
    return python(script, *arguments, options=(*options, number), limit=limit)
