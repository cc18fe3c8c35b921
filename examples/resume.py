"""Resume after a crash with the same batches and the same parameters.

    torchrun --standalone --nproc_per_node=2 --max-restarts=2 examples/resume.py FILE

Kill a process while it runs: torchrun restarts all processes, and they continue from
the last checkpoint, in the middle of an epoch. After its end, a new start does nothing.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from _checkpoint import Checkpoint
from torch import nn

from pyparallel import Collate, DataLoader, Pad, mmengine

NOISE = [torch.arange(40.0 + 4 * (i % 16)).add(i).sin().view(4, -1) for i in range(48)]
SIGNALS = [{"inputs": each, "loudness": each.square().mean(1)} for each in NOISE]


class Net(mmengine.BaseModel):
    """A small network with dropout: it draws random numbers in every step."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Conv1d(4, 9, 3), nn.Dropout(), nn.Conv1d(9, 4, 3))

    def forward(self, inputs, loudness, mode):
        """Return the loss of ``train_step``."""
        return {"loss": nn.functional.mse_loss(self.net(inputs).mean(2), loudness)}


def train(path):
    """Train on this rank, starting from the checkpoint."""
    torch.manual_seed(dist.get_rank())  # each rank has its own dropout
    sampler = torch.utils.data.DistributedSampler(SIGNALS)
    loader = DataLoader(SIGNALS, 4, sampler=sampler, collate_fn=Collate(inputs=Pad()))
    model = mmengine.MMDistributedDataParallel(Net())  # begins with rank 0's values
    wrapper = mmengine.OptimWrapper(torch.optim.AdamW(model.parameters(), lr=0.01))
    schedule = torch.optim.lr_scheduler.StepLR(wrapper.optimizer, 5, 0.5)
    saved = Checkpoint(path, loader, model=model, optimizer=wrapper, schedule=schedule)
    progress = saved.load(epoch=0, step=0)
    step = progress["step"]
    print(f"rank {dist.get_rank()} begins after step {step}", flush=True)
    for epoch in range(progress["epoch"], 4):
        sampler.set_epoch(epoch)
        for data in loader:  # after a crash: the rest of the epoch
            model.train_step(data, wrapper)
            schedule.step()
            step += 1
            if step % 4 == 0:
                saved.save(epoch=epoch, step=step)


if __name__ == "__main__":
    mmengine.init_dist("pytorch", timeout=60)  # of a rank that waits for others
    train(Path(sys.argv[1]))
    dist.destroy_process_group()
