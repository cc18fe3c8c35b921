"""tests/conftest.py: selected files, forbidden skips, leaks, commands of failures."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.repository.folders import ROOT, python_path
from tests.support.repository.marked_files import may_select
from tests.support.repository.peers import installed

pytestmark = pytest.mark.one_backend


def run(folder: Path, tests: str, **variables: str) -> tuple[dict[str, int], str]:
    """Run tests under a copy of the file; return the counts of outcomes, the output."""
    shutil.copy(ROOT / "tests" / "conftest.py", folder)
    (folder / "pytest.ini").write_text(
        "[pytest]\nmarkers =\n  cuda: needs a GPU\n  fake_cuda: needs the fake\n"
        "filterwarnings =\n  error\n  ignore:known\n"
    )
    (folder / "test_one.py").write_text(tests)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "."]
    env = {k: v for k, v in os.environ.items() if not k.startswith("PYPARALLEL_")}
    env |= {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": python_path(ROOT), **variables}
    done = subprocess.run(
        command, cwd=folder, env=env, capture_output=True, text=True, timeout=100
    )
    closing = done.stdout.splitlines()[-1]
    pairs = re.findall(r"(\d+) ([a-z]+?)s?\b", closing)
    found = {name: int(num) for num, name in pairs if name != "in"}
    return found, done.stdout


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


ON_ALL = "pytestmark = [\n    pytest.mark.slow,\n    pytest.mark.cuda,\n]\n"
ON_SOME = "@pytest.mark.slow\n@pytest.mark.cuda\ndef test_one(): pass\n"


@pytest.mark.parametrize(
    ("expression", "on_all", "on_some", "on_none"),
    [
        ("cuda", True, True, False),
        ("not cuda", False, True, True),
        ("cuda and not slow", False, True, False),
        ("slow or peers", True, True, False),
        ("not (slow and cuda)", False, True, True),
        ("peers", False, False, False),
        ("", True, True, True),
        ("cuda(index=1)", True, True, True),  # not read, so it may select any
    ],
)
def test_a_file_is_left_out_only_without_tests_of_the_markers(
    expression: str, on_all: bool, on_some: bool, on_none: bool
) -> None:
    files = {ON_ALL: on_all, ON_SOME: on_some, ON_ALL + ON_SOME: on_all}
    files["def test_cuda(): pass\n"] = on_none
    assert {text: may_select(expression, text) for text in files} == files


@pytest.mark.slow
def test_skips_are_forbidden_failures_have_a_command_and_leaks_a_name(
    tmp_path: Path,
) -> None:
    variables = {"BACKEND": "python", "NO_SKIP": "1", "REQUIRE_CUDA": "1"}
    variables = {f"PYPARALLEL_{name}": value for name, value in variables.items()}
    found, output = run(tmp_path, SKIPS + FAILS + LEAVES, **variables)
    # A test that follows one with leaked resources passes.
    counts = {"failed": 2, "passed": 6, "error": 6, "deselected": 1}
    assert found == counts, output
    values = [f"{name}={value}" for name, value in variables.items()]
    start = " ".join([*values, sys.executable, "-m pytest"])
    commands = [each for each in output.splitlines() if " -m pytest " in each]
    assert f"{start} 'test_one.py::test_text[a b]'" in commands
    assert f"{start} test_one.py::test_fixture" in commands
    assert len(commands) == 2 + 6
    said = re.findall(r"^E +AssertionError: the test (.*)", output, re.MULTILINE)
    expected = [
        "thread waits",
        r"process \d+ sleep 60",
        r"descriptor \d+ /memfd:slab \(deleted\)",
        r"shared memory torch_\d+_\S+",
    ]
    for line, resource in zip(said, expected, strict=True):
        assert re.fullmatch(f"must end or close: {resource}", line)


def test_a_missing_peer_is_an_error_where_no_test_may_be_skipped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("PYPARALLEL_NO_SKIP", raising=False)
    assert installed("torch", "no_such_peer") == ["torch"]
    monkeypatch.setenv("PYPARALLEL_NO_SKIP", "1")
    assert installed("torch") == ["torch"]
    with pytest.raises(ModuleNotFoundError, match=r"missing: \['no_such_peer'\]"):
        installed("torch", "no_such_peer")
