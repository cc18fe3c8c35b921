"""``pyparallel doctor``: report the installation and the machine, and test both."""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from .. import backend
from ..transfer import gpu_record
from . import build, gpu_test, machine, packages, report, self_test
from .report import Problem
from .self_test import IMPORTING, WORLD_SIZE, Failure

#: Returns the values of a section, and appends its problems to the list.
Section = Callable[[list[Problem]], Any]

#: The time limit since the start of the process, with the time to end two processes.
SECONDS = 40.0
_END_SECONDS = 3.0
#: With less time left, two processes are not started.
_LEAST_SECONDS = 3.0
#: Incremented when a key of the JSON object changes or goes.
SCHEMA = 1
_EPILOG = "The exit code is 1 if there is an error, and 0 if there is only advice."


def main(argv: list[str]) -> int:
    """Print the report; return the exit code."""
    parser = argparse.ArgumentParser(
        "pyparallel doctor", description=__doc__, epilog=_EPILOG
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="skip the bandwidths and the test in two processes",
    )
    parser.add_argument(
        "--gpu",
        action="store_true",
        help="test the kernels and copies of each GPU instead, and record the result",
    )
    options = parser.parse_args(argv)
    if sys.stderr:  # None: closed before the start
        faulthandler.enable()  # a crash of the extension prints the call
    problems: list[Problem] = []
    found: dict[str, Any] = {"schema": SCHEMA}
    deadline = time.monotonic() + SECONDS - _age()
    chosen = _GPU_SECTIONS if options.gpu else sections(options.quick, deadline)
    for name, section in chosen.items():
        found[name] = _run(name, section, problems)
        if not options.json:
            print(report.section(name, found[name]), end="\n\n", flush=True)
    fails = any(problem.fails for problem in problems)
    if options.json:
        found["problems"] = [problem._asdict() for problem in problems]
        print(json.dumps({**found, "ok": not fails}, indent=2))
    else:
        print(report.what_to_do(problems))
    return int(fails)


def sections(quick: bool, deadline: float) -> dict[str, Section]:
    """Return the sections by their names, in order.

    Args:
        quick: leave out the slow ones.
        deadline: the value of ``time.monotonic`` before which the self-tests end.
    """
    found: dict[str, Section] = {
        "versions": packages.versions,
        "backend": build.backend,
        "gpus": build.gpus,
        "toolchain": build.toolchain,
        "mmcv_parallel": packages.mmcv_parallel,
        "machine": machine.machine,
        "bandwidth": lambda _: machine.bandwidth(),
        "self_test": lambda problems: _self_tests(problems, deadline),
    }
    if quick:
        del found["bandwidth"]
        found["self_test"] = _quick_self_test
    return found


def _test_gpus(problems: list[Problem]) -> list[dict[str, Any]]:
    """Test every visible GPU, and record the results."""
    number = torch.cuda.device_count() if "cuda" in backend.transfers else 0
    if not number:
        text = (
            "--gpu must find a GPU and an extension with CUDA, but did not: the other "
            "sections have the reason."
        )
        problems.append(Problem(text, fails=True))
    return [_test_gpu(torch.device("cuda", i), problems) for i in range(number)]


def _test_gpu(device: torch.device, problems: list[Problem]) -> dict[str, Any]:
    started = time.perf_counter()
    passed, errors = gpu_test.test(device)
    took = time.perf_counter() - started
    for error in errors:
        text = f"The self-test of {device} must pass, but failed: {error}"
        problems.append(Problem(text, fails=True))
    recorded = str(gpu_record.path())
    try:
        gpu_record.write(device, passed=not errors)
    except OSError as error:
        text = f"The result for {device} should be recorded, but cannot be: {error}"
        problems.append(Problem(text, fails=False))
        recorded = ""
    return {
        "device": str(device),
        "passed": not errors,
        "took_seconds": took,
        "checks": passed,
        "recorded_in": recorded or None,
    }


#: The sections of ``--gpu``.
_GPU_SECTIONS: dict[str, Section] = {
    "versions": packages.versions,
    "backend": build.backend,
    "gpu_test": _test_gpus,  # before "gpus", which shows its record
    "gpus": build.gpus,
}


def _run(name: str, section: Section, problems: list[Problem]) -> Any:
    """Return a section; an exception, for example of a broken driver, is an error."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", r"\[PP005\]")  # the report says it
            return section(problems)
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        requirement = f"The doctor must be able to check the {name.replace('_', ' ')}"
        problems.append(Problem(f"{requirement}, but got {text}", fails=True))
        return {"error": text}


def _quick_self_test(problems: list[Problem]) -> dict[str, Any]:
    started = time.perf_counter()
    error = self_test.one_process()
    took, passed = time.perf_counter() - started, error is None
    if error is not None:
        problems.append(_failed("one process", error))
    return {
        "one_process": {"passed": passed, "took_seconds": took, "error": error},
        "refused_batch": _refused_batch(problems) if passed else None,
    }


def _refused_batch(problems: list[Problem]) -> int | None:
    code = self_test.refused_batch()
    if code:
        text = (
            "CUDA should copy a batch of pinned tensors by one call, but refused with "
            f"error {code}: each tensor is copied by a call of its own, which is "
            "slower. Use torch and a driver for CUDA 12.8 or newer."
        )
        problems.append(Problem(text, fails=False))
    return code


def _self_tests(problems: list[Problem], deadline: float) -> dict[str, Any]:
    found = _quick_self_test(problems)
    seconds = min(self_test.SECONDS, deadline - time.monotonic() - _END_SECONDS)
    found["two_processes"] = _in_two_processes(problems, seconds)
    return found


def _in_two_processes(problems: list[Problem], seconds: float) -> dict[str, Any]:
    """Run the self-test in two processes; a late result may be inconclusive.

    On a busy machine a late result is no failure. Nor is it one while a process still
    imports the package. A process that waits for a connection on an idle machine fails.
    """
    before, started = machine.load() or 0.0, time.perf_counter()
    failure: Failure | None = Failure("no time was left for it.", [], (IMPORTING,))
    if seconds >= _LEAST_SECONDS:
        failure = self_test.two_processes(seconds)
    took = time.perf_counter() - started
    load = max(before, (machine.load() or 0.0) - WORLD_SIZE)  # without our two
    passed: bool | None = failure is None
    if (
        failure
        and failure.late
        and (machine.is_busy(load) or IMPORTING in failure.late)
    ):
        passed = None
        text = (
            f"The self-test in two processes should be in time, but is inconclusive: "
            f"{failure.text} The load is {load:.1f} on {os.cpu_count()} cores. Run the "
            "doctor again when the machine is idle."
        )
        problems.append(Problem(text, fails=False))
    elif failure:
        problems.append(_failed("two processes", failure.text))
    return {
        "passed": passed,
        "took_seconds": took,
        "error": failure and failure.text,
        "output": failure.output if failure else [],
    }


def _failed(name: str, error: str) -> Problem:
    return Problem(f"The self-test in {name} must pass, but failed: {error}", True)


def _age() -> float:
    """Return the seconds since the start of this process, with the import of torch."""
    try:
        text = Path("/proc/self/stat").read_text(encoding="utf-8", errors="replace")
        start = int(text.rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - start)
    except (OSError, AttributeError, IndexError, ValueError):
        return 0.0
