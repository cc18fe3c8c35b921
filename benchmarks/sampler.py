"""What do batches of similar sizes save?

Compares the padding, the balance between ranks and the plan time of ways to batch
samples of different sizes. Padding and balance are exact, times are not. Trainings with
and without such batches are in `training`.

The algorithms of torchvision, mmdet and transformers are written here, because their
packages are large and their samplers short. lhotse is a package.
"""

from __future__ import annotations

import argparse
import itertools
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.utils.data import BatchSampler, RandomSampler

from pyparallel import SizeBatcher, SizeBatchSampler

from . import many_ranks, report
from ._harness import Case, Contender, Effort, Record
from .command import Question
from .sample_sizes import audio_lengths, coco_sizes, demo_sizes, sentence_lengths

try:
    from lhotse import MonoCut
    from lhotse.dataset import DynamicBucketingSampler
except ImportError:
    MonoCut = DynamicBucketingSampler = None

BATCH_SIZE = 16
#: The number of ranks for which the balance is calculated.
NUM_REPLICAS = 8
Batches = list[list[int]]

#: Frames of audio in a second.
_RATE = 100


def distributions(number: int) -> dict[str, tuple[str, Any]]:
    """Return notes and sizes ``(number, d)`` of samples, by their names."""
    found = {
        "COCO": ("synthetic: photographs as in COCO, resized for 1333x800", coco_sizes),
        "demo": ("synthetic: scenes as of examples/ragged_digits.py", demo_sizes),
        "sentences": ("synthetic: log-normal numbers of tokens", sentence_lengths),
        "audio": ("synthetic: gamma-distributed numbers of frames", audio_lengths),
    }
    return {
        name: (note, sizes_of(number).reshape(number, -1))
        for name, (note, sizes_of) in found.items()
    }


