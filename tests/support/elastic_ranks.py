"""The work of single ranks in the tests of crashes, in processes of a fork server."""

from __future__ import annotations

import argparse
import os
import signal
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # imports of DDP, which take longer than a step
import torch.distributed as dist
from mmengine_training import Net, batch, sgd
from torch.utils.data import DistributedSampler

from pyparallel import DataLoader, mmengine

STRUCK_STEP = 2


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


def survive(rank: int, folder: str, how: int, timeout: float) -> None:
    """Send a signal to rank 1 in the middle of a step; print the effect on rank 0.

    It prints the error and the seconds until it was raised. Signal 0 means a normal
    exit.
    """
    join(rank, folder)
    net = Net()
    wrapper = mmengine.OptimWrapper(sgd(net))
    pids = [torch.zeros(1, dtype=torch.long) for _ in range(2)]
    dist.all_gather(pids, torch.tensor([os.getpid()]))
    # The limit begins when both have started, however long that took.
    group = dist.new_group(timeout=timedelta(seconds=timeout))
    model = mmengine.MMDistributedDataParallel(net, process_group=group)
    struck = Path(folder) / "struck"

    def strike(gradient: torch.Tensor) -> None:
        struck.touch()
        os.kill(os.getpid(), how)
        os._exit(3)

    for step in range(STRUCK_STEP + 1):
        if step == STRUCK_STEP and rank == 1:
            # In the backward pass: the other rank waits for the sum of the gradients.
            next(net.parameters()).register_hook(strike)
        try:
            model.train_step(batch(step, 2, rank), wrapper)
        except RuntimeError as error:
            seconds = time.time() - struck.stat().st_mtime
            print(f"{seconds:.2f} s, step {step}: {error}", flush=True)
            if how == signal.SIGSTOP:  # it still runs
                os.kill(int(pids[1]), signal.SIGKILL)
            os._exit(0)
