"""A training in its own process, which runs an epoch for each message."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from .. import processes
from .pipelines import PIPELINES
from .ways import WAYS, order_of


class Epoch(NamedTuple):
    """An epoch of a way.

    Attributes:
        way: its name.
        seconds: its time.
        waiting: the part of the time without a batch.
        losses: of the steps.
        samples: their numbers, sorted.
        cpu: CPU seconds of the process and its workers.
        faults: minor page faults of the process.
    """

    way: str
    seconds: float
    waiting: float
    losses: list[float]
    samples: list[int]
    cpu: float = 0.0
    faults: int = 0


def serve(pipe: Any, pipeline: str, way: str, folder: Path, quick: bool) -> None:
    """Run an epoch for each message, and send its `Epoch`; end with the last one."""
    torch.set_num_threads(1)
    about = PIPELINES[pipeline](folder, quick)
    loader = WAYS[way].make(about, order_of(about))
    while pipe.recv():
        pipe.send(train(way, loader, about.training()))


def train(way: str, loader: Any, step: Callable[[Any], torch.Tensor]) -> Epoch:
    """Train a model for an epoch."""
    losses, samples, waiting = [], [], 0.0
    begin = last = time.perf_counter()
    for batch in loader:
        waiting += time.perf_counter() - last
        losses.append(step(batch).item())
        samples += batch["index"].tolist()
        last = time.perf_counter()
    end = time.perf_counter()
    return Epoch(way, end - begin, waiting + end - last, losses, sorted(samples))


class Trainer:
    """A way to load a pipeline, in its own process."""

    def __init__(self, pipeline: str, way: str, folder: Path, quick: bool) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, other = context.Pipe()
        arguments = other, pipeline, way, folder, quick
        self._process = context.Process(target=serve, args=arguments)
        self._process.start()
        other.close()

    def __call__(self) -> Epoch:
        """Run an epoch."""
        faults, cpu = self._cost()
        self._pipe.send(True)
        found: Epoch = self._pipe.recv()
        faults_after, cpu_after = self._cost()
        return found._replace(cpu=cpu_after - cpu, faults=faults_after - faults)

    def _cost(self) -> tuple[int, float]:
        """Return page faults of the process, and CPU seconds of its workers as well."""
        pid = self._process.pid
        assert pid is not None
        costs = [processes.cost(each) for each in processes.family(pid)]
        return costs[0][0], sum(cpu for _, cpu in costs)

    def facts(self) -> dict[str, int]:
        """Run an epoch, and return the most memory of the process and its workers."""
        assert self._process.pid is not None
        return {"memory": processes.peak(self, self._process.pid)}

    def close(self) -> None:
        """End the process and its workers."""
        if self._process.is_alive():
            self._pipe.send(False)
        self._process.join()
