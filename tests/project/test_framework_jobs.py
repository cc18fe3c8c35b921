"""Jobs of frameworks on one and two processes: killed and resumed, and evaluation."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path, PurePath
from typing import Any

import pytest
import torch

from tests.support.ranks import forked
from tests.support.ranks.torchrun import python, torchrun
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


#: The imports of the programs of a framework.
IMPORTS = {
    "Lightning": "import lightning",
    "transformers": "from transformers import LlamaForCausalLM, Trainer",
}
#: The runs of a program: their scripts.
RUNS = {"whole": "job", "killed": "killed", "continued": "job"}


def run_all(framework: str, folder: Path) -> dict[tuple[str, str], forked.Ended]:
    """Run all programs of a framework, which is imported once."""
    jobs = {}
    for job, (program, processes, step, *_) in JOBS.items():
        if not job.startswith(framework):
            continue
        texts = {"page": PAGES[framework], "job": program, "killed": KILLED}
        for run, script in RUNS.items():
            work = folder / job / ("whole" if run == "whole" else "stopped")
            work.mkdir(parents=True, exist_ok=True)
            for name, text in texts.items():
                (work / f"{name}.py").write_text(text, encoding="utf-8")
            given = ["weights.pt", str(processes), str(step)]
            jobs[job, run] = (work, f"{script}.py", given, processes)
    imports = f"import torch._dynamo, pyparallel\n{IMPORTS[framework]}"
    return dict(zip(jobs, forked.run(imports, [*jobs.values()]), strict=True))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("jobs")


@pytest.fixture(scope="module")
def ended(folder: Path) -> Callable[[str], dict[tuple[str, str], forked.Ended]]:
    return functools.cache(lambda framework: run_all(framework, folder))


@pytest.mark.parametrize("job", JOBS)
def test_a_killed_job_ends_with_the_weights_of_another(
    job: str, folder: Path, ended: Callable[..., Any]
) -> None:
    _, processes, _, last, later = JOBS[job]
    runs = ended(job.partition(",")[0])
    whole, killed, continued = (runs[job, run] for run in RUNS)
    assert whole.codes == [0] * processes, whole.err[-3000:]
    assert killed.codes[-1] == -9 and 0 not in killed.codes, killed.err[-3000:]

    def has(run: forked.Ended, pattern: str) -> bool:
        return any(PurePath(name).match(pattern) for name in run.files)

    assert has(killed, last) and not has(killed, later)
    assert not has(killed, "weights.pt")
    assert continued.codes == [0] * processes, continued.err[-3000:]
    assert has(continued, later)
    expected, found = (
        torch.load(folder / job / name / "weights.pt", weights_only=False)
        for name in ("whole", "stopped")
    )
    assert equal(found, expected)


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
