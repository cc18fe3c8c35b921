"""Convert the devices that callers name to ``torch.device``."""

from __future__ import annotations

import operator
import re
from collections.abc import Iterable
from typing import Any

import torch

from .errors import BatchTypeError, BatchValueError, plain_number, type_name

#: One target: a device, its index, or -1 to leave the data on the host.
Target = int | str | torch.device
Targets = Target | Iterable[Target]

# Checks of a tuple take half as long as those of a union.
_NAMED = (str, torch.device)
_TARGET = (int, *_NAMED)

#: The device of host memory.
HOST = torch.device("cpu")

# torch stores the index of a device in eight bits and silently truncates larger ones:
# "cuda:256" would be the first device.
_MAX_INDEX = 127


def resolve_targets(target_gpus: Targets) -> list[torch.device | None]:
    """Return the devices of the targets, at least one; None represents -1.

    Raises:
        TypeError: a target is not an index, a string or a device.
        ValueError: there is no target, torch does not know a name, or the list mixes
            the host and accelerators.
        RuntimeError: this machine does not have one of the devices.
    """
    target_gpus = plain_number(target_gpus)
    if isinstance(target_gpus, _TARGET):
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
    if len({target is None or target.type == "cpu" for target in targets}) > 1:
        raise BatchValueError(
            "scatter: target_gpus must be all on the host or all on accelerators, but "
            f"is {list(target_gpus)}."
        )
    return targets


def resolve_target(
    target: Any, who: str = "scatter", noun: str = "target"
) -> torch.device | None:
    """Return the device of one target; None represents -1.

    Args:
        target: a device, its index or its name.
        who: the public function that error messages name.
        noun: the name of the argument in error messages.

    Raises:
        TypeError: the target is not an index, a string or a device.
        ValueError: torch does not know the name.
        RuntimeError: this machine does not have the device.
    """
    named = isinstance(target, _NAMED)
    if not named:
        index = _to_index(target, who, noun)
        if index == -1:
            return None
        if index > _MAX_INDEX:
            raise _no_such_device(f"cuda:{index}", "cuda", f"{who}: {noun}")
    try:
        device = torch.device(target) if named else torch.device("cuda", index)
    except (RuntimeError, ValueError) as error:
        raise BatchValueError(
            f"{who}: a {noun} must be -1 or name a device, but is {target!r}."
        ) from error
    # "cpu:0" is also the host, but torch would copy to it.
    if device.type == "cpu":
        return HOST
    digits = re.search(r":(\d+)$", str(target)) if named else None
    if digits is not None and int(digits[1]) != device.index:
        raise _no_such_device(target, device.type, f"{who}: {noun}")
    return _with_index(device, f"{who}: {noun}")


def _to_index(target: Any, who: str, noun: str) -> int:
    try:
        if not isinstance(target, bool):
            return operator.index(target)
    except TypeError:
        pass
    raise BatchTypeError(
        f"{who}: a {noun} must be an index, a string or a torch.device, but is "
        f"{target!r} ({type_name(target)})."
    )


def _with_index(device: torch.device, where: str) -> torch.device:
    """Return ``device`` with its index, or raise RuntimeError if it does not exist."""
    count, index = _num_devices(device.type), device.index
    if index is None and count:
        index = torch.get_device_module(device).current_device()
    if count == 0 or not 0 <= index < count:
        raise _no_such_device(device, device.type, where)
    return device if device.index is not None else torch.device(device.type, index)


def _num_devices(device_type: str) -> int:
    if device_type == "cuda" and torch.cuda.is_initialized():
        return torch.cuda.device_count()  # which torch then keeps
    try:
        module = torch.get_device_module(device_type)
    except RuntimeError:  # a type without devices, such as "meta"
        return 0
    return module.device_count() if module.is_available() else 0


def _no_such_device(name: Any, device_type: str, where: str) -> RuntimeError:
    return RuntimeError(
        f"{where} {name} must be a device of this machine, but torch "
        f"{torch.__version__} sees {_num_devices(device_type)} of type "
        f"{device_type}. Use -1 or 'cpu' to stay on the host."
    )


def current_device() -> torch.device:
    """Return the current accelerator, or the host without one."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return HOST
    return torch.device(accelerator.type, torch.accelerator.current_device_index())
