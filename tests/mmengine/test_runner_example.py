"""The example of a Runner: killed in its second epoch, and continued."""

from __future__ import annotations

import importlib.util
import json
import unicodedata
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.ranks import forked
from tests.support.ranks.torchrun import python, torchrun
from tests.support.repository.folders import ROOT

pytestmark = [pytest.mark.peers, pytest.mark.slow, pytest.mark.timeout(900)]

if importlib.util.find_spec("mmengine") is None:
    pytest.skip("mmengine is not installed", allow_module_level=True)

EXAMPLE = ROOT / "examples" / "mmengine_runner.py"
NUM_NAMES = sum(bool(unicodedata.name(chr(i), "")) for i in range(0x20, 0x3000))
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


#: The runs of each number of ranks, and their folders.
RUNS = {"killed": "stopped", "continued": "stopped", "whole": "whole"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def ended(folder: Path) -> dict[tuple[str, int], forked.Ended]:
    """Run all jobs with one import of mmengine; one of 0 ranks has no group."""
    jobs, script = {}, folder / "killed.py"
    script.write_text(KILLED, encoding="utf-8")
    for ranks in (0, 2):
        for run, name in RUNS.items():
            work = folder / str(ranks)
            work.mkdir(exist_ok=True)
            arguments = [str(work / name)]
            if run == "killed":  # in the second epoch
                step = NUM_NAMES // max(ranks, 1) // 32 + 50
                arguments += [str(step), str(EXAMPLE)]
            start = str(script if run == "killed" else EXAMPLE)
            jobs[run, ranks] = (work, start, arguments, ranks)
    imports = "import torch._dynamo, pyparallel, mmengine.runner"
    return dict(zip(jobs, forked.run(imports, [*jobs.values()]), strict=True))


@pytest.mark.parametrize("ranks", [0, 2])
def test_a_killed_run_continues_with_its_last_epoch(
    ranks: int, folder: Path, ended: dict[tuple[str, int], forked.Ended]
) -> None:
    killed = ended["killed", ranks]
    assert killed.codes[-1] == -9 and 0 not in killed.codes, killed.err[-3000:]
    assert "stopped/epoch_1.pth" in killed.files
    assert "stopped/epoch_2.pth" not in killed.files
    stopped, whole = (folder / str(ranks) / name for name in ("stopped", "whole"))
    for run, work in (("continued", stopped), ("whole", whole)):
        done = ended[run, ranks]
        assert done.codes == [0] * max(ranks, 1), done.err[-3000:]
        found = "resumed epoch: 1" in done.out + done.err
        assert found is (run == "continued")
        assert last_loss(work) < 0.5  # 0.69 for equal scores
    found, expected = weights(stopped), weights(whole)
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
