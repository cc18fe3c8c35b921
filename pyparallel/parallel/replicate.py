"""replicate: copy a module to several devices, with a common gradient."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from typing import Any, TypeVar

import torch
from torch import nn

from ..core.devices import HOST, Target, Targets, resolve_target
from ..core.errors import BatchTypeError, BatchValueError, plain_number, type_name
from ..core.torch_private import compiled_from, require
from ..transfer.between_devices import copy_to_devices

Module = TypeVar("Module", bound=nn.Module)


def replicate(module: Module, devices: Targets, detach: bool = False) -> list[Module]:
    """Return one replica of a module for each device.

    The parameters of replicas are functions of the module's parameters. A backward pass
    through any number of replicas adds up their gradients in the module's parameters,
    on the device of the module. Parameters that no replica used get no gradient.

    Args:
        module: a module with all its parameters and buffers on one device.
        devices: the devices of the replicas; -1 is the host. A device may be named
            several times, also the host: ``["cpu", "cpu"]``, ``[0, 0]``.
        detach: create parameters without a graph, which require no gradient.

    Returns:
        The replicas, in the order of ``devices``. Use them for one forward and backward
        pass: only later replicas contain the changes of an optimizer.

        On the module's device, parameters of replicas share the module's memory. The
        first replica there uses the module's buffers, so its changes to them stay (such
        as statistics of BatchNorm). All other replicas have copies of the buffers.
        Parameters, buffers and modules that are shared inside the module are shared in
        a replica too. Hooks and all other attributes are those of the module.

    Raises:
        TypeError: the argument is not a module, or contains scripted or compiled
            modules, or a device has the wrong type.
        ValueError: parameters or buffers are on several devices, or a name is not the
            name of a device.
        RuntimeError: parameters are not initialised, or this machine does not have a
            device.

    Stream: the tensors for each other device are sent in packed copies. The copies are
    queued on the current streams, or the current streams wait for them.

    As in torch, replicas have no ``parameters()``. Their parameters are attributes and
    entries of ``_former_parameters`` of each module. Modules are copied by their method
    ``_replicate_for_data_parallel``. From ``torch.nn.parallel.replicate``, which cannot
    create replicas on the host and sets the gradient of unused parameters to zeros.

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
    # A module may refuse to be copied, so call this before tensors are copied.
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
    devices = plain_number(devices)
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
        TypeError, ValueError: the module cannot be replicated.
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
    """Return True if a call of a replica would run the original module."""
    return module._compiled_call_impl is not None or compiled_from(module) is not None


def _copies(
    parameters: Sequence[torch.Tensor],
    buffers: Sequence[torch.Tensor],
    source: torch.device,
    targets: Sequence[torch.device],
    detach: bool,
) -> list[dict[int, torch.Tensor]]:
    """Return, for each target, the copies of the module's tensors by their ``id``.

    Note: [memory of replicas]. Forward passes only read parameters, so all replicas on
    one device share one copy of them, with their own nodes in the graph. They may write
    buffers, in several threads at a time, so each replica has its own copy of them.
    """
    others = [each for each in dict.fromkeys(targets) if each != source]
    tensors = [*parameters, *buffers]
    with torch.no_grad() if detach else nullcontext():
        sent = dict(zip(others, copy_to_devices(tensors, others), strict=True))
        sent[source] = tensors
        seen: set[torch.device] = set()
        copies = []
        for target in targets:
            here = sent[target]
            own = [_alias(each, detach) for each in here[: len(parameters)]]
            written = here[len(parameters) :]
            if target in seen:
                written = [each.clone() for each in written]
            seen.add(target)
            copies.append(dict(zip(map(id, tensors), [*own, *written], strict=True)))
    return copies


def _alias(parameter: torch.Tensor, detach: bool) -> torch.Tensor:
    # This view lets sparse gradients through; that of `view_as` reshapes them.
    return parameter.detach() if detach else parameter[...]


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
                # The copy is not a Parameter, so it becomes a plain attribute.
                setattr(shell, name, tensors[id(parameter)])
                former[name] = tensors[id(parameter)]
        for name, buffer in module._buffers.items():
            shell._buffers[name] = None if buffer is None else tensors[id(buffer)]
