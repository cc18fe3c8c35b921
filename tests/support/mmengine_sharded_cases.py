"""The work of the ranks of test_fully_sharded_distributed.py, on the CPU with gloo."""

from __future__ import annotations

from typing import Any

import torch
from distributed_ranks import case
from mmengine_training import Net, alone, batch, sgd
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.utils import clip_grad_norm_

from pyparallel import mmengine

STEPS = [[number] for number in range(6)]
GROUPS = [[0, 1, 2], [3, 4, 5], [6, 7]]


def train(
    rank: int, world: int, model: Any, groups: Any, **settings: Any
) -> tuple[torch.optim.Optimizer, list[bool]]:
    """Train; return the micro-steps without reduced gradients."""
    optimizer = sgd(model)
    wrapper = mmengine.OptimWrapper(optimizer, len(groups[0]), **settings)
    total = sum(map(len, groups))
    wrapper.initialize_count_status(model, 0, total)
    kept = []
    for number in range(total):
        model.train_step(batch(number, world, rank), wrapper)
        kept.append(all(p.grad is None for p in model.parameters()))
    return optimizer, kept


def whole(model: Any) -> torch.Tensor:
    """Return all parameters of a model of fully_shard."""
    return torch.cat([p.detach().full_tensor().reshape(-1) for p in model.parameters()])


def has_three(module: Any) -> bool:
    return len(list(module.children())) == 3


def norm_clip(parameters: Any) -> Any:
    return clip_grad_norm_(parameters, max_norm=0.2)


@case
def second(rank: int, world: int) -> Any:
    """FSDP2 compared with one process."""
    result: dict[str, Any] = {}
    plans: dict[str, Any] = {
        "plain": (STEPS, {}, None, {}),
        "in groups": (STEPS, {"shard": ["body.0", "body.2"]}, None, {}),
        "by class": (STEPS, {"shard": "Linear"}, None, {}),
        "by function": (
            STEPS,
            {"shard": has_three},
            None,
            {},
        ),
        "accumulated": (GROUPS, {"shard": ["Linear"]}, None, {}),
        "clipped": (STEPS, {}, norm_clip, {"clip_grad": {"max_norm": 0.2}}),
    }
    for name, (groups, options, clip, settings) in plans.items():
        net = Net()
        expected = alone(net.body, world, groups, clip)[-1][1]
        model = mmengine.MMFullyShard(net, **options)
        _, kept = train(rank, world, model, groups, **settings)
        with torch.no_grad():
            inputs = {"inputs": batch(9, world, rank)["inputs"]}
            predicted = [model.val_step(inputs), model.test_step(inputs)]
        result[name] = {
            "deviation": (whole(model) - expected).abs().max().item(),
            "shard": next(model.parameters()).to_local().numel(),
            "kept": kept,
            "predicted": [tuple(each.shape) for each in predicted],
            "keys": list(model.state_dict()),
        }
    result["wrapper"] = mmengine.is_model_wrapper(model)
    return result


@case
def first(rank: int, world: int) -> Any:
    """Compare the older FSDP with one process, on the CPU if selected."""
    result = {}
    for name, groups in (("plain", STEPS), ("accumulated", GROUPS)):
        net = Net()
        expected = alone(net.body, world, groups)[-1][1]
        model = mmengine.MMFullyShardedDataParallel(
            net,
            device_id="cpu",
            sharding_strategy="FULL_SHARD",
            backward_prefetch="BACKWARD_PRE",
            auto_wrap_policy={
                "type": "torch.distributed.fsdp.wrap.size_based_auto_wrap_policy",
                "min_num_params": 30,
            },
        )
        train(rank, world, model, groups)
        parts = sum(
            isinstance(each, FullyShardedDataParallel) for each in model.modules()
        )
        inputs = {"inputs": batch(9, world, rank)["inputs"]}
        with torch.no_grad():
            predicted = model.val_step(inputs)
        with FullyShardedDataParallel.summon_full_params(model):
            values = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
        result[name] = {
            "deviation": (values - expected).abs().max().item(),
            "parts": parts,
            "predicted": tuple(predicted.shape),
        }
    result["wrapper"] = mmengine.is_model_wrapper(model)
    return result
