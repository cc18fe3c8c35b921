"""The limits of the machine: cores, memory, file descriptors, copy bandwidth."""

from __future__ import annotations

import math
import multiprocessing
import os
import time
from typing import Any

import torch

from ..core import rlimits
from ..core.cpu_time import cores_allowed
from ..loader import preflight
from .report import Problem

#: The size of the ring of the judgements. `loader.preflight()` judges a real loader.
RING_NBYTES = 1_000_000_000
#: The size of a copy, which exceeds most caches, and the seconds of a measurement.
_COPY_NBYTES = 64 << 20
_COPY_SECONDS = 0.15


def machine(
    problems: list[Problem], limits: preflight.Machine | None = None
) -> dict[str, Any]:
    """Return cores, memory and limits, each with a judgement: ``ok`` or the shortage.

    The judgements are those of `preflight.check` for a loader with a worker for each
    core.

    Args:
        problems: receives the shortages.
        limits: the source of the limits; by default this machine.
    """
    limits = limits or preflight.Machine()
    short = _shortages(limits)
    problems += [Problem(text, fails=False) for text in short.values()]
    judgements = dict.fromkeys(short, "short")
    left, opened = limits.memory_left(), limits.open_files()
    files, most_files = limits.getrlimit(rlimits.RLIMIT_NOFILE)
    locked, most_locked = limits.getrlimit(rlimits.RLIMIT_MEMLOCK)
    return {
        "cores": _threads(problems, limits),
        "load": _load(problems),
        "start_method": {
            "name": preflight.default_start_method(),
            "is_default": multiprocessing.get_start_method(allow_none=True) is None,
        },
        "memory": {
            "left_nbytes": left and left[0],
            "of": left and left[1],
            "judgement": judgements.get("memory", "ok"),
        },
        "shared_memory": {
            "left_nbytes": limits.shm_left(),
            "judgement": judgements.get("/dev/shm", "ok"),
        },
        "file_descriptors": {
            "open": opened,
            "limit": _limit(files),
            "hard_limit": _limit(most_files),
            "enough_for_workers": _enough_for(files, opened),
            "judgement": judgements.get("open files", "ok"),
        },
        "locked_memory": {
            "limit_nbytes": _limit(locked),
            "hard_limit_nbytes": _limit(most_locked),
            "may_lock_more": limits.may_lock(),
            "judgement": judgements.get("locked memory", "ok"),
        },
    }


def load() -> float | None:
    """Return the load average of the last minute; None if it is not available."""
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
            f"{cores} cores: the measured bandwidths are too low, and self-tests may "
            "be late. Run the doctor again when the machine is idle."
        )
        problems.append(Problem(text, fails=False))
    judgement = "busy" if is_busy(found) else "ok"
    return {"one_minute": found and round(found, 2), "judgement": judgement}


def _shortages(limits: preflight.Machine) -> dict[str, str]:
    """Return the texts of `preflight.check` by the names of the resources."""
    # NVIDIA's driver pins memory without counting it against the limit.
    counts = torch.accelerator.is_available() and torch.version.cuda is None
    found = preflight.check(
        num_workers=cores_allowed(),
        prefetch_factor=None,
        ring_nbytes=RING_NBYTES,
        pin_memory=counts,
        start_method="spawn",  # no finding about the device that the doctor initialised
        machine=limits,
    )
    return {finding.name: finding.text for finding in found}


def _threads(problems: list[Problem], limits: preflight.Machine) -> dict[str, Any]:
    """Return the numbers of cores and of torch's threads."""
    threads, quota = torch.get_num_threads(), limits.cores_left()
    is_ok = quota is None or threads <= math.ceil(quota)
    if not is_ok:
        text = (
            "torch should use no more threads than its control group has cores, but "
            f"uses {threads} threads on {quota:g} cores, which slows them down. Set "
            f"OMP_NUM_THREADS={math.ceil(quota or 1)}."
        )
        problems.append(Problem(text, fails=False))
    return {
        "present": os.cpu_count(),
        "allowed": cores_allowed(),
        "of_control_group": quota,
        "threads_of_torch": threads,
        "judgement": "ok" if is_ok else "too many threads",
    }


def _enough_for(limit: int, opened: int | None) -> int | None:
    """Return the number of workers for which file descriptors are left."""
    if limit == rlimits.RLIM_INFINITY or opened is None:
        return None
    spare = limit - opened - preflight.MORE_FILES
    return max(0, spare // preflight.FILES_PER_WORKER)


def _limit(value: int) -> int | str:
    return "unlimited" if value == rlimits.RLIM_INFINITY else value


def bandwidth() -> dict[str, Any]:
    """Return GB/s of host copies, and of host-to-device copies for every GPU.

    It takes about a second and twice `_COPY_NBYTES` of host memory.
    """
    left = preflight.Machine().memory_left()
    nbytes = min(_COPY_NBYTES, left[0] // 16 if left else _COPY_NBYTES)
    if not nbytes:
        return {"copied_nbytes": 0, "memcpy_gb_per_s": None, "to_devices": []}
    target = memoryview(bytearray(nbytes))
    return {
        "copied_nbytes": nbytes,
        # Not zeros: bytes(n) has no memory of its own, so copies would seem faster.
        "memcpy_gb_per_s": _gb_per_s(
            "target[:] = source", nbytes, target=target, source=b"\1" * nbytes
        ),
        "to_devices": [
            to_device_bandwidth(torch.device("cuda", i), nbytes)
            for i in range(torch.cuda.device_count())
        ],
    }


def to_device_bandwidth(device: torch.device, nbytes: int) -> dict[str, Any]:
    """Return GB/s to a device from pinned and from pageable memory.

    Stream: the copies run on the current stream, and the host waits for the device.
    """
    found: dict[str, Any] = {"device": str(device), "error": None}
    for memory in ("pinned", "pageable"):
        found[f"{memory}_gb_per_s"] = None
        try:
            source = torch.ones(nbytes, dtype=torch.uint8, device="cpu")
            if memory == "pinned":
                source = source.pin_memory()
            found[f"{memory}_gb_per_s"] = _gb_per_s(
                "target.copy_(source, non_blocking=True); synchronize(device)",
                nbytes,
                target=torch.empty_like(source, device=device),
                source=source,
                synchronize=torch.get_device_module(device).synchronize,
                device=device,
            )
        except RuntimeError as error:  # for example, no memory is left
            found["error"] = f"{type(error).__name__}: {error}"
    return found


def _gb_per_s(copy: str, nbytes: int, **names: Any) -> float:
    """Return GB/s of the fastest copy; each byte counts once.

    The default clock of the timer would initialise the GPU for a host copy.
    """
    # The import logs a line on a machine with nvcc and without a GPU.
    from torch.utils import benchmark

    timer = benchmark.Timer(copy, globals=names, timer=time.perf_counter)
    runs = timer.blocked_autorange(min_run_time=_COPY_SECONDS)
    return float(nbytes / min(runs.times) / 1e9)
