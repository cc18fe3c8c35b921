"""Resources of a process that no batch and no test must leak."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import threading
import time
from multiprocessing import forkserver, process, resource_sharer, resource_tracker
from typing import Any

import psutil

SERVER: Any = forkserver._forkserver
TRACKER: Any = resource_tracker._resource_tracker
SHARER: Any = resource_sharer._resource_sharer


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


#: A resource: its kind and a thread, a process id, a descriptor or a name.
Resource = tuple[str, Any]
#: Commands of processes that torch starts once and keeps.
KEPT = ("torch_shm_manager", "addr2line")
#: Targets of descriptors of memory that the library and torch share.
MEMORY = ("/memfd:", "/dev/shm/torch_")


def resources() -> set[Resource]:
    """Return the threads, children, descriptors and shared memory of this process.

    It takes a tenth of a millisecond. Threads and processes that a library starts once
    and keeps do not count.
    """
    own = f"torch_{os.getpid()}_"
    found: set[Resource] = {("shared memory", name) for name in os.listdir("/dev/shm")}
    found = {each for each in found if each[1].startswith(own)}
    found |= {("thread", each) for each in threading.enumerate() if not _is_kept(each)}
    found |= {("process", pid) for pid in _children()}
    found |= {("child", each) for each in process._children}
    return found | {("descriptor", fd) for fd in _descriptors()}


def left_behind(before: set[Resource], seconds: float) -> list[str]:
    """Describe the resources that are there now and were not before.

    Those that end within these seconds are not in the list. Of new descriptors it has
    those of shared memory.
    """
    limit = time.monotonic() + seconds
    while more := sorted(filter(None, map(_describe, resources() - before))):
        if time.monotonic() > limit:
            break
        gc.collect()
        multiprocessing.active_children()  # joins workers that have ended
        time.sleep(0.01)
    return more


def _is_kept(thread: threading.Thread) -> bool:
    kind = type(thread)
    # A thread of C++ that called Python, the pool of parallel_apply, tqdm's monitor.
    return (
        kind is threading._DummyThread
        or thread is SHARER._thread
        or (kind.__module__, kind.__name__)
        in (
            ("pyparallel.parallel._thread_pool", "Worker"),
            ("tqdm._monitor", "TMonitor"),
        )
    )


def _children() -> set[int]:
    try:  # most tests have no children
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return set()
    # Children of an ended thread are those of the main thread.
    with open(f"/proc/self/task/{os.getpid()}/children") as file:
        found = {int(pid) for pid in file.read().split()}
    return found - {SERVER._forkserver_pid, TRACKER._pid}


def _descriptors() -> set[int]:
    lowest = os.open("/proc/self/fd", os.O_RDONLY)
    os.close(lowest)  # the next one to open, which lists the folder
    return {int(fd) for fd in os.listdir("/proc/self/fd")} - {lowest}


def _describe(resource: Resource) -> str:
    """Return a text, or "" for a resource that has ended or that does not count."""
    kind, value = resource
    with contextlib.suppress(OSError):
        if kind == "thread":
            return f"thread {value.name}"
        if kind == "process":
            with open(f"/proc/{value}/stat") as file:
                if file.read().rpartition(") ")[2][0] == "X":
                    return ""  # the system removes it, because SIGCHLD is ignored
            with open(f"/proc/{value}/cmdline") as file:
                command = file.read().replace("\0", " ").strip()
            kept = any(name in command for name in KEPT)
            return "" if kept else f"process {value} {command[:100]}"
        if kind == "descriptor":
            target = os.readlink(f"/proc/self/fd/{value}")
            return f"descriptor {value} {target}" if target.startswith(MEMORY) else ""
        if kind == "child":
            return f"object of {value}"
        return f"{kind} {value}"
    return ""
