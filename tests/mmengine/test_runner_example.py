"""The example of a Runner: killed in its second epoch, and continued."""

from __future__ import annotations

import importlib.util
import json
import unicodedata
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.ranks.torchrun import python, torchrun
from tests.support.repository.folders import ROOT

pytestmark = [pytest.mark.peers, pytest.mark.slow, pytest.mark.timeout(900)]

if importlib.util.find_spec("mmengine") is None:
    pytest.skip("mmengine is not installed", allow_module_level=True)

EXAMPLE = ROOT / "examples" / "mmengine_runner.py"
#: Runs the example, but the last rank kills itself in a step.
KILLED = """
import os, runpy, signal, sys
from torch.optim.optimizer import register_optimizer_step_pre_hook
example, left = sys.argv.pop(), [int(sys.argv.pop())]
def kill(*_):
    left[0] -= 1
    ranks = int(os.environ.get("WORLD_SIZE", 1))
    if not left[0] and int(os.environ.get("RANK", 0)) == ranks - 1:
        os.kill(os.getpid(), signal.SIGKILL)
register_optimizer_step_pre_hook(kill)
runpy.run_path(example, run_name="__main__")
"""


def last_loss(folder: Path) -> float:
    """Return the last logged loss of the last run in the folder."""
    path = max(folder.glob("*/vis_data/scalars.json"))  # their names are times
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    found: float = [row["loss"] for row in rows if "loss" in row][-1]
    return found


def weights(folder: Path) -> dict[str, torch.Tensor]:
    found: Any = torch.load(folder / "epoch_2.pth", weights_only=False)
    state: dict[str, torch.Tensor] = found["state_dict"]
    return state


@pytest.mark.parametrize(("run", "ranks"), [(python, 1), (torchrun, 2)])
def test_a_killed_run_continues_with_its_last_epoch(
    run: Any, ranks: int, tmp_path: Path
) -> None:
    script, killed, whole = (tmp_path / name for name in ("killed.py", "a", "b"))
    script.write_text(KILLED, encoding="utf-8")
    num_names = sum(bool(unicodedata.name(chr(i), "")) for i in range(0x20, 0x3000))
    step = num_names // ranks // 32 + 50  # of the second epoch
    done = run(script, str(killed), str(step), str(EXAMPLE))
    assert "-9" in f"{done.returncode}{done.stderr}", done.stderr[-3000:]
    assert (killed / "epoch_1.pth").exists() and not (killed / "epoch_2.pth").exists()
    for folder in (killed, whole):
        done = run(EXAMPLE, str(folder))
        assert done.returncode == 0, done.stderr[-3000:]
        found = "resumed epoch: 1" in done.stdout + done.stderr
        assert found is (folder is killed)
        assert last_loss(folder) < 0.5  # 0.69 for equal scores
    found, expected = weights(killed), weights(whole)
    assert list(found) == list(expected)
    assert all(torch.equal(value, expected[name]) for name, value in found.items())


def test_one_process_continues_with_a_checkpoint_of_two(tmp_path: Path) -> None:
    folder, script = tmp_path / "new", tmp_path / "one_epoch.py"
    text = EXAMPLE.read_text()
    assert text.count("max_epochs=2") == 1
    script.write_text(text.replace("max_epochs=2", "max_epochs=1"))
    done = torchrun(script, str(folder))
    assert done.returncode == 0, done.stderr[-3000:]
    first = last_loss(folder)
    alone = python(EXAMPLE, str(folder))
    assert alone.returncode == 0, alone.stderr[-3000:]
    assert "resumed epoch: 1" in alone.stdout + alone.stderr
    assert last_loss(folder) < first < 0.5
