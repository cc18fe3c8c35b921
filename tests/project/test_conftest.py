"""tests/conftest.py: forbidden skips, leaked resources, commands of failed tests."""

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
    for name in ("fake_cuda", "process_resources"):
        shutil.copy(SUPPORT / f"{name}.py", folder)
    (folder / "pytest.ini").write_text("[pytest]\nmarkers = cuda: needs a GPU\n")
    (folder / "test_one.py").write_text(tests)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "."]
    env = {k: v for k, v in os.environ.items() if not k.startswith("PYPARALLEL_")}
    env |= {"CUDA_VISIBLE_DEVICES": "", **variables}
    done = subprocess.run(
        command, cwd=folder, env=env, capture_output=True, text=True, timeout=100
    )
    closing = done.stdout.splitlines()[-1]
    pairs = re.findall(r"(\d+) ([a-z]+?)s?\b", closing)
    found = {name: int(num) for num, name in pairs if name != "in"}
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


def test_a_test_that_leaves_resources_fails_and_the_next_one_passes(
    tmp_path: Path,
) -> None:
    tests = """\
import os, subprocess, threading
import conftest, pytest, torch
conftest.LIMIT_SECONDS = 0.5
kept, end = [], threading.Event()
@pytest.fixture(scope="module", autouse=True)
def ended():
    yield
    end.set()
    kept[1].kill()
    kept[1].wait()
def test_thread():
    kept.append(threading.Thread(target=end.wait, name="waits"))
    kept[0].start()
def test_process():
    kept.append(subprocess.Popen(["sleep", "60"]))
def test_descriptor():
    kept.append(os.memfd_create("slab"))
def test_shared_memory():
    torch.multiprocessing.set_sharing_strategy("file_system")
    kept.append(torch.ones(3).share_memory_())
def test_nothing():
    with open("/dev/zero"), subprocess.Popen(["true"]):
        thread = threading.Thread(target=len, args=[""])
        thread.start()
        thread.join()
"""
    found, output = run(tmp_path, tests)
    assert found == {"passed": 5, "error": 4}, output
    said = re.findall(r"^E +AssertionError: (.*)", output, re.MULTILINE)
    expected = [
        "thread waits",
        r"process \d+ sleep 60",
        r"descriptor \d+ /memfd:slab \(deleted\)",
        r"shared memory torch_\d+_\S+",
    ]
    for line, resource in zip(said, expected, strict=True):
        assert re.fullmatch(f"the test must end or close: {resource}", line)
