"""The work of two ranks in `test_bad_inputs_ranks`: one gets bad batches."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from pyparallel import DataContainer, MMDistributedDataParallel, collate, scatter
from tests.support.errors.bad_inputs import Case, Refused
from tests.support.errors.bad_inputs_all import CASES
from tests.support.ranks.distributed_ranks import case

STEPS = 3


class Stepping(nn.Module):
    """A model with buffers, whose steps all call forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))

    def forward(self, data: Any) -> torch.Tensor:
        result: torch.Tensor = self.layers(data["x"]).square().sum()
        return result

    train_step = forward
    val_step = forward


def good_batch(step: int, rank: int) -> Any:
    generator = torch.Generator().manual_seed(10 * step + rank)
    rows = [torch.rand(3, generator=generator) for _ in range(5)]
    return collate([{"x": DataContainer(row, True, pad_dims=None)} for row in rows], 5)


def bad_batches() -> list[Case]:
    """Return the batches that also fail with a single target."""
    return [
        case
        for name, case in CASES.items()
        if name.startswith("batches/")
        and isinstance(case.expected, Refused)
        and _is_refused(lambda case=case: scatter(case.make(), [-1]))
    ]


def _is_refused(call: Any) -> bool:
    try:
        call()
    except (TypeError, ValueError):
        return True
    return False


def num_collectives() -> int:
    """Return the number of collectives that this rank has joined."""
    group: Any = dist.group.WORLD
    return int(group._get_sequence_number_for_group())


@case
def refused_batches(rank: int, world: int) -> Any:
    """Train beside a reference model; rank 1 gets bad batches before every step."""
    torch.manual_seed(0)
    undisturbed = MMDistributedDataParallel(Stepping())
    model = MMDistributedDataParallel(Stepping())
    model.load_state_dict(undisturbed.state_dict())
    bad = bad_batches() if rank == 1 else []
    calls = [model.train_step, model.val_step, model]
    tried = refused = joined = 0
    for step in range(STEPS):
        before = num_collectives()
        for each in bad:
            tried += len(calls)
            refused += sum(_is_refused(lambda c=c, b=each: c(b.make())) for c in calls)
        joined += num_collectives() - before
        for wrapper in (undisturbed, model):
            wrapper.zero_grad()
            wrapper.train_step(good_batch(step, rank)).backward()
            with torch.no_grad():
                for parameter in wrapper.parameters():
                    parameter -= 0.1 * parameter.grad
    total = torch.tensor([rank + 1])
    dist.all_reduce(total)
    states = [list(each.state_dict().values()) for each in (undisturbed, model)]
    return {
        "bad": len(bad),
        "refused": (refused, tried),
        "joined": joined,
        "total": int(total),
        "states": states,
    }
