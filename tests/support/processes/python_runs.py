"""Run Python code in a separate process, with the package of this tree."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pyparallel
from tests.support.repository.folders import python_path

ROOT = Path(pyparallel.__file__).parents[1]


def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": python_path(ROOT), **environment},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
