"""Tensors of one device on others: in packed copies, and differentiable."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch

from ..backend.plain import is_plain
from ..core.tracing import span
from .from_device import MixedHostCopy, torch_return
from .to_device import depart


def carry(
    tensors: Sequence[torch.Tensor], devices: Sequence[torch.device]
) -> list[list[torch.Tensor]]:
    """Return copies of the tensors on each of the devices.

    Gradients come back in packed copies too, and are summed on the tensors' device. A
    tensor that got no gradient on any device gets none: no zeros are made.

    Args:
        tensors: all on one device.
        devices: other devices than that; none twice.

    Stream: the copies are queued on, or waited for by, the streams that are current on
    the devices. To the host the host waits.
    """
    if not tensors or not devices:
        return [[] for _ in devices]
    apply: Any = _Carry.apply  # torch's has no types
    flat = apply(tuple(devices), *tensors)
    ends = range(len(tensors), len(flat) + 1, len(tensors))
    return [list(flat[end - len(tensors) : end]) for end in ends]


def carry_apart(
    tensors: Sequence[torch.Tensor], device: torch.device
) -> list[torch.Tensor]:
    """Return copies of the tensors on one other device, each with a node of its own.

    The copies are packed. Each gradient comes back alone, because callers may run
    backward through one of the copies and later through another one.

    Args:
        tensors: all on one device.
        device: another device.

    Stream: as `carry`.
    """
    with torch.no_grad():
        (copies,) = _copies(tensors, [device])
    apply: Any = _Moved.apply  # torch's has no types
    return [
        apply(tensor, copy) if tensor.requires_grad else copy
        for tensor, copy in zip(tensors, copies, strict=True)
    ]


class _Moved(torch.autograd.Function):
    """A copy that was made before, as a node of the graph."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, copy: torch.Tensor) -> torch.Tensor:
        ctx.source = tensor.device
        return copy.detach()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad.to(ctx.source), None


class _Carry(torch.autograd.Function):
    """The copies as one node of the graph: its gradients can be packed."""

    @staticmethod
    def forward(ctx: Any, devices: Any, *tensors: torch.Tensor) -> Any:
        ctx.set_materialize_grads(False)
        ctx.source, ctx.num_tensors = tensors[0].device, len(tensors)
        copies = _copies(tensors, devices)
        needed = ctx.needs_input_grad[1:]
        ctx.mark_non_differentiable(
            *(
                copy
                for on_device in copies
                for copy, needs in zip(on_device, needed, strict=True)
                if not needs
            )
        )
        return tuple(chain.from_iterable(copies))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        num = ctx.num_tensors
        total: list[torch.Tensor | None] = [None] * num
        for start in range(0, len(grads), num):
            present = {
                i: grad
                for i, grad in enumerate(grads[start : start + num])
                if grad is not None
            }
            (back,) = carry(list(present.values()), [ctx.source])
            for i, grad in zip(present, back, strict=True):
                so_far = total[i]
                total[i] = grad if so_far is None else so_far + grad
        return None, *total


def _copies(
    tensors: Sequence[torch.Tensor], devices: Sequence[torch.device]
) -> list[list[torch.Tensor]]:
    source = tensors[0].device
    if source.type == "cpu":
        # All are on their way before the first lands.
        landings = [depart(list(tensors), device) for device in devices]
        return [land() for land in landings]
    # torch's own packed copies between devices, which it has for some types of them.
    comm = getattr(torch.get_device_module(source), "comm", None)
    if comm is None or any(device.type != source.type for device in devices):
        return [_sent(tensors, device) for device in devices]
    packed = [i for i, tensor in enumerate(tensors) if _packs(tensor)]
    copies = []
    sent = comm.broadcast_coalesced([tensors[i] for i in packed], [source, *devices])
    for device, of_packed in zip(devices, sent[1:], strict=True):
        by_place = dict(zip(packed, of_packed, strict=True))
        copies.append(
            [
                by_place[i] if i in by_place else tensor.to(device)
                for i, tensor in enumerate(tensors)
            ]
        )
    return copies


def _sent(tensors: Sequence[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    if device.type == "cpu":
        with span("pyparallel.to_host"):
            return MixedHostCopy(list(tensors), torch_return, snapshot=False).land()
    return [tensor.to(device) for tensor in tensors]


def _packs(tensor: torch.Tensor) -> bool:
    """Tell whether torch's packed copy gives back this very kind of tensor."""
    return is_plain(tensor) and not tensor.is_complex()
