"""Epochs of a loader, the unit for timing loaders, and the costs of an epoch."""

from __future__ import annotations

import gc
import os
import resource
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset

from .._harness import Contender, Record
from ..backends import ours


class Counted:
    """A clock that only advances when a contender adds its own measurement."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        """Return the sum of the added measurements."""
        return self.now


class Items(Dataset[Any]):
    """Samples from memory, repeated: fetching one costs no time."""

    def __init__(self, samples: Sequence[Any], num: int) -> None:
        self.samples, self.num = samples, num

    def __len__(self) -> int:
        return self.num

    def __getitem__(self, i: int) -> Any:
        if not 0 <= i < self.num:
            raise IndexError(i)
        return self.samples[i % len(self.samples)]


class Epochs:
    """One epoch for each call, with persistent workers that wait after its end.

    No worker runs between two calls, so that loaders can be measured in turn.

    Args:
        make: creates the loader. Its workers start with the first epoch.
        run: iterates over the loader once; returns the time to add to the clock.
        clock: the clock of the harness.
        batch: returns the part of a batch to compare.
    """

    def __init__(
        self,
        make: Callable[[], Any],
        run: Callable[[Any], float],
        clock: Counted,
        batch: Callable[[Any], Any] = lambda batch: batch,
    ) -> None:
        self._make, self._run, self._clock, self._batch = make, run, clock, batch
        self._loader: Any = None

    @property
    def loader(self) -> Any:
        """The loader, created at first use."""
        if self._loader is None:
            self._loader = self._make()
        return self._loader

    def __call__(self) -> Epochs:
        """Run an epoch."""
        self._clock.now += self._run(self.loader)
        return self

    def batches(self) -> list[Any]:
        """Return copies of an epoch's batches, and end the workers.

        The workers were forked while torch fills new memory with junk, and would keep
        this mode.
        """
        found = [_copy(self._batch(batch)) for batch in self.loader]
        self.close()
        return found

    def close(self) -> None:
        """End the workers."""
        self._loader = None
        gc.collect()

    def facts(self, call: Callable[[], Any]) -> Record:
        """Run two more epochs; return the costs of a batch other than time.

        Args:
            call: runs one of these epochs in the environment of a measurement.
        """
        loader = self.loader
        workers = pids(loader)
        before, mine = list(map(cost_of_process, workers)), _of_this_process()
        call()
        after, mine_after = list(map(cost_of_process, workers)), _of_this_process()
        found: Record = {}
        for i, name in enumerate(("faults", "cpu_seconds")):
            spent = sum(b[i] - a[i] for a, b in zip(before, after, strict=True))
            found[f"worker_{name}"] = spent / len(loader)
            found[f"parent_{name}"] = (mine_after[i] - mine[i]) / len(loader)
        found["held"] = held(loader)
        found["worker_rss"] = max((_resident(pid) for pid in workers), default=0)
        found["ring"] = ring(loader)
        return found


def contenders(
    make: Callable[[Callable[[], Any]], Epochs], loader: Callable[[], Any]
) -> list[tuple[Contender, Epochs]]:
    """Return ours with each backend; each has its own workers."""
    both = make(loader), make(loader)
    return [
        (replace(ours(epochs)[i], view=Epochs.batches), epochs)
        for i, epochs in enumerate(both)
    ]


def in_our_loader(name: str, epochs: Epochs) -> tuple[Contender, Epochs]:
    """Return a contender of our loader with the best available backend."""
    native, python = ours(epochs)
    best = python if native.call is None else native
    return replace(best, name=name, view=Epochs.batches), epochs


def peer(
    name: str, epochs: Epochs | None, kind: str = "peer"
) -> tuple[Contender, Epochs | None]:
    """Return a contender of one loader; None if it is not installed."""
    return Contender(name, epochs, kind, Epochs.batches), epochs


# ------------------------------------------------------------------------- consumers
def _leaves(tree: Any) -> Iterator[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, dict):
        for value in tree.values():
            yield from _leaves(value)
    elif isinstance(tree, list | tuple):
        for value in tree:
            yield from _leaves(value)


def touch_pages(batch: Any) -> None:
    """Read a byte of each page of all tensors, so that this process maps all pages."""
    for leaf in _leaves(batch):
        leaf.view(-1).view(torch.uint8)[::4096].sum()


class CopyWhole:
    """Copies a batch into warm memory, which reads it like a copy to a device."""

    def __init__(self) -> None:
        self._warm = torch.empty(0, dtype=torch.uint8)

    def __call__(self, batch: torch.Tensor) -> None:
        """Copy a batch."""
        source = batch.view(-1).view(torch.uint8)
        if len(source) > len(self._warm):
            self._warm = torch.zeros(len(source), dtype=torch.uint8)
        self._warm[: len(source)].copy_(source)


def per_batch(use: Callable[[Any], None]) -> Callable[[Any], float]:
    """Return a run that returns the seconds of an epoch per batch, with its start."""

    def run(loader: Any) -> float:
        num, start = 0, time.perf_counter()
        for batch in loader:
            use(batch)
            num += 1
        del batch
        return (time.perf_counter() - start) / num

    return run


def _copy(tree: Any) -> Any:
    if isinstance(tree, torch.Tensor):
        return tree.clone()
    if isinstance(tree, dict):
        return {key: _copy(value) for key, value in tree.items()}
    return type(tree)(map(_copy, tree)) if isinstance(tree, list | tuple) else tree


# ----------------------------------------------------------------------- other costs
def pids(loader: Any) -> list[int]:
    """Return the process ids of a loader's workers."""
    workers = getattr(getattr(loader, "_iterator", None), "_workers", ())
    return [worker.pid for worker in workers]


def held(loader: Any) -> Record:
    """Return the descriptors and mappings that this process frees with a batch."""
    counts: dict[str, list[int]] = {"descriptors": [], "mappings": []}
    for batch in loader:
        before = _open_things()
        del batch
        for name, more, less in zip(counts, before, _open_things(), strict=True):
            counts[name].append(more - less)
    return {name: statistics.median(values) for name, values in counts.items()}


def ring(loader: Any) -> Record:
    """Return the memory of a loader's ring, and its hits and misses."""
    inner = getattr(getattr(loader, "_receiver", None), "ring", None)
    if inner is None:
        return {}
    taken = sum(inner.committed(slab) for slab in range(inner.num_slabs))
    stats = loader.stats()
    counts = {"hits": stats.ring_hits, "misses": stats.ring_misses}
    return {"slabs": inner.num_slabs, "nbytes": taken, **counts}


def _open_things() -> tuple[int, int]:
    maps = Path("/proc/self/maps").read_bytes().count(b"\n")
    return len(os.listdir("/proc/self/fd")), maps


def cost_of_process(pid: int) -> tuple[int, float]:
    """Return the minor page faults and the CPU seconds of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    # As clock_getcpuclockid(3), which Python lacks: the CPU time of all threads.
    return int(fields[7]), time.clock_gettime((~pid << 3) | 2)


def _of_this_process() -> tuple[int, float]:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt, time.process_time()


def _resident(pid: int) -> int:
    """Return the resident bytes of a process, including shared memory."""
    fields = Path(f"/proc/{pid}/statm").read_text().split()
    return int(fields[1]) * resource.getpagesize()
