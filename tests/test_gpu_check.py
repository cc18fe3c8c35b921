"""scripts/gpu_check without a GPU: a fake interpreter tells what would have run."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent

#: Stands for an interpreter: notes what it is asked to run, and fails where it is told.
PYTHON = """#!/bin/bash
note() { echo "$*" >>"$FAKE/calls"; }
end() {
  [[ " ${FAILING:-} " == *" $1 "* ]] && echo "$1 broke" && exit 3
  [[ " ${SLOW:-} " == *" $1 "* ]] && echo "$1 began" && exec sleep 60
  echo "$1 is fine"; exit 0
}
case "$*" in
  -) cat >/dev/null
     [ -z "${BLIND:-}" ] && echo 'A GPU (9, 0)' && exit 0
     echo 'gpu-check must see a GPU, but torch 9 sees none.' >&2; exit 1;;
  "-c import torch;"*) echo "${GPUS:-1}"; exit 0;;
  "-c import sys"*) cat "$FAKE/missing" 2>/dev/null; exit 0;;
  "-c import glob"*) [ -x "$FAKE/wheel/compute-sanitizer" ] || exit 1
     echo "$FAKE/wheel/compute-sanitizer"; exit 0;;
esac
note "${SANITIZED:+$SANITIZED }${PYTORCH_NO_CUDA_MEMORY_CACHING:+uncached }$*"
case "$*" in
  "-m pip "*) [ -n "${ONLINE:-}" ] && rm "$FAKE/missing"; exit 0;;
  setup.py*) end build;;
  "-m pyparallel") end selftest;;
  *"-m cuda and kernel"*) end "$SANITIZED";;
  "-m pytest"*) end tests;;
  "-u -m benchmarks.gpu"*) end bench;;
esac
echo "unexpected: $*"; exit 9
"""
SANITIZER = """#!/bin/bash
echo "sanitizer $*" >>"$FAKE/calls"
export SANITIZED=$2
while [ "$1" != "$FAKE/python" ]; do shift; done
exec "$@"
"""


class Check:
    """Runs the script in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.out = folder, folder / "out"
        self.program("python", PYTHON)

    def program(self, name: str, text: str) -> None:
        path = self.folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)

    def run(self, **settings: str) -> subprocess.CompletedProcess[str]:
        kept = {
            k: v for k, v in os.environ.items() if not k.startswith(("GPU_", "CUDA_"))
        }
        for name in ("calls", "out/gpu-check.log"):
            (self.folder / name).unlink(missing_ok=True)
        kept |= {"PATH": "/usr/bin:/bin", "CUDA_HOME": str(self.folder / "none")}
        env = {**kept, "FAKE": str(self.folder), "OUT": str(self.out), **settings}
        command = [ROOT / "scripts" / "gpu_check", self.folder / "tree"]
        command.append(self.folder / "python")
        return subprocess.run(
            command, env=env, capture_output=True, text=True, timeout=100
        )

    @property
    def calls(self) -> list[str]:
        path = self.folder / "calls"
        return path.read_text().splitlines() if path.exists() else []


@pytest.fixture
def check(tmp_path: Path) -> Check:
    return Check(tmp_path)


def summary(done: subprocess.CompletedProcess[str]) -> list[str]:
    """Return the lines of the summary, without their times."""
    _, _, text = done.stdout.partition("=== summary")
    return [re.sub(r" +\d+ s  ", " # s  ", line) for line in text.splitlines()[1:]]


ONE_GPU = "tests for two GPUs are left out: this machine has one"


def test_every_step_runs_and_stands_in_the_summary(check: Check) -> None:
    check.program("wheel/compute-sanitizer", SANITIZER)
    steps = "build selftest tests bench memcheck racecheck"
    done = check.run(GPU_STEPS=steps, GPU_BENCH_ARGS="--rounds 7")
    assert done.returncode == 0, done.stdout + done.stderr
    assert summary(done) == [
        "build      passed # s  build is fine",
        "selftest   passed # s  selftest is fine",
        "tests      passed # s  tests is fine",
        "bench      passed # s  bench is fine",
        "memcheck   passed # s  memcheck is fine",
        "racecheck  passed # s  racecheck is fine",
        ONE_GPU,
    ]
    build, selftest, tests, bench, *sanitized = check.calls
    assert build == "setup.py -q build_ext --inplace"
    assert selftest == "-m pyparallel"
    files = sorted(p for p in (ROOT / "tests").glob("test_*.py") if has_mark(p))
    names = " ".join(f"tests/{path.name}" for path in files)
    assert tests == f"-m pytest -q --durations=5 -m cuda and not two_gpus {names}"
    assert bench.startswith(f"-u -m benchmarks.gpu --out {check.out} --json ")
    assert bench.endswith("--rounds 7")
    for tool, (tool_call, pytest_call) in zip(
        ("memcheck", "racecheck"), (sanitized[:2], sanitized[2:]), strict=True
    ):
        assert tool_call.startswith(f"sanitizer --tool {tool} --error-exitcode 86 ")
        run = f"{tool} uncached -m pytest -q --timeout 0 -m cuda and kernel {names}"
        assert pytest_call == run
    log = (check.out / "gpu-check.log").read_text()
    assert "=== racecheck (at most 240 s)\nracecheck is fine\n" in log
    assert log.rstrip().endswith(ONE_GPU)


