"""Starts a script under torchrun, and leaves none of its processes behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pyparallel


def torchrun(
    script: Path, *arguments: str, processes: int = 2, limit: int = 150
) -> subprocess.CompletedProcess[str]:
    """Run a script in processes of one group and return how it ended, after ``limit``
    seconds at the latest.
    """
    paths = [
        str(Path(pyparallel.__file__).parents[1]),
        os.environ.get("PYTHONPATH", ""),
    ]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc_per_node={processes}", str(script), *arguments]
    with subprocess.Popen(
        command,
        env=os.environ
        | {
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            out, err = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            # The agent first: it ends its processes, each of which is a session.
            process.terminate()
            out, err = process.communicate(timeout=60)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    return subprocess.CompletedProcess(command, process.returncode, out, err)
