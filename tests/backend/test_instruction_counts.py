"""Instruction counts of the native loops, independent of time.

Counts do not depend on how busy a machine is, but on the compiler. Where the table in
``csrc/support/instruction_counts.json`` has none for it, only their growth is checked.
Instructions of the C library are left out, because it chooses its code by the CPU.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.repository.folders import ROOT

TABLE = ROOT / "tests" / "csrc" / "support" / "instruction_counts.json"
CASES = (
    "pad_copy",
    "pad_copy_placed",
    "pad_copy_small",
    "pad_copy_streamed",
    "mask",
    "pack",
)
BAND = 0.10
SCALE = 4

NEEDED = [name for name in ("valgrind", "cmake", "c++") if shutil.which(name) is None]
PURE = os.environ.get("PYPARALLEL_BACKEND") == "python"
pytestmark = [
    pytest.mark.one_backend,
    pytest.mark.skipif(PURE, reason="pure Python runs none of these loops"),
    pytest.mark.skipif(bool(NEEDED), reason=f"needs {', '.join(NEEDED)}"),
    pytest.mark.skipif(
        not (ROOT / "CMakeLists.txt").exists(),
        reason="csrc is not part of this install",
    ),
]


def run(*command: object) -> str:
    done = subprocess.run(
        list(map(str, command)), capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def binary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("count")
    run("cmake", "-S", ROOT, "-B", folder, "-DPP_SANITIZE=")
    run("cmake", "--build", folder, "--target", "count_instructions")
    return folder / "count_instructions"


def own_cost(profile: str, binary: Path) -> int:
    """Sum the own cost of the functions of this binary."""
    total, ours, skip = 0, False, False
    for line in profile.splitlines():
        if line.startswith("ob="):
            ours = line.endswith(binary.name)
        elif line.startswith("calls="):
            skip = True  # the next line has the cost of the callee
        elif cost := re.fullmatch(r"\d+ (\d+)", line):
            total += 0 if skip or not ours else int(cost[1])
            skip = False
    return total


def count(binary: Path, case: str, scale: int) -> int:
    out = binary.parent / f"{case}.{scale}.out"
    options = ("--toggle-collect=counted", "--compress-strings=no", "--compress-pos=no")
    tool = ("valgrind", "--tool=callgrind", *options, f"--callgrind-out-file={out}")
    run(*tool, binary, case, scale)
    return own_cost(out.read_text(encoding="utf-8"), binary)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_the_instructions_of_a_loop_equal_the_table(binary: Path, case: str) -> None:
    counts = json.loads(TABLE.read_text(encoding="utf-8"))
    compiler = run(binary).strip()
    once = count(binary, case, SCALE)
    if compiler in counts:
        expected = counts[compiler][case]
        assert abs(once - expected) <= BAND * expected, (
            f"{case} takes {once} instructions and not {expected}. If that is meant, "
            f"write it into {TABLE.name}."
        )
    else:
        growth = count(binary, case, 2 * SCALE) / once
        assert 1.8 <= growth <= 2.2, f"twice as much work takes {growth:.2f} times"
