"""The trainings: equal batches of all collate functions, and losses that must agree."""

from __future__ import annotations

import importlib
import math
from pathlib import Path

import pytest

from benchmarks._harness import difference

pytestmark = pytest.mark.peers

pipelines = importlib.import_module("benchmarks.training.pipelines")
epochs = importlib.import_module("benchmarks.training.epochs")
command = importlib.import_module("benchmarks.training.question")


@pytest.mark.parametrize("name", pipelines.PIPELINES)
def test_our_collate_gives_the_batch_of_a_user_of_torch(
    name: str, tmp_path: Path
) -> None:
    pipeline = pipelines.PIPELINES[name](tmp_path, True)
    samples = [pipeline.dataset[i] for i in range(pipeline.batch_size)]
    batch = pipeline.collate(samples)
    assert difference(batch, pipeline.ours(samples)) == ""
    step = pipeline.training()
    losses = [step(batch).item() for _ in range(3)]
    assert all(map(math.isfinite, losses))
    assert losses[2] != losses[0], "the step trains"


TORCH, OURS = "torch's loader, 2 processes", "ours, 2 processes"
DALI, SORTED = "DALI on the CPU, 2 threads", "... with SizeBatchSampler"
TABLE: list[tuple[str, list[float], list[int], str]] = [
    (OURS, [1.0, 2.0], [0, 1], ""),
    (OURS, [1.0, 2.0000001], [0, 1], "losses"),
    (DALI, [1.0, 2.0000001], [0, 1], ""),
    (DALI, [1.0, 2.1], [0, 1], "losses"),
    (SORTED, [5.0, 6.0], [0, 1], ""),
    (SORTED, [5.0, 6.0], [0, 0], "samples"),
]


@pytest.mark.parametrize(("way", "losses", "samples", "where"), TABLE)
def test_an_epoch_must_have_the_samples_and_losses_of_torchs(
    way: str, losses: list[float], samples: list[int], where: str
) -> None:
    first = epochs.Epoch(TORCH, 1.0, 0.5, [1.0, 2.0], [0, 1])
    found = command.differ(first, epochs.Epoch(way, 1.0, 0.5, losses, samples))
    assert (where in found) if where else not found


def row(name: str, seconds: float) -> dict[str, object]:
    return {"name": name, "seconds": [seconds] * 3}


FACTORS = {"slabs": 1.5, "prefetch": 1.6, "threads instead of processes": None}
ROWS = [row(TORCH, 6.0), row(OURS, 4.0), row("... with our collate", 2.0)]
ROWS += [row("... with PreDataLoader", 3.0), row("... with 2 threads instead", 1.0)]


def test_predictions_are_compared_with_the_epochs_of_their_way() -> None:
    predicted = importlib.import_module("benchmarks.training.predicted")
    case = {"title": "equal", "rows": ROWS, "predicted": {"factors": FACTORS}}
    found = [(each.way, each.error) for each in predicted.compared(case)]
    # The loop has no gain from a collate function: the factor is that before it.
    assert found == [
        (OURS, 0.0),
        ("... with our collate", -0.5),
        ("... with PreDataLoader", pytest.approx(-0.2)),
    ]
    case["predicted"]["lines"] = ["expected: 1.6x"]
    run = {"cases": [case]}
    *lines, _, text = predicted.table(run)
    cells = "| equal | ours, 2 processes | 1.50 | 1.50 | 1.50 - 1.50 | +0 % |"
    assert lines[2] == cells and len(lines) == 5
    assert text == (
        "2 of 3 predictions are within 20 %. The largest error is -50 %: equal, ... "
        "with our collate."
    )
    assert predicted.example(run, "equal") == ["```text", "expected: 1.6x", "```"]