def has_mark(path: Path) -> bool:
    return "mark.cuda" in path.read_text(encoding="utf-8")


def test_two_gpus_run_the_tests_for_two(check: Check) -> None:
    done = check.run(GPU_STEPS="tests", GPUS="2")
    assert " -m cuda tests/" in check.calls[0]
    assert summary(done) == ["tests      passed # s  tests is fine"]


def test_a_step_that_fails_hides_no_other(check: Check) -> None:
    done = check.run(GPU_STEPS="build tests bench", FAILING="tests")
    assert done.returncode == 1
    assert summary(done) == [
        "build      passed # s  build is fine",
        "tests      FAILED # s  tests broke",
        "bench      passed # s  bench is fine",
        ONE_GPU,
    ]


def test_without_a_build_nothing_else_runs(check: Check) -> None:
    done = check.run(GPU_STEPS="build tests bench", FAILING="build")
    assert done.returncode == 1
    assert summary(done) == [
        "build      FAILED # s  build broke",
        "tests      not run # s  there is no build to run it on",
        "bench      not run # s  there is no build to run it on",
        ONE_GPU,
    ]
    assert len(check.calls) == 1


def test_a_step_that_takes_too_long_is_stopped(check: Check) -> None:
    done = check.run(GPU_STEPS="bench tests", SLOW="bench", GPU_LIMIT="5")
    assert done.returncode == 1
    assert summary(done) == [
        "bench      FAILED # s  stopped after 5 s: bench began",
        "tests      passed # s  tests is fine",
        ONE_GPU,
    ]


@pytest.mark.parametrize("where", ["PATH", "CUDA_HOME", "nowhere"])
def test_compute_sanitizer_is_looked_for(check: Check, where: str) -> None:
    settings: dict[str, Any] = {"GPU_STEPS": "racecheck"}
    if where == "PATH":
        check.program("bin/compute-sanitizer", SANITIZER)
        settings["PATH"] = f"{check.folder}/bin:/usr/bin:/bin"
    elif where == "CUDA_HOME":
        (check.folder / "cuda").mkdir()
        check.program("cuda/bin/compute-sanitizer", SANITIZER)
        settings["CUDA_HOME"] = str(check.folder / "cuda")
    done = check.run(**settings)
    if where != "nowhere":
        assert done.returncode == 0
        assert summary(done)[0] == "racecheck  passed # s  racecheck is fine"
        return
    assert done.returncode == 1
    assert (
        "compute-sanitizer must be in PATH, in CUDA_HOME/bin, or in a wheel, but is "
        f"nowhere. Install it: {check.folder}/python -m pip install "
        "nvidia-cuda-sanitizer-api\n"
    ) in done.stdout
    assert summary(done)[0].startswith("racecheck  FAILED # s  compute-sanitizer must")


@pytest.mark.parametrize("online", [True, False])
def test_an_interpreter_that_lacks_tools_gets_them_or_says_so(
    check: Check, online: bool
) -> None:
    (check.folder / "missing").write_text("optree pytest_timeout\n")
    settings = {"ONLINE": "1"} if online else {}
    done = check.run(GPU_STEPS="selftest", **settings)
    assert check.calls[0] == "-m pip install -q optree pytest-timeout"
    if online:
        assert done.returncode == 0
        return
    assert done.returncode == 1
    assert done.stderr == (
        f"{check.folder}/python must be able to import hypothesis optree psutil pytest "
        "pytest_timeout numpy pybind11 ninja setuptools, but lacks: optree "
        "pytest_timeout. Install them, or install them elsewhere with pip install "
        "--target and put that on PYTHONPATH.\n"
    )


def test_a_step_that_does_not_exist_is_named(check: Check) -> None:
    done = check.run(GPU_STEPS="tests benches")
    assert done.returncode == 2
    assert done.stderr == (
        'GPU_STEPS must name steps of "build selftest tests bench memcheck racecheck '
        'kernels", but names "benches".\n'
    )
    assert check.calls == []


def test_without_a_gpu_it_fails(check: Check) -> None:
    done = check.run(BLIND="1")
    assert done.returncode == 1
    assert done.stderr == "gpu-check must see a GPU, but torch 9 sees none.\n"
    assert check.calls == []
