"""The work of four ranks in test_distributed_faults.py; rank 1 has the fault.

The cases about gradients compare two to four ranks with plain torch on all data. They
return the largest differences of gradients, relative to those above 1.
"""

from __future__ import annotations

import copy
import functools
import os
import signal
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.parameter import is_lazy

from pyparallel import DataLoader
from tests.support.mmengine.training import Net, batch, gradients, values
from tests.support.ranks.fault_ranks import (
    FAULTY,
    SHORT,
    STEPS,
    STRUCK_STEP,
    WORLD,
    Rank,
    Training,
    in_rank,
)

Case = Callable[[Rank], Any]
CASES: dict[str, Callable[[Rank], None]] = {}


def case(function: Case) -> Case:
    """Make a function a case, under its name."""
    CASES[function.__name__] = functools.partial(in_rank, function)
    return function


# --------------------------------------------------------------------- lost ranks
def _signalled(rank: Rank, number: int, timeout: float | None = None) -> None:
    """Send rank 1 a signal in its backward pass, while the others wait for its sum."""
    training = rank.training()

    def strike(gradient: torch.Tensor) -> None:
        rank.strike()
        os.kill(os.getpid(), number)

    for step, data in rank.batches():
        if step == STRUCK_STEP:
            if timeout is not None:
                rank.wait_at_most(timeout)
            if rank.faulty:
                next(training.net.parameters()).register_hook(strike)
        training.step(data)


@case
def is_killed(rank: Rank) -> None:
    _signalled(rank, signal.SIGKILL)


def is_killed_and_nobody_ends(rank: Rank) -> None:
    """As above, but ranks that get the error stay, and keep their connections."""
    in_rank(lambda rank: _signalled(rank, signal.SIGKILL, SHORT), rank)
    rank.wait_for_the_others()


CASES["is_killed_and_nobody_ends"] = is_killed_and_nobody_ends


@case
def is_stopped(rank: Rank) -> None:
    _signalled(rank, signal.SIGSTOP, SHORT)


@case
def raises_in_forward(rank: Rank) -> None:
    training = rank.training()

    def fail(*_: Any) -> None:
        rank.strike()
        raise ZeroDivisionError("in the forward pass")

    for step, data in rank.batches():
        if rank.faulty and step == STRUCK_STEP:
            training.net.body.register_forward_pre_hook(fail)
        training.step(data)


