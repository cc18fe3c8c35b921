"""The checks on a GPU with a fake interpreter, which records its calls.

`make cuda-build` runs the whole bundle on the fake CUDA runtime.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.repository.folders import ROOT

pytestmark = pytest.mark.one_backend

#: An interpreter that records its calls, and fails or waits on request.
PYTHON = """#!/bin/bash
end() {
  [[ " ${FAILING:-} " == *" $1 "* ]] && echo "$1 broke" && exit 3
  [[ " ${SLOW:-} " == *" $1 "* ]] && echo $$ >"$FAKE/pid" && echo "$1 began" &&
    exec sleep 60
  echo "$1 is fine"; exit 0
}
case "$*" in
  -c*device_count*) echo "$PROBED"; exit 0;;
  -c*find_spec*) exit 0;;
  "-m pip"*) echo pip >>"$FAKE/calls"; exit 0;;
  */gpu_check.py*) exec "$REAL_PYTHON" "$@";;
esac
for name in SANITIZED PYTORCH_NO_CUDA_MEMORY_CACHING PYPARALLEL_NO_SKIP; do
  [ -z "${!name:-}" ] || printf '%s=%s ' $name "${!name}"
done >>"$FAKE/calls"
echo "$*" >>"$FAKE/calls"
case "$*" in
  setup.py*) echo built >pyparallel/backend/_C.abi.so; end build;;
  "-m pyparallel") end selftest;;
  *"-m cuda and kernel"*) end "$SANITIZED";;
  *--junitxml*) end tests;;
  "-m pytest"*) end "${@: -1}";;
  "-m benchmarks.gpu.kernels --time"*) end rates;;
  "-m benchmarks.gpu.kernels"*) end ncu;;
  "-m benchmarks.gpu"*) end bench;;
