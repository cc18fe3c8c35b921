"""The prediction of ``pyparallel profile`` beside the measured epochs.

`predict` profiles `loop` with torch's loader, as a user does.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from pyparallel.profiler.prediction import changes, expected, numbers_of
from pyparallel.profiler.record import Record as Profile
from pyparallel.profiler.summary import summarize

from .._harness import Record, ratio
from ..report import grid

#: The last change of the profile that each way has.
CHANGES = {
    "ours, 2 processes": "slabs",
    "... with our collate": "collate in the extension",
    "... with PreDataLoader": "prefetch",
    "... with SizeBatchSampler": "sampler",
    "... with 2 threads instead": "threads instead of processes",
    "... with 2 threads, SizeBatchSampler": "threads instead of processes",
}
#: A prediction within this part of the measurement is right.
RIGHT = 0.2


class Comparison(NamedTuple):
    """A way, with the time of torch's loader divided by its time."""

    case: str
    way: str
    predicted: float
    measured: Record

    @property
    def error(self) -> float:
        """The relative error of the prediction."""
        measured: float = self.measured["of_medians"]
        return self.predicted / measured - 1


def predict(name: str, folder: Path, quick: bool) -> Record:
    """Profile the loop of a pipeline; return the factors and the printed lines."""
    steps = ["--steps", "2", "--warmup", "1"] if quick else ["--steps", "40"]
    with tempfile.TemporaryDirectory() as out:
        loop = [sys.executable, "-m", "benchmarks.training.loop", name, str(folder)]
        command = [sys.executable, "-m", "pyparallel", "profile", *steps, "--out", out]
        done = subprocess.run(
            [*command, "--", *loop, *["quick"][:quick]], capture_output=True, text=True
        )
        if done.returncode:
            raise RuntimeError(f"{name}: the profile must succeed, but: {done.stderr}")
        text = Path(out, "profile.json").read_text(encoding="utf-8")
    summary = summarize(Profile.from_json(text))
    assert summary is not None
    numbers = numbers_of(summary)
    factors = {each.title.partition(":")[0]: each.factor for each in changes(numbers)}
    return {"factors": factors, "lines": expected(numbers)}


def compared(case: Record) -> Iterator[Comparison]:
    """Yield the ways of a case whose factor was predicted and measured."""
    rows = {row["name"]: row for row in case["rows"]}
    factors: dict[str, float | None] = case.get("predicted", {}).get("factors", {})
    sorts = "... with SizeBatchSampler" in rows
    first, last = next(iter(rows.values())), None  # torch's loader
    for way, change in CHANGES.items():
        # A loop with default_collate needs no other collate function.
        last = factors.get(change, last)
        # The factor of threads is that with the sampler, if there is one.
        if way not in rows or last is None or (sorts and way.endswith("instead")):
            continue
        measured = ratio(first["seconds"], rows[way]["seconds"])
        yield Comparison(case["title"], way, last, measured)


def table(run: Record) -> list[str]:
    """Return the predictions of a run beside its measurements, and their errors."""
    rows = [each for case in run["cases"] for each in compared(case)]
    cells = []
    for each in rows:
        spread = f"{each.measured['q1']:.2f} - {each.measured['q3']:.2f}"
        values = f"{each.predicted:.2f}", f"{each.measured['of_medians']:.2f}", spread
        cells.append([each.case, each.way, *values, f"{100 * each.error:+.0f} %"])
    titles = ["", "loader", "predicted", "measured", "quartiles", "error"]
    lines = grid(titles, cells, left=2)
    right = sum(abs(each.error) <= RIGHT for each in rows)
    worst = max(rows, key=lambda each: abs(each.error), default=None)
    text = f"{right} of {len(rows)} predictions are within {100 * RIGHT:.0f} %."
    if worst is not None:
        text += f" The largest error is {100 * worst.error:+.0f} %: {worst.case}, "
        text += f"{worst.way}."
    return [*lines, "", text]


def example(run: Record, title: str) -> list[str]:
    """Return the lines that the profile of a case printed, as a block of code."""
    found: list[Any] = [case for case in run["cases"] if case["title"] == title]
    return [
        "```text",
        *(line for case in found for line in case["predicted"]["lines"]),
        "```",
    ]
