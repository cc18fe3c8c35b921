"""Jobs of frameworks on one and two processes: killed and resumed, and evaluation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.ranks.torchrun import free_port, python, torchrun
from tests.support.repository.docs_blocks import blocks
from tests.support.repository.folders import SUPPORT

pytestmark = [pytest.mark.peers, pytest.mark.timeout(900)]

for _name in ("accelerate", "lightning", "transformers"):
    pytest.importorskip(_name)

#: The program of docs/frameworks.md, as a module.
TRANSFORMERS = """
import os, sys, torch
from transformers.trainer_utils import get_last_checkpoint
from page import Collate, Pad, train

if __name__ == "__main__":
    rules = Collate(input_ids=Pad(), attention_mask=Pad(), labels=Pad(-100))
    last = get_last_checkpoint("trainer") if os.path.isdir("trainer") else None
    weight = train(rules, last)
    if os.environ["RANK"] == "0":
        torch.save(weight, sys.argv[1])
"""
#: Runs job.py, but the last rank kills itself in the middle of a step.
KILLED = """
import os, runpy, signal, sys
from torch.optim.optimizer import register_optimizer_step_pre_hook
left = [int(sys.argv[3])]
def kill(*_):
    left[0] -= 1
    if not left[0] and int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1:
        os.kill(os.getpid(), signal.SIGKILL)
register_optimizer_step_pre_hook(kill)
runpy.run_path("job.py", run_name="__main__")
"""
#: Gathers the results of 23 texts on two processes, in two ways.
GATHER = """
import json, sys, torch
from accelerate import Accelerator
from pyparallel import Collate, DataLoader, Pad, SizeBatchSampler

SIZES = [1 + 17 * i % 13 for i in range(23)]

class Texts(torch.utils.data.Dataset):
    def __len__(self):
        return 23
    def __getitem__(self, i):
        return {"index": torch.tensor(i), "ids": torch.full((SIZES[i],), i)}

if __name__ == "__main__":
    accelerator, merge = Accelerator(cpu=True), Collate(ids=Pad())
    options = {"num_workers": 1, "collate_fn": merge}
    scores = []
    for batch in accelerator.prepare(DataLoader(Texts(), 4, **options)):
        scores += accelerator.gather_for_metrics(batch["ids"].data.sum(1)).tolist()
    sampler = SizeBatchSampler(SIZES, max_padded=30, shuffle=False)
    found, loader = {}, DataLoader(Texts(), batch_sampler=sampler, **options)
    for batch in loader:
        pairs = zip(batch["index"].tolist(), batch["ids"].data.sum(1).tolist())
        gathered = accelerator.gather_for_metrics(list(pairs), use_gather_object=True)
        found.update(gathered)
    if accelerator.is_main_process:
        print(json.dumps([scores, sorted(found.items())]))
"""


def program_of(text: str) -> str:
    """Return the program of docs/frameworks.md that has a text."""
    return next(it.text for it in blocks("docs/frameworks.md") if text in it.text)


#: A program of the page that also writes its weights.
OF_PAGE = """
import runpy, sys, torch
names = runpy.run_path("page.py", run_name="__main__")
if names["trainer"].is_global_zero:
    torch.save(names["detector"].state_dict(), sys.argv[1])
"""
PAGES = {
    "Lightning": program_of("class Detector(lightning"),
    "transformers": program_of("class SetEpoch"),
}
LIGHTNING = (SUPPORT / "ranks" / "lightning_job.py").read_text(encoding="utf-8")
#: The program, the processes, the step that is killed, and the last checkpoint then and
#: the next one.
JOBS = {
    "Lightning, augmented": (
        LIGHTNING,
        2,
        11,
        "run/*step=8.ckpt",
        "run/*step=12.ckpt",
    ),
    "Lightning, 1": (OF_PAGE, 1, 11, "run/*step=9.ckpt", "run/*step=12.ckpt"),
    "Lightning, 2": (OF_PAGE, 2, 11, "run/*step=9.ckpt", "run/*step=12.ckpt"),
    "transformers, 1": (TRANSFORMERS, 1, 14, "trainer/checkpoint-11", "trainer/*-16"),
    "transformers, 2": (TRANSFORMERS, 2, 14, "trainer/checkpoint-11", "trainer/*-16"),
}


def equal(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return list(a) == list(b) and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(equal, a, b))
    return bool(a == b)


@pytest.mark.parametrize("job", JOBS)
def test_a_killed_job_ends_with_the_weights_of_another(
    job: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program, processes, step, last, later = JOBS[job]
    page = PAGES[job.partition(",")[0]]
    for name, text in {"page": page, "job": program, "killed": KILLED}.items():
        (tmp_path / f"{name}.py").write_text(text, encoding="utf-8")

    def start(name: str, folder: str, *arguments: str) -> Any:
        work = tmp_path / folder
        work.mkdir(exist_ok=True)
        for path in tmp_path.glob("*.py"):
            (work / path.name).write_bytes(path.read_bytes())
        monkeypatch.chdir(work)
        given = "weights.pt", str(processes), *arguments
        if processes == 2:
            return torchrun(work / name, *given)
        alone = {"RANK": 0, "WORLD_SIZE": 1, "MASTER_PORT": free_port()}
        for key, value in {**alone, "MASTER_ADDR": "127.0.0.1"}.items():
            monkeypatch.setenv(key, str(value))
        monkeypatch.setenv("LOCAL_RANK", "0")
        return python(work / name, *given)

    assert (done := start("job.py", "whole")).returncode == 0, done.stderr[-3000:]
    done = start("killed.py", "stopped", str(step))
    assert "-9" in f"{done.returncode}{done.stderr}", done.stderr[-3000:]
    stopped = tmp_path / "stopped"
    assert list(stopped.glob(last)) and not list(stopped.glob(later))
    assert not (stopped / "weights.pt").exists()
    assert (done := start("job.py", "stopped")).returncode == 0, done.stderr[-3000:]
    assert list(stopped.glob(later))
    whole, found = (
        torch.load(tmp_path / folder / "weights.pt", weights_only=False)
        for folder in ("whole", "stopped")
    )
    assert equal(found, whole)


def test_gathered_results_are_those_of_one_process(tmp_path: Path) -> None:
    """The last batch of one process is smaller, and one of the sampler is repeated."""
    script = tmp_path / "gather.py"
    script.write_text(GATHER, encoding="utf-8")
    expected = [i * (1 + 17 * i % 13) for i in range(23)]
    for run in (python, torchrun):
        done = run(script)
        assert done.returncode == 0, done.stderr[-3000:]
        scores, found = json.loads(done.stdout.splitlines()[-1])
        assert scores == expected
        assert found == [list(pair) for pair in enumerate(expected)]
