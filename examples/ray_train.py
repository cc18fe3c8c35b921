"""Ray Train on a local cluster of two nodes: `python examples/ray_train.py FOLDER`.

If a worker dies, Ray starts all of them again, and they continue at the checkpoint.
"""

import sys
import tempfile
from pathlib import Path

import ray.train.torch
import torch
from ray.cluster_utils import Cluster
from torch import nn

from pyparallel import Collate, DataLoader, Pad, SizeBatchSampler, Stack

LENGTHS = [8 + 7 * i % 32 for i in range(200)]
WALKS = [torch.arange(3.0 * n).sin().view(3, n) for n in LENGTHS]
SAMPLES = [{"steps": walk, "end": walk.sum(1)} for walk in WALKS]


def train():
    """Train on this rank."""
    step, first = 0, ray.train.get_context().get_world_rank() == 0
    sampler = SizeBatchSampler(
        LENGTHS, max_padded=200
    )  # instead of prepare_data_loader
    merge = Collate({"steps": Pad(), "end": Stack()})
    loader = DataLoader(SAMPLES, batch_sampler=sampler, collate_fn=merge)
    torch.manual_seed(0)
    model = ray.train.torch.prepare_model(nn.Conv1d(3, 3, 1, bias=False))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    parts = {"model": model, "optimizer": optimizer, "loader": loader}
    if checkpoint := ray.train.get_checkpoint():
        with checkpoint.as_directory() as folder:
            step, states = torch.load(f"{folder}/state.pt", weights_only=True)
        for name, part in parts.items():
            part.load_state_dict(states[name])  # of rank 0, for all ranks
    while sampler.epoch < 2:
        for batch in loader:
            found = model(batch["steps"]).sum(2)  # padding adds 0
            nn.functional.mse_loss(found, batch["end"]).backward()
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if step % 7 == 0:
                with tempfile.TemporaryDirectory() as folder:
                    states = {name: part.state_dict() for name, part in parts.items()}
                    torch.save((step, states), f"{folder}/state.pt")
                    checkpoint = ray.train.Checkpoint(folder) if first else None
                    ray.train.report({"step": step}, checkpoint=checkpoint)


def main(loop, folder):
    """Run a loop on two ranks, one on each node, and print the last checkpoint."""
    cluster = Cluster(True, head_node_args={"num_cpus": 1}, connect=True)
    cluster.add_node(num_cpus=1)
    ranks = ray.train.ScalingConfig(num_workers=2, placement_strategy="STRICT_SPREAD")
    again, path = ray.train.FailureConfig(max_failures=1), str(Path(folder).resolve())
    run = ray.train.RunConfig(storage_path=path, failure_config=again)
    trainer = ray.train.torch.TorchTrainer(loop, scaling_config=ranks, run_config=run)
    print(trainer.fit().checkpoint.path)
    ray.shutdown()
    cluster.shutdown()


if __name__ == "__main__":
    main(train, sys.argv[1])
