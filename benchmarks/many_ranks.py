"""Many ranks in one process, which change their number ten times in an epoch.

Each rank is a `SizeBatchSampler` that loads the state of another rank, from JSON. They
share one planner, because all of them calculate the same plan.
"""

from __future__ import annotations

import copy
import functools
import json
import time
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from pyparallel import SizeBatchSampler
from pyparallel.sampler.ranks import Ranks

from . import report
from ._harness import Record
from .report import duration
from .sample_sizes import coco_sizes, sentence_lengths

#: The numbers of ranks of the parts of an epoch, in percent of the first one.
PARTS = (100, 90, 102, 50, 99, 100, 75, 80, 64, 96, 100)


def measure(number: int, num_replicas: int) -> Record:
    """Measure plans of up to a number of samples, and simulate an epoch of it.

    Both have texts and images, with one dimension and two. Plans have a place for each
    sample, or for ten samples.
    """
    plans, epochs = [], []
    for size in (number // 100, number // 10, number):
        for name, sizes, limit in _ways(size):
            for plan_size in (None, size // 10):
                row = {"name": name, "samples": size, "plan_size": plan_size}
                plans.append(row | plan(sizes, plan_size, **limit))
    cheapest, *_, dearest = _ways(number)
    for name, sizes, limit in (cheapest, dearest):
        for plan_size in (None, number // 10):
            row = {"name": name, "plan_size": plan_size}
            epochs.append(row | simulate(sizes, num_replicas, plan_size, **limit))
    return {"samples": number, "ranks": num_replicas, "plans": plans, "epochs": epochs}


def _ways(number: int) -> Iterator[tuple[str, Any, dict[str, int]]]:
    """Yield names, sizes and limits of about 16 and 24 samples in a batch."""
    for name, sizes in (
        ("texts", sentence_lengths(number)[:, None].astype(np.int32)),
        ("images", coco_sizes(number).astype(np.int32)),
    ):
        sizes.flags.writeable = False
        mean = float(sizes.prod(axis=1, dtype=np.float64).mean())
        yield f"{name}, batch_size=16", sizes, {"batch_size": 16}
        yield f"{name}, max_padded", sizes, {"max_padded": int(24 * mean)}


def plan(sizes: Any, plan_size: int | None, **limit: Any) -> Record:
    """Return the CPU time and the peak of memory of the first plan of a sampler."""

    def run() -> tuple[float, int, int]:
        begin = time.process_time()
        sampler = SizeBatchSampler(sizes, **limit, plan_size=plan_size)
        made = time.process_time()
        next(iter(sampler))
        return made - begin, time.process_time() - made, sampler.sizes.nbytes

    made, first, nbytes = run()
    tracemalloc.start()
    run()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return {"make": made, "first": first, "sizes": nbytes, "peak": peak}


def simulate(
    sizes: Any, num_replicas: int, plan_size: int | None, **limit: Any
) -> Record:
    """Run an epoch on all ranks, and count its samples.

    Returns:
        The numbers of samples that were used once, not at all and again, the balance of
        the steps, and the CPU times of a rank until its first batch: of the epoch, and
        the longest and the last one after a change of the number of ranks.
    """
    sampler = SizeBatchSampler(sizes, **limit, plan_size=plan_size)
    planner = sampler._planner
    share = functools.lru_cache(maxsize=4)(planner.plan)
    object.__setattr__(planner, "plan", share)  # each plan is made once, not by rank
    counts = np.zeros(len(sizes), dtype=np.int64)
    ratios: list[float] = []
    starts: list[float] = []
    state, used = sampler.state_dict(), 0
    for part, percentage in enumerate(PARTS):
        share.cache_clear()
        world = max(1, num_replicas * percentage // 100)
        state = json.loads(json.dumps(state))
        begin = time.process_time()
        next(iter(_rank_of(sampler, world, 0, state)), None)
        starts.append(time.process_time() - begin)
        ranks = [_rank_of(sampler, world, rank, state) for rank in range(world)]
        for step in zip(*map(iter, ranks), strict=True):  # all have equally many
            samples = np.fromiter((i for batch in step for i in batch), np.int64)
            np.add.at(counts, samples, 1)
            ratios.append(_balance(sizes, samples, [len(batch) for batch in step]))
            used += len(samples)
            if part < len(PARTS) - 1 and used * len(PARTS) >= len(sizes) * (part + 1):
                break
        states = [rank.state_dict() for rank in ranks]
        assert all(each == states[0] for each in states)
        state = states[-1]
    return {
        "steps": len(ratios),
        "once": int((counts == 1).sum()),
        "lost": int((counts == 0).sum()),
        "again": int((counts > 1).sum()),
        "balance_mean": float(np.mean(ratios)),
        "balance_p99": float(np.quantile(ratios, 0.99)),
        "first": starts[0],
        "resume": max(starts[1:]),
        "last_resume": starts[-1],
    }


def _rank_of(sampler: SizeBatchSampler, world: int, rank: int, state: Any) -> Any:
    """Return a sampler of a rank, as a program makes it."""
    found = copy.copy(sampler)
    found._ranks, found._plan = Ranks("", world, rank), None
    found.load_state_dict(state)
    return found


def _balance(sizes: Any, samples: Any, lengths: list[int]) -> float:
    """Return the largest padded size of the batches of a step over their mean."""
    starts = np.cumsum(lengths) - lengths
    largest = np.maximum.reduceat(sizes[samples], starts, axis=0)
    costs = largest.prod(axis=1, dtype=np.float64) * lengths
    return float(costs.max() / costs.mean())


def tables(found: Record) -> Iterator[str]:
    """Yield the lines of the tables of a record."""

    def part(key: str, form: Callable[[Any], str]) -> report.Column:
        return key.replace("_", " "), lambda row: form(row[key])

    named: list[report.Column] = [
        ("sizes and limit", lambda row: row["name"]),
        (
            "`plan_size`",
            lambda row: f"{row['plan_size']:,}" if row["plan_size"] else "None",
        ),
    ]
    yield "The CPU time of a rank until its first batch, and its peak of memory."
    yield "Sizes are read-only, so they are not copied."
    yield ""
    counts = [part("samples", "{:,}".format)]
    memory = [part(key, lambda n: f"{n / 2**20:.1f} MiB") for key in ("sizes", "peak")]
    times = [part("make", duration), part("first", duration)]
    yield from report.table(found["plans"], [*named, *counts, *times, *memory])
    yield ""
    yield f"{found['ranks']:,} ranks, {found['samples']:,} samples, and ten changes of"
    yield "the number of ranks in one epoch. A resume is the CPU time of a rank until"
    yield "its first batch after a change, of the last change and of the slowest one."
    yield ""
    counts = [part(key, "{:,}".format) for key in ("steps", "once", "lost", "again")]
    balance = [part(key, "{:.3f}".format) for key in ("balance_mean", "balance_p99")]
    times = [part("last_resume", duration), part("resume", duration)]
    yield from report.table(found["epochs"], [*named, *counts, *balance, *times])
