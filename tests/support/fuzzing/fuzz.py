"""Run generated cases on both backends: see `fuzzed`.

python -m tests.support.fuzzing.fuzz --cases 1000000 --jobs 2
python -m tests.support.fuzzing.fuzz --first 1234 --cases 1
python -m tests.support.fuzzing.fuzz --numbers 3,1,4
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
import warnings

import torch

from tests.support.fuzzing.fuzz_batches import any_case
from tests.support.fuzzing.fuzz_operators import BACKENDS
from tests.support.fuzzing.fuzzed import Failure, played, search

BLOCK = 2000  # cases that a process takes at a time


def run_block(block: tuple[int, int]) -> Failure | None:
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    return search(any_case, *block)


def run(first: int, count: int, jobs: int) -> tuple[int, Failure | None]:
    """Run these seeds in several processes; return their number and a failure."""
    starts = range(first, first + count, BLOCK)
    blocks = [(start, min(BLOCK, first + count - start)) for start in starts]
    done = 0
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        for (_, size), failure in zip(
            blocks, pool.imap(run_block, blocks), strict=True
        ):
            done += size
            if failure is not None:
                return done, failure
            if done % (50 * BLOCK) == 0:
                print(f"{done:,} cases", flush=True)
    return done, None


def main() -> int:
    """Run the cases, and print the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--cases", type=int, default=20_000)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--numbers", help="one case: its numbers, as they were printed")
    args = parser.parse_args()
    if len(BACKENDS) < 2:
        print("fuzz.py must have both backends, but the extension is not built.")
        return 1
    if args.numbers is not None:
        print(any_case(played([int(number) for number in args.numbers.split(",")])))
        return 0
    start = time.monotonic()
    if args.cases <= BLOCK:
        done, failure = args.cases, run_block((args.first, args.cases))
    else:
        done, failure = run(args.first, args.cases, args.jobs)
    seconds = time.monotonic() - start
    found = 0 if failure is None else 1
    print(
        f"{done:,} cases from seed {args.first} in {seconds:.0f} s, {found} differences"
    )
    if failure is not None:
        print(failure)
    return found


if __name__ == "__main__":
    sys.exit(main())
