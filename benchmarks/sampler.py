"""Batches of similar sizes: ``python -m benchmarks.sampler --help``.

Compares the padding, the balance between ranks and the plan time of ways to batch
samples of different sizes. It also trains the detector of examples/ragged_digits.py
with random batches and with batches of similar sizes. Padding and balance are exact,
times are not. It writes the records as JSON, and makes the tables beside them and a
chart from the JSON alone.

The algorithms of torchvision, mmdet and transformers are written here, because their
packages are large and their samplers short. lhotse is a package.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import BatchSampler, RandomSampler

from pyparallel import SizeBatcher, SizeBatchSampler

from . import command, environment, growth, many_ranks, report
from ._harness import QUICK, Contender, Curves, Effort, Record, compare
from .peers import ABSENT
from .report import _head, _row, duration
from .sample_sizes import audio_lengths, coco_sizes, demo_sizes, sentence_lengths

try:
    from lhotse import MonoCut
    from lhotse.dataset import DynamicBucketingSampler
except ImportError as error:
    MonoCut = DynamicBucketingSampler = None
    ABSENT["lhotse"] = str(error)

ROOT = Path(__file__).resolve().parents[1]
#: The window of random batches, and that of batches of similar sizes.
WINDOWS = {"random": 1, "similar": 50}
_SECTIONS = ("cases", "window", "growth", "ranks", "training")

BATCH_SIZE = 16
#: The number of ranks for which the balance is calculated.
NUM_REPLICAS = 8
Batches = list[list[int]]

OURS, LARGE = "ours, window=50", "ours, window=500"
RANDOM = "random"
#: Frames of audio in a second.
_RATE = 100


@dataclass(frozen=True)
class Way:
    """A way to make batches.

    Attributes:
        name: as shown in the table.
        kind: as of `Contender`.
        plan: returns all batches of an epoch, for one rank; None if its package is not
            installed.
        plan_ranks: returns all batches for `NUM_REPLICAS` ranks, step by step, if it
            differs from ``plan``.
    """

    name: str
    kind: str
    plan: Callable[[], Batches] | None
    plan_ranks: Callable[[], Batches] | None = None

    def contender(self) -> Contender:
        """Return the way for a comparison: all batches must have the same samples."""
        return Contender(
            self.name,
            self.plan,
            self.kind,
            lambda batches: sorted(itertools.chain.from_iterable(batches)),
        )


@dataclass(frozen=True)
class Case:
    """A distribution of sizes and the ways to batch it.

    Attributes:
        title: the title of its table.
        note: a description of the sizes.
        sizes: ``(n, d)``.
        ways: the ways.
    """

    title: str
    note: str
    sizes: Any
    ways: list[Way]


def cases(number: int) -> list[Case]:
    """Return all cases, with a number of samples, and a tenth of it for a stream."""
    found = []
    for title, note, sizes_of in [
        ("COCO", "synthetic: photographs as in COCO, resized for 1333x800", coco_sizes),
        ("demo", "synthetic: scenes as of examples/ragged_digits.py", demo_sizes),
        ("sentences", "synthetic: log-normal numbers of tokens", sentence_lengths),
        ("audio", "synthetic: gamma-distributed numbers of frames", audio_lengths),
    ]:
        sizes = sizes_of(number).reshape(number, -1)
        found.append(Case(title, note, sizes, _ways(sizes)))
    frames = audio_lengths(number // 10)
    budget = int(24 * frames.mean())
    note = f"the same frames as a stream, batches of {budget} frames with padding"
    ways = list(_stream_ways(frames, budget))
    return [*found, Case("audio stream", note, frames[:, None], ways)]


def _ways(sizes: Any) -> list[Way]:
    area = sizes.prod(axis=1)
    ways = [
        _ours(OURS, sizes, window=50),
        _ours(LARGE, sizes, window=500),
        Way(RANDOM, "limit", lambda: random_batches(len(sizes))),
        Way("transformers", "peer", lambda: length_grouped(area.tolist())),
    ]
    if sizes.shape[1] == 2:
        ratio = sizes[:, 1] / sizes[:, 0]
        bins = 2 ** np.linspace(-1, 1, 7)
        two, eight = (ratio > 1).tolist(), np.digitize(ratio, bins).tolist()
        ways.append(Way("mmdet, 2 groups", "peer", lambda: grouped(two)))
        ways.append(Way("torchvision, 8 groups", "peer", lambda: grouped(eight)))
    return ways


def _ours(name: str, sizes: Any, window: int) -> Way:
    def plan(num_replicas: int = 1) -> Batches:
        samplers = [
            SizeBatchSampler(
                sizes, BATCH_SIZE, window=window, num_replicas=num_replicas, rank=rank
            )
            for rank in range(num_replicas)
        ]
        steps = zip(*samplers, strict=True)
        return list(itertools.chain.from_iterable(steps))

    return Way(name, "ours", plan, lambda: plan(NUM_REPLICAS))


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


def _stream_ways(frames: Any, budget: int) -> Iterator[Way]:
    lengths = frames.tolist()
    order = list(range(len(lengths)))
    random.Random(0).shuffle(order)

    def ours(window: int) -> Batches:
        return list(
            SizeBatcher(order, lengths.__getitem__, max_padded=budget, window=window)
        )

    yield Way("ours, window=50", "ours", lambda: ours(50))
    yield Way("ours, window=800", "ours", lambda: ours(800))
    if MonoCut is None:
        for buffer_size in (1200, 20000):
            yield Way(f"lhotse, buffer_size={buffer_size}", "peer", None)
        return
    cuts = [MonoCut(str(i), 0.0, lengths[i] / _RATE, channel=0) for i in order]

    def theirs(buffer_size: int) -> Batches:
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

    yield Way("lhotse, buffer_size=1200", "peer", lambda: theirs(1200))
    yield Way("lhotse, buffer_size=20000", "peer", lambda: theirs(20000))


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


def plan_contenders(number: int) -> list[Contender]:
    """Return plans of images and of texts, for the growth of their cost."""
    rows = {"images (h, w)": coco_sizes(number), "sentences": sentence_lengths(number)}

    def plan(sizes: Any) -> int:
        return len(SizeBatchSampler(sizes, BATCH_SIZE, num_replicas=8, rank=0))

    return [
        Contender(f"ours, {name}", lambda sizes=sizes: plan(sizes), "ours")
        for name, sizes in rows.items()
    ]


def padding_by_window(number: int, windows: Sequence[int]) -> Record:
    """Return the padding of each distribution for each window."""
    series = []
    for case in cases(number)[:4]:
        shares = [
            SizeBatchSampler(case.sizes, BATCH_SIZE, window=window)
            .report()
            .planned.padding
            for window in windows
        ]
        assert all(map(math.isfinite, shares))
        series.append({"name": case.title, "padding": shares})
    return {"windows": list(windows), "number": number, "series": series}


def measure(
    effort: Effort,
    only: Sequence[str] = _SECTIONS,
    quick: bool = False,
    seeds: int = 1,
) -> Record:
    """Run sections by their names; return the record of the run."""
    number = 2_000 if quick else 100_000
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    found: Record = {"machine": environment.machine(), "cases": []}
    try:
        for section in _SECTIONS:
            if section not in only:
                continue
            print(f"{section} ...", file=sys.stderr, flush=True)
            if section == "cases":
                found["cases"] = [_case(each, effort) for each in cases(number)]
            elif section == "window":
                windows = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000]
                windows = windows[:4] if quick else windows
                found["window"] = padding_by_window(number, windows)
            elif section == "growth":
                found["growth"] = [growth.measure(_plans(quick), effort)]
            elif section == "ranks":
                size = (20_000, 20) if quick else (10_000_000, 1000)
                found["ranks"] = many_ranks.measure(*size)
            else:
                found["training"] = list(train(quick, seeds))
    finally:
        torch.set_num_threads(before)
    found["machine"]["load average after"] = environment.load()
    return found


def _case(case: Case, effort: Effort) -> Record:
    contenders = [way.contender() for way in case.ways]
    note = f"{case.note}; {len(case.sizes)} samples"
    found = compare(case.title, contenders, note=note, **effort._asdict())
    for row, way in zip(found["rows"], case.ways, strict=True):
        if plan := way.plan_ranks or way.plan:
            row["figures"] = figures(case.sizes, plan())
    return found


def _plans(quick: bool) -> Curves:
    numbers = [1_000, 3_000, 10_000] if quick else [10_000, 100_000, 1_000_000]
    note = "synthetic: the sizes of COCO and sentences; 8 ranks, windows of 50 batches"
    return Curves("plan", note, "samples", numbers, plan_contenders)


def train(quick: bool, seeds: int) -> Iterator[Record]:
    """Yield the result of each training run, with each seed and window in turn."""
    options = "--scenes 64 --epochs 1 --val-scenes 8" if quick else "--epochs 5"
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    for seed in range(1 if quick else seeds):
        for name, window in WINDOWS.items():
            with tempfile.TemporaryDirectory() as folder:
                script = str(ROOT / "examples" / "ragged_digits.py")
                arguments = f"--min-f1 0 --seed {seed} --window {window} --out {folder}"
                subprocess.run(
                    [sys.executable, script, *options.split(), *arguments.split()],
                    env=environ,
                    check=True,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                )
                summary = json.loads(Path(folder, "summary.json").read_text())
            kept = ("epoch_seconds", "padding", "f1")
            yield {
                "batches": name,
                "seed": seed,
                **{key: summary[key] for key in kept},
            }


def page(results: Record) -> str:
    """Return the page of a record."""
    lines = ["# Batches of similar sizes\n", report.head(results)]
    for run in results["runs"]:
        for case in run["cases"]:
            lines += ["", f"## {case['title']}", "", f"{case['note']}.", ""]
            lines += _case_table(case)
        if "window" in run:
            lines += ["", "## Padding by window", "", *_window_table(run["window"])]
        if "growth" in run:
            lines += ["", "## Time of a plan", "", *report.growth_table(run["growth"])]
        if "ranks" in run:
            lines += ["", "## Many ranks", "", *many_ranks.tables(run["ranks"])]
        if "training" in run:
            lines += ["", "## Training", "", *_training(run["training"])]
        if run["cases"]:
            lines += ["", *report.loss_table(report.losses(run))]
        lines += ["", *report.machine(run), ""]
    return "\n".join(lines)


def _case_table(case: Record) -> Iterator[str]:
    titles = ["", "padding", "balance, mean", "balance, p99", "batches", "plan"]
    ours = next(row["name"] for row in case["rows"] if row["kind"] == "ours")
    yield from _head([*titles, "quartiles", f"relative to {ours}"])
    for row in case["rows"]:
        if not row["installed"]:
            yield _row([row["name"], "not installed", *[""] * 6])
            continue
        found = row["figures"]
        over = row["over"].get(ours)
        yield _row(
            [
                row["name"],
                f"{found['padding']:.3f}",
                f"{found['balance_mean']:.3f}",
                f"{found['balance_p99']:.3f}",
                str(found["num_batches"]),
                duration(row["median"]),
                f"{duration(row['q1'])} - {duration(row['q3'])}",
                f"{over['of_medians']:.3g} ({over['q1']:.3g} - {over['q3']:.3g})"
                if over
                else "1",
            ]
        )


def _window_table(found: Record) -> Iterator[str]:
    yield from _head(["sizes", *map(str, found["windows"])])
    for each in found["series"]:
        yield _row([each["name"], *(f"{share:.4f}" for share in each["padding"])])


def _training(runs: Sequence[Record]) -> Iterator[str]:
    yield (
        "The detector of examples/ragged_digits.py, one process and one thread. The "
        "epochs are the medians of a run."
    )
    yield ""
    yield from _head(["batches", "seed", "padding", "epoch", "F1"])
    for run in runs:
        yield _row(
            [
                run["batches"],
                str(run["seed"]),
                f"{run['padding']:.3f}",
                duration(statistics.median(run["epoch_seconds"])),
                f"{run['f1']:.3f}",
            ]
        )
    yield ""
    ratios, scores = training_ratios(runs), _scores(runs)
    yield (
        f"An epoch with random batches takes {statistics.median(ratios):.3g} "
        f"({min(ratios):.3g} - {max(ratios):.3g}) times as long. F1 is "
        f"{_range(scores['similar'])} with similar sizes, and "
        f"{_range(scores['random'])} with random batches."
    )


def training_ratios(runs: Sequence[Record]) -> list[float]:
    """Return the time of an epoch of random batches relative to similar ones."""
    found: dict[str, list[float]] = {name: [] for name in WINDOWS}
    for run in runs:
        found[run["batches"]].append(statistics.median(run["epoch_seconds"]))
    pairs = zip(found["random"], found["similar"], strict=True)
    return [random / similar for random, similar in pairs]


def _scores(runs: Sequence[Record]) -> dict[str, list[float]]:
    names = WINDOWS
    return {n: [run["f1"] for run in runs if run["batches"] == n] for n in names}


def _range(values: Sequence[float]) -> str:
    return f"{min(values):.3f} to {max(values):.3f}"


def main(arguments: list[str] | None = None) -> None:
    """Measure or read records, write the page and the chart."""
    parser = command.parser("sampler", __doc__, only=False)
    parser.add_argument(
        "--only", nargs="+", choices=_SECTIONS, help="run these sections"
    )
    text = "of the training; a seed takes 3 minutes"
    parser.add_argument("--seeds", type=int, default=1, help=text)
    args = parser.parse_args(arguments)
    effort = QUICK if args.quick else Effort(rounds=10, max_seconds=10.0)
    run = partial(measure, effort, args.only or _SECTIONS, args.quick, args.seeds)
    results, folder = command.report_run(args, "sampler", run, page)
    from . import charts  # needs matplotlib

    charts.draw_windows(results, folder / "charts")


if __name__ == "__main__":
    main()
