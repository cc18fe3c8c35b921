"""The examples with Ray: a worker that dies, and samples of different lengths."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch

from tests.support.ranks.torchrun import python
from tests.support.repository.folders import ROOT, SUPPORT

pytestmark = [pytest.mark.peers, pytest.mark.ray, pytest.mark.timeout(1000)]


def last_state(
    script: Path, *arguments: str
) -> tuple[int, dict[str, dict[str, object]]]:
    done = python(script, *arguments, limit=450)
    assert done.returncode == 0, done.stderr[-3000:]
    path = done.stdout.splitlines()[-1]
    found: tuple[int, dict[str, dict[str, object]]]
    found = torch.load(f"{path}/state.pt", weights_only=True)
    return found


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_continues_after_a_worker_was_killed(ranks: int, tmp_path: Path) -> None:
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    killed.mkdir(), whole.mkdir()
    job = SUPPORT / "ranks" / "ray_job.py"
    step, states = last_state(job, str(killed), str(ranks))
    assert (killed / "died").exists()
    (whole / "died").touch()  # nothing happens
    undisturbed = (job, ROOT / "examples" / "ray_train.py")[ranks - 1]
    expected_step, expected = last_state(undisturbed, str(whole), str(ranks))
    assert step == expected_step and step == (49, 28)[ranks - 1]
    weights, expected_weights = states["model"], expected["model"]
    assert list(weights) == list(expected_weights)
    for name, value in weights.items():
        assert torch.equal(value, expected_weights[name])  # type: ignore[arg-type]


def test_rows_of_ray_data_are_padded_by_size() -> None:
    done = python(ROOT / "examples" / "ray_data.py", limit=450)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [
        line.rpartition(" ") for line in done.stdout.splitlines() if line[0] == "("
    ]
    shapes = [ast.literal_eval(shape) for shape, _, _ in lines]
    assert sum(rows for rows, _ in shapes) == 99
    assert all(rows * width <= 400 for rows, width in shapes)
    # The text of number n has n % 13 + 1 words.
    assert sum(int(words) for _, _, words in lines) == sum(
        n % 13 + 1 for n in range(99)
    )
