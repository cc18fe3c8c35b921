"""A GAN for the separate wrapper, and its training in one process.

`alone` uses plain torch on the whole batch.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from mmengine_training import batch
from torch import nn

from pyparallel import mmengine


class Adversaries(nn.Module):
    """Two adversarial networks, a frozen and a shared child, and own parameters."""

    def __init__(self, base: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.generator = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))
        self.critic = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
        self.scale = nn.Parameter(torch.ones(3))  # of the generator's step
        self.shifts = nn.ParameterList([torch.zeros(3)])
        self.same_generator = self.generator
        self.frozen = nn.Linear(3, 3).requires_grad_(False)
        self.activation = nn.ReLU()
        self.register_module("missing", None)
        self.register_buffer("offset", torch.full((3,), 0.5))

    def fake(self, inputs: torch.Tensor) -> torch.Tensor:
        made = self.same_generator(inputs) * self.scale + self.shifts[0]
        return self.frozen(made + self.offset)

    def critic_loss(self, data: Any) -> torch.Tensor:
        fake = self.critic(self.fake(data["inputs"]).detach())
        return (fake - self.critic(data["targets"])).square().mean()

    def generator_loss(self, data: Any) -> torch.Tensor:
        return self.critic(self.fake(data["inputs"])).square().mean()

    def made_parameters(self) -> list[nn.Parameter]:
        return [*self.generator.parameters(), self.scale, *self.shifts]


class Model(Adversaries):
    """The same model with the steps for a runner."""

    def train_step(self, data: Any, optim_wrapper: Any) -> Any:
        with optim_wrapper["critic"].optim_context(self.critic):
            critic_loss = self.critic_loss(data)
        optim_wrapper["critic"].update_params(critic_loss)
        self.critic.requires_grad_(False)
        with optim_wrapper["generator"].optim_context(self.generator):
            generator_loss = self.generator_loss(data)
        optim_wrapper["generator"].update_params(generator_loss)
        self.critic.requires_grad_(True)
        return {"critic": critic_loss.detach(), "generator": generator_loss.detach()}

    def val_step(self, data: Any) -> Any:
        return self.fake(data["inputs"])

    test_step = val_step


def optimizers(model: Adversaries) -> dict[str, torch.optim.Optimizer]:
    return {
        "critic": torch.optim.SGD(model.critic.parameters(), lr=0.05),
        "generator": torch.optim.SGD(model.made_parameters(), lr=0.1, momentum=0.9),
    }


def wrappers(
    optimizers: dict[str, torch.optim.Optimizer], every: int, total: int
) -> mmengine.OptimWrapperDict:
    made = {
        name: mmengine.OptimWrapper(optimizer, accumulative_counts=every)
        for name, optimizer in optimizers.items()
    }
    for wrapper in made.values():
        wrapper.initialize_count_status(None, 0, total)
    return mmengine.OptimWrapperDict(**made)


def alone(model: Adversaries, world: int, groups: list[list[int]]) -> torch.Tensor:
    """Return the values after training in one process; the model does not change."""
    model = copy.deepcopy(model)
    both = optimizers(model)
    for group in groups:
        for number in group:
            data = batch(number, world)
            (model.critic_loss(data) / len(group)).backward()
            if number == group[-1]:
                both["critic"].step()
                both["critic"].zero_grad()
            model.critic.requires_grad_(False)
            (model.generator_loss(data) / len(group)).backward()
            model.critic.requires_grad_(True)
        both["generator"].step()
        both["generator"].zero_grad()
    return all_values(model)


def all_values(model: nn.Module) -> torch.Tensor:
    tensors = [*model.parameters(), *model.buffers()]
    return torch.cat([each.detach().reshape(-1) for each in tensors])
