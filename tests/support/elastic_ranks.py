"""The work of single ranks in the tests of crashes, in processes of a fork server."""

from __future__ import annotations

import argparse
import os
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # imports of DDP, which take longer than a step
import torch.distributed as dist
from torch.utils.data import DistributedSampler

from pyparallel import DataLoader


def join(rank: int, folder: str) -> None:
    """Join a group of two ranks on this machine."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = dist.FileStore(str(Path(folder) / "store"), 2)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=2, timeout=timedelta(minutes=2)
    )


def undisturbed(rank: int, folder: str) -> None:
    """Run ``examples/resume.py`` to its end."""
    import resume

    join(rank, folder)
    path = Path(folder) / "undisturbed.pt"
    resume.train(argparse.Namespace(checkpoint=path, every=4, epochs=4))


def together(rank: int, folder: str) -> None:
    """Save in two ranks; the writer waits, to see if the other rank continues early."""
    import _checkpoint

    join(rank, folder)
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
