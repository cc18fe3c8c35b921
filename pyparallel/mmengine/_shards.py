"""Find out how the parameters of an optimizer are sharded over the ranks.

A ``DTensor`` knows it. A parameter of ``FullyShardedDataParallel`` has no reference to
its process group. So `MMFullyShardedDataParallel` and `OptimWrapper.optim_context` call
`learn_shards`, which records the groups.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from ..core.torch_private import flattened_in, is_flattened


class Layout(NamedTuple):
    """The ranks that have parts of a parameter.

    Attributes:
        shards: the process groups over which it is sharded, one after the other.
        replicas: the process groups whose ranks have the same shard.
        device: the device with which these groups communicate. None for a whole
            parameter that belongs to no group.
    """

    shards: tuple[Any, ...] = ()
    replicas: tuple[Any, ...] = ()
    device: torch.device | None = None


_WHOLE = Layout()
#: The layouts of the parameters of FullyShardedDataParallel.
_layouts: Any = WeakTensorKeyDictionary()
#: Parameters whose place in the model other parameters took, with the class that did.
_replaced: Any = WeakTensorKeyDictionary()


def learn_shards(model: nn.Module) -> None:
    """Record the layouts of all parameters of ``FullyShardedDataParallel`` in a model.

    Modules of torch's own class count too.
    """
    for module in model.modules():
        parameters, shards, replicas = flattened_in(module)
        layout = _WHOLE
        if shards:
            device: Any = module.compute_device
            layout = Layout(shards, replicas, device)
        for parameter in parameters:
            _layouts[parameter] = layout


def has_unknown_shards(parameters: Iterable[torch.Tensor]) -> bool:
    """Return True if `learn_shards` has not seen the modules of some parameters."""
    return any(is_flattened(each) and each not in _layouts for each in parameters)


def layout_of(parameter: Any) -> Layout:
    """Return the layout of a parameter.

    Raises:
        RuntimeError: `learn_shards` has not seen its ``FullyShardedDataParallel``.
    """
    if is_flattened(parameter):
        found: Layout | None = _layouts.get(parameter)
        if found is not None:
            return found
        if dist.is_initialized() and dist.get_world_size() > 1:
            raise RuntimeError(
                "OptimWrapper: clip_grad must know the ranks that share each "
                "parameter, but has not seen their FullyShardedDataParallel. Run the "
                "forward pass inside optim_context(model)."
            )
    mesh = getattr(parameter, "device_mesh", None)
    if mesh is None:
        return _WHOLE
    groups = list(zip(mesh.get_all_groups(), parameter.placements, strict=True))
    return Layout(
        tuple(group for group, each in groups if not each.is_replicate()),
        tuple(group for group, each in groups if each.is_replicate()),
        torch.device(mesh.device_type),
    )


def meshes_of(parameters: Iterable[torch.Tensor]) -> set[Any]:
    """Return the meshes of the ``DTensor``s, and None if there are other tensors."""
    return {getattr(parameter, "device_mesh", None) for parameter in parameters}


def local_leaves(parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return a tensor for each gradient, with the part on this rank as its ``grad``.

    A change in place of that ``grad`` changes the gradient.
    """
    return [_local_leaf(each.grad) for each in parameters if each.grad is not None]


def _local_leaf(grad: Any) -> torch.Tensor:
    with torch.no_grad():
        local = grad.to_local() if hasattr(grad, "to_local") else grad
        leaf: torch.Tensor = local.detach()
        leaf.grad = local
    return leaf


def note_replaced(
    before: Iterable[torch.Tensor], module: nn.Module, where: str
) -> None:
    """Record the parameters that a model had before it was sharded, and has no more."""
    present = {id(each) for each in module.parameters()}
    for each in before:
        if id(each) not in present:
            _replaced[each] = where


def check_present(groups: Iterable[Mapping[str, Any]]) -> None:
    """Raise if an optimizer has parameters from before the model was sharded.

    Args:
        groups: the groups of the optimizer. The first parameter of each is checked.

    Raises:
        RuntimeError: the optimizer would train nothing.
    """
    if not len(_replaced):
        return
    for group in groups:
        where = next((_replaced.get(each) for each in group["params"][:1]), None)
        if where is not None:
            raise RuntimeError(
                f"{where}: the optimizer must have parameters of the sharded model, "
                "but has those that sharding replaced, and would not train the model. "
                f"Create the optimizer after {where}."
            )
