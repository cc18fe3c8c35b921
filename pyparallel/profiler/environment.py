"""The process and the machine that a profile was taken on."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from typing import Any

import torch
import torch.distributed as dist

from .. import backend
from ..loader.preflight import num_cores


def describe() -> dict[str, str]:
    """Return versions and the machine: nothing that names its user or a folder."""
    try:
        version = metadata.version("pyparallel-torch")
    except metadata.PackageNotFoundError:  # run from a source tree
        version = "unknown"
    module = _device_in_use()
    device = "CPU"
    if module is not None and hasattr(module, "get_device_name"):
        device = str(module.get_device_name())
    return {
        "pyparallel": f"{version}, {backend.name} backend",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "cores": str(num_cores()),
        "threads of torch": str(torch.get_num_threads()),
        "device": device,
    }


def place() -> dict[str, int | None]:
    """Return the rank of this process and the number of ranks, if it has one."""
    found = [os.environ.get(name, "") for name in ("RANK", "WORLD_SIZE")]
    numbers = [int(text) if text.isdecimal() else None for text in found]
    if dist.is_available() and dist.is_initialized():
        numbers = [dist.get_rank(), dist.get_world_size()]
    return {"rank": numbers[0], "world_size": numbers[1]}


def synchronize() -> None:
    """Wait until the accelerator, if one is in use, has done what it was given.

    One that this process has not touched stays untouched.
    """
    if _device_in_use() is not None:
        torch.accelerator.synchronize()


def _device_in_use() -> Any:
    """Return torch's module of the accelerator that this process works with."""
    if not torch.accelerator.is_available():
        return None
    module = torch.get_device_module()
    is_initialized = getattr(module, "is_initialized", None)
    return module if is_initialized is not None and is_initialized() else None
