"""Check the limits of this machine before the workers of a loader start.

Nothing here initialises a device or changes a limit. Limits that cannot be read, as on
systems other than Linux, produce no finding.
"""

from __future__ import annotations

import errno
import functools
import math
import multiprocessing
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.utils.data import IterDataPipe, MapDataPipe

from ..core import rlimits
from ..core.cpu_time import cores_allowed
from ..core.errors import BatchTypeError, BatchValueError, check_int
from ..core.text import nbytes_text
from ..shm import memfd
from .arguments import Loader

#: The size of /dev/shm in a Docker container by default.
DOCKER_SHM_NBYTES = 64 << 20
# Files that an iterator opens in the parent, measured with 1 to 8 workers and all start
# methods: 3 for each worker, 4 for all of them, and 2 for the ring. A batch outside the
# ring opens 1 while it arrives.
FILES_PER_WORKER = 3
MORE_FILES = 7
_CAP_IPC_LOCK = 14
# Files of a control group: its limit, its usage, and the cached part in memory.stat.
_GROUP_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_GROUP_V2 = ("memory.max", "memory.current", "inactive_file")


class Finding(NamedTuple):
    """A limit of this machine that is too low for a loader.

    Attributes:
        name: ``memory``, ``/dev/shm``, ``open files``, ``locked memory`` or ``fork``.
        text: the requirement, the value that was found, and how to fix it.
        warns: whether batches are at risk. If not, the finding is a note.
    """

    name: str
    text: str
    warns: bool


def initialised_device() -> str | None:
    """Return the type of the accelerator if this process has initialised it."""
    found = torch.accelerator.current_accelerator()
    if found is None:
        return None
    ask = getattr(torch.get_device_module(found), "is_initialized", None)
    return found.type if ask is not None and ask() else None


@dataclass(frozen=True)
class Machine:
    """The sources of the numbers. Tests replace them.

    Attributes:
        root: the folder that contains ``proc``, ``sys`` and ``dev``.
        statvfs: returns the free space of a file system.
        getrlimit: returns the soft and the hard limit of this process.
        device: returns the accelerator that has been initialised.
    """

    root: Path = Path("/")
    # Windows has no statvfs, and no file system that it is called for.
    statvfs: Callable[[Path], Any] = field(
        default_factory=lambda: getattr(os, "statvfs", Path.stat)
    )
    getrlimit: Callable[[int], tuple[int, int]] = rlimits.getrlimit
    device: Callable[[], str | None] = initialised_device

    def memory_left(self) -> tuple[int, str] | None:
        """Return the available memory in bytes, and a text that names the limit.

        The memory of the machine and of the process's control groups limits a memfd.
        The size of /dev/shm does not.
        """
        left = list(self._groups_left())
        for line in self._lines("proc/meminfo"):
            if line.startswith("MemAvailable:"):
                left.append((int(line.split()[1]) << 10, "the machine's memory"))
        return min(left, default=None)

    def cores_left(self) -> float | None:
        """Return the CPU quota of the control groups in cores, None without a quota."""
        left = []
        for group, is_v2 in self._groups("cpu"):
            if is_v2:
                numbers = " ".join(self._lines(group / "cpu.max")).split()
            else:
                names = ("cpu.cfs_quota_us", "cpu.cfs_period_us")
                numbers = [each for name in names for each in self._lines(group / name)]
            if len(numbers) == 2 and all(each.isdecimal() for each in numbers):
                left.append(int(numbers[0]) / int(numbers[1]))
        return min(left, default=None)

    def _groups(self, controller: str) -> Iterator[tuple[Path, bool]]:
        """Yield each control group of this process, and whether its version is 2."""
        for line in self._lines("proc/self/cgroup"):
            _, controllers, path = line.split(":", 2)
            base = self.root / "sys/fs/cgroup"
            if controller in controllers.split(","):
                base /= controller
            elif controllers:
                continue
            # Without its own namespace, a container sees its group as the base.
            folder = base / path.lstrip("/")
            for group in (folder, *folder.parents):
                if group.is_relative_to(base):
                    yield group.relative_to(self.root), not controllers

    def _groups_left(self) -> Iterator[tuple[int, str]]:
        """Yield the memory that is left in each control group of this process."""
        for where, is_v2 in self._groups("memory"):
            limit, usage, reclaimed = _GROUP_V2 if is_v2 else _GROUP_V1
            most, used = self._number(where / limit), self._number(where / usage)
            if most is None or used is None:
                continue
            for line in self._lines(where / "memory.stat"):
                if line.split()[0] == reclaimed:  # cached files, freed on demand
                    used -= int(line.split()[1])
            text = f"the limit of {nbytes_text(most)} in {self.root / where / limit}"
            yield max(0, most - used), text

    def shm_left(self) -> int | None:
        """Return the free space in /dev/shm in bytes."""
        try:
            found = self.statvfs(self.root / "dev/shm")
        except OSError:
            return None
        return int(found.f_bavail * found.f_frsize)

    def open_files(self) -> int | None:
        """Return the number of open file descriptors of this process."""
        try:
            return len(os.listdir(self.root / "proc/self/fd")) - 1  # of listdir
        except OSError:
            return None

    def may_lock(self) -> bool:
        """Return True if this process may exceed the limit of locked memory."""
        for line in self._lines("proc/self/status"):
            if line.startswith("CapEff:"):
                return bool(int(line.split()[1], 16) >> _CAP_IPC_LOCK & 1)
        return False

    def _lines(self, path: str | Path) -> list[str]:
        try:
            return (self.root / path).read_text(encoding="utf-8").splitlines()
        except OSError:
            return []

    def _number(self, path: Path) -> int | None:
        lines = self._lines(path)
        return int(lines[0]) if lines and lines[0].isdecimal() else None


