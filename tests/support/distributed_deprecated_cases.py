"""Cases of test_distributed_deprecated.py, which run on several ranks."""

from __future__ import annotations

from typing import Any

import torch
from distributed_ranks import case
from torch import nn

from pyparallel.mmcv.distributed_deprecated import MMDistributedDataParallel


class Mixed(nn.Module):
    """State of many kinds, different on every rank."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        torch.manual_seed(rank)
        self.weight = nn.Parameter(torch.rand(3, 4))
        self.transposed = nn.Parameter(torch.rand(5, 2).t())
        self.double_precision = nn.Parameter(torch.rand(3, dtype=torch.float64))
        self.tied = self.weight
        self.frozen = nn.Parameter(torch.rand(2), requires_grad=False)
        self.register_buffer("steps", torch.tensor(rank))
        self.register_buffer("mask", torch.rand(9) > 0.5)
        self.register_buffer("half_precision", torch.rand(3).half())
        self.register_buffer("brain", torch.rand(3).bfloat16())
        self.register_buffer("complex", torch.rand(2, dtype=torch.complex64))
        self.register_buffer("short", torch.full((3,), rank, dtype=torch.int16))
        self.register_buffer("empty", torch.zeros(0, 3))
        self.register_buffer("absent", None)
        self.register_buffer("hidden", torch.rand(4), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.weight @ x).sum()

    def get_extra_state(self) -> str:
        return "not a tensor"

    def set_extra_state(self, state: str) -> None:
        pass

    def tensors(self) -> dict[str, torch.Tensor]:
        state = dict(self.named_parameters()) | dict(self.named_buffers())
        return {name: tensor.detach().clone() for name, tensor in state.items()}


OPTIONS: dict[str, dict[str, Any]] = {
    "one bucket": {},
    "tiny buckets": {"bucket_cap_mb": 1e-6},
    "no buffers": {"broadcast_buffers": False},
}


@case
def wrapped_state(rank: int, world: int) -> Any:
    result = {}
    for name, options in OPTIONS.items():
        model = Mixed(rank)
        before = model.tensors()
        MMDistributedDataParallel(model, **options)
        result[name] = (before, model.tensors())
    return result


@case
def gradients(rank: int, world: int) -> Any:
    model = Mixed(rank)
    MMDistributedDataParallel(model)(torch.full((4,), rank + 1.0)).backward()
    return model.weight.grad
