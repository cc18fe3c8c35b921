"""``pyparallel doctor``: what is installed, what is short, and whether it works."""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from . import _bandwidth, _one_process, _two_processes, build, machine, packages, report
from ._problem import Problem
from ._rank import WORLD_SIZE
from ._two_processes import IMPORTING, Failure

Look = Callable[[list[Problem]], Any]

#: The most time of it all, since the process began, and of that to end two processes.
SECONDS = 40.0
_END_SECONDS = 3.0
#: With less time left two processes are not started.
_LEAST_SECONDS = 3.0
#: Changes when a key of the JSON object does.
SCHEMA = 1
_EPILOG = "The exit code is 1 if there is an error, else 0; advice is no error."


def main(argv: list[str]) -> int:
    """Print the report; return the exit code."""
    parser = argparse.ArgumentParser(
        "pyparallel doctor", description=__doc__, epilog=_EPILOG
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="measure no bandwidth, and test in this process only",
    )
    options = parser.parse_args(argv)
    problems: list[Problem] = []
    found: dict[str, Any] = {"schema": SCHEMA}
    deadline = time.monotonic() + SECONDS - _age()
    for name, look in sections(options.quick, deadline).items():
        found[name] = _look(name, look, problems)
        if not options.json:
            print(report.section(name, found[name]), end="\n\n", flush=True)
    fails = any(problem.fails for problem in problems)
    if options.json:
        found["problems"] = [problem._asdict() for problem in problems]
        print(json.dumps({**found, "ok": not fails}, indent=2))
    else:
        print(report.what_to_do(problems))
    return int(fails)


def sections(quick: bool, deadline: float) -> dict[str, Look]:
    """Return what is looked at, by the names of the sections.

    Args:
        quick: leave out what takes longer than a moment.
        deadline: of ``time.monotonic``; the self-tests end before it.
    """
    looks: dict[str, Look] = {
        "versions": packages.versions,
        "backend": build.backend,
        "gpus": build.gpus,
        "toolchain": build.toolchain,
        "mmcv_parallel": packages.mmcv_parallel,
        "machine": machine.machine,
        "bandwidth": lambda _: _bandwidth.bandwidth(),
        "self_test": lambda problems: _self_test(problems, deadline),
    }
    if quick:
        del looks["bandwidth"]
        looks["self_test"] = _quick_self_test
    return looks


def _look(name: str, look: Look, problems: list[Problem]) -> Any:
    """Return a section; one that cannot be had, as of a broken driver, is an error."""
    try:
        return look(problems)
    except Exception as error:
        told, what = f"{type(error).__name__}: {error}", name.replace("_", " ")
        text = f"The doctor must be able to look at the {what}, but was told: {told}"
        problems.append(Problem(text, fails=True))
        return {"error": told}


def _quick_self_test(problems: list[Problem]) -> dict[str, Any]:
    return {"one_process": _timed("one process", _one_process.one_process, problems)}


def _self_test(problems: list[Problem], deadline: float) -> dict[str, Any]:
    found = _quick_self_test(problems)
    seconds = min(_two_processes.SECONDS, deadline - time.monotonic() - _END_SECONDS)
    found["two_processes"] = _in_two_processes(problems, seconds)
    return found


def _in_two_processes(problems: list[Problem], seconds: float) -> dict[str, Any]:
    """Return the result; on a busy machine a late one tells nothing.

    Processes that wait for a connection are late on an idle machine, too. Those that
    are still being imported only need more time.
    """
    before, started = machine.load() or 0.0, time.perf_counter()
    failure: Failure | None = Failure("no time was left for it.", [], (IMPORTING,))
    if seconds >= _LEAST_SECONDS:
        failure = _two_processes.two_processes(seconds)
    took = time.perf_counter() - started
    load = max(before, (machine.load() or 0.0) - WORLD_SIZE)  # these are our own
    passed: bool | None = failure is None
    if failure is not None and failure.late:
        if machine.is_busy(load) or IMPORTING in failure.late:
            passed = None
            text = (
                f"The self-test in two processes should be in time, but is "
                f"inconclusive: {failure.text} The load is {load:.1f} on "
                f"{os.cpu_count()} cores. Run the doctor again when the machine is "
                "idle."
            )
            problems.append(Problem(text, fails=False))
    if failure is not None and passed is not None:
        problems.append(_failed("two processes", failure.text))
    return {
        "passed": passed,
        "took_seconds": took,
        "error": failure and failure.text,
        "output": failure.output if failure else [],
    }


def _timed(
    name: str, test: Callable[[], str | None], problems: list[Problem]
) -> dict[str, Any]:
    started = time.perf_counter()
    error = test()
    took = time.perf_counter() - started
    if error is not None:
        problems.append(_failed(name, error))
    return {"passed": error is None, "took_seconds": took, "error": error}


def _failed(name: str, error: str) -> Problem:
    return Problem(f"The self-test in {name} must pass, but failed: {error}", True)


def _age() -> float:
    """Return the seconds since this process began: torch takes some to be imported."""
    try:
        text = Path("/proc/self/stat").read_text(encoding="utf-8", errors="replace")
        began = int(text.rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - began)
    except (OSError, AttributeError, IndexError, ValueError):
        return 0.0
