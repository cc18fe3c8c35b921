"""Fails if a source file is longer than 300 lines, or a test than 400."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SUFFIXES = {".py", ".pyi", ".h", ".cpp", ".cu", ".cuh"}


def main() -> int:
    """Print every file that is too long; return how many there are."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    too_long = 0
    for path in map(Path, listed.splitlines()):
        if path.suffix not in SUFFIXES or not path.exists():
            continue
        limit = 400 if path.parts[0] == "tests" else 300
        lines = len(path.read_text(encoding="utf-8").splitlines())
        if lines > limit:
            print(f"{path} must have at most {limit} lines, but has {lines}. Split it.")
            too_long += 1
    return too_long


if __name__ == "__main__":
    sys.exit(min(main(), 1))
