"""Resources of a process that a batch must not leak: descriptors, shared memory."""

from __future__ import annotations

import contextlib
import os

import psutil


def memfds() -> int:
    """Return the number of descriptors of unnamed memory."""
    found = 0
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the descriptor of the listing itself
            found += "memfd:" in os.readlink(f"/proc/self/fd/{fd}")
    return found


def shared_names() -> int:
    """Return the number of torch's shared-memory names of this or of an ended process.

    A name begins with ``torch_`` and the id of the process that created it.
    """
    found = 0
    for name in os.listdir("/dev/shm"):
        maker = name.split("_")[1] if name.startswith("torch_") else ""
        if maker.isdigit():
            found += int(maker) == os.getpid() or not psutil.pid_exists(int(maker))
    return found
