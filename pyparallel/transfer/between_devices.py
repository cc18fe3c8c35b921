"""Copy tensors of one device to others: packed, and with gradients."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch

from ..backend.plain import is_plain
from ..core.tracing import span
from .device import torch_device, torch_return
from .from_device import MixedHostCopy
from .to_device import start_copy


def copy_to_devices(
    tensors: Sequence[torch.Tensor], devices: Sequence[torch.device]
) -> list[list[torch.Tensor]]:
    """Return copies of the tensors on each of the devices.

    Gradients come back in packed copies too, and are summed on the tensors' device. A
    tensor that got no gradient on any device gets none: no zeros are made.

    Args:
        tensors: all on one device.
        devices: different devices, without that of the tensors.

    Stream: the copies are queued on, or waited for by, the streams that are current on
    the devices. The host waits for copies to the host.
    """
    if not tensors or not devices:
        return [[] for _ in devices]
    apply: Any = _CopyToDevices.apply  # torch's has no types
    flat = apply(tuple(devices), *tensors)
    ends = range(len(tensors), len(flat) + 1, len(tensors))
    return [list(flat[end - len(tensors) : end]) for end in ends]


def copy_with_separate_nodes(
    tensors: Sequence[torch.Tensor], device: torch.device
) -> list[torch.Tensor]:
    """Return copies of the tensors on one other device, each with its own graph node.

    The copies are packed. Each gradient comes back alone, because callers may run
    backward through one of the copies and later through another one.

    Args:
        tensors: all on one device.
        device: another device.

    Stream: as `copy_to_devices`.
    """
    with torch.no_grad():
        (copies,) = _copies(tensors, [device])
    apply: Any = _CopyNode.apply  # torch's has no types
    return [
        apply(tensor, copy) if tensor.requires_grad else copy
        for tensor, copy in zip(tensors, copies, strict=True)
    ]


class _CopyNode(torch.autograd.Function):
    """The graph node of one copy that was made before."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, copy: torch.Tensor) -> torch.Tensor:
        ctx.source = tensor.device
        return copy.detach()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        with torch_device.relaxed(grad.device):
            return grad.to(ctx.source), None


class _CopyToDevices(torch.autograd.Function):
    """One graph node for all copies, so that gradients can be packed."""

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
            (back,) = copy_to_devices(list(present.values()), [ctx.source])
            for i, grad in zip(present, back, strict=True):
                previous = total[i]
                total[i] = grad if previous is None else previous + grad
        return None, *total


def _copies(
    tensors: Sequence[torch.Tensor], devices: Sequence[torch.device]
) -> list[list[torch.Tensor]]:
    source = tensors[0].device
    if source.type == "cpu":
        # All copies are started before the first one is waited for.
        waits = [start_copy(list(tensors), device) for device in devices]
        return [wait() for wait in waits]
    # torch has packed copies between devices of some types.
    comm = getattr(torch.get_device_module(source), "comm", None)
    if comm is None or any(device.type != source.type for device in devices):
        return [_copies_on(device, tensors) for device in devices]
    packed = [i for i, tensor in enumerate(tensors) if _can_pack(tensor)]
    copies = []
    with torch_device.relaxed(source):
        chosen = [tensors[i] for i in packed]
        sent = comm.broadcast_coalesced(chosen, [source, *devices])
        for device, on_device in zip(devices, sent[1:], strict=True):
            by_index = dict(zip(packed, on_device, strict=True))
            copies.append(
                [
                    by_index[i] if i in by_index else tensor.to(device)
                    for i, tensor in enumerate(tensors)
                ]
            )
    return copies


def _copies_on(
    device: torch.device, tensors: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    if device.type == "cpu":
        with span("pyparallel.to_host"):
            return MixedHostCopy(list(tensors), torch_return, snapshot=False).wait()
    with torch_device.relaxed(tensors[0].device):
        return [tensor.to(device) for tensor in tensors]


def _can_pack(tensor: torch.Tensor) -> bool:
    """Return True if torch's packed copy preserves the type of this tensor."""
    return is_plain(tensor) and not tensor.is_complex()
