"""A training in its own process, which runs an epoch for each message."""

from __future__ import annotations

import multiprocessing
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..loader.epochs import cost_of_process
from .pipelines import PIPELINES
from .ways import WAYS, order_of


class Epoch(NamedTuple):
    """An epoch: its time, the part of it without a batch, the losses, the samples."""

    way: str
    seconds: float
    waiting: float
    losses: list[float]
    samples: list[int]


# ------------------------------------------------------------------ the other process
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
        self.about = WAYS[way]
        arguments = other, pipeline, way, folder, quick
        self._process = context.Process(target=serve, args=arguments)
        self._process.start()
        other.close()

    def __call__(self) -> Epoch:
        """Run an epoch."""
        self._pipe.send(True)
        found: Epoch = self._pipe.recv()
        return found

    def cpu(self) -> float:
        """Return the CPU seconds of the process and its workers until now."""
        return sum(cost_of_process(pid)[1] for pid in self._pids())

    def peak(self) -> float:
        """Run an epoch, and return the most memory of the process and its workers.

        The pages of files count for nothing, because other processes share them.
        """
        most, done = 0, threading.Event()

        def watch() -> None:
            nonlocal most
            ends = False
            while not ends:
                ends = done.wait(0.02)
                most = max(most, sum(map(_memory, self._pids())))

        thread = threading.Thread(target=watch)
        thread.start()
        try:
            self()
        finally:
            done.set()
            thread.join()
        return most

    def close(self) -> None:
        """End the process and its workers."""
        if self._process.is_alive():
            self._pipe.send(False)
        self._process.join()

    def _pids(self) -> list[int]:
        found = [self._process.pid]
        for pid in found:
            for task in Path(f"/proc/{pid}/task").glob("*/children"):
                found += map(int, task.read_text().split())
        return found


def _memory(pid: int) -> int:
    """Return the bytes of a process that are no file's; each holder has its part."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:  # it has ended
        return 0
    sizes = {name: rest for name, _, rest in (each.partition(":") for each in lines)}
    return sum(int(sizes[k].split()[0]) << 10 for k in ("Pss_Anon", "Pss_Shmem"))