@case
def raises_in_the_dataset(rank: Rank) -> None:
    class Samples(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return STEPS

        def __getitem__(self, index: int) -> Any:
            if rank.faulty and index == STRUCK_STEP:
                rank.strike()
                raise OSError(f"sample {index} cannot be read")
            return batch(index, WORLD, rank.rank)

    training = rank.training()
    loader: Any = DataLoader(Samples(), batch_size=None)
    for rank.number, data in enumerate(loader):
        training.step(data)


# -------------------------------------------------------------- ranks out of step
def _fewer(rank: Rank, timeout: float | None = None) -> None:
    """Train for five steps, but on rank 1 for two steps."""
    training = rank.training()
    for step, data in rank.batches():
        if step == STRUCK_STEP:
            if timeout is not None:
                rank.wait_at_most(timeout)
            if rank.faulty:
                rank.strike()
                return
        training.step(data)


@case
def has_fewer_batches(rank: Rank) -> None:
    _fewer(rank)


@case
def has_fewer_batches_and_waits(rank: Rank) -> None:
    _fewer(rank, SHORT)
    torch.distributed.barrier()


@case
def has_fewer_batches_and_goes_on(rank: Rank) -> None:
    _fewer(rank, SHORT)
    rank.wait_for_the_others()


def _joined(rank: Rank, **options: Any) -> list[float]:
    training = rank.training()
    with training.model.join(**options):
        for step, data in rank.batches():
            if rank.faulty and step == STRUCK_STEP:
                rank.strike()
                break
            training.step(data)
    trained: list[float] = values(training.net).tolist()
    return trained


@case
def has_fewer_batches_in_join(rank: Rank) -> list[float]:
    return _joined(rank)


@case
def has_fewer_batches_in_a_join_that_throws(rank: Rank) -> list[float]:
    return _joined(rank, throw_on_early_termination=True)


def _out_of_step(rank: Rank, what: str, buffers: bool = False) -> list[float]:
    """Let rank 1 leave out or add something in one step; 5 of 5 steps on the others."""
    net = Net()
    if buffers:
        net.body.append(nn.BatchNorm1d(3))
    training = rank.training(net)
    for step, data in rank.batches():
        if step == STRUCK_STEP:
            if buffers:
                rank.wait_at_most(SHORT)
            if rank.faulty and what == "step":
                continue
            if rank.faulty:
                rank.strike()
                training.loss(data)
            if rank.faulty and what == "backward":
                continue
        training.step(data)
    if rank.faulty and not buffers:
        rank.strike()
    trained: list[float] = values(training.net).tolist()
    return trained


for name, what in {
    "skips_a_step": "step",
    "skips_a_backward": "backward",
    "runs_forward_twice": "forward",
}.items():
    part = functools.partial(_out_of_step, what=what)
    CASES[name] = functools.partial(in_rank, part)
    part = functools.partial(_out_of_step, what=what, buffers=True)
    CASES[f"{name}_with_buffers"] = functools.partial(in_rank, part)
# Its next step broadcasts buffers like the others, so buffers make no difference.
del CASES["skips_a_step_with_buffers"]


# --------------------------------------------------------------- different models
@case
def all_leave_parameters_out(rank: Rank) -> None:
    training = rank.training(Net(unused=True))
    for step, data in rank.batches():
        if rank.faulty and step == 1:
            rank.strike()
        training.step(data)


@case
def leaves_parameters_out(rank: Rank) -> None:
    net = Net(unused=True)
    training = rank.training(net)

    def use(module: nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        assert net.unused is not None
        return output + net.unused(torch.zeros(1, 2)).sum()

    if not rank.faulty:
        net.body.register_forward_hook(use)
    for step, data in rank.batches():
        if rank.faulty and step == 1:
            rank.strike()
        training.step(data)


def _wider(net: Net) -> None:
    net.body[2] = nn.Linear(7, 3)


def _deeper(net: Net) -> None:
    net.body.append(nn.PReLU(3))  # its weight has the shape of the previous tensor


def _frozen(net: Net) -> None:
    net.body[0].bias.requires_grad_(False)


def _all_frozen(net: Net) -> None:
    net.requires_grad_(False)


def _double(net: Net) -> None:
    net.body[2].double()


def _buffer(net: Net) -> None:
    net.register_buffer("mean", torch.zeros(3))


def _nothing(net: Net) -> None:
    names = [name for name, _ in net.named_parameters()]
    net._ddp_params_and_buffers_to_ignore = names


def _lazy(net: Net) -> None:
    net.body[2] = nn.LazyLinear(3)


def _renamed(net: Net) -> None:
    net.other = net.body
    net.body = None


def _ignored(net: Net) -> None:
    net.expert = nn.Linear(1, 1)
    net._ddp_params_and_buffers_to_ignore = ["expert.weight", "expert.bias"]


CHANGES = (_wider, _deeper, _frozen, _all_frozen, _double, _buffer, _nothing, _lazy)


@case
def builds_another_model(rank: Rank) -> Any:
    """Build several different models, and then train equal models.

    Returns the errors, if each left the model unchanged, and the trained parameters.
    """
    found = []
    for change in CHANGES:
        net = Net()
        if rank.faulty:
            change(net)
        known = [each for each in net.parameters() if not is_lazy(each)]
        for parameter in known:
            nn.init.constant_(parameter, rank.rank)
        with torch.no_grad():
            try:
                rank.training(net)
            except Exception as error:
                found.append([type(error).__name__, str(error)])
        found[-1].append(all(bool((each == rank.rank).all()) for each in known))
    training = rank.training()
    for _, data in rank.batches():
        training.step(data)
    return [found, values(training.net).tolist()]


@case
def builds_another_model_that_will_do(rank: Rank) -> Any:
    """Build models that differ only in tensors that DDP does not send."""
    taken = []
    for change in (_renamed, _ignored):
        net = Net()
        if rank.faulty:
            change(net)
        rank.training(net)
        taken.append(change.__name__)
    net = Net()
    if rank.faulty:
        _double(net)
    rank.training(net, init_sync=False)
    taken.append("init_sync")
    return taken


@case
def builds_another_model_in_a_part_of_the_ranks(rank: Rank) -> Any:
    """Let ranks 3 and 2, in a separate group, build different models."""
    group = torch.distributed.new_group([2, 3])
    if rank.rank < 2:
        return None
    net = Net()
    if rank.rank == 3:
        _wider(net)
    try:
        rank.training(net, process_group=group)
    except ValueError as error:
        return str(error)
    return None


# ---------------------------------------------------------------- gradients of ranks
DTYPES = {"float32": torch.float32, "float64": torch.float64}


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
def accumulated_without_sync(rank: Rank) -> Any:
    return in_worlds(rank, functools.partial(_accumulated, rank))


def _accumulated(
    rank: Rank, training: Training, world: int, dtype: torch.dtype
) -> float:
    """Train on steps of one and of three batches; the last batch of each reduces."""
    largest, body = 0.0, training.net.body
    for steps in (range(1), range(1, 4), range(4, 7)):
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
    return in_worlds(rank, functools.partial(_joined_gradients, rank, initial=True))


@case
def joined_and_divided_by_who_is_left(rank: Rank) -> Any:
    return in_worlds(rank, functools.partial(_joined_gradients, rank, initial=False))


def _joined_gradients(
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
