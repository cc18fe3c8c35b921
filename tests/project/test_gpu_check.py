"""Limits, summaries and exits of scripts/gpu_check.py, without a GPU."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from types import ModuleType

import from_scripts
import pytest
from gpu_check_runs import ONE_GPU, TITLE, Check, rows
from loader_sets import wait_for

pytestmark = pytest.mark.one_backend


@pytest.fixture
def check(tmp_path: Path) -> Check:
    return Check(tmp_path)


def test_a_step_that_fails_hides_no_other_but_a_build_does(check: Check) -> None:
    done = check.run(GPU_STEPS="build tests bench", FAILING="tests")
    assert done.returncode == 1
    assert rows(done.stdout) == [
        TITLE,
        "build      passed # s  build is fine",
        "tests      FAILED # s  tests broke",
        "bench      passed # s  bench is fine",
        ONE_GPU,
    ]
    done = check.run(GPU_STEPS="build tests bench", FAILING="build")
    assert done.returncode == 1
    assert rows(done.stdout) == [
        TITLE,
        "build      FAILED # s  build broke",
        "tests      not run # s  the build failed",
        "bench      not run # s  the build failed",
        ONE_GPU,
    ]
    assert len(check.calls) == 1


def test_a_step_is_stopped_at_its_limit(check: Check) -> None:
    done = check.run(GPU_STEPS="bench tests", SLOW="bench", GPU_LIMIT="5")
    assert done.returncode == 1
    assert rows(done.stdout) == [
        TITLE,
        "bench      FAILED # s  stopped after 5 s: bench began",
        "tests      passed # s  tests is fine",
        ONE_GPU,
    ]


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


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(from_scripts.FOLDER))
    return from_scripts.load("gpu_check")


def test_a_step_that_ignores_the_interrupt_is_killed_with_its_children(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(script, "GRACE_SECONDS", 0.1)
    with (tmp_path / "log").open("wb") as log:
        machine = type("Machine", (), {"env": dict(os.environ)})
        check = script.Check(tmp_path, machine, log)
        code = "trap '' INT; sleep 60 & echo $!; wait"
        ended = check.run(script.Command(["bash", "-c", code]), 2)
    assert (ended.code, ended.stopped) == (-signal.SIGKILL, True)
    state = Path(f"/proc/{ended.last}/stat")

    def has_ended() -> bool:
        try:
            return state.read_text().split()[2] in "ZX"
        except (FileNotFoundError, ProcessLookupError):
            return True

    assert wait_for(has_ended)  # the kernel ends it a moment after the signal


def test_a_stage_ends_before_540_s_and_a_slow_step_is_named(
    script: ModuleType, tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    assert script.STAGE_SECONDS + script.GRACE_SECONDS < 540
    assert script.compared("selftest", 60) == ""
    note = " [took 3.1x the expected 20 s]"
    assert script.compared("selftest", 62) == note
    summary = script.Summary(tmp_path / "summary.txt", "title", "")
    with (tmp_path / "log").open("wb") as log:
        check = script.Check(tmp_path, None, log)
        assert not script.run_steps(["build", "tests"], check, None, summary, over=0)
    assert rows((tmp_path / "summary.txt").read_text()) == [
        "title",
        "build      not run # s  no time is left",
        "tests      not run # s  no time is left",
    ]


def test_settings_that_cannot_be_are_named(check: Check) -> None:
    done = check.run(GPU_STEPS="tests benches")
    assert done.returncode == 2
    assert done.stderr == (
        'GPU_STEPS must name steps of "build selftest tests bench memcheck initcheck '
        'ncu retest", but names "benches".\n'
    )
    done = check.run(GPU_STAGE="5")
    assert done.returncode == 2
    assert done.stderr == 'GPU_STAGE must be 1, 2, 3 or 4, but is "5".\n'
    check.probed["gpus"] = []
    done = check.run()
    assert done.returncode == 1
    assert done.stderr == "gpu-check must see a GPU, but torch 9.0 sees none.\n"
    assert check.calls == []
