"""Fuzz the C++ core: libFuzzer on tests/csrc/fuzz, under ASan and UBSan.

    python scripts/fuzz_core.py --seconds 60        # in total
    python scripts/fuzz_core.py --keep              # keep inputs in the corpus

A run saves the inputs that it finds in build/fuzz, and the next run continues there.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build" / "fuzz"
FUZZ = ROOT / "tests" / "csrc" / "fuzz"
KEPT = FUZZ / "corpus"
#: Longer inputs make larger cases, but no new kinds of cases.
LONGEST = "-max_len=256"
MOST_KEPT = 32  # inputs of one target, so that the corpus stays small
ABSENT = (
    "make fuzz-core must have a clang++ with libFuzzer, but none of clang++ and "
    "clang++-14 to clang++-21 links -fsanitize=fuzzer. Install one, on Debian 12 by "
    "apt-get install clang-14 libclang-rt-14-dev, or name one in CLANG."
)


class Run(NamedTuple):
    """The result of fuzzing one target."""

    name: str
    executions: int
    inputs: int
    failure: str  # the end of its output; empty if it found nothing


def find_clang() -> str | None:
    """Return a clang++ that links libFuzzer and the sanitizers."""
    names = ["clang++", *(f"clang++-{version}" for version in range(21, 13, -1))]
    if os.environ.get("CLANG"):
        names = [os.environ["CLANG"]]
    BUILD.mkdir(parents=True, exist_ok=True)
    empty = BUILD / "empty.cpp"
    empty.write_text(
        "#include <cstdint>\n#include <cstddef>\n"
        'extern "C" int LLVMFuzzerTestOneInput(const uint8_t*, size_t) { return 0; }\n'
    )
    flags = ["-fsanitize=fuzzer,address,undefined", "-o", str(BUILD / "empty")]
    for name in filter(shutil.which, names):
        if not subprocess.run([name, *flags, empty], capture_output=True).returncode:
            return name
    return None


def build(clang: str, cmake: str) -> list[str]:
    """Build every target; return their names."""
    configure = [cmake, "-S", ROOT, "-B", BUILD, f"-DCMAKE_CXX_COMPILER={clang}"]
    configure += ["-DPP_FUZZ=ON", "-DPP_SANITIZE=address,undefined"]
    configure += ["-DCMAKE_BUILD_TYPE=", "-DCMAKE_CXX_FLAGS=-g -O1"]
    subprocess.run(configure, check=True, stdout=subprocess.DEVNULL)
    subprocess.run([cmake, "--build", BUILD, "-j2"], check=True)
    sources = FUZZ.glob("fuzz_*.cpp")
    names = {path.stem.removeprefix("fuzz_") for path in sources}
    return sorted(names - {"entry", "replay"})


def folders(name: str) -> tuple[Path, Path]:
    """Return the folder of all inputs and the folder of the corpus."""
    grown = BUILD / "corpus" / name
    grown.mkdir(parents=True, exist_ok=True)
    (KEPT / name).mkdir(parents=True, exist_ok=True)
    return grown, KEPT / name


def fuzz(name: str, seconds: float) -> Run:
    """Run one target for some seconds, or until it fails."""
    grown, kept = folders(name)
    command = [str(BUILD / f"fuzz_{name}"), LONGEST, "-print_final_stats=1"]
    command += [f"-max_total_time={max(1, round(seconds))}", "-timeout=20"]
    command += [f"-artifact_prefix={BUILD / name}-", str(grown), str(kept)]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace")
    output = done.stdout + done.stderr
    found = re.search(r"number_of_executed_units: (\d+)", output)
    executions = int(found[1]) if found else 0
    failure = output[-6000:] if done.returncode else ""
    return Run(name, executions, len(list(grown.iterdir())), failure)


def keep(name: str) -> None:
    """Keep the fewest inputs with the coverage of all inputs."""
    grown, kept = folders(name)
    small = BUILD / "small" / name
    shutil.rmtree(small, ignore_errors=True)
    small.mkdir(parents=True)
    command = [str(BUILD / f"fuzz_{name}"), LONGEST, "-set_cover_merge=1"]
    command += ["-use_counters=0", str(small), str(grown), str(kept)]
    subprocess.run(command, check=True, capture_output=True)
    # Names are hashes of the contents, so this choice is uniform.
    chosen = sorted(small.iterdir())[:MOST_KEPT]
    shutil.rmtree(kept)
    kept.mkdir(parents=True)
    for path in chosen:
        shutil.copy(path, kept / path.name)
    print(f"{name}: {len(chosen)} of {len(list(grown.iterdir()))} inputs kept")


def report(runs: list[Run], seconds: float) -> int:
    """Print the runs and the findings; return the number of failed targets."""
    print(f"{'target':<14}{'executions':>12}{'inputs':>9}  findings")
    for run in runs:
        found = 1 if run.failure else 0
        print(f"{run.name:<14}{run.executions:>12,}{run.inputs:>9}  {found}")
    total = sum(run.executions for run in runs)
    failed = [run for run in runs if run.failure]
    print(f"{total:,} executions in {seconds:.0f} s, {len(failed)} findings")
    for run in failed:
        print(f"\n---- {run.name}\n{run.failure}")
        inputs = [path for path in BUILD.glob(f"{run.name}-*") if path.is_file()]
        for path in sorted(inputs, key=lambda path: path.stat().st_mtime)[-1:]:
            print(f"To repeat it: {BUILD / f'fuzz_{run.name}'} {path}")
    return len(failed)


def main() -> int:
    """Build the targets, then fuzz them or reduce the corpus."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60.0, help="for all targets")
    parser.add_argument("--cmake", default="cmake")
    parser.add_argument("--find", action="store_true", help="only print the compiler")
    parser.add_argument("--keep", action="store_true", help="rebuild the corpus")
    args = parser.parse_args()
    clang = find_clang()
    if clang is None:
        print(ABSENT, file=sys.stderr)
        return 1
    if args.find:
        print(clang)
        return 0
    names = build(clang, args.cmake)
    if args.keep:
        for name in names:
            keep(name)
        return 0
    start = time.monotonic()
    jobs = min(len(names), os.cpu_count() or 1)
    each = args.seconds * jobs / len(names)
    with ThreadPoolExecutor(jobs) as pool:
        runs = list(pool.map(lambda name: fuzz(name, each), names))
    return min(1, report(runs, time.monotonic() - start))


if __name__ == "__main__":
    sys.exit(main())
