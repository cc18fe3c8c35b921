"""The work of the ranks of test_separate_distributed.py."""

from __future__ import annotations

from typing import Any

import torch
from distributed_ranks import case
from mmengine_adversaries import Model, all_values, alone, optimizers, wrappers
from mmengine_training import batch
from torch import nn

from pyparallel import DataContainer, mmengine
from pyparallel.mmengine import MMDistributedDataParallel as DDP
from pyparallel.mmengine import MMSeparateDistributedDataParallel as Separate


@case
def adversaries(rank: int, world: int) -> Any:
    """Twenty steps, and eight micro-steps in groups of three."""
    result = {}
    plans = {
        "each": [[number] for number in range(20)],
        "groups": [[0, 1, 2], [3, 4, 5], [6, 7]],
    }
    for name, groups in plans.items():
        model = Model()
        expected = alone(model, world, groups)
        with torch.no_grad():  # which the constructor has to undo
            for each in (*model.parameters(), *model.buffers()):
                each.add_(rank)
        both = optimizers(model)
        wrapped = Separate(model, device_ids=[rank])
        total = sum(map(len, groups))
        wrapper = wrappers(both, len(groups[0]), total)
        for number in range(total):
            logged = wrapped.train_step(batch(number, world, rank), wrapper)
        result[name] = {
            "deviation": (all_values(model) - expected).abs().max().item(),
            "values": all_values(model),
            "logged": list(logged),
        }
    return result


@case
def structure(rank: int, world: int) -> Any:
    model = Model()
    wrapped = Separate(model, find_unused_parameters=True, detect_anomalous_params=True)
    kinds = {name: type(child).__name__ for name, child in model._modules.items()}
    data = {"inputs": DataContainer([torch.ones(2, 5)], stack=True)}
    with torch.no_grad():
        predicted = [wrapped.val_step(data), wrapped.test_step(data)]
        expected = model.fake(torch.ones(2, 5))
    wrapped.eval()
    modes = [wrapped.training, model.training, model.critic.module[0].training]
    wrapped.train()
    modes += [wrapped.training, model.training, model.critic.module[0].training]
    try:
        wrapped(torch.ones(1))
    except NotImplementedError as error:
        message = str(error)
    old = vars(model.critic).get("broadcast_buffers")  # before torch 2.13
    syncs_buffers = vars(model.critic).get("forward_sync_buffers", old)
    return {
        "kinds": kinds,
        "shared": model.generator is model.same_generator,
        "options": [
            (model.critic.find_unused_parameters, syncs_buffers),
            model.critic.detect_anomalous_params,
        ],
        "keys": list(wrapped.state_dict()),
        "predicted": [torch.equal(each, expected) for each in predicted],
        "modes": modes,
        "message": message,
        "is wrapper": [
            mmengine.is_model_wrapper(each) for each in (wrapped, wrapped.module)
        ],
    }


class Pair(nn.Module):
    """Has two children and its own parameter; the loss uses all."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(2, 2), nn.Linear(2, 1)
        self.own = nn.Parameter(torch.ones(2))

    def train_step(self, data: Any, optim_wrapper: Any) -> Any:
        return self.other(self.one(data) * self.own).square().sum()


def flags(model: Pair) -> list[bool]:
    return [each.require_backward_grad_sync for each in (model.one, model.other)]


@case
def no_sync(rank: int, world: int) -> Any:
    """Gradients after a pass inside, and after one more outside."""
    model = Pair()
    wrapped = Separate(model)
    data = torch.full((1, 2), 1.0 + rank)
    found = []
    with wrapped.no_sync():
        inside = [
            child.require_backward_grad_sync for child in (model.one, model.other)
        ]
        wrapped.train_step(data, None).backward()
    found.append([p.grad.clone() for p in model.parameters()])
    wrapped.train_step(data, None).backward()
    found.append([p.grad.clone() for p in model.parameters()])
    after = flags(model)
    assert isinstance(model.one, DDP)
    return {"gradients": found, "flags": inside + after}