esac
echo "unexpected: $*"; exit 9
"""
#: compute-sanitizer or ncu: records its options, and runs the interpreter.
TOOL = r"""#!/bin/bash
for option; do [ "$option" = "$FAKE/python" ] && break; options+=("$option"); done
echo "${0##*/} ${options[*]}" >>"$FAKE/calls"
[[ $1 == --tool ]] && export SANITIZED=$2
[[ "$*" =~ --log-file\ ([^ ]+) ]] && file=${BASH_REMATCH[1]}
if [ -n "${REFUSED:-}" ]; then echo "$REFUSED" >"${file:-/dev/stderr}"; exit 1; fi
while [ "$1" != "$FAKE/python" ]; do shift; done
exec "$@"
"""
PROBED: dict[str, Any] = {"python": "3.12.3", "torch": "9.0", "gpus": ["A GPU"]}
TITLE = "1 x A GPU, torch 9.0, Python 3.12.3, commit abc"
ONE_GPU = "tests for two GPUs are left out: there is one"


class Check:
    """Runs the script in a separate folder."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.out = folder, folder / "out"
        self.probed = {**PROBED, "bins": [str(folder / "wheel")]}
        self.program("python", PYTHON)
        for name in ("compute-sanitizer", "ncu"):
            self.program(f"wheel/{name}", TOOL)

    def program(self, name: str, text: str) -> None:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)

    def start(self, *command: Any, **settings: str) -> subprocess.Popen[str]:
        kept = {
            k: v
            for k, v in os.environ.items()
            if not k.startswith(("GPU_", "CUDA_", "MAX_JOBS", "PYPARALLEL_", "WERROR"))
        }
        (self.folder / "calls").unlink(missing_ok=True)
        kept |= {"PATH": "/usr/bin:/bin", "CUDA_HOME": str(self.folder / "cuda")}
        kept |= {"FAKE": str(self.folder), "OUT": str(self.out), "GPU_COMMIT": "abc"}
        kept |= {"PROBED": json.dumps(self.probed), "REAL_PYTHON": sys.executable}
        script = ROOT / "scripts" / "gpu_check.py"
        own = [sys.executable, script, self.folder / "tree", self.folder / "python"]
        return subprocess.Popen(
            command or own,
            env={**kept, **settings},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def run(self, *command: Any, **settings: str) -> subprocess.CompletedProcess[str]:
        with self.start(*command, **settings) as process:
            out, err = process.communicate(timeout=100)
        return subprocess.CompletedProcess([], process.returncode, out, err)

    @property
    def calls(self) -> list[str]:
        path = self.folder / "calls"
        return path.read_text().splitlines() if path.exists() else []


def rows(text: str) -> list[str]:
    """Return the lines of a summary, without their times."""
    _, _, after = text.rpartition("=== summary")
    lines = after.splitlines()[1:] if after != text else text.splitlines()
    return [re.sub(r" +\d+ s  ", " # s  ", line) for line in lines]


@pytest.fixture
def check(tmp_path: Path) -> Check:
    return Check(tmp_path)


def test_every_step_runs_and_has_a_row(check: Check) -> None:
    """`make cuda-build` runs each stage alone, from a bundle."""
    steps = "build selftest tests rates bench memcheck initcheck ncu".split()
    done = check.run(GPU_BENCH_ARGS="--rounds 7")
    assert done.returncode == 0, done.stdout + done.stderr
    fine = [f"{step:<10} passed # s  {step} is fine" for step in steps]
    assert rows(done.stdout) == [TITLE, *fine, ONE_GPU]
    assert rows((check.out / "summary.txt").read_text()) == rows(done.stdout)
    assert f"{steps[-1]} is fine\n" in (check.out / "gpu-check.log").read_text()
    tests, bench = (check.calls[i] for i in (2, 4))
    assert tests.startswith("PYPARALLEL_NO_SKIP=1 ")
    assert " -m cuda and not two_gpus " in tests
    assert bench.endswith(" --total-seconds 380 --commit abc --rounds 7")
    sanitized = [call for call in check.calls if call.startswith("compute-")]
    assert [call.split()[2] for call in sanitized] == ["memcheck", "initcheck"]
    assert all(" --launch-timeout 0 " in f"{call} " for call in sanitized)
    for name, seconds in (("memcheck", 170), ("initcheck", 90)):
        (call,) = [c for c in check.calls if c.startswith(f"SANITIZED={name}")]
        assert call.endswith(f" --first-cases-after {seconds} -m cuda and kernel")
    assert sum("PYTORCH_NO_CUDA_MEMORY_CACHING=1 " in c for c in check.calls) == 2


def test_a_step_that_fails_or_hangs_hides_no_other_but_a_build_does(
    check: Check,
) -> None:
    check.probed["bins"] = []
    steps = "build tests bench initcheck ncu"
    done = check.run(GPU_STEPS=steps, FAILING="tests", SLOW="bench", GPU_LIMIT="3")
    assert done.returncode == 1
    assert rows(done.stdout) == [
        TITLE,
        "build      passed # s  build is fine",
        "tests      FAILED # s  tests broke",
        "bench      FAILED # s  stopped after 3 s: bench began",
        "initcheck  FAILED # s  compute-sanitizer must be in PATH, in CUDA_HOME/bin or "
        f"in a wheel, but is not there. Install it: {check.folder}/python -m pip "
        "install nvidia-cuda-sanitizer-api",
        "ncu        skipped # s  ncu is not in PATH, in CUDA_HOME/bin or in a wheel",
        ONE_GPU,
    ]
    done = check.run(GPU_STEPS="build tests", FAILING="build")
    assert done.returncode == 1
    assert rows(done.stdout)[1:] == [
        "build      FAILED # s  build broke",
        "tests      not run # s  the build failed",
        ONE_GPU,
    ]
    assert len(check.calls) == 1


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_run_leaves_its_summary(check: Check, number: signal.Signals) -> None:
    process = check.start(GPU_STEPS="build tests bench", SLOW="bench")
    assert process.stdout
    printed = []
    for line in process.stdout:
        printed.append(line)
        if line == "bench began\n":
            break
    os.killpg(process.pid, number)
    out, _ = process.communicate(timeout=100)
    expected = [
        TITLE,
        "build      passed # s  build is fine",
        "tests      passed # s  tests is fine",
        "bench      running # s  at most 420 s",
        ONE_GPU,
    ]
    assert rows((check.out / "summary.txt").read_text()) == expected
    assert set(expected[1:3]) <= set(rows("".join(printed)))
    step = int((check.folder / "pid").read_text())
    if number == signal.SIGKILL:
        os.kill(step, signal.SIGKILL)  # has a process group of its own
        return
    assert process.returncode == 128 + number
    assert rows(out) == expected
    with pytest.raises(ProcessLookupError):
        os.kill(step, 0)


def test_the_last_stage_repeats_red_tests_one_by_one(check: Check) -> None:
    """The report is of real tests: the ids of all red ones are needed."""
    folder = check.folder / "tests"
    folder.mkdir()
    (folder / "test_red.py").write_text(
        "import pytest\n"
        "@pytest.mark.parametrize('x', ['a b', 'c.d'])\n"
        "def test_two(x): assert x == 'a b'\n"
        "class TestClass:\n"
        "    def test_method(self): assert 0\n"
        "@pytest.fixture\n"
        "def broken(): assert 0\n"
        "def test_fixture(broken): pass\n"
        "def test_skipped(): pytest.skip()\n"
    )
    (folder / "test_broken.py").write_text("import no_such_module\n")
    (check.folder / "pytest.ini").touch()
    report = check.folder / "tests.xml"
    command = [sys.executable, "-m", "pytest", "-q", "--continue-on-collection-errors"]
    command += ["-o", "junit_family=xunit1", "--junitxml", str(report), "tests"]
    subprocess.run(command, cwd=check.folder, capture_output=True, timeout=100)
    red = ["tests/test_broken.py", "tests/test_red.py::test_two[c.d]"]
    red += ["tests/test_red.py::TestClass::test_method"]
    red += ["tests/test_red.py::test_fixture"]
    done = check.run(GPU_STAGE="4", FAILING=red[1], GPU_RESULTS=str(report.parent))
    assert done.returncode == 1
    assert rows(done.stdout)[1:3] == [
        "build      passed # s  build is fine",
        f"retest     FAILED # s  1 of 4 commands failed: {red[3]} is fine",
    ]
    assert [call.rpartition(" ")[2] for call in check.calls[1:]] == red
    done = check.run(GPU_STAGE="4")
    assert rows(done.stdout)[2].startswith(
        f"retest     FAILED # s  {check.out}/tests.xml"
    )


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ("==ERROR== ERR_NVGPUCTRPERM - The user", "the driver refuses the counters to"),
        ("LibraryNotLoaded", "the driver refuses the counters to this machine"),
        ("Error: Device not supported", "the tool does not support this device"),
    ],
)
def test_a_refused_tool_fails_no_stage(check: Check, said: str, why: str) -> None:
    done = check.run(GPU_STEPS="initcheck ncu", REFUSED=said)
    assert done.returncode == 0, done.stdout
    found = rows(done.stdout)[1:3]
    assert [row.partition(why)[0] for row in found] == [
        "initcheck  skipped # s  ",
        "ncu        skipped # s  ",
    ]
    done = check.run(GPU_STEPS="initcheck ncu", REFUSED="a leak")
    assert done.returncode == 1 and done.stdout.count("FAILED") == 4
