"""The example of a Runner: two processes train, one process continues."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from tests.support.ranks.torchrun import python, torchrun
from tests.support.repository.folders import ROOT

pytestmark = [pytest.mark.peers, pytest.mark.slow]

if importlib.util.find_spec("mmengine") is None:
    pytest.skip("mmengine is not installed", allow_module_level=True)

EXAMPLE = ROOT / "examples" / "mmengine_runner.py"


def accuracies(folder: Path) -> list[float]:
    """Return the logged accuracies of the last run in the folder."""
    path = max(folder.glob("*/vis_data/scalars.json"))  # their names are times
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [row["accuracy"] for row in rows if "accuracy" in row]


def test_two_processes_learn_and_one_continues_from_their_checkpoint(
    tmp_path: Path,
) -> None:
    folder, script = tmp_path / "new", tmp_path / "one_epoch.py"
    text = EXAMPLE.read_text()
    assert text.count("max_epochs=2") == 1
    script.write_text(text.replace("max_epochs=2", "max_epochs=1"))
    done = torchrun(script, str(folder))
    assert done.returncode == 0, done.stderr[-3000:]
    (first,) = accuracies(folder)
    alone = python(EXAMPLE, str(folder))
    assert alone.returncode == 0, alone.stderr[-3000:]
    assert "resumed epoch: 1" in alone.stdout + alone.stderr
    (second,) = accuracies(folder)
    assert first > 0.85 and second > 0.88  # the most frequent kind has 0.53
