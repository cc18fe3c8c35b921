"""One of the processes of the self-test: `_two_processes` starts it and reads it."""

from __future__ import annotations

import os
import shutil
import sys
import threading
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import pyparallel

#: What a rank writes before each of its stages, and at the end.
STAGE, PASSED = "stage: ", "passed"
WORLD_SIZE = 2
#: Rank ``r`` has ones times ``r + 1`` in images of widths 1 and 2, and the loss is the
#: sum of all times the weight. Its gradient is 3 in rank 0 and 6 in rank 1.
_GRADIENT = 4.5


def run(rank: int, folder: str, seconds: float) -> None:
    """Collate, scatter and train in a group of gloo ranks; end this process.

    Args:
        rank: 0 or 1.
        folder: where the ranks meet.
        seconds: the most that a collective may take.
    """
    done = threading.Event()
    watcher = threading.Thread(target=_end_with_parent, args=(folder, done))
    watcher.start()
    try:
        _train(rank, folder, seconds)
        done.set()
        print(PASSED, flush=True)
        watcher.join()  # the other rank may still be reading what this one sent
    except BaseException:
        traceback.print_exc(file=sys.stdout)
        sys.stdout.flush()
        os._exit(1)


def _end_with_parent(folder: str, done: threading.Event) -> None:
    """End this process when its parent closes the pipe, or is no more.

    A group is not torn down: a process that does so sometimes aborts.
    """
    sys.stdin.buffer.read()
    if not done.is_set():
        shutil.rmtree(folder, ignore_errors=True)
    os._exit(0 if done.is_set() else 1)


def _say(stage: str) -> None:
    print(f"{STAGE}{stage}", flush=True)


def _train(rank: int, folder: str, seconds: float) -> None:
    torch.set_num_threads(1)
    _say("joining the group")
    path = str(Path(folder) / "store")
    dist.init_process_group(
        "gloo",
        # torch exports it, but without saying so to type checkers.
        store=dist.FileStore(path, WORLD_SIZE),  # type: ignore[attr-defined]
        rank=rank,
        world_size=WORLD_SIZE,
        timeout=timedelta(seconds=seconds),
    )
    _say("wrapping the model")
    model = pyparallel.MMDistributedDataParallel(_Scale())
    _say("collating")
    container = pyparallel.DataContainer
    value = float(rank + 1)
    samples = [
        {"img": container(torch.full((1, 1, width), value), stack=True)}
        for width in (1, 2)
    ]
    batch = pyparallel.collate(samples, samples_per_gpu=2)
    _say("running the step")
    loss = model.train_step(batch)
    _say("reducing the gradient")
    loss.backward()
    gradient = model.module.weight.grad
    _say("comparing the gradients")
    gradients = [torch.empty_like(gradient) for _ in range(WORLD_SIZE)]
    dist.all_gather(gradients, gradient)
    found = [each.item() for each in gradients]
    if found != [_GRADIENT] * WORLD_SIZE:
        raise ValueError(
            f"the gradients of all ranks must be {_GRADIENT}, but are {found}."
        )


class _Scale(nn.Module):
    """One weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def train_step(self, data: Any) -> torch.Tensor:
        """Return the loss of a batch of two images, one above the other."""
        image: torch.Tensor = data["img"]
        if image.shape != (2, 1, 1, 2):
            raise ValueError(
                f"the images must have the shape (2, 1, 1, 2), but have "
                f"{tuple(image.shape)}."
            )
        return (image * self.weight).sum()
