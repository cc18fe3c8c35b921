"""The work of single ranks in the tests of crashes, in processes of a fork server."""

from __future__ import annotations

import os
import runpy
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DistributedSampler

from pyparallel import DataLoader
from tests.support.ranks.distributed_ranks import join
from tests.support.repository.folders import SUPPORT


def undisturbed(rank: int, folder: str) -> None:
    """Run ``examples/resume.py`` to its end."""
    import resume

    join(Path(folder), rank, 2, 120)
    path = Path(folder) / "undisturbed.pt"
    resume.train(path)


def sharded(rank: int, folder: str, port: int) -> None:
    """Run ``sharded_job.py`` without signals, as torchrun starts it."""
    warnings.resetwarnings()
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    script = str(SUPPORT / "ranks" / "sharded_job.py")
    sys.argv = [script, folder, "2"]
    runpy.run_path(script, run_name="__main__")


def together(rank: int, folder: str) -> None:
    """Save in two ranks; the writer waits, to see if the other rank continues early."""
    import _checkpoint

    join(Path(folder), rank, 2, 120)
    own = _checkpoint.from_all_ranks(b"rank" * (1 + 2 * rank))
    first = _checkpoint.from_first_rank(b"of %d" % rank)
    nothing = _checkpoint.from_first_rank(b"" if rank == 0 else b"of 1")
    path, returned = Path(folder) / "a.pt", Path(folder) / "returned"
    write = _checkpoint.write

    def write_late(state: Any, path: Path) -> None:
        deadline = time.monotonic() + 1
        while not returned.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        write(state, path)

    _checkpoint.write = write_late
    loader = DataLoader(range(8), 2, sampler=DistributedSampler(range(8)))
    next(iter(loader))
    _checkpoint.Checkpoint(path, loader).save(rank=rank)
    written = path.exists()
    returned.touch()
    print(own, first, nothing, written, flush=True)
    os._exit(0)
