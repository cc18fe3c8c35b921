"""Batches of similar sizes: ``python -m benchmarks.sampler --help``.

Compares the padding, the balance between ranks and the plan time of ways to batch
samples of different sizes. It also trains the detector of examples/ragged_digits.py
with random batches and with batches of similar sizes. Padding and balance are exact,
times are not. It writes the records as JSON, and makes the tables beside them and a
chart from the JSON alone.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from . import command, environment, growth, report, sampler_ways
from ._harness import Record, compare
from .case import QUICK, Curves, Effort
from .report import _head, _row, duration

ROOT = Path(__file__).resolve().parents[1]
#: The window of random batches, and that of batches of similar sizes.
WINDOWS = {"random": 1, "similar": 50}
_SECTIONS = ("cases", "window", "growth", "training")


def measure(
    effort: Effort, only: Sequence[str] = _SECTIONS, quick: bool = False
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
                found["cases"] = [_case(each, effort) for each in _cases(number)]
            elif section == "window":
                windows = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000]
                windows = windows[:4] if quick else windows
                found["window"] = sampler_ways.padding_by_window(number, windows)
            elif section == "growth":
                found["growth"] = [growth.measure(_plans(quick), effort)]
            else:
                found["training"] = list(train(quick))
    finally:
        torch.set_num_threads(before)
    found["machine"]["load average after"] = environment.load()
    return found


def _cases(number: int) -> list[sampler_ways.Case]:
    return sampler_ways.cases(number)


def _case(case: sampler_ways.Case, effort: Effort) -> Record:
    contenders = [way.contender() for way in case.ways]
    note = f"{case.note}; {len(case.sizes)} samples"
    found = compare(case.title, contenders, note=note, **effort._asdict())
    for row, way in zip(found["rows"], case.ways, strict=True):
        if plan := way.plan_ranks or way.plan:
            row["figures"] = sampler_ways.figures(case.sizes, plan())
    return found


def _plans(quick: bool) -> Curves:
    numbers = [1_000, 3_000, 10_000] if quick else [10_000, 100_000, 1_000_000]
    note = "synthetic: the sizes of COCO and sentences; 8 ranks, windows of 50 batches"
    return Curves("plan", note, "samples", numbers, sampler_ways.plan_contenders)


def train(quick: bool) -> Iterator[Record]:
    """Yield the result of each training run, with each seed and window in turn."""
    options = "--scenes 64 --epochs 1 --val-scenes 8" if quick else "--epochs 5"
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    for seed in range(1 if quick else 3):
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
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sampler")
    parser.description = __doc__
    parser.add_argument(
        "--only", nargs="+", choices=_SECTIONS, help="run these sections"
    )
    parser.add_argument(
        "--quick", action="store_true", help="a test run without figures"
    )
    parser.add_argument("--json", type=Path, help="file of the records")
    command.add_options(parser)
    args = parser.parse_args(arguments)

    def records() -> Record:
        effort = QUICK if args.quick else Effort(rounds=10, max_seconds=30.0)
        run = measure(effort, args.only or _SECTIONS, args.quick)
        date = datetime.date.today().isoformat()
        return {"date": date, "quick": args.quick, "runs": [run]}

    results, path, folder = command.obtain(args, "sampler-cpu", records)
    command.write_page(path, page(results))
    from . import charts  # needs matplotlib

    charts.draw_windows(results, folder / "charts")


if __name__ == "__main__":
    main()
