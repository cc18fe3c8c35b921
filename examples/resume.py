"""Resume after a crash with the same batches and the same parameters.

    torchrun --standalone --nproc_per_node=2 --max-restarts=2 examples/resume.py

Kill a process while it runs: torchrun restarts all processes, and they continue from
the last checkpoint, in the middle of an epoch. After its end, a new start does nothing.
"""

from __future__ import annotations

import argparse
import functools
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from _checkpoint import Checkpoint
from torch import Tensor, nn
from torch.utils.data import Dataset, DistributedSampler

from pyparallel import DataContainer, DataLoader, collate, mmengine


class Signals(Dataset[dict[str, DataContainer]]):
    """Noise of 10 to 25 values in 4 channels; the target is the volume of each."""

    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> dict[str, DataContainer]:
        generator = torch.Generator().manual_seed(index)
        signal = torch.randn(4, 10 + index % 16, generator=generator)
        loudness = signal.square().mean(1)
        return {
            "inputs": DataContainer(signal, stack=True, pad_dims=1),
            "loudness": DataContainer(loudness, stack=True, pad_dims=None),
        }


class Net(mmengine.BaseModel):
    """A small network with dropout: it draws random numbers in every step."""

    def __init__(self) -> None:
        super().__init__()
        layers = nn.Conv1d(4, 16, 3), nn.ReLU(), nn.Dropout(0.1), nn.Conv1d(16, 4, 3)
        self.layers = nn.Sequential(*layers)

    def forward(self, inputs: Tensor, loudness: Any = None, mode: str = "loss") -> Any:
        """Return the loss, or the volume of each channel, ``(batch, 4)``."""
        found = self.layers(inputs).mean(2)
        if mode != "loss":
            return found
        return {"loss": nn.functional.mse_loss(found, loudness)}


def train(args: argparse.Namespace) -> None:
    """Train on this rank, starting from the checkpoint."""
    rank, signals, batch = dist.get_rank(), Signals(), 4
    torch.manual_seed(rank)  # each rank has its own dropout
    sampler: Any = DistributedSampler(signals, seed=0)
    merge = functools.partial(collate, samples_per_gpu=batch)
    loader: Any = DataLoader(signals, batch, sampler=sampler, collate_fn=merge)
    model = mmengine.MMDistributedDataParallel(Net())  # begins with rank 0's values
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.5)
    wrapper = mmengine.OptimWrapper(optimizer)
    checkpoint = Checkpoint(
        args.checkpoint, loader, model=model, optimizer=wrapper, schedule=schedule
    )
    progress = checkpoint.load(epoch=0, step=0)
    step = progress["step"]
    print(f"rank {rank} begins after step {step}", flush=True)
    for epoch in range(progress["epoch"], args.epochs):
        sampler.set_epoch(epoch)
        for data in loader:  # after a crash: the rest of the epoch
            model.train_step(data, wrapper)
            schedule.step()
            step += 1
            if step % args.every == 0:
                checkpoint.save(epoch=epoch, step=step)
    print(f"rank {rank} ends after step {step}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--checkpoint", type=Path, default=Path("run/last.pt"))
    parser.add_argument("--every", type=int, default=4, help="steps to a checkpoint")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--timeout", type=float, default=60, help="seconds to wait")
    args = parser.parse_args()
    # If a rank hangs, the others raise after this time; torch waits half an hour.
    mmengine.init_dist("pytorch", timeout=args.timeout)
    train(args)
    dist.destroy_process_group()
