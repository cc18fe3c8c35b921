#!/usr/bin/env python3
"""Compile for the GPU of this machine and run the checks that need one.

``python3 scripts/gpu_check.py TREE PYTHON`` copies the sources to TREE, builds them
there with PYTHON and runs the steps below. Each result is printed and written to the
summary as soon as its step ends, so a killed run keeps the results that it has. The
exit code is 1 if a step failed. Settings are environment variables:

GPU_STAGE       1, 2, 3 or 4: the steps of `STAGES`, together below 540 s
GPU_STEPS       the steps to run, in this order, instead of those of the stage
GPU_LIMIT       the limit of each step in seconds, instead of its own limit
GPU_SECONDS     the limit of the stage in seconds (520)
GPU_COMMIT      the commit, if the tree is no git repository
GPU_WHEELS      the folder of wheels to install
GPU_RESULTS     the folder with the results of earlier stages: the extension, which is
                not built again, and the tests that the step retest repeats (OUT)
GPU_TEST_ARGS   options of pytest in the step tests
GPU_BENCH_ARGS  options of python -m benchmarks.gpu
GPU_KERNEL_ARGS options of python -m benchmarks.gpu.kernels in the steps rates and ncu
GPU_CASES       the seconds after which memcheck and initcheck only run tests that have
                run no case yet (30 less than the limit of the step)
GPU_WERROR      1: a warning of the compiler is an error
MAX_JOBS        compilers at a time (one for each core, at most 16)
OUT             the folder of the log, the summary and the results (build/gpu-check)
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, NamedTuple

from gpu_steps import Command, Commands, Machine, NotRun, refusal, stop

ROOT = Path(__file__).resolve().parents[1]


class Step(NamedTuple):
    """The limit and the expected time of a step, in seconds."""

    limit: float
    expected: float


#: The expected times are those of an H100 with 16 cores.
STEPS = {
    "build": Step(limit=240, expected=30),
    "selftest": Step(limit=60, expected=20),
    "tests": Step(limit=420, expected=130),
    "rates": Step(limit=60, expected=10),
    "bench": Step(limit=420, expected=350),
    "memcheck": Step(limit=200, expected=15),
    "initcheck": Step(limit=120, expected=80),
    "ncu": Step(limit=90, expected=10),
    "retest": Step(limit=420, expected=60),
}
STAGES = {
    "": "build selftest tests rates bench memcheck initcheck ncu".split(),
    "1": "build selftest tests".split(),
    "2": "build rates bench".split(),
    "3": "build memcheck initcheck ncu".split(),
    "4": "build retest".split(),
}
#: A step that ignores the interrupt at its limit is killed after the grace period.
STAGE_SECONDS, GRACE_SECONDS = 520.0, 10.0


def chosen_steps(env: Mapping[str, str]) -> list[str]:
    """Return the steps of GPU_STEPS, or those of GPU_STAGE."""
    stage = env.get("GPU_STAGE", "")
    if stage not in STAGES:
        stop(f'GPU_STAGE must be 1, 2, 3 or 4, but is "{stage}".', 2)
    steps = env.get("GPU_STEPS", "").split() or STAGES[stage]
    for step in steps:
        if step not in STEPS:
            known = " ".join(STEPS)
            stop(f'GPU_STEPS must name steps of "{known}", but names "{step}".', 2)
    return steps


class Summary:
    """A row for each step, on disk as soon as it changes."""

    def __init__(self, path: Path, title: str, note: str) -> None:
        self._path, self._title, self._note = path, title, note
        self._rows: dict[str, str] = {}

    def set(self, step: str, verdict: str, seconds: float, text: str) -> str:
        """Set and return the row of a step."""
        row = f"{step:<10} {verdict:<8} {seconds:>5.0f} s  {text}".rstrip()
        self._rows[step] = row
        beside = self._path.with_suffix(".part")
        beside.write_text(f"{self}\n", encoding="utf-8")
        beside.replace(self._path)
        return row

    def __str__(self) -> str:
        rows = [self._title, *self._rows.values(), self._note]
        return "\n".join(filter(None, rows))


class Ended(NamedTuple):
    """How a command ended."""

    code: int
    stopped: bool
    last: str  # line that it printed
    refused: str  # why a tool could not work


def signal_group(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    """Send a signal to a command and its children."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, number)


