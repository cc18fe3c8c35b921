"""tests/conftest.py: forbidden skips, commands of failed tests."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from repository import ROOT, SUPPORT

pytestmark = pytest.mark.one_backend


def run(folder: Path, tests: str, **variables: str) -> tuple[dict[str, int], str]:
    """Run tests under a copy of the file; return the counts of outcomes, the output."""
    shutil.copy(ROOT / "tests" / "conftest.py", folder)
    shutil.copy(SUPPORT / "fake_cuda.py", folder)
    (folder / "pytest.ini").write_text("[pytest]\nmarkers = cuda: needs a GPU\n")
    (folder / "test_one.py").write_text(tests)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "."]
    env = {k: v for k, v in os.environ.items() if not k.startswith("PYPARALLEL_")}
    env |= {"CUDA_VISIBLE_DEVICES": "", **variables}
    done = subprocess.run(
        command, cwd=folder, env=env, capture_output=True, text=True, timeout=100
    )
    closing = done.stdout.splitlines()[-1]
    found = {name: int(num) for num, name in re.findall(r"(\d+) ([a-z]+)", closing)}
    return found, done.stdout


@pytest.mark.parametrize(
    ("variables", "outcome"),
    [
        ({}, {"skipped": 2}),
        ({"PYPARALLEL_REQUIRE_CUDA": "1"}, {"skipped": 1, "error": 1}),
        ({"PYPARALLEL_NO_SKIP": "1"}, {"failed": 1, "error": 1}),
    ],
)
def test_a_job_can_forbid_skips(
    tmp_path: Path, variables: dict[str, str], outcome: dict[str, int]
) -> None:
    tests = """\
import pytest
@pytest.mark.cuda
def test_cuda(): pass
def test_skipping(): pytest.skip("not here")
"""
    found, output = run(tmp_path, tests, **variables)
    assert found == outcome, output


def test_failed_tests_have_a_command_that_runs_them_alone(tmp_path: Path) -> None:
    tests = """\
import pytest
@pytest.mark.parametrize("text", ["a b", "c"])
def test_text(text): assert text == "c"
@pytest.fixture
def broken(): assert 0
def test_fixture(broken): pass
"""
    found, output = run(tmp_path, tests, PYPARALLEL_BACKEND="python")
    assert found == {"failed": 1, "passed": 1, "error": 1}, output
    start = f"PYPARALLEL_BACKEND=python {sys.executable} -m pytest"
    expected = [
        f"{start} 'test_one.py::test_text[a b]'",
        f"{start} test_one.py::test_fixture",
    ]
    assert [each for each in output.splitlines() if " -m pytest " in each] == expected
