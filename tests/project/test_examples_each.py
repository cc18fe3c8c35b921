"""Every example is short, uses public names, is described, and is run by a test."""

from __future__ import annotations

import ast
import importlib.util
import re
from pathlib import Path

import pytest
from repository import ROOT, SUPPORT
from torchrun import python, torchrun

import pyparallel

pytestmark = pytest.mark.one_backend

FOLDER = ROOT / "examples"
EXAMPLES = sorted(FOLDER.glob("[!_]*.py"))
STRICT = ("-W", "error", "-W", "ignore:[PP004]")  # the host is enough


def name_of(path: Path) -> str:
    return path.name


def taken_from_the_package(text: str) -> set[str]:
    """Return dotted names of what code imports from pyparallel, at any depth of it."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {name for name in found if name.split(".")[0] == "pyparallel"}


def private(text: str) -> set[str]:
    modules = {"mmcv", "mmengine", "memory"}
    public = {"pyparallel"}.union(
        f"pyparallel.{name}" for name in modules.union(pyparallel.__all__)
    )
    return taken_from_the_package(text) - public


@pytest.mark.parametrize("path", EXAMPLES, ids=name_of)
def test_an_example_is_short_and_uses_the_public_interface(path: Path) -> None:
    text = path.read_text("utf-8")
    assert len(text.splitlines()) < 100
    assert private(text) == set() and "pyparallel" in text
    assert private(text + "\nfrom pyparallel.transfer.to_device import Slab\n") == {
        "pyparallel.transfer.to_device.Slab"
    }


@pytest.mark.parametrize("path", EXAMPLES, ids=name_of)
def test_an_example_is_described_and_run(path: Path) -> None:
    readme = (FOLDER / "README.md").read_text("utf-8")
    assert re.search(rf"^\| \[{path.name}\]\(#", readme, re.MULTILINE), "the table"
    section = readme.partition(f"\n## {path.name}")[2].partition("\n## ")[0]
    assert f"examples/{path.name}" in section
    tests = [*ROOT.glob("tests/*/test_*example*.py"), SUPPORT / "elastic_job.py"]
    assert any(f'"{path.name}"' in test.read_text("utf-8") for test in tests)


@pytest.mark.slow
def test_kinds_of_characters_are_learned_from_their_names() -> None:
    script = FOLDER / "unicode_names.py"
    done = python(script, "--epochs", "1", "--batch", "256", options=STRICT)
    assert (done.returncode, done.stderr) == (0, "")
    epoch, summary = done.stdout.splitlines()
    (share,) = re.findall(r"^epoch 1: (0\.\d+) of held-out names$", epoch)
    assert float(share) > 0.8  # the most frequent kind has 0.49
    assert re.fullmatch(r"\d{5} names, \d+\.\d s", summary)


@pytest.mark.slow
def test_a_stopped_run_continues_in_mid_epoch(tmp_path: Path) -> None:
    pytest.importorskip("PIL", reason="the example needs pillow")
    script = FOLDER / "detection.py"
    assert len(script.read_text("utf-8").splitlines()) <= 60

    def run(folder: str, steps: int) -> list[str]:
        (tmp_path / folder).mkdir(exist_ok=True)
        done = torchrun(script, str(tmp_path / folder), str(steps))
        assert (done.returncode, done.stderr) == (0, "")
        return done.stdout.splitlines()

    stopped = [*run("stopped", 13), *run("stopped", 24)]  # an epoch has 8 steps
    assert stopped == run("whole", 24)
    lines = [re.fullmatch(r"step (\d+): loss (\d+\.\d+)", line) for line in stopped]
    losses = {int(line[1]): float(line[2]) for line in lines if line}
    assert list(losses) == list(range(1, 25))
    epochs = [sum(losses[8 * epoch + i] for i in range(1, 9)) for epoch in range(3)]
    assert epochs[2] < 0.7 * epochs[0]


@pytest.mark.slow
def test_code_of_mmcv_1_trains_without_mmcv() -> None:
    pytest.importorskip("sklearn", reason="the example needs scikit-learn")
    if importlib.util.find_spec("mmcv"):
        pytest.skip("mmcv is installed; then test_examples_peers.py runs the example")
    done = python(FOLDER / "mmcv1_install.py", options=STRICT)
    assert (done.returncode, done.stderr) == (0, "")
    (off,) = re.findall(
        r"^trained by a loop: (\d\.\d\d) digits off, on average$", done.stdout
    )
    assert float(off) < 1  # of one to eight; always four and a half: two
