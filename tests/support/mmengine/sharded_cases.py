"""Gradient clipping of sharded models on ranks, against one process: `CLIPPED`."""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.nn.functional import mse_loss

from pyparallel import mmengine
from pyparallel.mmengine._steps import ForwardSteps
from tests.support.mmengine.training import Net, batch, sgd, values
from tests.support.ranks.distributed_ranks import case, equal_on_all

warnings.filterwarnings("ignore", ".*NO_SHARD.*deprecated", FutureWarning)

EACH = [[0], [1]]
GROUPS = [[0, 1, 2], [3, 4]]
NORM = {"max_norm": 0.2}
WRAPPED = "_fsdp_wrapped_module."  # in the names of parameters


class Case(NamedTuple):
    """A model to shard, and the settings of its training."""

    shard: Callable[[Net], Any]
    clip: dict[str, Any] = NORM
    groups: list[list[int]] = EACH
    select: str = ""  # the optimizer has the parameters whose names contain it
    amp: bool = False
    before: bool = False  # the optimizer wrapper is made before the model is sharded
    parts: int = 0  # parameter groups of the optimizer
    dtype: torch.dtype = torch.float32


def average_grads(parameters: Iterable[Any]) -> None:
    """Reduce gradients that no wrapper reduces."""

    def average(parameter: Any) -> None:
        parameter.grad /= dist.get_world_size()
        dist.all_reduce(parameter.grad)

    for parameter in parameters:
        parameter.register_post_accumulate_grad_hook(average)


def one(net: Net, strategy: str = "FULL_SHARD", **settings: Any) -> Any:
    """Shard by FullyShardedDataParallel, on the CPU."""
    return mmengine.MMFullyShardedDataParallel(
        net, device_id="cpu", sharding_strategy=strategy, **settings
    )


def mixed(net: Net) -> Any:
    """Shard one layer, and not the other."""
    inner: Any = FullyShardedDataParallel(
        net.body[0],
        device_id=torch.device("cpu"),
        sharding_strategy=ShardingStrategy.NO_SHARD,
        use_orig_params=True,
    )
    net.body[0] = inner
    return one(net)


def with_ignored(net: Net, **settings: Any) -> Any:
    average_grads(net.body[0].parameters())
    return one(net, ignored_modules=["body.0"], **settings)


def hybrid(net: Net, **settings: Any) -> Any:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "shards"))
    return one(net, "HYBRID_SHARD", device_mesh=mesh, **settings)


class Plain(ForwardSteps, FullyShardedDataParallel):
    """torch's class with a training step, which only the optimizer wrapper sees."""


def torchs(net: Net) -> Any:
    return Plain(net, device_id=torch.device("cpu"), use_orig_params=True)


def two(net: Net, ignored: Sequence[str] = (), **settings: Any) -> Any:
    """Shard by fully_shard."""
    average_grads(map(net.get_parameter, ignored))
    return mmengine.MMFullyShard(net, ignored_parameters=ignored, **settings)


def two_meshes(net: Net) -> Any:
    """Shard each layer over another mesh of the same ranks."""
    world = dist.get_world_size()
    for layer in (net.body[0], net.body[2]):
        mesh = init_device_mesh("cpu", (world,), mesh_dim_names=(str(id(layer)),))
        torch.distributed.fsdp.fully_shard(layer, mesh=mesh)
        layer.set_force_sum_reduction_for_comms(True)
    return mmengine.MMFullyShard(net)


def two_hybrid(net: Net) -> Any:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "shards"))
    return two(net, ["body.0.bias"], mesh=mesh)


POLICY = {
    "type": "torch.distributed.fsdp.wrap.size_based_auto_wrap_policy",
    "min_num_params": 20,
}
flat = functools.partial(one, use_orig_params=False)
nested = functools.partial(one, auto_wrap_policy=POLICY)
grad_op = functools.partial(one, strategy="SHARD_GRAD_OP")
no_shard = functools.partial(one, strategy="NO_SHARD")
ignoring = functools.partial(two, ignored=["body.0.weight", "body.2.bias"])
ORDERS: list[Any] = [1, 2.0, 3, float("inf"), "inf"]
CLIPS: list[dict[str, Any]] = [
    *({"max_norm": 0.2, "norm_type": order} for order in ORDERS),
    {"max_norm": 1e6, "error_if_nonfinite": True},
    {"type": "value", "clip_value": 0.02},
]
KINDS = [one, flat, nested, grad_op, no_shard, mixed, with_ignored, torchs]
KINDS += [two, ignoring, two_meshes]
FEW = [CLIPS[0], CLIPS[3], CLIPS[-1]]
CLIPPED: dict[int, list[Case]] = {
    2: [
        *(Case(kind, clip) for kind in (one, ignoring) for clip in CLIPS),
        *(Case(kind, clip) for kind in KINDS for clip in (NORM, FEW[1])),
        *(Case(kind, groups=GROUPS) for kind in KINDS),
        *(Case(kind, {}, groups=GROUPS) for kind in (one, flat, two, ignoring)),
        *(Case(kind, amp=True) for kind in (one, flat, no_shard, two, ignoring)),
        # A shortened group is rounded to bfloat16 in another scale.
        *(Case(kind, {}, amp=True, groups=GROUPS[:1]) for kind in (one, ignoring)),
        # One rank has all of it, another one no gradient.
        *(Case(one, clip, select="body.2.bias") for clip in FEW),
        *(Case(kind, select="body.0.bias") for kind in (nested, two)),
        *(Case(kind, select="body.2") for kind in (one, two, ignoring)),
        *(Case(kind, parts=2) for kind in (one, two, ignoring)),
        *(Case(one, amp=amp, before=True) for amp in (False, True)),
        *(Case(kind, dtype=torch.float64) for kind in (one, ignoring)),
    ],
    4: [Case(kind, clip) for kind in (hybrid, two_hybrid) for clip in FEW],
}