def check(
    *,
    num_workers: int,
    prefetch_factor: int | None,
    ring_nbytes: int,
    pin_memory: bool,
    start_method: str,
    machine: Machine | None = None,
) -> list[Finding]:
    """Return a finding for each limit that is too low for a loader with workers.

    Args:
        num_workers: the number of workers. Without workers, there are no findings.
        prefetch_factor: batches that each worker prepares. None: torch's default, 2.
        ring_nbytes: the size of the ring, which is not allocated yet. 0: no ring.
        pin_memory: whether the ring will be pinned.
        start_method: ``fork``, ``spawn``, ``forkserver``, or ``thread`` for workers
            that are threads.
        machine: the sources of the numbers.
    """
    if not num_workers:
        return []
    machine = machine or Machine()
    found = [
        _check_memory(machine, ring_nbytes),
        _check_locked(machine, ring_nbytes) if pin_memory else None,
    ]
    if start_method != "thread":
        num_batches = num_workers * (prefetch_factor or 2)
        found += [
            _check_shm(machine, ring_nbytes, num_batches),
            _check_files(machine, num_workers),
            _check_fork(machine, start_method),
        ]
    return [finding for finding in found if finding is not None]


def _check_memory(machine: Machine, ring_nbytes: int) -> Finding | None:
    left = machine.memory_left()
    if left is None or ring_nbytes <= left[0]:
        return None
    text = (
        f"DataLoader: the ring may grow to {nbytes_text(ring_nbytes)}, but only "
        f"{nbytes_text(left[0])} is left of {left[1]}. If the memory runs out, batches "
        "are allocated outside the ring, which is slower. Decrease ring_slabs or "
        "max_ring_bytes, or give the job more memory."
    )
    return Finding("memory", text, False)


def _check_shm(machine: Machine, ring_nbytes: int, num_batches: int) -> Finding | None:
    """Check /dev/shm, which only tensors that torch sends itself use."""
    left, needed = machine.shm_left(), max(DOCKER_SHM_NBYTES, ring_nbytes)
    if left is None or left > needed:
        return None
    text = (
        f"DataLoader: /dev/shm has only {nbytes_text(left)} free. torch sends tensors "
        "that are not dense, or that have gradients, through it, for up to "
        f"{num_batches} batches. Other tensors do not need it. If you use such "
        "tensors, start the container with --shm-size or --ipc=host, or remount "
        f"/dev/shm, so that more than {nbytes_text(needed)} are free."
    )
    return Finding("/dev/shm", text, False)


def _check_files(machine: Machine, num_workers: int) -> Finding | None:
    soft, hard = machine.getrlimit(rlimits.RLIMIT_NOFILE)
    opened = machine.open_files()
    needed = FILES_PER_WORKER * num_workers + MORE_FILES
    if opened is None or soft == rlimits.RLIM_INFINITY or opened + needed <= soft:
        return None
    most = "unlimited" if hard == rlimits.RLIM_INFINITY else hard
    text = (
        f"DataLoader: RLIMIT_NOFILE must leave {needed} file descriptors for "
        f"{num_workers} workers, but {opened} of {soft} are open. Raise it above "
        f"{opened + needed} (ulimit -n; the hard limit is {most})."
    )
    return Finding("open files", text, True)


