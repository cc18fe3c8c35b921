"""The programs of docs/sources.md: a killed run ends as one that was not killed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.ranks.torchrun import free_port, python, torchrun
from tests.support.repository.docs_blocks import blocks

pytestmark = [pytest.mark.peers, pytest.mark.timeout(900)]

for _name in ("datasets", "litdata", "webdataset"):
    pytest.importorskip(_name)

_PROGRAMS = [it for it in blocks("docs/sources.md") if it.language == "python"]
TRAIN, *SAMPLES = (it.text for it in _PROGRAMS)
SOURCES = ("map-style", "streams", "webdataset", "litdata")
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


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("source", SOURCES)
def test_a_killed_run_ends_with_the_weights_of_another(
    source: str, processes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    samples = tmp_path / "samples.py"
    samples.write_text(SAMPLES[SOURCES.index(source)], encoding="utf-8")
    if '"__main__"' in samples.read_text():
        assert (done := python(samples)).returncode == 0, done.stderr[-3000:]
    for name, text in {"train.py": TRAIN, "killed.py": KILLED}.items():
        Path(name).write_text(text, encoding="utf-8")

    def start(name: str) -> Any:
        if processes == 2:
            return torchrun(tmp_path / name)
        alone = {"RANK": 0, "WORLD_SIZE": 1, "MASTER_PORT": free_port()}
        for key, value in {**alone, "MASTER_ADDR": "127.0.0.1"}.items():
            monkeypatch.setenv(key, str(value))
        return python(tmp_path / name)

    def last() -> Any:
        return torch.load("last.pt", weights_only=True)

    assert (done := start("train.py")).returncode == 0, done.stderr[-3000:]
    step, weights, moments, loaders = last()
    assert step == 30 and {epoch for epoch, _ in loaders} != {0}
    Path("last.pt").unlink()
    assert "-9" in f"{(done := start('killed.py')).returncode}{done.stderr}"
    assert last()[0] == 15
    assert (done := start("train.py")).returncode == 0, done.stderr[-3000:]
    found = last()
    assert found[0] == step and equal(found[1], weights) and equal(found[2], moments)
    assert [epoch for epoch, _ in found[3]] == [epoch for epoch, _ in loaders]
