"""Cases of PreDataLoader: the share of the data's time during the GPU's work."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch.utils.data

from pyparallel import DataLoader, PreDataLoader

from .._harness import Contender, Goal
from ..loader.epochs import Make, Run, Ways, loader
from ..loader.overlap import (
    COMPUTE,
    DATA,
    FETCH,
    Inflated,
    add_hidden,
    fetch_alone,
    step_alone,
    with_step,
)
from .case import GpuCase
from .rings import Sent
from .target import DryRun

_BATCH = 4
#: The time for data in steps, for the case where no prefetching can hide it.
_LONG_DATA = 2.0
_TORCHS = "DataLoader(pin_memory) + .to(non_blocking)"


def cases(quick: bool) -> list[GpuCase]:
    """Return the cases; ``quick`` shrinks them."""
    nbytes = 1 << 12 if quick else 1 << 20
    note = (
        "synthetic: 4 images of 1 MB, inflated by zlib, which lets go of the GIL; a "
        "step is a kernel that sleeps, calibrated so that data take {} of it, and "
        "a wait for it, as for a loss that is printed; times are of a step"
    )
    return [
        GpuCase(
            "a step of the device and its data",
            note.format(DATA),
            partial(_contenders, 3 if quick else 12, nbytes, DATA),
            [
                Goal(COMPUTE, 1 / 1.02),
                Goal(f"{_TORCHS}, no workers", 1.2),
                Goal(f"{_TORCHS}, 4 workers", 1 / 1.01),
            ],
            finish=add_hidden,
        ),
        GpuCase(
            "data that take longer than the step",
            note.format(_LONG_DATA),
            # The last of the 24 steps of an epoch has no data to hide.
            partial(_contenders, 3 if quick else 24, nbytes, _LONG_DATA),
            [Goal(FETCH, 1 / 1.05), Goal(f"{_TORCHS}, no workers", 1.3)],
        ),
        GpuCase(
            "the slowest calls of next()",
            note.format(DATA) + "; times are the 99th percentile of an epoch's calls",
            partial(_contenders, 3 if quick else 100, nbytes, DATA, slowest=True),
            [Goal(f"{_TORCHS}, 4 workers")],
        ),
    ]


def _slowest(step: Callable[[Any], None], loader: Any) -> float:
    """Return the 99th percentile of the times of ``next()`` after the first."""
    batches, seconds = iter(loader), []
    batch = next(batches)
    for _ in range(len(loader) - 1):
        step(batch)
        start = time.perf_counter()
        batch = next(batches)
        seconds.append(time.perf_counter() - start)
    return statistics.quantiles(seconds, n=100, method="inclusive")[98]


def _contenders(
    num: int, nbytes: int, data: float, where: DryRun, slowest: bool = False
) -> list[Contender]:
    """Compare loaders before a step; ``data`` is the time for data in steps."""
    items = Inflated(num * _BATCH, nbytes)
    workers = 1 if where.dry else 4

    def made(kind: Any, workers: int, pin: bool = False) -> Any:
        pin = pin and not where.dry
        return loader(kind, items, _BATCH, workers, pin_memory=pin)()

    def sent(kind: Any, workers: int, pin: bool) -> Make:
        def send(batch: Any) -> Any:
            return batch.to(where.device, non_blocking=True)

        return lambda: Sent(made(kind, workers, pin), send)

    torchs: Any = torch.utils.data.DataLoader
    plain = sent(torchs, 0, False)
    ahead = partial(PreDataLoader, device=None if where.dry else where.index)
    seconds = min(fetch_alone(plain()) for _ in range(3))
    seconds *= num / (num - 1) / data  # fetch_alone leaves one batch out

    def step(batch: Any = None) -> None:
        where.sleep(seconds)
        where.sync()

    def way(name: str, make: Make, run: Run, kind: str = "peer") -> Contender:
        return Ways(run, costs=False).peer(name, make, kind)

    run = partial(_slowest if slowest else with_step, step)
    many = f"{workers} worker{'s' * (workers > 1)}"
    in_ours = f"ours around our DataLoader, {many}"
    found = [
        way("ours", lambda: ahead(made(torchs, 0)), run, "ours"),
        way(in_ours, lambda: ahead(made(DataLoader, workers)), run, "ours"),
        way(f"{_TORCHS}, no workers", sent(torchs, 0, True), run),
        way(f"{_TORCHS}, {many}", sent(torchs, workers, True), run),
    ]
    if not slowest:
        found.append(way(COMPUTE, plain, partial(step_alone, step), "limit"))
        found.append(way(FETCH, plain, fetch_alone, "limit"))
    return found
