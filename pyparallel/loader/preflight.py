"""What this machine allows a loader that is about to start, and which number is short.

Nothing here initialises a device or changes a limit. What cannot be read, as on another
system than Linux, is not judged.
"""

from __future__ import annotations

import functools
import math
import multiprocessing
import os
import resource
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..core.text import nbytes_text

#: Docker gives a container that much /dev/shm unless told otherwise.
DOCKER_SHM_NBYTES = 64 << 20
# What torch's iterator opens in the parent: measured with 1 to 8 workers and all start
# methods, 4 pipe ends for each worker and up to 3 besides. The ring takes 2, and a
# batch that misses it one while it arrives.
FILES_PER_WORKER = 4
MORE_FILES = 6
_CAP_IPC_LOCK = 14
# Files of a control group: its limit, its usage; and the cached part in memory.stat.
_GROUP_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_GROUP_V2 = ("memory.max", "memory.current", "inactive_file")


class Finding(NamedTuple):
    """Something a loader should know before it starts.

    Attributes:
        name: ``memory``, ``/dev/shm``, ``open files``, ``locked memory``, ``fork``.
        text: what must hold, what was found, and what to do.
        warns: whether batches are at risk; otherwise it is a note.
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
    """Where the numbers are read; tests put others in the place of each.

    Attributes:
        root: the folder in which ``proc``, ``sys`` and ``dev`` stand.
        statvfs: tells the free space of a file system.
        getrlimit: tells the soft and the hard limit of this process.
        device: tells which accelerator has been initialised.
    """

    root: Path = Path("/")
    statvfs: Callable[[Path], Any] = os.statvfs
    getrlimit: Callable[[int], tuple[int, int]] = resource.getrlimit
    device: Callable[[], str | None] = initialised_device

    def memory_left(self) -> tuple[int, str] | None:
        """Return how many bytes can still be had, and what the limit is.

        A memfd is limited by the memory of the machine and of the process's control
        groups, not by the size of /dev/shm.
        """
        left = [*self._system_left(), *self._groups_left()]
        return min(left, default=None)

    def _system_left(self) -> Iterator[tuple[int, str]]:
        for line in self._lines("proc/meminfo"):
            if line.startswith("MemAvailable:"):
                yield int(line.split()[1]) << 10, "the machine's memory"

    def cores_left(self) -> float | None:
        """Return for how many cores the control groups give time; None: for all."""
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
        """Yield every control group around this process, and whether it is of v2."""
        for line in self._lines("proc/self/cgroup"):
            _, controllers, path = line.split(":", 2)
            base = self.root / "sys/fs/cgroup"
            if controller in controllers.split(","):
                base /= controller
            elif controllers:
                continue
            # Without a namespace of its own a container sees its group as the base.
            folder = base / path.lstrip("/")
            for group in (folder, *folder.parents):
                if group.is_relative_to(base):
                    yield group.relative_to(self.root), not controllers

    def _groups_left(self) -> Iterator[tuple[int, str]]:
        """Yield what memory every control group around this process leaves."""
        for where, is_v2 in self._groups("memory"):
            limit, usage, reclaimed = _GROUP_V2 if is_v2 else _GROUP_V1
            most, used = self._number(where / limit), self._number(where / usage)
            if most is None or used is None:
                continue
            for line in self._lines(where / "memory.stat"):
                if line.split()[0] == reclaimed:  # cached files, given up when asked
                    used -= int(line.split()[1])
            text = f"the limit of {nbytes_text(most)} in {self.root / where / limit}"
            yield max(0, most - used), text

    def shm_left(self) -> int | None:
        """Return how many bytes are free in /dev/shm."""
        try:
            found = self.statvfs(self.root / "dev/shm")
        except OSError:
            return None
        return int(found.f_bavail * found.f_frsize)

    def open_files(self) -> int | None:
        """Return how many file descriptors this process has open."""
        try:
            return len(os.listdir(self.root / "proc/self/fd")) - 1  # one is the listing
        except OSError:
            return None

    def may_lock(self) -> bool:
        """Tell whether the limit of locked memory does not hold for this process."""
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
    start_method: str | None,
    machine: Machine | None = None,
) -> list[Finding]:
    """Return what stands in the way of a loader; nothing without workers.

    Args:
        num_workers: of the loader.
        prefetch_factor: batches under way for each worker; None: torch's 2.
        ring_nbytes: size of the ring that is yet to be allocated; 0 for no ring.
        pin_memory: whether the ring will be page-locked.
        start_method: ``fork``, ``spawn``, ``forkserver``; None: the default.
        machine: where the numbers are read.
    """
    if not num_workers:
        return []
    machine = machine or Machine()
    found = [
        _check_memory(machine, ring_nbytes),
        _check_shm(machine, ring_nbytes, num_workers * (prefetch_factor or 2)),
        _check_files(machine, num_workers),
        _check_locked(machine, ring_nbytes) if pin_memory else None,
        _check_fork(machine, start_method),
    ]
    return [finding for finding in found if finding is not None]


def _check_memory(machine: Machine, ring_nbytes: int) -> Finding | None:
    left = machine.memory_left()
    if left is None or ring_nbytes <= left[0]:
        return None
    text = (
        "DataLoader: memory should have room for a ring that grows to "
        f"{nbytes_text(ring_nbytes)}, but {nbytes_text(left[0])} is left of {left[1]}. "
        "A slab takes what its batches need, and where none is left, they take the way "
        "around. Lower ring_slabs or max_ring_bytes, or give the job more memory."
    )
    return Finding("memory", text, False)


def _check_shm(machine: Machine, ring_nbytes: int, num_batches: int) -> Finding | None:
    """Look where torch puts what it sends itself: neither the ring nor its misses."""
    left = machine.shm_left()
    if left is None or left > max(DOCKER_SHM_NBYTES, ring_nbytes):
        return None
    text = (
        "DataLoader: /dev/shm should have room for the tensors of up to "
        f"{num_batches} batches that cross as torch sends them (not dense, or with "
        f"gradients), but has {nbytes_text(left)} free. Dense tensors do not need "
        "it. Else give a container --shm-size or --ipc=host, or remount it larger."
    )
    return Finding("/dev/shm", text, False)


def _check_files(machine: Machine, num_workers: int) -> Finding | None:
    soft, hard = machine.getrlimit(resource.RLIMIT_NOFILE)
    opened = machine.open_files()
    needed = FILES_PER_WORKER * num_workers + MORE_FILES
    if opened is None or soft == resource.RLIM_INFINITY or opened + needed <= soft:
        return None
    text = (
        f"DataLoader: RLIMIT_NOFILE must leave {needed} file descriptors for "
        f"{num_workers} workers, but {opened} of {soft} are open. Raise it above "
        f"{opened + needed} (ulimit -n; the hard limit is {_limit(hard)})."
    )
    return Finding("open files", text, True)


def _check_locked(machine: Machine, ring_nbytes: int) -> Finding | None:
    """Compare the ring with a limit that NVIDIA's driver does not apply.

    It pins pages itself (``os_lock_user_pages`` in its open kernel module) without
    counting them as the process's locked memory.
    """
    soft, _ = machine.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY or ring_nbytes <= soft or machine.may_lock():
        return None
    text = (
        "DataLoader: RLIMIT_MEMLOCK should cover the ring of "
        f"{nbytes_text(ring_nbytes)} where the device's driver counts page-locked "
        f"memory, but is {nbytes_text(soft)}. NVIDIA's driver does not count it: "
        "raise the limit (ulimit -l) only if page-locking fails."
    )
    return Finding("locked memory", text, False)


def _check_fork(machine: Machine, start_method: str | None) -> Finding | None:
    if (start_method or default_start_method()) != "fork":
        return None
    device = machine.device()
    if device is None:
        return None
    text = (
        f"DataLoader: workers should be forked before {device} is initialised, but it "
        "is initialised already. They may use CPU tensors and the ring, but neither "
        f"{device} nor tensors that were page-locked before; if the dataset does, give "
        "multiprocessing_context='forkserver' or 'spawn'."
    )
    return Finding("fork", text, False)


def cores_allowed() -> int:
    """Return the number of cores that this process may run on."""
    ask = getattr(os, "sched_getaffinity", None)
    return len(ask(0)) if ask else os.cpu_count() or 1


@functools.cache
def num_cores() -> int:
    """Return the number of cores that this process has the time of, rounded up."""
    quota = Machine().cores_left()
    allowed = cores_allowed()
    return allowed if quota is None else max(1, min(allowed, math.ceil(quota)))


def default_start_method() -> str:
    """Return how processes start here, without settling it."""
    chosen = multiprocessing.get_start_method(allow_none=True)
    return chosen or multiprocessing.get_all_start_methods()[0]


def _limit(value: int | str) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else str(value)
