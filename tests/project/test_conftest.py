"""tests/conftest.py: leaked resources and commands of failed tests."""

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


SKIPS = """\
import pytest
@pytest.mark.cuda
def test_cuda(): pass
@pytest.mark.cuda
@pytest.mark.fake_cuda
def test_fake(): assert 0
def test_skipping(): pytest.skip("not here")
"""
FAILS = """\
@pytest.mark.parametrize("text", ["a b", "c"])
def test_text(text): assert text == "c"
@pytest.fixture
def broken(): assert 0
def test_fixture(broken): pass
"""
LEAVES = """\
import os, subprocess, threading
import conftest, torch
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


@pytest.mark.slow
def test_failed_tests_have_a_command_and_leaked_resources_a_name(
    tmp_path: Path,
) -> None:
    shutil.copy(ROOT / "tests" / "conftest.py", tmp_path)
    for name in ("fake_cuda", "process_resources"):
        shutil.copy(SUPPORT / f"{name}.py", tmp_path)
    (tmp_path / "pytest.ini").write_text(
        "[pytest]\nmarkers =\n  cuda: needs a GPU\n  fake_cuda: needs the fake\n"
    )
    (tmp_path / "test_one.py").write_text(SKIPS + FAILS + LEAVES)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "."]
    env = {k: v for k, v in os.environ.items() if not k.startswith("PYPARALLEL_")}
    env |= {"CUDA_VISIBLE_DEVICES": "", "PYPARALLEL_BACKEND": "python"}
    output = subprocess.run(
        command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=100
    ).stdout
    pairs = re.findall(r"(\d+) ([a-z]+?)s?\b", output.splitlines()[-1])
    found = {name: int(num) for num, name in pairs if name != "in"}
    # A test that follows one with leaked resources passes.
    counts = {"skipped": 2, "failed": 1, "passed": 6, "error": 5, "deselected": 1}
    assert found == counts, output
    start = f"PYPARALLEL_BACKEND=python {sys.executable} -m pytest"
    commands = [each for each in output.splitlines() if " -m pytest " in each]
    assert f"{start} 'test_one.py::test_text[a b]'" in commands
    assert f"{start} test_one.py::test_fixture" in commands
    assert len(commands) == 1 + 5
    said = re.findall(r"^E +AssertionError: the test (.*)", output, re.MULTILINE)
    expected = [
        "thread waits",
        r"process \d+ sleep 60",
        r"descriptor \d+ /memfd:slab \(deleted\)",
        r"shared memory torch_\d+_\S+",
    ]
    for line, resource in zip(said, expected, strict=True):
        assert re.fullmatch(f"must end or close: {resource}", line)
