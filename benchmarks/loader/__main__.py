"""Loaders: ``python -m benchmarks.loader --help``.

Samples in memory go through workers to a consumer in the parent. The command compares
pyparallel's loader with torch's loader and other collate functions. It writes the
records as JSON, and makes the tables beside them from the JSON alone.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from .. import command, environment
from .._harness import QUICK, Effort, Record, compare, ratio, summarise
from ..backends import AS_LOADED, use_backend
from . import fields, images, in_process, overlap, report, threads
from .epochs import Counted
from .images import Comparison


def cases(quick: bool, workers: Sequence[int]) -> list[Comparison]:
    """Return all comparisons."""
    return [
        *images.cases(quick, workers),
        *fields.cases(quick),
        *in_process.cases(quick),
        *threads.cases(quick),
        *overlap.cases(quick),
    ]


def measure_case(case: Comparison, effort: Effort) -> Record:
    """Compare, then measure the other costs of a batch; return the record."""
    clock = Counted()
    found = case.contenders(clock)
    contenders = [contender for contender, _ in found]
    options: dict[str, Any] = {**effort._asdict(), "min_seconds": 0.0}
    try:
        record = compare(
            case.title,
            contenders,
            note=case.note,
            clock=clock,
            watch=time.perf_counter,
            **options,
        )
        if case.kind != "overlap":
            for row, (contender, epochs) in zip(record["rows"], found, strict=True):
                if contender.call is not None and epochs is not None:
                    row["facts"] = epochs.facts(contender.call)
        sizes = {len(epochs.loader) for _, epochs in found if epochs is not None}
        (record["batches"],) = sizes
    finally:
        use_backend(AS_LOADED)
        for _, epochs in found:
            if epochs is not None:
                epochs.close()
    record["kind"] = case.kind
    record["goals"] = [goal._asdict() for goal in case.goals]
    if case.floors:
        add_net(record, case.floors)
    if case.kind == "overlap":
        overlap.add_hidden(record)
    return record


def add_net(record: Record, floors: Mapping[str, str]) -> None:
    """Add to the rows of a case their times above a floor."""
    rows = {row["name"]: row for row in record["rows"] if row["installed"]}
    net = {
        name: [a - b for a, b in zip(rows[name]["seconds"], under, strict=True)]
        for name, floor in floors.items()
        if name in rows
        for under in [rows[floor]["seconds"]]
    }
    for name, values in net.items():
        ours = {each: net[each] for each in net if rows[each]["kind"] == "ours"}
        over = {k: ratio(values, v) for k, v in ours.items() if k != name}
        rows[name]["net"] = {**summarise(values), "over": over}


def measure(
    effort: Effort,
    only: str = "",
    quick: bool = False,
    workers: list[int] | None = None,
) -> Record:
    """Run the cases whose title contains ``only``; return the record of the run."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        record: Record = {"machine": environment.machine(), "cases": []}
        for case in cases(quick, workers):
            if only in case.title:
                print(f"{case.title} ...", file=sys.stderr, flush=True)
                record["cases"].append(measure_case(case, effort))
        record["machine"]["load average after"] = environment.load()
        return record
    finally:
        torch.set_num_threads(before)


def main(arguments: list[str] | None = None) -> None:
    """Measure or read records, write the page, and print the problems found."""
    parser = command.parser("loader", __doc__)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument(
        "--max-seconds",
        type=float,
        default=6.0,
        help="limit of each comparison; no round starts after it",
    )
    args = parser.parse_args(arguments)
    effort = QUICK if args.quick else Effort(args.rounds, args.max_seconds)
    run = partial(measure, effort, args.only, args.quick, args.workers)
    command.report_run(args, "loader", run, report.page, report.complaints)


if __name__ == "__main__":
    main()
