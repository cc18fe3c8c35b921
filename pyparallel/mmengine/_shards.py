"""Parameters that are sharded over the ranks, and the clipping of their gradients.

A ``DTensor`` knows its shards. A parameter of ``FullyShardedDataParallel`` has no
reference to its process group. So `MMFullyShardedDataParallel` and
`OptimWrapper.optim_context` call `learn_shards`, which records the groups.

The norm of a model is the norm of all its gradients, on whatever ranks their shards
are. torch's ``clip_grad_norm_`` computes it for ordinary parameters, and for
``DTensor``s of one mesh. It takes a shard of ``FullyShardedDataParallel`` for a whole
parameter, and raises for parameters of several kinds. `clip` is right for all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from ..core.errors import SettingValueError
from ..core.torch_private import flattened_in, is_flattened

_WHERE = "OptimWrapper: clip_grad"
_CLIP_NORM, _CLIP_VALUE = nn.utils.clip_grad_norm_, nn.utils.clip_grad_value_


class Layout(NamedTuple):
    """The ranks that have parts of a parameter."""

    #: The process groups over which it is sharded, one after the other.
    shards: tuple[Any, ...] = ()
    replicas: tuple[Any, ...] = ()  # the process groups whose ranks have the same shard
    #: The device with which these groups communicate. None for a whole parameter that
    #: belongs to no group.
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
    """Raise if an optimizer has parameters from before the model was sharded."""
    if not len(_replaced):  # they are freed, unless something has a reference
        return
    for parameter in (each for group in groups for each in group["params"]):
        where = _replaced.get(parameter)
        if where is not None:
            raise RuntimeError(
                f"{where}: the optimizer must have parameters of the sharded model, "
                "but has those that sharding replaced, and would not train the model. "
                f"Create the optimizer after {where}."
            )


def is_right_in_torch(
    function: Callable[..., Any],
    parameters: Collection[torch.Tensor],
    arguments: Mapping[str, Any],
) -> bool:
    """Return True if a function of torch clips the gradients of these parameters."""
    meshes = meshes_of(parameters)
    if function is not _CLIP_NORM:
        return function is not _CLIP_VALUE or len(meshes) < 2
    if any(is_flattened(each) and layout_of(each).shards for each in parameters):
        return False
    # torch raises on a rank whose shard of a DTensor is empty, and the others wait.
    is_maximum = float(arguments.get("norm_type", 2.0)) == float("inf")
    return len(meshes) < 2 and (meshes == {None} or not is_maximum)


def clip(
    function: Callable[..., Any],
    parameters: Sequence[torch.Tensor],
    arguments: Mapping[str, Any],
) -> Any:
    """Clip gradients, and return the norm of all of them before that, or None.

    All ranks must call it together if any of the parameters is sharded. They all get
    the same norm. If parameters that are not sharded have different gradients on the
    ranks, this is the largest norm of any rank.

    Args:
        function: ``clip_grad_norm_`` or ``clip_grad_value_`` of ``torch.nn.utils``, or
            another function of parameters, which is only called.
        parameters: the parameters that require grad, in the same order on all ranks.
        arguments: further arguments of the function.
    """
    present = [each for each in parameters if each.grad is not None]
    for each in present:
        _match_placements(each)
    if function is _CLIP_VALUE:
        present = local_leaves(present)
    elif function is _CLIP_NORM:
        layouts = [layout_of(each) for each in parameters]
        if any(each.device for each in layouts):
            leaves = local_leaves(present)
            return _clip_norm(parameters, layouts, leaves, **arguments)
    return function(present, **arguments) if present else None


def _match_placements(parameter: Any) -> None:
    """Give a gradient that is a sum still to compute the placements of its parameter.

    Tensor parallelism leaves such gradients of replicated parameters.
    """
    placements = getattr(parameter, "placements", None)
    if placements is not None and parameter.grad.placements != placements:
        parameter.grad = parameter.grad.redistribute(placements=placements)


def _clip_norm(
    parameters: Sequence[torch.Tensor],
    layouts: Sequence[Layout],
    leaves: list[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    """Clip by the norm of all shards, and return it, on the device of the gradients."""
    order = float(norm_type)
    if not order > 0:
        raise SettingValueError(
            f"{_WHERE}['norm_type'] must be above 0 for sharded parameters, but is "
            f"{norm_type!r}."
        )
    total = _total_norm(parameters, layouts, order)
    if leaves:
        total = total.to(leaves[0].device)
    if error_if_nonfinite:  # raises torch's error, on all ranks
        nn.utils.get_total_norm([total], order, True)
    nn.utils.clip_grads_with_norm_(leaves, max_norm, total, foreach)
    return total


def _total_norm(
    parameters: Sequence[torch.Tensor], layouts: Sequence[Layout], order: float
) -> torch.Tensor:
    """Return the norm of all gradients, a tensor of shape ``()``, on all ranks alike.

    A norm of several tensors is the norm of their norms. So each rank computes the norm
    of its shards, and then the norm of the norms of all ranks. The ranks need the same
    dtype, and those without a gradient take part too, so parameters decide both.
    """
    is_double = torch.float64 in [each.dtype.to_real() for each in parameters]
    dtype = torch.float64 if is_double else torch.float32
    device = next(layout.device for layout in layouts if layout.device is not None)
    norms: dict[Any, list[torch.Tensor]] = {layout.shards: [] for layout in layouts}
    with torch.no_grad():
        for parameter, layout in zip(parameters, layouts, strict=True):
            for leaf in local_leaves([parameter]):
                if leaf.numel():  # some orders have no norm of nothing
                    wide = torch.promote_types(leaf.dtype, dtype)
                    norm = torch.linalg.vector_norm(leaf.grad, order, dtype=wide)
                    norms[layout.shards].append(norm.to(device, dtype))
        parts = []
        for shards, found in norms.items():
            part = _norm(found or [torch.zeros((), dtype=dtype, device=device)], order)
            for group in shards:
                part = _norm(_gather(part, group), order)
            parts.append(part)
        total = _norm(parts, order)
        if () in norms:  # their gradients may differ between the ranks
            for group in dict.fromkeys(
                group for each in layouts for group in (*each.shards, *each.replicas)
            ):
                total = torch.stack(_gather(total, group)).amax()
    return total


def _norm(norms: list[torch.Tensor], order: float) -> torch.Tensor:
    norm: torch.Tensor = torch.linalg.vector_norm(torch.stack(norms), order)
    return norm


def _gather(value: torch.Tensor, group: Any) -> list[torch.Tensor]:
    """Return the values of all ranks of a group."""
    found = [torch.empty_like(value) for _ in range(group.size())]
    dist.all_gather(found, value, group=group)
    return found
