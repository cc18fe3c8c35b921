#!/usr/bin/env python3
"""Flags for builds with sanitizers, and the environment for running them.

``python scripts/sanitizers.py address,undefined python -m pytest`` runs a command with
an extension that was built with ``PYPARALLEL_SANITIZE=address,undefined``.

Note: [sanitizer runtimes]. Python is not built with sanitizers, so their runtimes are
preloaded. AddressSanitizer's is loaded together with libstdc++, because it looks up
``__cxa_throw`` once, at its start. Python's own allocator is off, because it would hide
freed memory. tests/robustness/test_leaks.py checks for leaks, because no sanitizer sees
references of Python. ThreadSanitizer does not see OpenMP's synchronization: so our
threads are ``std::thread``, and torch uses one thread. Workers of loaders may start
threads after a fork. Reports go to files and from there to the end of the output:
pytest drops the output of tests that pass, and a child process may end with any code.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

#: The flags of every value besides -fsanitize. UBSan does not check casts of floats by
#: default; vptr needs torch's type information.
_UNDEFINED = ["-fno-sanitize=vptr", "-fsanitize=float-cast-overflow"]
FLAGS = {
    "address": [],
    "address,undefined": _UNDEFINED,
    "thread": ["-DPP_STD_THREADS"],
    "undefined": _UNDEFINED,
}
#: Libraries to preload, and settings; the caller's settings have priority.
RUNTIMES = {
    "address": (
        ["libasan.so", "libstdc++.so"],
        {"ASAN_OPTIONS": "detect_leaks=0", "PYTHONMALLOC": "malloc"},
    ),
    "thread": (
        ["libtsan.so"],
        {"TSAN_OPTIONS": "exitcode=66 die_after_fork=0", "OMP_NUM_THREADS": "1"},
    ),
    "undefined": ([], {"UBSAN_OPTIONS": "print_stacktrace=1"}),
}
#: The variable that each runtime reads its options from.
OPTIONS = {
    "address": "ASAN_OPTIONS",
    "thread": "TSAN_OPTIONS",
    "undefined": "UBSAN_OPTIONS",
}
REPORTED = 66  # the exit code of a command that succeeded, but with reports


def flags(env: Mapping[str, str], cuda: bool) -> list[str]:
    """Return the compiler's flags for ``PYPARALLEL_SANITIZE``; empty without it."""
    rule, wanted = "PYPARALLEL_SANITIZE must", env.get("PYPARALLEL_SANITIZE", "")
    if not wanted:
        return []
    if wanted not in FLAGS:
        raise SystemExit(f"{rule} be one of {' | '.join(FLAGS)}, but is {wanted!r}.")
    if cuda:
        raise SystemExit(f"{rule} be unset for CUDA, or FORCE_ONLY_CPU=1 be set.")
    found = [f"-fsanitize={wanted}", "-fno-sanitize-recover=all", *FLAGS[wanted]]
    compiler = env.get("CXX", "c++").split()
    probe = [*compiler, *found, "-x", "c++", "-", "-o", os.devnull]
    done = subprocess.run(probe, input="int main() {}", capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(
            f"{rule} be supported by the C++ compiler, but {compiler[0]} says:\n"
            f"{done.stderr}Install its sanitizers, or unset the variable."
        )
    return ["-O1", "-g", *found, "-fno-omit-frame-pointer"]


def environment(wanted: str, compiler: list[str]) -> dict[str, str]:
    """Return the environment variables for a module built with ``wanted``."""
    found: dict[str, str] = {}
    preload = []
    for name in wanted.split(","):
        libraries, settings = RUNTIMES[name]
        found.update(settings)
        for library in libraries:
            command = [*compiler, f"-print-file-name={library}"]
            preload.append(subprocess.check_output(command, text=True).strip())
    if preload:
        found["LD_PRELOAD"] = " ".join(preload)
    return found


def run(wanted: str, command: Sequence[str], variables: Mapping[str, str]) -> int:
    """Run a command, print the sanitizers' reports, and return an exit code."""
    with tempfile.TemporaryDirectory(prefix="sanitizers-") as folder:
        logged = {
            option: f"log_path={folder}/{name} {variables.get(option, '')}".strip()
            for name, option in OPTIONS.items()
            if name in wanted.split(",")
        }
        code = subprocess.run(command, env={**variables, **logged}).returncode
        reports = sorted(Path(folder).iterdir())
        for report in reports:
            sys.stderr.write(report.read_text(encoding="utf-8", errors="replace"))
    if code < 0:
        return 128 - code
    return code or (REPORTED if reports else 0)


def main() -> None:
    """Run the given command in the environment of the sanitizers."""
    if len(sys.argv) < 3 or sys.argv[1] not in FLAGS:
        raise SystemExit(f"usage: {sys.argv[0]} {'|'.join(FLAGS)} command ...")
    compiler = os.environ.get("CXX", "c++").split()
    found = environment(sys.argv[1], compiler)
    sys.exit(run(sys.argv[1], sys.argv[2:], {**found, **os.environ}))


if __name__ == "__main__":
    main()
