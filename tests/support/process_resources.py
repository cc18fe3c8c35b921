"""What a process has that a batch must not leave: descriptors, shared memory."""

from __future__ import annotations

import contextlib
import os

import psutil


def memfds() -> int:
    """Return how many descriptors are memory without a name."""
    found = 0
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the descriptor of the listing itself
            found += "memfd:" in os.readlink(f"/proc/self/fd/{fd}")
    return found


def shared_names() -> int:
    """Return how many names of torch's shared memory are ours, or nobody's any more.

    A name begins with ``torch_`` and the number of the process that made it.
    """
    found = 0
    for name in os.listdir("/dev/shm"):
        maker = name.split("_")[1] if name.startswith("torch_") else ""
        if maker.isdigit():
            found += int(maker) == os.getpid() or not psutil.pid_exists(int(maker))
    return found
