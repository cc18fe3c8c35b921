"""Folders of the repository."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
SUPPORT = ROOT / "tests" / "support"


def python_path(*folders: object) -> str:
    """Return a PYTHONPATH for a child process: these folders, then those of this one.

    The packages of the tests may be in a folder there, as on a machine with a GPU.
    """
    paths = [*map(str, folders), os.environ.get("PYTHONPATH", "")]
    return os.pathsep.join(filter(None, paths))
