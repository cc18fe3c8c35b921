"""Cases of copies to the host: the results of a step."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

import pyparallel

from .._harness import Contender, Goal
from .case import GpuCase, Made, Rotation
from .target import DryRun
from .transfers import MIB, each

CPU = ".cpu() of each"
QUEUED = ".to('cpu', non_blocking) of each, one wait"
BLOCKING = "ours, to_host"
STARTED = "ours, start_to_host"
#: The kernel that runs beside a copy of 64 MB; the copy takes slightly less time.
_STEP_SECONDS = 1.5e-3


def cases(quick: bool) -> list[GpuCase]:
    """Return the cases; ``quick`` shrinks them."""
    unit = MIB >> 8 if quick else MIB
    milliseconds = _STEP_SECONDS * 1e3
    return [
        GpuCase(
            "64 MB to the host beside a step",
            f"synthetic: 4 float32 tensors; the step is a kernel of {milliseconds:g} "
            "ms, queued behind the results of the step before",
            partial(_beside_step, 16 * unit, 3),
            [Goal(BLOCKING, 1.5), Goal(CPU, 2)],
        ),
        GpuCase(
            "64 small tensors to the host",
            "synthetic: 64 float32 tensors of 1 to 64 values, as losses and "
            "predictions; start_to_host is not waited for",
            partial(_small, 3 if quick else 32),
            [
                Goal(CPU, 5),
                *(Goal(count=name, most=1) for name in ("launches", "copies", "waits")),
            ],
        ),
    ]


def _cpu(tree: Any) -> Any:
    return each(Tensor.cpu, tree)


def _queued(where: DryRun, tree: Any) -> Any:
    got = each(lambda leaf: leaf.to("cpu", non_blocking=True), tree)
    where.sync()
    return got


def _beside_step(nbytes: int, num: int, where: DryRun) -> Made:
    """Compare ways to read results while the next step computes."""
    one = torch.rand(nbytes // 4, device=where.device)
    batches = Rotation([[one + i + j for j in range(4)] for i in range(num)])

    def started(tree: Any) -> Any:
        handle = pyparallel.start_to_host(tree)
        where.sleep(_STEP_SECONDS)
        return handle.get()

    def before_step(read: Callable[[Any], Any]) -> Callable[[], Any]:
        def call(tree: Any) -> Any:
            got = read(tree)
            where.sleep(_STEP_SECONDS)
            return got

        return batches.of(call)

    contenders = [
        Contender(STARTED, batches.of(started), "ours"),
        Contender(BLOCKING, before_step(pyparallel.to_host), "ours"),
        Contender(CPU, before_step(_cpu)),
        Contender(QUEUED, before_step(partial(_queued, where))),
    ]
    return Made(contenders, batches)


def _small(num: int, where: DryRun) -> Made:
    """Compare ways to copy many small tensors to the host."""
    generator = torch.Generator().manual_seed(0)
    sizes = [1 + 7 * i % 64 for i in range(64)]
    turns = []
    for _ in range(num):
        leaves = [torch.rand(n, generator=generator).to(where.device) for n in sizes]
        turns.append({"losses": leaves[:32], "boxes": leaves[32:]})
    batches = Rotation(turns)

    def joined(tree: Any) -> Any:
        leaves = [leaf for group in tree.values() for leaf in group]
        parts = iter(torch.cat(leaves).cpu().split([len(leaf) for leaf in leaves]))
        return {key: [next(parts) for _ in group] for key, group in tree.items()}

    started, done = batches.of(pyparallel.start_to_host), pyparallel.HostCopy.get
    contenders = [
        Contender("ours", batches.of(pyparallel.to_host), "ours"),
        Contender(STARTED, started, "ours", view=done),
        Contender(CPU, batches.of(_cpu)),
        Contender(QUEUED, batches.of(partial(_queued, where))),
        Contender("by hand: cat, .cpu(), split", batches.of(joined)),
    ]
    return Made(contenders, batches)
