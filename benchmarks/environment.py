"""The source of figures: the machine, its load, the allocator, the versions."""

from __future__ import annotations

import os
import platform
import subprocess
import time
from importlib import metadata
from pathlib import Path

import torch

from pyparallel import backend

#: Keeps freed memory in the process, so that no page is faulted in twice (glibc).
WARM = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(1 << 40),
    "MALLOC_TOP_PAD_": str(1 << 26),
}

#: Additional environment variables for each mode of the allocator.
MALLOC = {"default": {}, "warm": WARM}

PACKAGES = (
    "pyparallel-torch",
    "mmcv",
    "mmengine",
    "tensordict",
    "numpy",
    "scikit-image",
    "scikit-learn",
    "matplotlib",
)

_ROOT = Path(__file__).parent.parent


def is_warm() -> bool:
    """Return True if this process uses the allocator that keeps freed memory."""
    return all(os.environ.get(key) == value for key, value in WARM.items())


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0))


def machine() -> dict[str, str]:
    """Describe the source of the figures."""
    malloc = [f"{k}={v}" for k, v in sorted(os.environ.items()) if "MALLOC_" in k]
    return {
        "cpu": f"{_model()}, {cores()} cores for this process",
        "load average": load(),
        "threads": str(torch.get_num_threads()),
        "malloc": " ".join(malloc) or "default",
        "python": platform.python_version(),
        "torch": torch.__version__,
        **{package: _version(package) for package in PACKAGES},
        "commit": commit(),
        "backend": f"{backend.name}: {backend.reason}",
    }


def malloc_mode(machine: dict[str, str]) -> str:
    """Return ``"default"`` or ``"warm"`` for the description of a machine."""
    return "default" if machine["malloc"] == "default" else "warm"


def load() -> str:
    """Return the load average, because figures of a busy machine are unreliable."""
    return "{:.2f} {:.2f} {:.2f}".format(*os.getloadavg())


class OtherLoad:
    """The share of the cores that other processes use, from its creation on."""

    def __init__(self) -> None:
        self._start = _core_seconds()

    def share(self) -> float:
        """Return the share until now, from 0 to 1; 0 where the system has no figures.

        The time of this process and of its ended children is not counted.
        """
        now = _core_seconds()
        busy, own, passed = (b - a for a, b in zip(self._start, now, strict=True))
        return min(1.0, max(0.0, (busy - own) / (passed * cores())))


def _core_seconds() -> tuple[float, float, float]:
    """Return the busy seconds of the cores, those of this process, and a clock."""
    own, clock = sum(os.times()[:4]), time.monotonic()
    try:
        lines = Path("/proc/stat").read_text(encoding="ascii").splitlines()
    except OSError:
        return own, own, clock
    names = {f"cpu{core}" for core in os.sched_getaffinity(0)}
    ticks = 0
    for name, *numbers in (line.split() for line in lines if line.startswith("cpu")):
        if name in names:
            user, nice, system, _, _, irq, soft, steal = map(int, numbers[:8])
            ticks += user + nice + system + irq + soft + steal
    return ticks / os.sysconf("SC_CLK_TCK"), own, clock


def commit() -> str:
    """Return the commit of this tree, ``-dirty`` if its code differs from it.

    Pages and figures may differ: a run writes those of one question before it measures
    the next one. The text is empty outside a checkout.
    """
    found = _git("describe", "--always")
    code = ("*.py", "*.cpp", "*.h", "*.cu", "*.cuh")
    return found + "-dirty" * bool(_git("status", "--porcelain", "-uno", "--", *code))


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(_ROOT), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return done.stdout.strip()


def _model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"
