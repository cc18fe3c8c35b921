"""Ranks in separate processes: `launch` starts them, and each calls `run_rank`.

Results are returned through files. A rank ends without destroying the group, because
that sometimes aborts a process after all its work.
"""

from __future__ import annotations

import concurrent.futures
import importlib
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import pyparallel
from tests.support.processes import forkserver
from tests.support.repository.folders import ROOT

Case = Callable[[int, int], Any]  # of rank and world size
CASES: dict[str, Case] = {}


def case(function: Case) -> Case:
    """Make a function a case, under its name."""
    CASES[function.__name__] = function
    return function


def set_timeout(seconds: float) -> None:
    """Set the timeout of the group of all ranks."""
    c10d: Any = dist.distributed_c10d
    # torch 2.15 deprecates the private name.
    public = getattr(c10d, "set_timeout", None)
    set_for = public or c10d._set_pg_timeout
    set_for(timedelta(seconds=seconds), dist.group.WORLD)


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
    paths = [str(Path(pyparallel.__file__).parents[1]), str(ROOT)]
    programs = [
        "from tests.support.ranks import distributed_ranks as ranks\n"
        f"ranks.run_rank({rank}, {world}, {limit / 2}, {str(folder)!r}, {module!r}, "
        f"{list(cases)})"
        for rank in range(world)
    ]
    with concurrent.futures.ThreadPoolExecutor(world) as pool:
        done = pool.map(lambda code: forkserver.run(code, paths, limit), programs)
        logs = [text for _, text in done]
    return _collect(folder, cases, world, logs)


def _collect(
    folder: Path, cases: Sequence[str], world: int, logs: Sequence[str]
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
    results.errors = "\n".join([*errors, *logs])
    return results


def join(folder: Path, rank: int, world: int, timeout: float) -> None:
    """Join a group of gloo ranks that meet in a folder, with one thread each."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(str(folder / "store"), world),
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=timeout),
    )


def from_all(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the tensors of all ranks."""
    found = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(found, tensor)
    return found


def equal_on_all(tensor: torch.Tensor) -> bool:
    return all(torch.equal(tensor, each) for each in from_all(tensor))


def run_rank(
    rank: int, world: int, timeout: float, folder: str, module: str, cases: list[str]
) -> None:
    """Run the cases of a module as one rank, and end the process."""
    importlib.import_module(module)
    join(Path(folder), rank, world, timeout)
    for name in cases:
        result, error = None, ""
        try:
            result = CASES[name](rank, world)
        except BaseException:
            error = f"rank {rank}, case {name}: {traceback.format_exc()}"
        unfinished = Path(folder) / f"{name}.{rank}.part"
        torch.save({"error": error, "result": result}, unfinished)
        unfinished.rename(unfinished.with_suffix(".pt"))
        if error:  # the other ranks are no longer in step
            break
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
