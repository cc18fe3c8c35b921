"""A model of mmengine's protocol, and the same training in one process.

`alone` uses no wrapper, only plain torch on the whole batch.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.functional import mse_loss

from pyparallel import mmengine

SAMPLES = 4  # of one rank in one batch


class Net(mmengine.BaseModel):
    """Two layers; the squared error is the loss."""

    def __init__(self, data_preprocessor: Any = None, unused: bool = False) -> None:
        super().__init__(data_preprocessor=data_preprocessor)
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3))
        self.unused = nn.Linear(2, 2) if unused else None
        self.seen: list[Any] = []

    def forward(self, inputs: Any, targets: Any = None, mode: str = "tensor") -> Any:
        self.seen.append((type(inputs).__name__, mode))
        if mode == "loss":
            return {"loss_square": mse_loss(self.body(inputs), targets), "acc": ONE}
        return self.body(inputs)


ONE = torch.ones(())


def batch(step: int, world: int, rank: int | None = None) -> dict[str, torch.Tensor]:
    """Return the batch of one rank; with None, the batch of all ranks."""
    generator = torch.Generator().manual_seed(step)
    inputs = torch.randn(SAMPLES * world, 5, generator=generator)
    targets = torch.randn(SAMPLES * world, 3, generator=generator)
    part = slice(None) if rank is None else slice(rank, None, world)
    # Ours makes strided tensors contiguous; torch rounds their products differently.
    return {
        "inputs": inputs[part].contiguous(),
        "targets": targets[part].contiguous(),
    }


def gradients(module: nn.Module) -> torch.Tensor:
    zeros = [torch.zeros_like(p) if p.grad is None else p.grad
             for p in module.parameters()]  # fmt: skip
    return torch.cat([grad.detach().reshape(-1) for grad in zeros])


def values(module: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1) for p in module.parameters()])


Record = list[tuple[torch.Tensor, torch.Tensor]]  # gradients and values of each step


def sgd(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)


def alone(
    body: nn.Module,
    world: int,
    groups: Sequence[Sequence[int]],
    clip: Callable[[Any], Any] | None = None,
    dtype: torch.dtype | None = None,
    parts: int = 1,
) -> Record:
    """Train in one process: a step for each group, with the mean of its losses.

    Args:
        body: the layers; they are copied.
        world: the number of parts of a batch.
        groups: the numbers of the batches in each group.
        clip: clips the gradients of parameters.
        dtype: autocast to this dtype.
        parts: split each batch into this number of parts, with a backward pass each.
    """
    body = copy.deepcopy(body)
    optimizer = sgd(body)
    record = []
    for group in groups:
        optimizer.zero_grad()
        for number in group:
            for part in range(parts):
                each = batch(number, world, part if parts > 1 else None)
                with torch.autocast("cpu", dtype, enabled=dtype is not None):
                    loss = mse_loss(body(each["inputs"]), each["targets"])
                (loss / (len(group) * parts)).backward()
        if clip is not None:
            clip(body.parameters())
        found = gradients(body)
        optimizer.step()
        record.append((found, values(body)))
    return record


def recorded(body: nn.Module, optimizer: torch.optim.Optimizer) -> Record:
    """Return a list that gets the gradients and values of every step."""
    record: Record = []
    found: list[torch.Tensor] = []
    optimizer.register_step_pre_hook(lambda *_: found.append(gradients(body)))
    optimizer.register_step_post_hook(
        lambda *_: record.append((found[-1], values(body)))
    )
    return record


def deviation(one: Record, other: Record) -> float:
    """Return the largest difference of any gradient or value; inf for other steps."""
    if len(one) != len(other):
        return float("inf")
    return max(
        (a - b).abs().max().item()
        for pair in zip(one, other, strict=True)
        for a, b in zip(*pair, strict=True)
    )
