"""Targets: the many ways in which callers name devices."""

from __future__ import annotations

import operator
import re
from collections.abc import Iterable
from typing import Any

import torch

from .errors import BatchTypeError, BatchValueError, type_name

#: One target: a device, its index, or -1 for "the host, as it is".
Target = int | str | torch.device
Targets = Target | Iterable[Target]

#: The device of host memory.
HOST = torch.device("cpu")

# torch keeps the index of a device in eight bits, and cuts longer ones off in silence:
# "cuda:256" would be the first device.
_MAX_INDEX = 127


def resolve_targets(target_gpus: Targets) -> list[torch.device | None]:
    """Return the devices that are meant, at least one; None stands for -1.

    Raises:
        TypeError: a target that is not an index, a string or a device.
        ValueError: no targets, a name that torch does not know, hosts and accelerators
            in one list.
        RuntimeError: a device that this machine does not have.
    """
    if isinstance(target_gpus, int | str | torch.device):
        target_gpus = [target_gpus]
    if not isinstance(target_gpus, Iterable) or isinstance(target_gpus, bytes):
        raise BatchTypeError(
            "scatter: target_gpus must be a device, an index or a list of them, but is "
            f"{type_name(target_gpus)}."
        )
    targets = [resolve_target(target) for target in target_gpus]
    if not targets:
        raise BatchValueError(
            "scatter: target_gpus must name at least one target, but is empty."
        )
    on_host = [target is None or target.type == "cpu" for target in targets]
    if any(on_host) and not all(on_host):
        raise BatchValueError(
            "scatter: target_gpus must be all on the host or all on accelerators, but "
            f"is {list(target_gpus)}."
        )
    return targets


def resolve_target(
    target: Any, who: str = "scatter", noun: str = "target"
) -> torch.device | None:
    """Return one device; None stands for -1. Messages call it the ``noun`` of ``who``.

    Raises:
        TypeError: it is not an index, a string or a device.
        ValueError: torch does not know the name.
        RuntimeError: this machine does not have the device.
    """
    named = isinstance(target, str | torch.device)
    if not named:
        index = _index(target, f"{who}: a {noun}")
        if index == -1:
            return None
        if index > _MAX_INDEX:
            raise _absent(f"cuda:{index}", "cuda", f"{who}: {noun}")
    try:
        device = torch.device(target if named else f"cuda:{index}")
    except RuntimeError as error:
        raise BatchValueError(
            f"{who}: a {noun} must be -1 or name a device, but is {target!r}."
        ) from error
    # "cpu:0" is the host too, but torch would copy to it.
    if device.type == "cpu":
        return HOST
    digits = re.search(r":(\d+)$", str(target))
    if digits is not None and int(digits[1]) != device.index:
        raise _absent(target, device.type, f"{who}: {noun}")
    return _present(device, f"{who}: {noun}")


def _index(target: Any, where: str) -> int:
    try:
        if not isinstance(target, bool):
            return operator.index(target)
    except TypeError:
        pass
    raise BatchTypeError(
        f"{where} must be an index, a string or a torch.device, but is {target!r} "
        f"({type_name(target)})."
    )


def _present(device: torch.device, where: str) -> torch.device:
    """Return ``device`` with its index; RuntimeError if the machine has none such."""
    count, index = _num_devices(device.type), device.index
    if index is None and count:
        index = torch.get_device_module(device).current_device()
    if count == 0 or not 0 <= index < count:
        raise _absent(device, device.type, where)
    return torch.device(device.type, index)


def _num_devices(kind_of_device: str) -> int:
    try:
        module = torch.get_device_module(kind_of_device)
    except RuntimeError:  # torch knows the type (meta, for one), but no such devices
        return 0
    return module.device_count() if module.is_available() else 0


def _absent(name: Any, kind_of_device: str, where: str) -> RuntimeError:
    return RuntimeError(
        f"{where} {name} must be a device of this machine, but torch "
        f"{torch.__version__} sees {_num_devices(kind_of_device)} of type "
        f"{kind_of_device}. Use -1 or 'cpu' to stay on the host."
    )
