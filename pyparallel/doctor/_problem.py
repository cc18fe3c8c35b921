"""What the doctor finds wrong, and programs that it asks."""

from __future__ import annotations

import subprocess
from typing import NamedTuple


class Problem(NamedTuple):
    """Something to do.

    Attributes:
        text: what must hold, what was found, and what to do.
        fails: whether the exit code is 1 for it; otherwise it is advice.
    """

    text: str
    fails: bool


def output_of(*command: str, seconds: float) -> str | None:
    """Return what a program prints; None if it does not run, or fails.

    Raises:
        subprocess.TimeoutExpired: it has not ended in time, and was killed.
    """
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=seconds,
            check=False,
        )
    except OSError:
        return None
    return done.stdout.decode(errors="replace") if done.returncode == 0 else None
