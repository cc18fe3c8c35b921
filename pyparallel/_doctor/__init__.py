"""``pyparallel doctor``: what is installed, what is short, and whether it works."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from typing import Any

from . import _bandwidth, _build, _machine, _one_process, _packages, _text
from ._problem import Problem
from ._two_processes import two_processes

Look = Callable[[list[Problem]], Any]

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
    for name, look in sections(options.quick).items():
        found[name] = _look(name, look, problems)
        if not options.json:
            print(_text.section(name, found[name]), end="\n\n", flush=True)
    fails = any(problem.fails for problem in problems)
    if options.json:
        found["problems"] = [problem._asdict() for problem in problems]
        print(json.dumps({**found, "ok": not fails}, indent=2))
    else:
        print(_text.what_to_do(problems))
    return int(fails)


def sections(quick: bool) -> dict[str, Look]:
    """Return what is looked at, by the names of the sections.

    Args:
        quick: leave out what takes longer than a moment.
    """
    looks: dict[str, Look] = {
        "versions": _packages.versions,
        "backend": _build.backend,
        "gpus": _build.gpus,
        "toolchain": _build.toolchain,
        "mmcv_parallel": _packages.mmcv_parallel,
        "machine": _machine.machine,
        "bandwidth": lambda _: _bandwidth.bandwidth(),
        "self_test": _self_test,
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


def _self_test(problems: list[Problem]) -> dict[str, Any]:
    output: list[str] = []

    def both() -> str | None:
        failure = two_processes()
        output.extend(failure.output if failure else [])
        return failure.text if failure else None

    found = _quick_self_test(problems)
    found["two_processes"] = _timed("two processes", both, problems)
    found["two_processes"]["output"] = output
    return found


def _timed(
    name: str, test: Callable[[], str | None], problems: list[Problem]
) -> dict[str, Any]:
    started = time.perf_counter()
    error = test()
    took = time.perf_counter() - started
    if error is not None:
        text = f"The self-test in {name} must pass, but failed: {error}"
        problems.append(Problem(text, fails=True))
    return {"passed": error is None, "took_seconds": took, "error": error}
