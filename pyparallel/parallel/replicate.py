"""replicate: a module once for every device, with gradients that come together."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from typing import Any, TypeVar

import torch
from torch import nn

from ..core.devices import HOST, Target, Targets, resolve_target
from ..core.errors import BatchTypeError, BatchValueError, type_name
from ..core.torch_private import compiled_from, require
from ..transfer.between_devices import copy_to_devices

Module = TypeVar("Module", bound=nn.Module)


def replicate(module: Module, devices: Targets, detach: bool = False) -> list[Module]:
    """Return one replica of a module for every device.

    The parameters of replicas are functions of the module's own: a backward pass
    through any number of replicas leaves the sum of their gradients in the module's
    parameters, on the device of the module. A parameter that no replica used gets none.

    Args:
        module: with all its parameters and buffers on one device, any device.
        devices: where the replicas are to be; a device may stand there more than once,
            the host too: ``["cpu", "cpu"]``, ``[0, 0]``. -1 is the host.
        detach: the parameters of replicas have no history and need no gradient.

    Returns:
        The replicas, in the order of ``devices``; none for none. They live for one
        forward and backward pass: what an optimizer changes, later replicas have. On
        the module's own device their parameters share its memory. The first replica
        there has the very buffers of the module, so that what it writes to them stays
        (statistics of BatchNorm); all others have copies. Parameters, buffers and
        modules that are used at several places are shared in a replica too. Hooks and
        all other attributes are the module's own.

    Raises:
        TypeError: no module; one with scripted or compiled modules in it; a device of
            the wrong kind.
        ValueError: parameters or buffers on several devices; a name that is no device.
        RuntimeError: parameters that are not initialised yet; a device that this
            machine does not have.

    Stream: each other device gets everything in packed copies, queued on, or waited for
    by, the streams that are current when this is called.

    As in torch, replicas have no ``parameters()``: they are attributes, and in
    ``_former_parameters`` of each module. ``_replicate_for_data_parallel`` of modules
    is called. From ``torch.nn.parallel.replicate``, which has no replicas on the host
    and gives zeros as the gradient of unused parameters.

    Example:
        >>> net = torch.nn.Linear(2, 1, bias=False)
        >>> first, second = replicate(net, ["cpu", "cpu"])
        >>> (first(torch.ones(1, 2)) + second(torch.ones(1, 2))).backward()
        >>> net.weight.grad
        tensor([[2., 2.]])
    """
    require("replicate", nn.Module)
    targets = _targets(devices)
    if not targets:
        return []
    source = _check(module)
    modules = list(module.modules())
    # Modules may refuse: ask all of them before anything is copied.
    shells = [
        {id(each): each._replicate_for_data_parallel() for each in modules}
        for _ in targets
    ]
    parameters = list(module.parameters())
    buffers = list(module.buffers())
    copies = _copies(parameters, buffers, source, targets, detach)
    for by_id, tensors in zip(shells, copies, strict=True):
        _fill(modules, by_id, tensors)
    return [by_id[id(module)] for by_id in shells]


def _targets(devices: Targets) -> list[torch.device]:
    listed: Iterable[Target]
    if isinstance(devices, int | str | torch.device):
        listed = [devices]
    elif isinstance(devices, Iterable):
        listed = devices
    else:
        raise BatchTypeError(
            "replicate: devices must be a list of devices, but is "
            f"{devices!r} ({type_name(devices)})."
        )
    return [resolve_target(each, "replicate", "device") or HOST for each in listed]


def _check(module: Any) -> torch.device:
    """Return the device of the module.

    Raises:
        TypeError, ValueError: it cannot be replicated.
    """
    if not isinstance(module, nn.Module):
        raise BatchTypeError(
            f"replicate: module must be a torch.nn.Module, but is {type_name(module)}."
        )
    for name, each in module.named_modules():
        if isinstance(each, torch.jit.ScriptModule) or _is_compiled(each):
            raise BatchTypeError(
                "replicate: module must be made of plain modules, but "
                f"{'.'.join(filter(None, ('module', name)))} is scripted or compiled "
                f"({type_name(each)}). Replicate the module that it was made from."
            )
    first: tuple[str, torch.device] | None = None
    for tensors in (module.named_parameters(), module.named_buffers()):
        for name, tensor in tensors:
            if first is None:
                first = name, tensor.device
            elif tensor.device != first[1]:
                raise BatchValueError(
                    "replicate: module must be on one device, but has "
                    f"{first[0]} on {first[1]} and {name} on {tensor.device}."
                )
    return first[1] if first else HOST


def _is_compiled(module: nn.Module) -> bool:
    """Tell whether a call would run the module itself, also if asked of a replica."""
    return module._compiled_call_impl is not None or compiled_from(module) is not None


def _copies(
    parameters: Sequence[torch.Tensor],
    buffers: Sequence[torch.Tensor],
    source: torch.device,
    targets: Sequence[torch.device],
    detach: bool,
) -> list[dict[int, torch.Tensor]]:
    """Return for every target the tensors that stand there for those of the module.

    Note: [memory of replicas]. Forward passes read parameters, so all replicas on one
    device share one copy of them, each with nodes of its own in the graph. They write
    to buffers, from several threads at a time: only one replica may have a given copy.
    """
    others = [each for each in dict.fromkeys(targets) if each != source]
    both = [*parameters, *buffers]
    with torch.no_grad() if detach else nullcontext():
        sent = dict(zip(others, copy_to_devices(both, others), strict=True))
        sent[source] = both
        seen: set[torch.device] = set()
        copies = []
        for target in targets:
            here = sent[target]
            mine = [_alias(each, detach) for each in here[: len(parameters)]]
            written = here[len(parameters) :]
            if target in seen:
                written = [each.clone() for each in written]
            seen.add(target)
            copies.append(dict(zip(map(id, both), [*mine, *written], strict=True)))
    return copies


def _alias(parameter: torch.Tensor, detach: bool) -> torch.Tensor:
    return parameter.detach() if detach else parameter.view_as(parameter)


def _fill(
    modules: Sequence[nn.Module],
    shells: dict[int, Any],
    tensors: dict[int, torch.Tensor],
) -> None:
    """Put children, parameters and buffers into the shells of one replica."""
    for module in modules:
        shell = shells[id(module)]
        former = shell.__dict__["_former_parameters"] = OrderedDict()
        for name, child in module._modules.items():
            shell._modules[name] = None if child is None else shells[id(child)]
        for name, parameter in module._parameters.items():
            if parameter is None:
                shell._parameters[name] = None
            else:
                # No Parameter any more: a plain attribute, by the class's __setattr__.
                setattr(shell, name, tensors[id(parameter)])
                former[name] = tensors[id(parameter)]
        for name, buffer in module._buffers.items():
            shell._buffers[name] = None if buffer is None else tensors[id(buffer)]
