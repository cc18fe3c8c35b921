"""Ranks in separate processes: `launch` starts them, and each calls `run_rank`.

Results are returned through files. A rank ends without destroying the group, because
that sometimes aborts a process after all its work.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import pyparallel

Case = Callable[[int, int], Any]  # of rank and world size
CASES: dict[str, Case] = {}


def case(function: Case) -> Case:
    """Make a function a case, under its name."""
    CASES[function.__name__] = function
    return function


class Results(dict[str, list[Any]]):
    """The result of each case, rank by rank. Access to a failed case raises."""

    errors: str = ""

    def __missing__(self, name: str) -> list[Any]:
        raise AssertionError(f"case {name} did not finish on every rank\n{self.errors}")


def launch(
    folder: Path, module: str, cases: Sequence[str], world: int = 2, limit: int = 240
) -> Results:
    """Run the cases of a test module in sequence, in one group of gloo ranks.

    No collective waits longer than half of ``limit`` seconds, and no rank lives longer
    than ``limit``.
    """
    here, package = Path(__file__).parent, Path(pyparallel.__file__).parents[1]
    paths = [str(here), str(package), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    command = [sys.executable, "-W", "error", "-c"]
    command += ["import distributed_ranks; distributed_ranks.run_rank()"]
    logs = [folder / f"{rank}.log" for rank in range(world)]
    ranks = []
    for rank, log in enumerate(logs):
        numbers = [str(rank), str(world), str(limit / 2)]
        with log.open("wb") as file:
            ranks.append(
                subprocess.Popen(
                    [*command, *numbers, str(folder), module, *cases],
                    env=environment,
                    stdout=file,
                    stderr=file,
                )
            )
    deadline = time.monotonic() + limit
    for process in ranks:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    return _collect(folder, cases, world, logs)


def _collect(
    folder: Path, cases: Sequence[str], world: int, logs: Sequence[Path]
) -> Results:
    results = Results()
    errors = []
    for name in cases:
        files = [folder / f"{name}.{rank}.pt" for rank in range(world)]
        # Our own ranks wrote it, and it contains more than tensors.
        found = [torch.load(f, weights_only=False) for f in files if f.exists()]
        errors += [part["error"] for part in found if part["error"]]
        if len(found) == world and not any(part["error"] for part in found):
            results[name] = [part["result"] for part in found]
    results.errors = "\n".join(errors + [log.read_text() for log in logs])
    return results


def join(folder: Path, rank: int, world: int, timeout: float) -> None:
    """Join a group of gloo ranks that meet in a folder."""
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(str(folder / "store"), world),
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=timeout),
    )


def run_rank() -> None:
    """Run the cases that the command line names, as the rank that it names."""
    rank, world, timeout = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    folder = Path(sys.argv[4])
    torch.set_num_threads(1)
    importlib.import_module(sys.argv[5])
    join(folder, rank, world, timeout)
    for name in sys.argv[6:]:
        result, error = None, ""
        try:
            result = CASES[name](rank, world)
        except BaseException:
            error = f"rank {rank}, case {name}: {traceback.format_exc()}"
        unfinished = folder / f"{name}.{rank}.part"
        torch.save({"error": error, "result": result}, unfinished)
        unfinished.rename(unfinished.with_suffix(".pt"))
        if error:  # the other ranks are no longer in step
            break
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