def chosen(model: nn.Module, each: Case) -> list[Any]:
    named = model.named_parameters()
    found = [p for name, p in named if each.select in name.replace(WRAPPED, "")]
    if each.parts:
        return [{"params": found[:1]}, {"params": found[1:], "lr": 0.05}]
    return found


def optimizer_of(model: nn.Module, each: Case) -> Any:
    return torch.optim.SGD(chosen(model, each), lr=0.1, momentum=0.9)


def wrapper_of(model: nn.Module, each: Case) -> Any:
    settings: dict[str, Any] = {
        "optimizer": optimizer_of(model, each),
        "accumulative_counts": max(map(len, each.groups)),
        "clip_grad": each.clip or None,
    }
    if each.amp:
        return mmengine.AmpOptimWrapper(dtype="bfloat16", **settings)
    return mmengine.OptimWrapper(**settings)


def in_one_process(net: Net, each: Case, world: int) -> tuple[Any, list[float]]:
    """Train in plain torch; return the final values and the norm at each step."""
    net = copy.deepcopy(net)
    optimizer, norms = optimizer_of(net, each), []
    kwargs = {key: value for key, value in each.clip.items() if key != "type"}
    for group in each.groups:
        net.zero_grad()
        for number in group:
            for rank in range(world):
                data = {
                    k: v.to(each.dtype) for k, v in batch(number, world, rank).items()
                }
                with torch.autocast("cpu", torch.bfloat16, enabled=each.amp):
                    loss = mse_loss(net.body(data["inputs"]), data["targets"])
                (loss / (len(group) * world)).backward()
        trained = [p for part in optimizer.param_groups for p in part["params"]]
        if "type" in each.clip:
            nn.utils.clip_grad_value_(trained, **kwargs)
        elif kwargs:
            norms.append(nn.utils.clip_grad_norm_(trained, **kwargs).item())
        optimizer.step()
    return values(net), norms


def on_ranks(net: Net, each: Case, rank: int, world: int) -> tuple[Any, list[float]]:
    wrapper = wrapper_of(net, each) if each.before else None
    model = each.shard(net)
    wrapper = wrapper or wrapper_of(model, each)
    norms = []
    for group in each.groups:
        for number in group:
            if number == group[-1]:
                wrapper.end_group()
            data = {k: v.to(each.dtype) for k, v in batch(number, world, rank).items()}
            model.train_step(data, wrapper)
        if each.clip and "type" not in each.clip:
            norms.append(wrapper.grad_norm.item())
            assert equal_on_all(wrapper.grad_norm)
    return all_values(model), norms


def all_values(model: nn.Module) -> torch.Tensor:
    """Return the values of whole parameters."""
    if isinstance(model, FullyShardedDataParallel):
        with FullyShardedDataParallel.summon_full_params(model):
            return values(model)
    parts = [getattr(p, "full_tensor", p.detach)() for p in model.parameters()]
    return torch.cat([part.detach().reshape(-1) for part in parts])


def check(each: Case, rank: int, world: int) -> None:
    net = Net().to(each.dtype)
    start = values(net)
    expected, norms = in_one_process(net, each, world)
    found, seen = on_ranks(net, each, rank, world)
    limit = 1e-6 if each.dtype == torch.float32 else 1e-12
    assert (found - start).abs().max() > 1e-3
    assert len(seen) == len(norms)
    assert all(abs(a - b) < limit * max(1, b) for a, b in zip(seen, norms, strict=True))
    assert (found - expected).abs().max() < limit


