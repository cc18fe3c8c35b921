"""Processes with loaders, each in its own process group."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import psutil
from repository import ROOT, SUPPORT

START = """
import gc, os, resource, sys, time
import torch
from loader_sets import Making, Numbers, only
from torch.utils.data import DataLoader as TorchLoader
import pyparallel
DataLoader = TorchLoader if sys.argv[1:] == ["torch"] else pyparallel.DataLoader
torch.set_num_threads(1)
"""


def start(
    code: str, *args: str, before: str = "", within: tuple[str, ...] = ()
) -> subprocess.Popen[str]:
    """Start Python in a new process group, in a shell with commands before it."""
    path = os.pathsep.join([str(SUPPORT), str(ROOT)])
    python = f'exec "{sys.executable}" -W error -c "$CODE" {" ".join(args)}'
    return subprocess.Popen(
        [*within, "bash", "-c", f"{before}\n{python}"],
        env={**os.environ, "PYTHONPATH": path, "CODE": START + code},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def run(code: str, *args: str, before: str = "") -> tuple[int, str, str]:
    return finish(start(code, *args, before=before))


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    try:
        out, err = process.communicate(timeout=60)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert left(process.pid) == []
    return process.returncode, out, err


def left(group: int) -> list[int]:
    """Return the remaining processes of a group, after a short time to end."""
    end = time.monotonic() + 10
    while True:
        found = [p.pid for p in psutil.process_iter() if in_group(p.pid, group)]
        if not found or time.monotonic() > end:
            return found
        time.sleep(0.02)


def in_group(pid: int, group: int) -> bool:
    try:
        return os.getpgid(pid) == group
    except ProcessLookupError:
        return False
