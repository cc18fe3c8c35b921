"""Items of one call, dealt to devices and sent there."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import nn

from ..batch.container import TensorSkeleton
from ..core.devices import HOST, resolve_target
from ..core.errors import BatchTypeError, BatchValueError, type_name
from ..scatter_gather.move import start_copy

#: Whom messages are from.
WHO = "parallel_apply"
#: Nothing has to be looked for that is elsewhere: this torch has no other place.
_ONLY_HOST = torch.accelerator.current_accelerator() is None


def items_of(inputs: Any, dim: int) -> Sequence[Any]:
    """Return the items of ``inputs``."""
    if isinstance(inputs, torch.Tensor):
        if isinstance(dim, bool) or not isinstance(dim, int):
            raise BatchTypeError(
                f"{WHO}: dim must be an integer, but is {dim!r} ({type_name(dim)})."
            )
        if not -inputs.dim() <= dim < inputs.dim():
            raise BatchValueError(
                f"{WHO}: dim must be a dimension of inputs, but is {dim!r} for shape "
                f"{tuple(inputs.shape)}."
            )
        return inputs.split(1, dim) if inputs.shape[dim] else ()
    if isinstance(inputs, Sequence) and not isinstance(inputs, str | bytes):
        return list(inputs)
    raise BatchTypeError(
        f"{WHO}: inputs must be a tensor or a sequence of items, but is of type "
        f"{type_name(inputs)}. Make a list of them."
    )


def places_of(devices: Any) -> list[torch.device]:
    """Return the devices that are meant."""
    if devices is None:
        if not torch.accelerator.is_available():
            return [HOST] * torch.get_num_threads()
        found = torch.accelerator.current_accelerator()
        number = torch.accelerator.device_count()
        return [torch.device((found or HOST).type, i) for i in range(number)]
    if isinstance(devices, int | str | torch.device):
        devices = [devices]
    if not isinstance(devices, Iterable):
        raise BatchTypeError(
            f"{WHO}: devices must be a device, an index or a list of them, but is of "
            f"type {type_name(devices)}."
        )
    places = [resolve(device) for device in devices]
    if not places:
        raise BatchValueError(f"{WHO}: devices must name at least one, but is empty.")
    return places


def deal(items: Sequence[Any], most: int) -> list[Sequence[Any]]:
    """Divide items into at most so many parts, in order and as equal as can be."""
    num_parts = min(most, len(items))
    least, longer = divmod(len(items), num_parts)
    ends = accumulate(least + (i < longer) for i in range(num_parts))
    return [items[start:end] for start, end in pairwise((0, *ends))]


def send(batches: Sequence[Any], places: Sequence[torch.device]) -> Sequence[Any]:
    """Return every batch with its tensors on its device."""
    if _ONLY_HOST:
        return batches
    skeletons = [
        TensorSkeleton(batch, partial(_is_elsewhere, place))
        for batch, place in zip(batches, places, strict=True)
    ]
    # All copies are started before the first one is waited for.
    waits = []
    for skeleton, place in zip(skeletons, places, strict=True):
        tensors = skeleton.take_tensors()
        waits.append(start_copy(tensors, tensors, place, None) if tensors else None)
    return [
        skeleton.restore(wait()) if wait else batch
        for skeleton, wait, batch in zip(skeletons, waits, batches, strict=True)
    ]


def _is_elsewhere(place: torch.device, tensor: torch.Tensor) -> bool:
    return tensor.device != place and not tensor.is_meta  # which has nothing to move


def resolve(device: Any) -> torch.device:
    """Return one device; -1 is the host."""
    if type(device) is str and device == "cpu":  # what most calls name, many times
        return HOST
    return resolve_target(device, WHO, "device") or HOST


def place_of(call: tuple[Any, Any]) -> torch.device:
    """Return where arguments lie, or else the callable: where nobody named a device."""
    if _ONLY_HOST:
        return HOST
    args, module = call
    tensors = TensorSkeleton(args, lambda tensor: True).tensors
    if isinstance(module, nn.Module):
        tensors += module.parameters()
    return tensors[0].device if tensors else HOST