class Check:
    """Runs steps one after the other, with a log and a summary."""

    def __init__(self, tree: Path, machine: Machine, log: IO[bytes]) -> None:
        self._tree, self._machine, self._log = tree, machine, log

    def say(self, text: str) -> None:
        """Print a text, also to the log."""
        self._write(f"{text}\n".encode())

    def _write(self, data: bytes) -> None:
        for file in (sys.stdout.buffer, self._log):
            file.write(data)
            file.flush()

    def run(self, command: Command, seconds: float) -> Ended:
        """Run a command; interrupt it when its time is over, and kill it later."""
        over = time.monotonic() + seconds
        # pytest and the benchmark write their reports when they are interrupted.
        signals = [(over, signal.SIGINT), (over + GRACE_SECONDS, signal.SIGKILL)]
        tail, stopped, begun = b"", False, b""
        with subprocess.Popen(
            command.argv,
            cwd=self._tree,
            env={**self._machine.env, **command.env},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            preexec_fn=os.setpgrp,
        ) as process:
            assert process.stdout
            try:
                while True:
                    if select.select([process.stdout], [], [], 0.2)[0]:
                        data = os.read(process.stdout.fileno(), 1 << 16)
                        if not data:
                            break
                        self._write(data)
                        tail = (tail + data)[-4096:]
                        begun += data[: 4096 - len(begun)]
                    elif process.poll() is not None:
                        break  # a descendant may keep the pipe open
                    if signals and time.monotonic() > signals[0][0]:
                        signal_group(process, signals.pop(0)[1])
                        stopped = True
            finally:
                # Compilers have process groups of their own, which ninja ends.
                for number in (signal.SIGTERM, signal.SIGKILL):
                    with suppress(subprocess.TimeoutExpired):
                        process.wait(1)
                    signal_group(process, number)
        lines = [
            line for line in tail.decode(errors="replace").splitlines() if line.strip()
        ]
        printed = (begun + tail).decode(errors="replace")
        refused = refusal(command, printed) if process.returncode else ""
        last = lines[-1][:160] if lines else ""
        return Ended(process.returncode, stopped, last, refused)

    def step(self, commands: list[Command], seconds: float) -> tuple[bool, str]:
        """Run the commands of a step; return whether all passed, and the last line."""
        over, num_failed, last = time.monotonic() + seconds, 0, ""
        for number, command in enumerate(commands, 1):
            ended = self.run(command, over - time.monotonic())
            num_failed += ended.code != 0
            last = ended.last
            if ended.refused:
                raise NotRun(ended.refused, False)
            if ended.stopped:
                place = f" in command {number} of {len(commands)}"
                place = place if len(commands) > 1 else ""
                return False, f"stopped after {seconds:.0f} s{place}: {last}"
        if num_failed and len(commands) > 1:
            last = f"{num_failed} of {len(commands)} commands failed: {last}"
        return not num_failed, last


def compared(step: str, seconds: float) -> str:
    """Return a note if a step took much longer than expected."""
    expected = STEPS[step].expected
    if seconds <= 3 * expected:
        return ""
    return f" [took {seconds / expected:.1f}x the expected {expected:.0f} s]"


def run_steps(
    steps: list[str], check: Check, commands: Commands, summary: Summary, over: float
) -> bool:
    """Run all steps, whose rows go to the summary; return whether none failed."""
    passed, build_failed = True, False
    for step in steps:
        limit = float(os.environ.get("GPU_LIMIT") or STEPS[step].limit)
        begin = time.monotonic()
        limit = min(limit, over - begin)
        if build_failed or limit < 1:
            why = "the build failed" if build_failed else "no time is left"
            check.say(summary.set(step, "not run", 0, why))
            passed = False
            continue
        check.say(f"\n=== {step} (at most {limit:.0f} s)")
        summary.set(step, "running", 0, f"at most {limit:.0f} s")
        try:
            fine, text = check.step(commands.of(step, limit), limit)
            verdict = "passed" if fine else "FAILED"
            if step == "build" and fine:
                commands.keep()
        except NotRun as reason:
            fine, text = not reason.failed, str(reason)
            verdict = "FAILED" if reason.failed else "skipped"
        seconds = time.monotonic() - begin
        text += compared(step, seconds)
        check.say(summary.set(step, verdict, seconds, text))
        passed &= fine
        build_failed |= step == "build" and not fine
    return passed


def described() -> str:
    """Return the commit, or that git does not know it or is missing."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
    with suppress(OSError):
        done = subprocess.run(command, capture_output=True, text=True)
        return done.stdout.strip() or "unknown"
    return "unknown"


def main() -> int:
    """Run the chosen steps; return the exit code."""
    begin, env = time.monotonic(), os.environ
    steps, stage = chosen_steps(env), env.get("GPU_STAGE", "")
    tree, python = Path(sys.argv[1]).resolve(), shutil.which(sys.argv[2])
    if python is None:
        stop(f"PYTHON must be an interpreter, but is {sys.argv[2]}.", 2)
    # This ends the steps together with this process.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    machine = Machine(os.path.abspath(python), tree)
    out = Path(env.get("OUT") or ROOT / "build/gpu-check").resolve()
    out.mkdir(parents=True, exist_ok=True)
    subprocess.run([ROOT / "scripts/copy_tree", tree], check=True)
    wheels = env.get("GPU_WHEELS")
    machine.install(sorted(Path(wheels).glob("*.whl")) if wheels else [])
    results = Path(env["GPU_RESULTS"]).resolve() if env.get("GPU_RESULTS") else None
    commit = env.get("GPU_COMMIT") or described()
    num_gpus = len(machine.gpus)
    suffix = f"-{stage}" if stage else ""
    summary = Summary(
        out / f"summary{suffix}.txt",
        f"{num_gpus} x {machine.gpus[0]}, torch {machine.torch}, Python "
        f"{machine.version}, commit {commit}",
        "" if num_gpus > 1 else "tests for two GPUs are left out: there is one",
    )
    seconds = float(env.get("GPU_SECONDS") or STAGE_SECONDS)
    over = begin + seconds if stage else float("inf")
    with (out / f"gpu-check{suffix}.log").open("wb") as log:
        check = Check(tree, machine, log)
        try:
            commands = Commands(machine, tree, out, results, commit)
            passed = run_steps(steps, check, commands, summary, over)
        finally:
            check.say(f"\n=== summary (log and results: {out})\n{summary}")
    return 0 if passed else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
