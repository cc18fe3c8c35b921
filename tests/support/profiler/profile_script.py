"""A training script without code for the profiler.

    python profile_script.py HOW

``HOW`` is the kind of end, ``killed`` or ``fails``, or a mode, ``spawn`` or ``ranks``.
"""

from __future__ import annotations

import functools
import os
import signal
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import Dataset

from pyparallel import (
    DataContainer,
    MMDataParallel,
    MMDistributedDataParallel,
    PreDataLoader,
    collate,
)


class Ragged(Dataset[Any]):
    """64 samples; every batch of two has widths 1 and 3."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> DataContainer:
        return DataContainer(torch.ones(1, 1 + 2 * (index % 2)), stack=True, pad_dims=1)


class Net(torch.nn.Linear):
    def __init__(self) -> None:
        super().__init__(1, 1)

    def train_step(self, data: torch.Tensor, optimizer: Any) -> dict[str, Any]:
        return {"loss": self(data.sum().view(1, 1)).sum()}


def main(how: str) -> None:
    options: dict[str, Any] = {}
    if how == "spawn":
        options = {"num_workers": 1, "multiprocessing_context": "spawn"}
    together = functools.partial(collate, samples_per_gpu=2)
    loader: Any = TorchLoader(Ragged(), 2, collate_fn=together, **options)
    if how == "spawn":
        loader = PreDataLoader(loader)
    model: Any = MMDataParallel(Net(), [-1])
    if how == "ranks":
        dist.init_process_group("gloo")
        model = MMDistributedDataParallel(Net())
    try:
        for i, data in enumerate(loader):
            model.train_step(data, None)["loss"].backward()
            if i == 4 and how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
    finally:
        if how == "ranks":
            dist.destroy_process_group()
    print("to its end")
    if how == "fails":
        raise ValueError("nine of ten")


if __name__ == "__main__":
    main(sys.argv[1])