@case
def clipped(rank: int, world: int) -> list[str]:
    """Return the cases that differ from one process."""
    wrong = []
    for each in CLIPPED[world]:
        try:
            check(each, rank, world)
        except AssertionError as error:
            wrong.append(f"{each}: {error}")
    return wrong


def refused(error: type[Exception], start: str, call: Callable[[], Any]) -> None:
    try:
        call()
    except error as caught:
        assert str(caught).startswith(start), str(caught)
    else:
        raise AssertionError(f"no {error.__name__} that starts with {start!r}")


def set_grads(model: nn.Module, value: float) -> list[torch.Tensor]:
    """Set all gradients; return copies of the parameters."""
    for each in model.parameters():
        each.grad = torch.full_like(each, value)
    return [each.detach().clone() for each in model.parameters()]


@case
def refusals(rank: int, world: int) -> None:
    """Raise on all ranks if a step cannot be right, and change nothing."""
    kinds = [one, flat, with_ignored, two, ignoring]
    for shard in kinds:
        net = Net()
        stale = mmengine.OptimWrapper(sgd(net))
        model = shard(net)
        inputs = batch(0, world, rank)
        wrapper = mmengine.OptimWrapper(
            sgd(model), clip_grad={"max_norm": 1.0, "error_if_nonfinite": True}
        )
        # Only one rank has a gradient that is not finite.
        before = set_grads(model, float("nan") if rank == 0 else 1.0)
        refused(RuntimeError, "The total norm of order 2.0 for", wrapper.step)
        assert all(map(torch.equal, model.parameters(), before))
        amp = mmengine.AmpOptimWrapper(optimizer=sgd(model), clip_grad=NORM)
        amp.loss_scaler.scale(torch.ones(()))
        set_grads(model, float("inf") if rank == 0 else 1.0)
        amp.step()
        assert all(map(torch.equal, model.parameters(), before))
        assert amp.loss_scaler.get_scale() == 2**15
        zero = mmengine.OptimWrapper(
            sgd(model), clip_grad={"max_norm": 1.0, "norm_type": 0}
        )
        refused(
            ValueError, "OptimWrapper: clip_grad['norm_type'] must be above", zero.step
        )
        if shard in (flat, two, ignoring):  # others took the place of all or most
            name = type(model).__name__
            refused(
                RuntimeError,
                f"{name}: the optimizer must have parameters of the sharded model, but",
                lambda: model.train_step(inputs, stale),  # noqa: B023
            )
            # The advice: create it after sharding.
            model.train_step(inputs, mmengine.OptimWrapper(sgd(model)))
    model = torchs(Net())
    wrapper = mmengine.OptimWrapper(sgd(model), clip_grad=NORM)
    set_grads(model, 1.0)
    refused(RuntimeError, "OptimWrapper: clip_grad must know the ranks", wrapper.step)
    model.train_step(batch(0, world, rank), wrapper)  # inside optim_context


@case
def with_mmengine(rank: int, world: int) -> None:
    """Our models with mmengine's optimizer wrapper, and the other way round."""
    from mmengine.model import MMFullyShardedDataParallel
    from mmengine.optim import OptimWrapper

    def theirs(net: Net) -> Any:
        return MMFullyShardedDataParallel(
            net, device_id=torch.device("cpu"), use_orig_params=True
        )

    for clip in CLIPS:
        check(Case(theirs, clip), rank, world)
    value = {"type": "value", "clip_value": 0.02}
    maximum = {"max_norm": 0.2, "norm_type": "inf"}
    right: list[Any] = [(two, dict(NORM)), (no_shard, dict(NORM))]
    right += [(one, {**value}), (two, {**value}), (one, None), (ignoring, None)]
    for shard, clip in right:
        model = shard(Net())
        each = Case(shard, clip or {}, EACH[:1])
        expected, _ = in_one_process(Net(), each, world)
        model.train_step(
            batch(0, world, rank),
            OptimWrapper(optimizer_of(model, each), clip_grad=clip),
        )
        assert (all_values(model) - expected).abs().max() < 1e-6, (shard, clip)
    wrong = [(one, NORM), (flat, NORM), (ignoring, NORM), (two, maximum)]
    wrong += [(ignoring, value)]
    for shard, clip in wrong:
        model = shard(Net())
        before = all_values(model)
        refused(
            TypeError,
            f"{type(model).__name__}: optim_wrapper must clip the gradients of the",
            lambda: model.train_step(  # noqa: B023
                batch(0, world, rank),
                OptimWrapper(sgd(model), clip_grad=dict(clip)),  # noqa: B023
            ),
        )
        assert torch.equal(all_values(model), before)
    net = Net()
    stale = OptimWrapper(sgd(net))
    model = two(net)
    start = "MMFullyShard: the optimizer must have parameters of the sharded model"
    refused(RuntimeError, start, lambda: model.train_step(batch(0, world, rank), stale))
