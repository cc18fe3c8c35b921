"""init_dist: initialize torch.distributed in processes that a launcher started."""

from __future__ import annotations

import os
import subprocess
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing

from ..core.errors import BatchTypeError, BatchValueError, type_name, warn

_PORT = "29500"  # torch's own default
_LAUNCHERS = ("pytorch", "slurm", "mpi", "none")
_NUMBERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK")


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
    if launcher not in _LAUNCHERS:
        raise BatchValueError(
            f"init_dist: launcher must be one of {', '.join(_LAUNCHERS)}, but is "
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
    os.environ.update(_environment(launcher, port))
    wanted = [*_NUMBERS]
    method = kwargs.get("init_method") or "env://"
    if method.startswith("env://") and kwargs.get("store") is None:
        wanted += ["MASTER_ADDR", "MASTER_PORT"]
    _require_variables(*wanted)
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    backend = _backend(backend, accelerator)
    if accelerator is not None:
        if torch.multiprocessing.get_start_method(allow_none=True) is None:
            torch.multiprocessing.set_start_method("spawn")
        count, local_rank = torch.accelerator.device_count(), os.environ["LOCAL_RANK"]
        if int(local_rank) >= count:
            raise RuntimeError(
                "init_dist: LOCAL_RANK must be the number of an accelerator of this "
                f"machine, but is {int(local_rank)} and torch finds {count} "
                "accelerators. Start fewer processes on it."
            )
        torch.accelerator.set_device_index(int(local_rank))
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


def _environment(launcher: str, port: Any) -> dict[str, str]:
    """Return torch's environment variables from those of a launcher."""
    if launcher == "pytorch":
        return {} if port is None else {"MASTER_PORT": str(port)}
    found = {"MASTER_PORT": os.environ.get("MASTER_PORT", _PORT)}
    if port is not None:
        found["MASTER_PORT"] = str(port)
    if launcher == "mpi":
        names = "RANK", "SIZE", "LOCAL_RANK"
        numbers = _require_variables(*(f"OMPI_COMM_WORLD_{name}" for name in names))
    else:
        numbers = _require_variables("SLURM_PROCID", "SLURM_NTASKS")
        count = torch.accelerator.device_count() or 1
        local = os.environ.get("SLURM_LOCALID")
        numbers += [str(int(numbers[0]) % count) if local is None else local]
        if "MASTER_ADDR" not in os.environ:
            found["MASTER_ADDR"] = _first_node(*_require_variables("SLURM_NODELIST"))
    return found | dict(zip(_NUMBERS, numbers, strict=True))


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