def raise_lack_of_files(error: OSError, num_workers: int) -> None:
    """Raise an error of workers again with the limit of open files, if it met that."""
    if error.errno in (errno.EMFILE, errno.ENFILE):
        needed = FILES_PER_WORKER * num_workers + MORE_FILES
        text = (
            f"DataLoader: {num_workers} workers must find {needed} free file "
            "descriptors, and more for batches that contain some, but "
            f"{memfd.limit_text(error)}, or use fewer workers."
        )
        raise OSError(error.errno, text) from error


def _check_locked(machine: Machine, ring_nbytes: int) -> Finding | None:
    """Compare the ring with a limit that NVIDIA's driver does not apply.

    The driver pins pages itself (``os_lock_user_pages`` in its open kernel module). It
    does not count them as locked memory of the process.
    """
    soft, _ = machine.getrlimit(rlimits.RLIMIT_MEMLOCK)
    if soft == rlimits.RLIM_INFINITY or ring_nbytes <= soft or machine.may_lock():
        return None
    text = (
        f"DataLoader: RLIMIT_MEMLOCK is {nbytes_text(soft)}, less than the ring of "
        f"{nbytes_text(ring_nbytes)}. This matters only if the device's driver counts "
        "pinned memory, which NVIDIA's driver does not. Increase the limit (ulimit -l) "
        "only if pinning fails."
    )
    return Finding("locked memory", text, False)


def _check_fork(machine: Machine, start_method: str) -> Finding | None:
    device = machine.device() if start_method == "fork" else None
    if device is None:
        return None
    text = (
        f"DataLoader: {device} is already initialised, and the workers will be forked. "
        "They can use CPU tensors and the ring, but neither "
        f"{device} nor tensors that are already pinned. If the dataset uses them, set "
        "multiprocessing_context='forkserver' or 'spawn'."
    )
    return Finding("fork", text, False)


@functools.cache
def num_cores() -> int:
    """Return the number of cores that this process may use, rounded up."""
    quota = Machine().cores_left()
    allowed = cores_allowed()
    return allowed if quota is None else max(1, min(allowed, math.ceil(quota)))


def start_method_of(loader: Loader) -> str:
    """Return the start method of a loader's workers, without fixing the default."""
    if loader.worker_method == "thread":
        return "thread"
    context = loader.multiprocessing_context
    return context.get_start_method() if context else default_start_method()


def check_workers(loader: Loader) -> None:
    """Raise an error for workers that cannot be started.

    Worker processes set the seeds of their process. Threads of a context would do so
    for the whole program.

    Raises:
        BatchTypeError: the context would start threads, a number is no integer, or a
            DataPipe has threads.
        BatchValueError: ``prefetch_factor`` is 0, or ``worker_method`` has no such
            kind, or has threads with a context of processes.
    """
    if loader.worker_method not in ("multiprocessing", "thread"):
        raise BatchValueError(
            "DataLoader: worker_method must be 'multiprocessing' or 'thread', but is "
            f"{loader.worker_method!r}."
        )
    if loader.num_workers == 0:
        return
    check_int(loader.num_workers, 0, "DataLoader: num_workers")
    if loader.prefetch_factor is not None:
        check_int(loader.prefetch_factor, 1, "DataLoader: prefetch_factor")
    if loader.worker_method == "thread":
        if loader.multiprocessing_context is not None:
            raise BatchValueError(
                "DataLoader: with worker_method='thread' multiprocessing_context must "
                f"be None, but is {loader.multiprocessing_context!r}. Remove one of "
                "them."
            )
        if isinstance(loader.dataset, IterDataPipe | MapDataPipe):
            raise BatchTypeError(
                "DataLoader: with worker_method='thread' dataset must be a Dataset or "
                "an IterableDataset, but is a DataPipe, which torch's own iterator "
                "reads in processes. Use worker_method='multiprocessing'."
            )
        return
    process = (loader.multiprocessing_context or torch.multiprocessing).Process
    made = process if isinstance(process, type) else type(process())
    if not issubclass(made, BaseProcess):
        raise BatchTypeError(
            "DataLoader: the workers of multiprocessing_context must be processes, but "
            f"are of {made.__module__}.{made.__qualname__}. Remove "
            "multiprocessing_context (MONAI: use_thread_workers) and use "
            "worker_method='thread', or set num_workers=0."
        )


def default_start_method() -> str:
    """Return the start method of processes, without fixing it."""
    chosen = multiprocessing.get_start_method(allow_none=True)
    return chosen or multiprocessing.get_all_start_methods()[0]
