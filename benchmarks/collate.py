"""collate against its peers: ``python -m benchmarks.collate --help``."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

import torch

from pyparallel import _backend

from . import _harness
from .cases import AS_LOADED, cases, use_backend

#: Keeps freed memory in the process, so that no page is faulted in twice.
WARM = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(1 << 40),
    "MALLOC_TOP_PAD_": str(1 << 26),
}


def measure(
    threads: int, rounds: int, only: str = "", quick: bool = False
) -> _harness.Record:
    """Run the cases whose title contains ``only``; return the record."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        machine = _harness.machine("pyparallel-torch", "mmcv", "mmengine", "numpy")
        machine["backend"] = f"{_backend.name}: {_backend.reason}"
        record: _harness.Record = {"machine": machine, "cases": []}
        for case in cases(quick):
            if only not in case.title:
                continue
            print(f"{case.title} ...", file=sys.stderr, flush=True)
            comparison = _harness.compare(
                case.title, case.contenders(), rounds=rounds, note=case.note
            )
            record["cases"].append(comparison)
        record["machine"]["load average after"] = _harness.load()
        return record
    finally:
        torch.set_num_threads(before)
        use_backend(AS_LOADED)


def main(arguments: list[str] | None = None) -> None:
    """Measure, print the table, and write the JSON that was asked for."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.collate")
    parser.add_argument("--threads", type=int, nargs="+", default=[1], help="of torch")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--only", default="", help="part of the titles of cases to run")
    parser.add_argument("--json", type=Path, help="e.g. benchmarks/results/1.json")
    parser.add_argument(
        "--warm-malloc",
        action="store_true",
        help="start again with an allocator that keeps freed memory (glibc)",
    )
    parser.add_argument("--quick", action="store_true", help="a smoke run, no figures")
    args = parser.parse_args(arguments)
    if args.warm_malloc and any(os.environ.get(k) != v for k, v in WARM.items()):
        command = [sys.executable, "-m", "benchmarks.collate", *sys.argv[1:]]
        os.execve(sys.executable, command, {**os.environ, **WARM})
    rounds = 2 if args.quick else args.rounds
    records = [measure(n, rounds, args.only, args.quick) for n in args.threads]
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps({"runs": records}, indent=1) + "\n")
    print("\n".join(map(_harness.table, records)))


if __name__ == "__main__":
    main()
