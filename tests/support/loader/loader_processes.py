"""Processes with loaders, each in its own process group."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import psutil

from tests.support.repository.folders import ROOT, python_path

START = """
import gc, os, resource, sys, time
import torch
from tests.support.loader.loader_sets import Making, Numbers, only
from pyparallel import DataLoader
torch.set_num_threads(1)
"""


def start(code: str) -> subprocess.Popen[str]:
    """Start Python in a new process group."""
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-c", START + code],
        env={**os.environ, "PYTHONPATH": python_path(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def run(code: str) -> tuple[int, str, str]:
    return finish(start(code))


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
