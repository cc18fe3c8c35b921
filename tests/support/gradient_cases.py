"""Gradients of two, three and four ranks, compared with plain torch on all data.

Each case returns the largest differences of gradients, relative to those above 1.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from fault_ranks import FAULTY, WORLD, Rank, Training, in_rank
from mmengine_training import Net, batch, gradients, values
from torch import nn
from torch.nn.functional import mse_loss

CASES: dict[str, Callable[[Rank], None]] = {}
DTYPES = {"float32": torch.float32, "float64": torch.float64}


def case(function: Callable[[Rank], Any]) -> Callable[[Rank], Any]:
    """Make a function a case, under its name."""
    CASES[function.__name__] = functools.partial(in_rank, function)
    return function


def data_of(step: int, world: int, rank: int | None, dtype: torch.dtype) -> Any:
    """Return the batch of one rank; with None, the batch of all ranks."""
    return {key: each.to(dtype) for key, each in batch(step, world, rank).items()}


def plain(body: nn.Module, parts: Iterable[Any], weight: float) -> torch.Tensor:
    """Return the weighted sum of the gradients of some batches, without a wrapper."""
    body = copy.deepcopy(body)
    body.zero_grad()
    for part in parts:
        (mse_loss(body(part["inputs"]), part["targets"]) * weight).backward()
    return gradients(body)


def deviation(found: torch.Tensor, expected: torch.Tensor) -> float:
    return ((found - expected).abs() / expected.abs().clamp(min=1)).max().item()


def in_worlds(rank: Rank, train: Callable[[Training, int, torch.dtype], float]) -> Any:
    """Train in groups of two, three and four ranks; return the deviations of each."""
    found: dict[str, dict[str, float]] = {name: {} for name in DTYPES}
    for world in range(2, WORLD + 1):
        group = dist.new_group(list(range(world)))
        for name, dtype in DTYPES.items():
            if rank.rank < world:
                training = rank.training(Net().to(dtype), process_group=group)
                found[name][str(world)] = train(training, world, dtype)
    return found


@case
def every_step(rank: Rank) -> Any:
    return in_worlds(rank, functools.partial(_accumulated, rank, count=1))


@case
def accumulated_without_sync(rank: Rank) -> Any:
    return in_worlds(rank, functools.partial(_accumulated, rank, count=3))


def _accumulated(
    rank: Rank, training: Training, world: int, dtype: torch.dtype, count: int
) -> float:
    """Train on six batches; ``count`` of them form a step, whose last one reduces."""
    largest, body = 0.0, training.net.body
    for first in range(0, 6, count):
        steps = range(first, first + count)
        whole = [data_of(each, world, None, dtype) for each in steps]
        expected = plain(body, whole, 1.0)
        training.optimizer.zero_grad()
        *parts, last = (data_of(each, world, rank.rank, dtype) for each in steps)
        with training.model.no_sync():
            for part in parts:
                training.loss(part).backward()
        training.loss(last).backward()
        largest = max(largest, deviation(gradients(body), expected))
        training.optimizer.step()
    return largest


@case
def joined(rank: Rank) -> Any:
    return in_worlds(rank, functools.partial(_joined, rank, initial=True))


@case
def joined_and_divided_by_who_is_left(rank: Rank) -> Any:
    return in_worlds(rank, functools.partial(_joined, rank, initial=False))


def _joined(
    rank: Rank, training: Training, world: int, dtype: torch.dtype, initial: bool
) -> float:
    """Train on four batches, but on rank 1 on two batches."""
    largest, body = 0.0, training.net.body
    with training.model.join(divide_by_initial_world_size=initial):
        for step in range(2 if rank.faulty else 4):
            there = [n for n in range(world) if step < 2 or n != FAULTY]
            weight = 1 / (world if initial else len(there))
            parts = (data_of(step, world, n, dtype) for n in there)
            expected = plain(body, parts, weight)
            training.optimizer.zero_grad()
            training.loss(data_of(step, world, rank.rank, dtype)).backward()
            largest = max(largest, deviation(gradients(body), expected))
            training.optimizer.step()
    trained = [torch.empty_like(values(body)) for _ in range(world)]
    dist.all_gather(trained, values(body), group=training.model.process_group)
    return largest if all(map(torch.equal, trained, trained[1:])) else float("inf")
