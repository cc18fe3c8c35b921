"""The costs of processes: CPU time, page faults and memory."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def family(pid: int) -> list[int]:
    """Return a process, its children and their children."""
    found = [pid]
    for each in found:
        for task in Path(f"/proc/{each}/task").glob("*/children"):
            found += map(int, task.read_text().split())
    return found


def cost(pid: int) -> tuple[int, float]:
    """Return the minor page faults and the CPU seconds of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    # As clock_getcpuclockid(3), which Python lacks: the CPU time of all threads.
    return int(fields[7]), time.clock_gettime((~pid << 3) | 2)


def memory(pid: int) -> int:
    """Return the bytes of a process that are no file's; each holder has its part.

    The pages of files count for nothing, because other processes share them.
    """
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:  # it has ended
        return 0
    sizes = {name: rest for name, _, rest in (each.partition(":") for each in lines)}
    return sum(int(sizes[k].split()[0]) << 10 for k in ("Pss_Anon", "Pss_Shmem"))


def peak(run: Callable[[], Any], pid: int) -> int:
    """Call a function; return the most memory of a process and its children."""
    most, done = 0, threading.Event()

    def watch() -> None:
        nonlocal most
        ends = False
        while not ends:
            ends = done.wait(0.02)
            most = max(most, sum(map(memory, family(pid))))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        run()
    finally:
        done.set()
        thread.join()
    return most


def peak_of_epoch(make: Callable[[], Any]) -> int:
    """Return the most memory of a new process that runs an epoch, and of its workers.

    Args:
        make: makes the loader; it can be pickled.
    """
    context = multiprocessing.get_context("spawn")
    receive, send = context.Pipe(duplex=False)
    process = context.Process(target=_serve, args=(send, make))
    process.start()
    send.close()
    try:
        found: int = receive.recv()
        return found
    finally:
        process.join()


def _serve(send: Any, make: Callable[[], Any]) -> None:
    loader = make()

    def epoch() -> None:
        for _ in loader:
            pass

    send.send(peak(epoch, os.getpid()))
