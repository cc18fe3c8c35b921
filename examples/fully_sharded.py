"""A sharded model (FSDP2) whose training may stop at any step.

    torchrun --nproc_per_node=2 examples/fully_sharded.py run 4

SIGTERM and SIGUSR1 save and end the run. Any number of processes may continue it.
"""

import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from pyparallel import Collate, DataLoader, Pad, SizeBatchSampler

LENGTHS = [8 + 7 * i % 32 for i in range(200)]
SAMPLES = [{"steps": torch.arange(3.0 * n).sin().view(3, n)} for n in LENGTHS]


def state_of(model, optimizer):
    """Return the state of the sharded parts, as arguments of `set_state_dict`."""
    weights, moments = get_state_dict(model, optimizer)
    return {"model_state_dict": weights, "optim_state_dict": moments}


if __name__ == "__main__":
    dist.init_process_group("gloo")
    folder, num_epochs, step = Path(sys.argv[1]), int(sys.argv[2]), 0
    stop, signals = False, []
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, lambda *args: signals.append(args))
    sampler = SizeBatchSampler(LENGTHS, max_padded=200)
    loader = DataLoader(SAMPLES, batch_sampler=sampler, collate_fn=Collate(steps=Pad()))
    torch.manual_seed(0)
    model = fully_shard(torch.nn.Conv1d(3, 3, 1, bias=False))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    if complete := sorted(folder.glob("step-*/.metadata")):  # the file is written last
        state = {"parts": state_of(model, optimizer), "loader": loader}
        dcp.load(state, checkpoint_id=complete[-1].parent)
        set_state_dict(model, optimizer, **state["parts"])
        step = int(complete[-1].parent.name[5:])
    print(f"begins after step {step}", flush=True)
    while sampler.epoch < num_epochs and not stop:  # the first epoch may be a rest
        for batch in loader:
            found = model(batch["steps"]).sum(2)  # padding adds 0
            torch.nn.functional.mse_loss(found, batch["steps"].sum(2)).backward()
            optimizer.step()
            optimizer.zero_grad()
            stop, step = torch.tensor(len(signals)), step + 1
            dist.all_reduce(stop, dist.ReduceOp.MAX)  # a signal may reach one rank
            if stop or step % 10 == 0:
                state = {"parts": state_of(model, optimizer), "loader": loader}
                dcp.save(state, checkpoint_id=folder / f"step-{step:06}")
            if stop:
                break
    dist.destroy_process_group()
