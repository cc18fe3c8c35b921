"""init_dist: initialize torch.distributed in processes that a launcher started."""

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
    """Initialize the process group from the launcher's environment; set the device.

    Args:
        launcher: ``"pytorch"`` (torchrun, which sets ``RANK``, ``WORLD_SIZE`` and
            ``LOCAL_RANK``), ``"slurm"``, ``"mpi"`` (Open MPI), or ``"none"`` to do
            nothing.
        backend: the backend of torch.distributed. None selects the backend of this
            machine's accelerator (``nccl`` for CUDA), or ``gloo`` without one. Without
            an accelerator, ``gloo`` replaces a backend that needs one, with a warning.
        init_backend: must be ``"torch"``; mmengine's other values are not supported.
        **kwargs: arguments of ``torch.distributed.init_process_group``. ``timeout`` may
            be a number of seconds. ``port`` is the port of the first node. With a
            ``store``, or an ``init_method`` other than ``env://``, ``MASTER_ADDR`` and
            ``MASTER_PORT`` may be missing.

    Raises:
        TypeError: ``timeout`` is not a number, a timedelta or None.
        ValueError: the launcher or ``init_backend`` is unknown.
        RuntimeError: a variable of the launcher is missing; this machine has fewer
            accelerators than processes; ``scontrol`` failed.

    With an accelerator, the device of this process becomes the current device, and the
    start method becomes ``spawn`` unless it was set before, as in mmengine. Without an
    accelerator both stay unchanged; mmengine's function fails there.

    With slurm and mpi, the function sets ``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK``,
    ``MASTER_ADDR`` and ``MASTER_PORT``, the last two only if they are missing.
    """
    if launcher not in _ENVIRONMENTS:
        raise BatchValueError(
            f"init_dist: launcher must be one of {', '.join(_ENVIRONMENTS)}, but is "
            f"{launcher!r}."
        )
    if init_backend != "torch":
        raise BatchValueError(
            f"init_dist: init_backend must be 'torch', but is {init_backend!r}. Call "
            "the initialization of that library instead."
        )
    if launcher == "none":
        return
    if kwargs.get("timeout") is not None:
        kwargs["timeout"] = _to_timedelta(kwargs["timeout"])
    port = kwargs.pop("port", None)
    os.environ.update(_ENVIRONMENTS[launcher](port))
    wanted = ["RANK", "WORLD_SIZE", "LOCAL_RANK"]
    method = kwargs.get("init_method") or "env://"
    if method.startswith("env://") and kwargs.get("store") is None:
        wanted += ["MASTER_ADDR", "MASTER_PORT"]
    _require_variables(*wanted)
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
        f"[PP003] init_dist: backend {requested} needs an accelerator, but torch "
        f"{torch.__version__} finds none. gloo is used instead, on the CPU. Pass "
        "backend='gloo' if that is intended.",
        UserWarning,
    )
    return "gloo"


def _set_device(local_rank: int) -> None:
    count = torch.accelerator.device_count()
    if local_rank >= count:
        raise RuntimeError(
            "init_dist: LOCAL_RANK must be the number of an accelerator of this "
            f"machine, but is {local_rank} and torch finds {count} accelerators. Start "
            "fewer processes on it."
        )
    torch.accelerator.set_device_index(local_rank)


def _to_timedelta(timeout: Any) -> timedelta:
    if isinstance(timeout, timedelta):
        return timeout
    try:
        return timedelta(seconds=timeout)
    except TypeError:
        raise BatchTypeError(
            "init_dist: timeout must be a number of seconds or a timedelta, but is "
            f"{timeout!r} ({type_name(timeout)})."
        ) from None


def _require_variables(*names: str) -> list[str]:
    missing = [name for name in names if name not in os.environ]
    if missing:
        raise RuntimeError(
            "init_dist: the launcher must have set "
            f"{', '.join(names)}, but {', '.join(missing)} is missing. Start the "
            "processes with that launcher, or set the variables."
        )
    return [os.environ[name] for name in names]


def _torchrun_environment(port: Any) -> dict[str, str]:
    return {} if port is None else {"MASTER_PORT": str(port)}


def _mpi_environment(port: Any) -> dict[str, str]:
    rank, world, local = _require_variables(
        "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"
    )
    return {
        "RANK": rank,
        "WORLD_SIZE": world,
        "LOCAL_RANK": local,
        "MASTER_PORT": _port(port),
    }


def _slurm_environment(port: Any) -> dict[str, str]:
    rank, world = _require_variables("SLURM_PROCID", "SLURM_NTASKS")
    result = {"RANK": rank, "WORLD_SIZE": world, "MASTER_PORT": _port(port)}
    local = os.environ.get("SLURM_LOCALID")
    count = torch.accelerator.device_count() or 1
    result["LOCAL_RANK"] = str(int(rank) % count) if local is None else local
    if "MASTER_ADDR" not in os.environ:
        result["MASTER_ADDR"] = _first_node(*_require_variables("SLURM_NODELIST"))
    return result


def _port(port: Any) -> str:
    return os.environ.get("MASTER_PORT", _PORT) if port is None else str(port)


def _first_node(nodes: str) -> str:
    """Return the first host of a list in slurm's format, such as ``node[1-4]``."""
    command = ["scontrol", "show", "hostnames", nodes]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        return done.stdout.split()[0]
    except (OSError, subprocess.CalledProcessError, IndexError) as error:
        raise RuntimeError(
            f"init_dist: {' '.join(command)} must name the first node, but failed: "
            f"{error!r}. Set MASTER_ADDR."
        ) from error


#: By launcher: the function that returns torch's environment variables.
_ENVIRONMENTS: dict[str, Callable[[Any], dict[str, str]]] = {
    "pytorch": _torchrun_environment,
    "slurm": _slurm_environment,
    "mpi": _mpi_environment,
    "none": _torchrun_environment,
}
