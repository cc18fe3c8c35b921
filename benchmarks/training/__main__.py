"""Trainings: ``python -m benchmarks.training --help``.

An epoch goes from files to a trained model. Each way to load the batches has its own
process, which waits while another one is measured. All ways of an equal order must give
equal losses. The command writes the records as JSON, and the tables beside them.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from .. import command, environment, report
from .._harness import QUICK, Contender, Effort, Record, compare, ratio
from ..report import _head, _row, duration
from .epochs import Epoch, Trainer
from .pipelines import PIPELINES
from .predicted import predict, table
from .ways import ABSENT, TORCH, WAYS


# ------------------------------------------------------------------------- measurement
def measure(effort: Effort, only: str = "", quick: bool = False) -> Record:
    """Run the pipelines whose title contains ``only``; return the record of the run."""
    missing = {
        way.package: ABSENT[way.package]
        for way in WAYS.values()
        if way.package in ABSENT
    }
    if missing and not quick:
        sys.exit(
            "benchmarks.training must compare all contenders, but these are missing: "
            f"{missing}. Run: make bench-training"
        )
    record: Record = {"machine": environment.machine(), "cases": []}
    record["machine"]["threads"] = "1"
    with tempfile.TemporaryDirectory() as root:
        for name, make in PIPELINES.items():
            folder = Path(root) / name
            folder.mkdir()
            pipeline = make(folder, quick)
            if only in pipeline.title:
                print(f"{pipeline.title} ...", file=sys.stderr, flush=True)
                ways = {
                    way: about
                    for way, about in WAYS.items()
                    if about.fits(pipeline) and about.package not in missing
                }
                trainers = {way: Trainer(name, way, folder, quick) for way in ways}
                case = measure_case(pipeline.title, pipeline.note, trainers, effort)
                case["samples"] = len(pipeline.dataset)
                case["predicted"] = predict(name, folder, quick)
                record["cases"].append(case)
    record["machine"]["load average after"] = environment.load()
    return record


def measure_case(
    title: str, note: str, trainers: dict[str, Trainer], effort: Effort
) -> Record:
    """Compare the ways of a pipeline; end their processes."""
    try:
        case = compare(
            title,
            [Contender(k, each, each.about.kind) for k, each in trainers.items()],
            note=note,
            rounds=effort.rounds,
            max_seconds=effort.max_seconds,
            min_seconds=0,
            timer=timed,
            differ=differ,
        )
        for row in case["rows"]:
            row["memory"] = trainers[row["name"]].peak()
        return case
    finally:
        for each in trainers.values():
            each.close()


def timed(call: Any, repeats: int) -> dict[str, float]:
    """Run an epoch; return its time, its waits and its CPU time."""
    before = call.cpu()
    epoch = call()
    cpu = call.cpu() - before
    return {"seconds": epoch.seconds, "waiting": epoch.waiting, "cpu": cpu}


def differ(first: Epoch, other: Epoch) -> str:
    """Return what differs that must be equal: the samples, and losses of one order."""
    if first.samples != other.samples:
        return " in the samples of the epoch"
    way = WAYS[other.way]
    if not way.ordered:
        return ""
    if way.exact:
        return "" if first.losses == other.losses else " in the losses"
    near = torch.allclose(*map(torch.tensor, (first.losses, other.losses)), rtol=1e-3)
    return "" if near else " in the losses, by more than 0.1 %"


# -------------------------------------------------------------------------------- page
_NOTE = (
    "Each row is an epoch from files to a trained model: the files are read and "
    "decoded, batches are made, and a net is trained on them by one thread of the CPU. "
    "Two workers load batches. *Faster* is the time of torch's loader with the collate "
    "function that its users write, divided by the time of the row: the ratio of the "
    "medians, and the quartiles of all rounds. *Waiting* is the share of the epoch in "
    "which the training has no batch. CPU time and memory are those of all processes; "
    "the memory is the peak, without the pages of files. Rows of one order of samples "
    "have equal losses, which is checked first."
)


def page(results: Record) -> str:
    """Return the page of a record."""
    lines = ["# Epochs of training, from files to a trained model", ""]
    lines += [f"Measured on {results['date']}. {_NOTE}"]
    for run in results["runs"]:
        for case in run["cases"]:
            lines += ["", f"## {case['title'].capitalize()}", "", f"{case['note']}; "]
            lines[-1] += f"{case['rounds']} rounds."
            lines += ["", *_table(case)]
        lines += ["", "## Predicted by pyparallel profile", "", *table(run)]
        lines += ["", *report.loss_table(report.losses(run)), "", *report.machine(run)]
    return "\n".join(lines) + "\n"


def _table(case: Record) -> Iterator[str]:
    titles = ["", "samples/s", "quartiles", "faster", "waiting", "CPU", "memory"]
    yield from _head(titles)
    rows = {row["name"]: row for row in case["rows"]}
    for name, row in rows.items():
        speeds = [f"{case['samples'] / row[key]:.0f}" for key in ("q3", "q1")]
        faster = ratio(rows[TORCH]["seconds"], row["seconds"])
        spread = f"{faster['q1']:.2f} - {faster['q3']:.2f}"
        yield _row(
            [
                f"**{name}**" if row["kind"] == "ours" else name,
                f"{case['samples'] / row['median']:.0f}",
                " - ".join(speeds),
                f"{faster['of_medians']:.2f} ({spread})" if name != TORCH else "1",
                f"{100 * row['waiting']['median'] / row['median']:.0f} %",
                duration(row["cpu"]["median"]),
                f"{row['memory'] / 1e6:.0f} MB",
            ]
        )


def main(arguments: list[str] | None = None) -> None:
    """Measure or read records, and write the page."""
    parser = command.parser("training", __doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument(
        "--max-seconds",
        type=float,
        default=60.0,
        help="limit of each pipeline; no round starts after it",
    )
    args = parser.parse_args(arguments)
    effort = QUICK if args.quick else Effort(args.rounds, args.max_seconds)
    run = partial(measure, effort, args.only, args.quick)
    complaints = report.complaints
    results, folder = command.report_run(args, "training", run, page, complaints)
    from .. import charts  # needs matplotlib

    charts.draw_epochs(results, folder / "charts")


if __name__ == "__main__":
    main()
