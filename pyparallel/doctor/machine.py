"""What the machine allows: numbers, and what is short for loaders of a usual size."""

from __future__ import annotations

import math
import multiprocessing
import os
import resource
from typing import Any

import torch

from ..loader import preflight
from ._problem import Problem

#: A ring that the judgements are for; what a loader of yours needs, its `preflight`
#: tells.
RING_NBYTES = 1_000_000_000


def machine(
    problems: list[Problem], at: preflight.Machine | None = None
) -> dict[str, Any]:
    """Return cores, memory and limits, each with a judgement: ``ok`` or what is short.

    It is that of `preflight.check` for as many workers as there are cores.
    """
    at = at or preflight.Machine()
    workers = preflight.cores_allowed()
    short = _short(at, workers)
    problems += [Problem(text, fails=False) for text in short.values()]
    left, shm, opened = at.memory_left(), at.shm_left(), at.open_files()
    files, most_files = at.getrlimit(resource.RLIMIT_NOFILE)
    locked, most_locked = at.getrlimit(resource.RLIMIT_MEMLOCK)
    threads = _threads(problems, at)
    return {
        "cores": threads,
        "load": _load(problems),
        "start_method": {
            "name": preflight.default_start_method(),
            "is_default": multiprocessing.get_start_method(allow_none=True) is None,
        },
        "memory": {
            "left_nbytes": left and left[0],
            "of": left and left[1],
            "judgement": _judgement(short, "memory"),
        },
        "shared_memory": {
            "left_nbytes": shm,
            "judgement": _judgement(short, "/dev/shm"),
        },
        "file_descriptors": {
            "open": opened,
            "limit": _limit(files),
            "hard_limit": _limit(most_files),
            "enough_for_workers": _enough_for(files, opened),
            "judgement": _judgement(short, "open files"),
        },
        "locked_memory": {
            "limit_nbytes": _limit(locked),
            "hard_limit_nbytes": _limit(most_locked),
            "may_lock_more": at.may_lock(),
            "judgement": _judgement(short, "locked memory"),
        },
    }


def load() -> float | None:
    """Return how many threads ran or waited for a core in the last minute, as a mean.

    None: the system does not tell.
    """
    try:
        return os.getloadavg()[0]
    except (AttributeError, OSError):
        return None


def is_busy(found: float | None) -> bool:
    """Return True if a load is above the number of cores."""
    return found is not None and found > (os.cpu_count() or 1)


def _load(problems: list[Problem]) -> dict[str, Any]:
    found, cores = load(), os.cpu_count() or 1
    if is_busy(found):
        text = (
            f"The machine should have free cores, but has a load of {found:.1f} on "
            f"{cores}: bandwidths are lower than they could be, and answers late. Run "
            "the doctor again when the machine is idle."
        )
        problems.append(Problem(text, fails=False))
    judgement = "busy" if is_busy(found) else "ok"
    return {"one_minute": found and round(found, 2), "judgement": judgement}


def _short(at: preflight.Machine, workers: int) -> dict[str, str]:
    """Return what is short by its name."""
    # NVIDIA's driver does not count what it locks, and nothing else locks the ring.
    counts = torch.accelerator.is_available() and torch.version.cuda is None
    found = preflight.check(
        num_workers=workers,
        prefetch_factor=None,
        ring_nbytes=RING_NBYTES,
        pin_memory=counts,
        start_method="spawn",  # a device that the doctor has initialised is no news
        machine=at,
    )
    return {finding.name: finding.text for finding in found}


def _judgement(short: dict[str, str], name: str) -> str:
    return "short" if name in short else "ok"


def _threads(problems: list[Problem], at: preflight.Machine) -> dict[str, Any]:
    """Return how many cores there are, may be used, and are used by torch."""
    threads, quota = torch.get_num_threads(), at.cores_left()
    is_ok = quota is None or threads <= math.ceil(quota)
    if not is_ok:
        text = (
            "torch should use no more threads than its control group has cores, but "
            f"uses {threads} where the group has the time of {quota:g}: they stop each "
            f"other. Set OMP_NUM_THREADS={math.ceil(quota or 1)}."
        )
        problems.append(Problem(text, fails=False))
    return {
        "present": os.cpu_count(),
        "allowed": preflight.cores_allowed(),
        "of_control_group": quota,
        "threads_of_torch": threads,
        "judgement": "ok" if is_ok else "too many threads",
    }


def _enough_for(limit: int, opened: int | None) -> int | None:
    """Return for how many workers of a loader file descriptors are left."""
    if limit == resource.RLIM_INFINITY or opened is None:
        return None
    spare = limit - opened - preflight.MORE_FILES
    return max(0, spare // preflight.FILES_PER_WORKER)


def _limit(value: int) -> int | str:
    return "unlimited" if value == resource.RLIM_INFINITY else value
