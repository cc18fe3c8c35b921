"""init_dist: the process group of whoever started these processes."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing

from ..core.errors import BatchTypeError, BatchValueError, type_name, warn

_PORT = "29500"  # torch's own default


def init_dist(
    launcher: str,
    backend: str | None = None,
    init_backend: str = "torch",
    **kwargs: Any,
) -> None:
    """Join the process group that a launcher has prepared, and choose the device.

    Args:
        launcher: ``"pytorch"`` (torchrun: ``RANK``, ``WORLD_SIZE`` and ``LOCAL_RANK``
            are set), ``"slurm"``, ``"mpi"`` (Open MPI), or ``"none"``: nothing is done.
        backend: of torch.distributed. None: the one for the accelerator of this machine
            (``nccl`` for CUDA), or ``gloo`` without one. Without an accelerator a
            backend that needs one is replaced by ``gloo``, with a warning.
        init_backend: ``"torch"``; mmengine's others are not supported.
        **kwargs: for ``torch.distributed.init_process_group``. ``timeout`` may be in
            seconds. With slurm, ``port`` is that of the first node.

    Raises:
        TypeError: a ``timeout`` that is neither a number nor a timedelta.
        ValueError: an unknown launcher or ``init_backend``.
        RuntimeError: a variable that the launcher should have set is missing; fewer
            accelerators than processes on this machine; ``scontrol`` failed.

    With an accelerator, the process's own becomes the current device, and processes are
    started by ``spawn`` unless the start method was chosen before, as in mmengine.
    Without one neither is touched, where mmengine failed.

    With slurm and mpi, ``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK``, ``MASTER_ADDR`` and
    ``MASTER_PORT`` are set; the last two only if they are not yet.
    """
    if launcher not in _PREPARE:
        raise BatchValueError(
            f"init_dist: launcher must be {', '.join(_PREPARE)}, but is {launcher!r}."
        )
    if init_backend != "torch":
        raise BatchValueError(
            f"init_dist: init_backend must be 'torch', but is {init_backend!r}. Call "
            "that library's own initialisation instead."
        )
    if launcher == "none":
        return
    if "timeout" in kwargs:
        kwargs["timeout"] = _duration(kwargs["timeout"])
    port = kwargs.pop("port", None)
    os.environ.update(_PREPARE[launcher](port))
    _require("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    backend = _backend(backend, accelerator)
    if accelerator is not None:
        if torch.multiprocessing.get_start_method(allow_none=True) is None:
            torch.multiprocessing.set_start_method("spawn")
        _set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(backend=backend, **kwargs)


def _backend(requested: str | None, accelerator: torch.device | None) -> str:
    defaults = dist.Backend.default_device_backend_map
    if accelerator is not None:
        return requested or defaults.get(accelerator.type, "gloo")
    needs_one = {name for device, name in defaults.items() if device != "cpu"}
    if requested is None or requested.lower() not in needs_one - {"gloo"}:
        return requested or "gloo"
    warn(
        f"[PP003] init_dist: backend {requested} needs an accelerator, and torch "
        f"{torch.__version__} sees none: gloo is used instead.",
        UserWarning,
    )
    return "gloo"


def _set_device(local_rank: int) -> None:
    count = torch.accelerator.device_count()
    if local_rank >= count:
        raise RuntimeError(
            "init_dist: LOCAL_RANK must be the number of an accelerator of this "
            f"machine, but is {local_rank} where torch sees {count}. Start fewer "
            "processes on it."
        )
    torch.accelerator.set_device_index(local_rank)


def _duration(timeout: Any) -> timedelta:
    if isinstance(timeout, timedelta):
        return timeout
    try:
        return timedelta(seconds=timeout)
    except TypeError:
        raise BatchTypeError(
            "init_dist: timeout must be a number of seconds or a timedelta, but is "
            f"{timeout!r} ({type_name(timeout)})."
        ) from None


def _require(*names: str) -> list[str]:
    missing = [name for name in names if name not in os.environ]
    if missing:
        raise RuntimeError(
            "init_dist: the launcher must have set "
            f"{', '.join(names)}, but {', '.join(missing)} is missing. Start the "
            "processes by the launcher that is named, or set it."
        )
    return [os.environ[name] for name in names]


def _of_torchrun(port: Any) -> dict[str, str]:
    return {} if port is None else {"MASTER_PORT": str(port)}


def _of_mpi(port: Any) -> dict[str, str]:
    rank, world, local = _require(
        "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"
    )
    return {
        "RANK": rank,
        "WORLD_SIZE": world,
        "LOCAL_RANK": local,
        "MASTER_PORT": _port(port),
    }


def _of_slurm(port: Any) -> dict[str, str]:
    rank, world = _require("SLURM_PROCID", "SLURM_NTASKS")
    result = {"RANK": rank, "WORLD_SIZE": world, "MASTER_PORT": _port(port)}
    local = os.environ.get("SLURM_LOCALID")
    count = torch.accelerator.device_count() or 1
    result["LOCAL_RANK"] = str(int(rank) % count) if local is None else local
    if "MASTER_ADDR" not in os.environ:
        result["MASTER_ADDR"] = _first_node(*_require("SLURM_NODELIST"))
    return result


def _port(port: Any) -> str:
    return os.environ.get("MASTER_PORT", _PORT) if port is None else str(port)


def _first_node(nodes: str) -> str:
    """Return the first of the hosts that slurm writes as ``node[1-4]``."""
    command = ["scontrol", "show", "hostnames", nodes]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        return done.stdout.split()[0]
    except (OSError, subprocess.CalledProcessError, IndexError) as error:
        raise RuntimeError(
            f"init_dist: {' '.join(command)} must name the first node, but failed: "
            f"{error!r}. Set MASTER_ADDR."
        ) from error


#: What a launcher says of these processes, as torch's environment variables.
_PREPARE: dict[str, Callable[[Any], dict[str, str]]] = {
    "pytorch": _of_torchrun,
    "slurm": _of_slurm,
    "mpi": _of_mpi,
    "none": _of_torchrun,
}
