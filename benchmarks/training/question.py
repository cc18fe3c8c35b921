"""How long does an epoch take, from files to a trained model?

Each way to load the batches has its own process, which waits while another one is
measured. All ways of an equal order must give equal losses.
"""

from __future__ import annotations

import argparse
import atexit
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch

from .. import report
from .._harness import Case, Contender, Effort, Record, ratio
from ..command import Question
from ..environment import is_warm
from ..report import duration
from .epochs import Epoch, Trainer
from .pipelines import PIPELINES, Pipeline
from .predicted import predict, table
from .ways import ABSENT, TORCH, WAYS

#: The trainings whose steps allocate so much that malloc may give it back.
LARGE = ("photographs", "equal_images")
#: The end of their titles if it keeps the memory.
KEPT = ", memory kept"


def cases(args: argparse.Namespace) -> Iterator[Case]:
    """Yield a case for each pipeline, with all ways that fit."""
    if ABSENT and not args.quick:
        sys.exit(
            "The benchmark of trainings must compare all contenders, but these "
            f"packages are missing: {ABSENT}. Run: make bench-training"
        )
    root = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    warm = is_warm()
    for name, make in PIPELINES.items():
        if warm and name not in LARGE:
            continue
        folder = Path(root, name)
        folder.mkdir()
        pipeline = make(folder, args.quick)
        yield Case(
            pipeline.title + KEPT * warm,
            pipeline.note,
            partial(_contenders, pipeline, name, folder, args.quick),
            timer=timed,
            differ=differ,
            finish=partial(_finish, pipeline, name, folder, args.quick),
        )


def _contenders(
    pipeline: Pipeline, name: str, folder: Path, quick: bool
) -> Iterator[Contender]:
    for way, about in WAYS.items():
        if about.fits(pipeline) and about.package not in ABSENT:
            trainer = Trainer(name, way, folder, quick)
            more = {"facts": trainer.facts, "close": trainer.close}
            yield Contender(way, trainer, about.kind, **more)


def _finish(
    pipeline: Pipeline, name: str, folder: Path, quick: bool, record: Record
) -> None:
    record["samples"] = len(pipeline.dataset)
    if not is_warm():
        record["predicted"] = predict(name, folder, quick)


def timed(call: Callable[[], Epoch], repeats: int) -> dict[str, float]:
    """Run an epoch; return its time, its waits and its CPU time."""
    epoch = call()
    names = ("seconds", "waiting", "cpu", "faults")
    return {name: getattr(epoch, name) for name in names}


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
    "the memory is the peak, without the pages of files. Page faults are those of the "
    "training process, most of them of its steps. Rows of one order of samples have "
    "equal losses, which is checked first."
)


def columns(case: Record) -> Iterator[report.Column]:
    """Yield the columns for the ways of a case."""
    first, samples = report.installed(case)[TORCH], case["samples"]

    def faster(row: Record) -> str:
        if row["name"] == TORCH:
            return "1"
        found = ratio(first["seconds"], row["seconds"])
        return f"{found['of_medians']:.2f} ({found['q1']:.2f} - {found['q3']:.2f})"

    yield "", report.name_of
    yield "samples/s", lambda row: f"{samples / row['median']:.0f}"
    yield (
        "quartiles",
        lambda row: f"{samples / row['q3']:.0f} - {samples / row['q1']:.0f}",
    )
    yield "faster", faster
    yield (
        "waiting",
        lambda row: f"{100 * row['waiting']['median'] / row['median']:.0f} %",
    )
    yield "CPU", lambda row: duration(row["cpu"]["median"])
    yield "page faults", lambda row: f"{row['faults']['median'] / 1e3:.0f} k"
    yield "memory", lambda row: f"{row['memory'] / 1e6:.0f} MB"


def sections(run: Record) -> list[str]:
    """Return the predictions beside the measurements."""
    if not any("predicted" in case for case in run["cases"]):
        return []
    return ["### Predicted by pyparallel profile", "", *table(run), ""]


QUESTION = Question(
    "training",
    "Epochs of training, from files to a trained model",
    cases,
    Effort(rounds=9, max_seconds=60.0, min_seconds=0.0),
    malloc=("default", "warm"),
    page={"note": _NOTE, "sections": sections, "columns": columns},
)
