"""The programs of docs/sources.md: a killed run ends as one that was not killed."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.ranks import forked
from tests.support.ranks.torchrun import python
from tests.support.repository.docs_blocks import blocks

pytestmark = [pytest.mark.peers, pytest.mark.timeout(900)]

for _name in ("datasets", "litdata", "webdataset"):
    pytest.importorskip(_name)

_PROGRAMS = [it for it in blocks("docs/sources.md") if it.language == "python"]
TRAIN, *SAMPLES = (it.text for it in _PROGRAMS)
#: The sources, and their libraries.
SOURCES = {
    "map-style": "datasets",
    "streams": "datasets",
    "webdataset": "webdataset",
    "litdata": "litdata",
}
#: Runs train.py, but the last rank kills itself once in the middle of step 17.
KILLED = """
import os, pathlib, runpy, signal, sys
from torch.optim.optimizer import register_optimizer_step_pre_hook
left = [17]
def kill(*_):
    left[0] -= 1
    if not left[0] and int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1:
        os.kill(os.getpid(), signal.SIGKILL)
register_optimizer_step_pre_hook(kill)
runpy.run_path("train.py", run_name="__main__")
"""
#: Keeps the state of a run. The first one is moved, because a run continues from it.
KEPT = """
import shutil, sys
getattr(shutil, sys.argv[1])("last.pt", sys.argv[2])
"""
#: The scripts of a source, one after the other.
RUNS = {
    "whole": ("train.py", []),
    "whole, kept": ("kept.py", ["move", "whole.pt"]),
    "killed": ("killed.py", []),
    "killed, kept": ("kept.py", ["copy", "killed.pt"]),
    "continued": ("train.py", []),
}


def test_programs_are_short() -> None:
    assert len(SAMPLES) == len(SOURCES)
    for samples in SAMPLES:
        assert max(TRAIN.count("\n"), samples.count("\n")) <= 60
        assert max(map(len, (TRAIN + samples).splitlines())) <= 100


def equal(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return list(a) == list(b) and all(equal(a[key], b[key]) for key in a)
    return bool(a == b)


def run_all(library: str, folder: Path) -> dict[tuple[str, int, str], forked.Ended]:
    """Run the programs of the sources of a library, which is imported once."""
    jobs = {}
    for source, processes in [(it, n) for it in SOURCES for n in (1, 2)]:
        if SOURCES[source] != library:
            continue
        work = folder / source / str(processes)
        work.mkdir(parents=True)
        samples = SAMPLES[[*SOURCES].index(source)]
        texts = {"samples": samples, "train": TRAIN, "killed": KILLED, "kept": KEPT}
        for name, text in texts.items():
            (work / f"{name}.py").write_text(text, encoding="utf-8")
        if '"__main__"' in samples:
            with pytest.MonkeyPatch.context() as patch:
                patch.chdir(work)
                done = python(work / "samples.py")
            assert done.returncode == 0, done.stderr[-3000:]
        for run, (script, arguments) in RUNS.items():
            world = 0 if script == "kept.py" else processes
            jobs[source, processes, run] = (work, script, arguments, world)
    imports = f"import torch._dynamo, pyparallel, {library}"
    return dict(zip(jobs, forked.run(imports, [*jobs.values()]), strict=True))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sources")


@pytest.fixture(scope="module")
def ended(folder: Path) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_DATASETS_CACHE", str(folder / "cache"))
        yield functools.cache(lambda library: run_all(library, folder))


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("source", SOURCES)
def test_a_killed_run_ends_with_the_weights_of_another(
    source: str, processes: int, folder: Path, ended: Callable[[str], Any]
) -> None:
    runs = ended(SOURCES[source])
    whole, _, killed, _, continued = (runs[source, processes, run] for run in RUNS)
    assert whole.codes == [0] * processes, whole.err[-3000:]
    assert killed.codes[-1] == -9 and 0 not in killed.codes, killed.err[-3000:]
    assert continued.codes == [0] * processes, continued.err[-3000:]

    def kept(name: str) -> Any:
        path = folder / source / str(processes) / f"{name}.pt"
        return torch.load(path, weights_only=True)

    step, weights, moments, loaders = kept("whole")
    assert step == 30 and {epoch for epoch, _ in loaders} != {0}
    assert kept("killed")[0] == 15
    found = kept("last")
    assert found[0] == step and equal(found[1], weights) and equal(found[2], moments)
    assert [epoch for epoch, _ in found[3]] == [epoch for epoch, _ in loaders]
