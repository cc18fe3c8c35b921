"""The work of four ranks in test_distributed_faults.py; rank 1 has the fault."""

from __future__ import annotations

import functools
import os
import signal
from collections.abc import Callable
from typing import Any

import torch
from fault_ranks import SHORT, STEPS, STRUCK_STEP, WORLD, Rank, in_rank
from mmengine_training import Net, batch, values
from torch import nn

from pyparallel import DataLoader

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


def _renamed(net: Net) -> None:
    net.other = net.body
    net.body = None


def _ignored(net: Net) -> None:
    net.expert = nn.Linear(1, 1)
    net._ddp_params_and_buffers_to_ignore = ["expert.weight", "expert.bias"]


@case
def builds_another_model(rank: Rank) -> Any:
    """Build several different models, and then train equal models.

    Returns the errors, if each left the model unchanged, and the trained parameters.
    """
    found = []
    for change in (_wider, _deeper, _frozen, _all_frozen, _double, _buffer):
        net = Net()
        if rank.faulty:
            change(net)
        for parameter in net.parameters():
            nn.init.constant_(parameter, rank.rank)
        with torch.no_grad():
            try:
                rank.training(net)
            except Exception as error:
                found.append([type(error).__name__, str(error)])
        found[-1].append(bool((values(net) == rank.rank).all()))
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