def cases(args: argparse.Namespace) -> Iterator[Case]:
    """Yield all cases; the stream has a tenth of the samples."""
    number = 2_000 if args.quick else 100_000
    for title, (note, sizes) in distributions(number).items():
        yield Case(title, f"{note}; {number} samples", partial(_ways, sizes))
    frames = audio_lengths(number // 10)
    budget = int(24 * frames.mean())
    note = f"the same frames as a stream, batches of {budget} frames with padding"
    ways = partial(_stream_ways, frames, budget)
    yield Case("audio stream", f"{note}; {len(frames)} samples", ways)


def _way(
    name: str,
    sizes: Any,
    plan: Callable[[], Batches] | None,
    kind: str = "peer",
    plan_ranks: Callable[[], Batches] | None = None,
) -> Contender:
    """Return a way to make batches: all ways must batch the same samples.

    Args:
        name: as shown in the table.
        sizes: of the samples.
        plan: returns all batches of an epoch, for one rank; None if its package is not
            installed.
        kind: as of `Contender`.
        plan_ranks: returns all batches for `NUM_REPLICAS` ranks, step by step, if it
            differs from ``plan``.
    """

    def view(batches: Batches) -> list[int]:
        return sorted(itertools.chain.from_iterable(batches))

    def facts() -> Record:
        planned = plan_ranks or plan
        return {"figures": figures(sizes, planned())} if planned else {}

    return Contender(name, plan, kind, view, facts)


def _ways(sizes: Any) -> Iterator[Contender]:
    area = sizes.prod(axis=1)
    for window in (50, 500):
        plan = partial(_ours, sizes, window)
        ranks = partial(plan, NUM_REPLICAS)
        yield _way(f"ours, window={window}", sizes, plan, "ours", ranks)
    yield _way("random", sizes, partial(random_batches, len(sizes)), "limit")
    yield _way("transformers", sizes, partial(length_grouped, area.tolist()))
    if sizes.shape[1] == 2:
        ratio = sizes[:, 1] / sizes[:, 0]
        bins = 2 ** np.linspace(-1, 1, 7)
        two, eight = (ratio > 1).tolist(), np.digitize(ratio, bins).tolist()
        yield _way("mmdet, 2 groups", sizes, partial(grouped, two))
        yield _way("torchvision, 8 groups", sizes, partial(grouped, eight))


def _ours(sizes: Any, window: int, num_replicas: int = 1) -> Batches:
    samplers = [
        SizeBatchSampler(
            sizes, BATCH_SIZE, window=window, num_replicas=num_replicas, rank=rank
        )
        for rank in range(num_replicas)
    ]
    return list(itertools.chain.from_iterable(zip(*samplers, strict=True)))


def random_batches(number: int) -> Batches:
    """Return batches of torch's samplers."""
    generator = torch.Generator().manual_seed(0)
    sampler = RandomSampler(range(number), generator=generator)
    return list(BatchSampler(sampler, BATCH_SIZE, drop_last=False))


def grouped(group_of: Sequence[int]) -> Batches:
    """Return batches of random samples of one group, as torchvision and mmdet do.

    torchvision fills the last batch of each group with repeated samples. Here it is
    smaller.
    """
    order = torch.randperm(len(group_of), generator=torch.Generator().manual_seed(0))
    groups: dict[int, list[int]] = {}
    batches = []
    for index in order.tolist():
        group = groups.setdefault(group_of[index], [])
        group.append(index)
        if len(group) == BATCH_SIZE:
            batches.append(groups.pop(group_of[index]))
    return [*batches, *groups.values()]


def length_grouped(lengths: Sequence[int]) -> Batches:
    """Return batches of ``LengthGroupedSampler``: windows of 50 batches are sorted.

    The longest sample is in the first batch, to fail early if memory is short.
    """
    order = torch.randperm(len(lengths), generator=torch.Generator().manual_seed(0))
    shuffled, size = order.tolist(), 50 * BATCH_SIZE
    windows = [shuffled[i : i + size] for i in range(0, len(shuffled), size)]
    for window in windows:
        window.sort(key=lengths.__getitem__, reverse=True)
    longest = max(range(len(windows)), key=lambda i: lengths[windows[i][0]])
    windows[0][0], windows[longest][0] = windows[longest][0], windows[0][0]
    samples = list(itertools.chain.from_iterable(windows))
    return [samples[i : i + BATCH_SIZE] for i in range(0, len(samples), BATCH_SIZE)]


def _stream_ways(frames: Any, budget: int) -> Iterator[Contender]:
    lengths, sizes = frames.tolist(), frames[:, None]
    order = list(range(len(lengths)))
    random.Random(0).shuffle(order)
    for window in (50, 800):
        make = partial(
            SizeBatcher, order, lengths.__getitem__, max_padded=budget, window=window
        )
        yield _way(f"ours, window={window}", sizes, partial(_planned, make), "ours")
    cuts = MonoCut and [MonoCut(str(i), 0.0, lengths[i] / _RATE, 0) for i in order]
    for size in (1200, 20000):
        lhotse = cuts and partial(_lhotse, cuts, budget, size)
        yield _way(f"lhotse, buffer_size={size}", sizes, lhotse)


def _planned(make: Callable[[], Iterable[list[int]]]) -> Batches:
    return list(make())


def _lhotse(cuts: Sequence[Any], budget: int, buffer_size: int) -> Batches:
    sampler = DynamicBucketingSampler(
        cuts,
        max_duration=budget / _RATE,
        num_buckets=30,
        buffer_size=buffer_size,
        num_cuts_for_bins_estimate=min(10_000, len(cuts)),
        shuffle=True,
        world_size=1,
        rank=0,
    )
    return [[int(cut.id) for cut in batch] for batch in sampler]


def figures(sizes: Any, batches: Batches) -> Record:
    """Return the padding and the balance of batches.

    The balance is the largest padded size of the batches of a step, divided by their
    mean. A step is `NUM_REPLICAS` consecutive batches. The last, incomplete one does
    not count.
    """
    lengths = np.array([len(batch) for batch in batches])
    samples = np.fromiter(itertools.chain.from_iterable(batches), dtype=np.int64)
    starts = np.cumsum(lengths) - lengths
    largest = np.maximum.reduceat(sizes[samples], starts, axis=0)
    costs = largest.prod(axis=1) * lengths
    steps = costs[: len(costs) // NUM_REPLICAS * NUM_REPLICAS].reshape(-1, NUM_REPLICAS)
    balance = steps.max(axis=1) / steps.mean(axis=1) if len(steps) else np.ones(1)
    return {
        "padding": 1 - float(sizes[samples].prod(axis=1).sum() / costs.sum()),
        "balance_mean": float(balance.mean()),
        "balance_p99": float(np.quantile(balance, 0.99)),
        "num_batches": len(batches),
        "largest": float(costs.max()),
    }


# ------------------------------------------------------------------- other measurements
def padding_by_window(args: argparse.Namespace, _: Effort) -> Record:
    """Return the padding of each distribution for each window."""
    number = 2_000 if args.quick else 100_000
    windows = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000][
        : 4 if args.quick else 11
    ]
    series = []
    for name, (_, sizes) in distributions(number).items():
        samplers = [
            SizeBatchSampler(sizes, BATCH_SIZE, window=each) for each in windows
        ]
        shares = [sampler.report().planned.padding for sampler in samplers]
        series.append({"name": name, "padding": shares})
    return {"windows": windows, "number": number, "series": series}


def ranks(args: argparse.Namespace, _: Effort) -> Record:
    """Simulate many ranks that change their number."""
    return many_ranks.measure(*((20_000, 20) if args.quick else (10_000_000, 1000)))


# ------------------------------------------------------------------------------- tables
def columns(case: Record) -> Iterator[report.Column]:
    """Yield the columns for the ways of a case."""

    def figure(key: str) -> Callable[[Record], str]:
        return lambda row: f"{row['figures'][key]:.3f}" if row["installed"] else ""

    def batches(row: Record) -> str:
        return str(row["figures"]["num_batches"]) if row["installed"] else ""

    yield "", report.name_of
    yield "padding", figure("padding")
    yield "balance, mean", figure("balance_mean")
    yield "balance, p99", figure("balance_p99")
    yield "batches", batches
    yield "plan", report.time("median")
    yield "quartiles", report.spread
    ours = next(iter(report.installed(case, "ours")))
    yield f"relative to {ours}", partial(report.ratio, other=ours)


def sections(run: Record) -> Iterator[str]:
    """Yield the other tables of a run."""
    if "window" in run:
        found = run["window"]
        shares: list[report.Column] = [("sizes", lambda row: row["name"])]
        for i, window in enumerate(found["windows"]):
            shares.append((str(window), lambda row, i=i: f"{row['padding'][i]:.4f}"))
        yield from ("### Padding by window", "", *report.table(found["series"], shares))
        yield ""
    if "ranks" in run:
        yield from ("### Many ranks", "", *many_ranks.tables(run["ranks"]), "")


QUESTION = Question(
    "sampler",
    "Batches of similar sizes",
    cases,
    Effort(rounds=10, max_seconds=10.0),
    parts={"window": padding_by_window, "ranks": ranks},
    page={"sections": sections, "columns": columns},
)
