"""Epochs of a loader, the unit for timing loaders, and the costs of an epoch."""

from __future__ import annotations

import gc
import os
import resource
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset

from .. import processes
from .._harness import (
    AS_LOADED,
    IN_PYTHON,
    MIN_ROUNDS,
    Case,
    Contender,
    Goal,
    Record,
    ratio,
    summarise,
)

#: Makes a loader.
Make = Callable[[], Any]
#: Iterates over a loader once; returns the time to record.
Run = Callable[[Any], float]


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


def loader(
    kind: Any, items: Any, batch_size: int | None, workers: int, **options: Any
) -> Make:
    """Return a function that makes a loader, with forked workers that wait."""
    if workers:
        options |= {"persistent_workers": True, "multiprocessing_context": "fork"}
    return partial(kind, items, batch_size, num_workers=workers, **options)


class Epochs:
    """One epoch for each call, with persistent workers that wait after its end.

    No worker runs between two calls, so that loaders can be measured in turn.

    Args:
        make: creates the loader. Its workers start with the first epoch.
        run: iterates over the loader once; returns the time to record.
        batch: returns the part of a batch to compare.
    """

    def __init__(self, make: Make, run: Run, batch: Callable[[Any], Any]) -> None:
        self._make, self._run, self._batch = make, run, batch
        self._loader: Any = None
        self.seconds = 0.0

    @property
    def loader(self) -> Any:
        """The loader, created at first use."""
        if self._loader is None:
            self._loader = self._make()
        return self._loader

    def __call__(self) -> Epochs:
        """Run an epoch, and record its time."""
        self.seconds = self._run(self.loader)
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

    def facts(self) -> Record:
        """Run two more epochs; return the costs of a batch other than time."""
        loader = self.loader
        workers = pids(loader)
        before, mine = list(map(processes.cost, workers)), _of_this_process()
        self()
        after, mine_after = list(map(processes.cost, workers)), _of_this_process()
        found: Record = {}
        for i, name in enumerate(("faults", "cpu_seconds")):
            spent = sum(b[i] - a[i] for a, b in zip(before, after, strict=True))
            found[f"worker_{name}"] = spent / len(loader)
            found[f"parent_{name}"] = (mine_after[i] - mine[i]) / len(loader)
        found["held"] = held(loader)
        found["worker_rss"] = max((_resident(pid) for pid in workers), default=0)
        found["ring"] = ring(loader)
        return {"facts": found}


def timed(call: Callable[[], Epochs], repeats: int) -> dict[str, float]:
    """Return the mean of the times that epochs record."""
    return {"seconds": sum(call().seconds for _ in range(repeats)) / repeats}


def same(batch: Any) -> Any:
    """Return a batch as it is."""
    return batch


@dataclass(frozen=True)
class Ways:
    """Makes contenders that run their loaders alike.

    Attributes:
        run: iterates over a loader once; returns the time to record.
        batch: returns the part of a batch to compare.
        more: returns more costs of an epoch of a loader that it makes.
        costs: record the costs of a batch other than time.
    """

    run: Run
    batch: Callable[[Any], Any] = same
    more: Callable[[Make], Record] = lambda make: {}
    costs: bool = True

    def peer(
        self, name: str, make: Make | None, kind: str = "peer", python: bool = False
    ) -> Contender:
        """Return a contender of one loader; None if it is not installed."""
        if make is None:
            return Contender(name, None, kind)
        epochs = Epochs(make, self.run, self.batch)

        def facts() -> Record:
            found = epochs.facts()
            if not python:  # a new process uses the extension
                found["facts"].update(self.more(make))
            return found

        return Contender(
            name,
            epochs,
            kind,
            Epochs.batches,
            facts if self.costs else None,
            epochs.close,
            IN_PYTHON if python else None,
        )

    def ours(self, make: Make) -> list[Contender]:
        """Return ours with each backend; each has its own workers."""
        native = make if AS_LOADED["name"] == "native" else None
        return [
            self.peer("ours, native", native, "ours"),
            self.peer("ours, Python", make, "ours", python=True),
        ]


def case(
    title: str,
    note: str,
    contenders: Callable[[], Sequence[Contender]],
    batches: int,
    goals: Sequence[Goal] = (),
    finish: Callable[[Record], None] = lambda record: None,
    min_rounds: int = MIN_ROUNDS,
) -> Case:
    """Return a comparison of epochs of ``batches`` batches."""

    def finished(record: Record) -> None:
        record["batches"] = batches
        finish(record)

    return Case(
        title,
        note,
        contenders,
        goals,
        timed,
        finish=finished,
        min_rounds=min_rounds,
    )


def add_net(floors: dict[str, str], record: Record) -> None:
    """Add to the rows of a case their times above another row, their floor."""
    rows = {row["name"]: row for row in record["rows"] if row["installed"]}
    net = {
        name: [a - b for a, b in zip(rows[name]["seconds"], under, strict=True)]
        for name, floor in floors.items()
        if name in rows
        for under in [rows[floor]["seconds"]]
    }
    for name, values in net.items():
        ours = {each: net[each] for each in net if rows[each]["kind"] == "ours"}
        over = {k: ratio(values, v) for k, v in ours.items() if k != name}
        rows[name]["net"] = {**summarise(values), "over": over}


# ------------------------------------------------------------------------- consumers
def _leaves(tree: Any) -> Iterator[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, dict | list | tuple):
        for value in tree.values() if isinstance(tree, dict) else tree:
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


def per_batch(
    use: Callable[[Any], None] = lambda batch: None,
    clock: Callable[[], float] = time.perf_counter,
) -> Run:
    """Return a run that returns the time of an epoch per batch, with its start."""

    def run(loader: Any) -> float:
        num, start = 0, clock()
        for batch in loader:
            use(batch)
            num += 1
        del batch
        return (clock() - start) / num

    return run


def first_batch(loader: Any) -> float:
    """Return the seconds from ``iter()`` to the first batch."""
    start = time.perf_counter()
    batches = iter(loader)
    next(batches)
    return time.perf_counter() - start


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


def _of_this_process() -> tuple[int, float]:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt, time.process_time()


def _resident(pid: int) -> int:
    """Return the resident bytes of a process, including shared memory."""
    fields = Path(f"/proc/{pid}/statm").read_text().split()
    return int(fields[1]) * resource.getpagesize()
