"""A sharded model (FSDP2) whose training may stop at any step.

    torchrun --nproc_per_node=2 examples/fully_sharded.py run 4

SIGTERM and SIGUSR1 save a checkpoint and end the run. The next start, also of another
number of processes, continues there.
"""

from __future__ import annotations

import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from pyparallel import Collate, DataLoader, Pad, SizeBatchSampler, Stack


class Walks(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Walks of 8 to 39 random steps in 3 dimensions; the target is their end."""

    lengths = tuple(8 + 7 * i % 32 for i in range(200))

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(index)
        steps = torch.randn(3, self.lengths[index], generator=generator)
        return {"steps": steps, "end": steps.sum(1)}


def state_of(model: nn.Module, optimizer: Any, loader: Any) -> dict[str, Any]:
    """Return the state of this rank."""
    weights, moments = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": moments, "loader": loader.state_dict()}


def save(folder: Path, step: int, *parts: Any) -> None:
    """Write the shards of all ranks; keep the checkpoint before until they exist."""
    before = list(folder.glob("step-*"))
    dcp.save(state_of(*parts), checkpoint_id=folder / "new")
    if dist.get_rank() == 0:
        (folder / "new").rename(folder / f"step-{step}")
        for old in before:
            shutil.rmtree(old)
    dist.barrier()


def load(folder: Path, model: nn.Module, optimizer: Any, loader: Any) -> int:
    """Read the last checkpoint, if there is one, and return its step."""
    steps = [int(path.name.removeprefix("step-")) for path in folder.glob("step-*")]
    if not steps:
        return 0
    state = state_of(model, optimizer, loader)
    dcp.load(state, checkpoint_id=folder / f"step-{max(steps)}")
    weights, moments = state["model"], state["optimizer"]
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
    loader.load_state_dict(state["loader"])
    return max(steps)


def train(folder: Path, num_epochs: int, every: int = 10) -> nn.Module:
    """Train on this rank from the last checkpoint on."""
    stop = torch.zeros(1)
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, lambda *_: stop.fill_(1))
    walks, merge = Walks(), Collate({"steps": Pad(), "end": Stack()})
    sampler = SizeBatchSampler(walks.lengths, max_padded=200)
    loader: Any = DataLoader(walks, batch_sampler=sampler, collate_fn=merge)
    torch.manual_seed(0)
    layers = nn.Conv1d(3, 32, 1, bias=False), nn.Conv1d(32, 3, 1, bias=False)
    model = fully_shard(nn.Sequential(layers[0], nn.ReLU(), layers[1]))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    step = load(folder, model, optimizer, loader)
    print(f"begins after step {step}", flush=True)
    while sampler.epoch < num_epochs:  # the first one may be a rest
        for batch in loader:
            found = model(batch["steps"].data).sum(2)  # padding adds 0
            nn.functional.mse_loss(found, batch["end"]).backward()
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            dist.all_reduce(stop, dist.ReduceOp.MAX)  # a signal may reach one rank
            if stop or step % every == 0:
                save(folder, step, model, optimizer, loader)
            if stop:
                return model
    return model


if __name__ == "__main__":
    dist.init_process_group("gloo")
    train(Path(sys.argv[1]), int(sys.argv[2]))
    dist.destroy_process_group()
