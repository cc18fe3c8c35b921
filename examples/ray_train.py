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

from pyparallel import Collate, DataLoader, Pad, SizeBatchSampler

LENGTHS = [8 + 7 * i % 32 for i in range(200)]
SAMPLES = [{"steps": torch.arange(3.0 * n).sin().view(3, n)} for n in LENGTHS]


def train():
    """Train on this rank."""
    step, rank = 0, ray.train.get_context().get_world_rank()
    sampler = SizeBatchSampler(LENGTHS, max_padded=200)  # no prepare_data_loader
    loader = DataLoader(SAMPLES, batch_sampler=sampler, collate_fn=Collate(steps=Pad()))
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
            nn.functional.mse_loss(found, batch["steps"].sum(2)).backward()
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if step % 7 == 0:
                states = {name: part.state_dict() for name, part in parts.items()}
                with tempfile.TemporaryDirectory() as folder:
                    torch.save((step, states), f"{folder}/state.pt")
                    checkpoint = None if rank else ray.train.Checkpoint(folder)
                    ray.train.report({"step": step}, checkpoint=checkpoint)


if __name__ == "__main__":
    cluster = Cluster(True, head_node_args={"num_cpus": 1}, connect=True)
    cluster.add_node(num_cpus=1)
    ranks = ray.train.ScalingConfig(num_workers=2, placement_strategy="STRICT_SPREAD")
    path, again = Path(sys.argv[1]).resolve(), ray.train.FailureConfig(max_failures=1)
    run = ray.train.RunConfig(storage_path=str(path), failure_config=again)
    trainer = ray.train.torch.TorchTrainer(train, scaling_config=ranks, run_config=run)
    print(trainer.fit().checkpoint.path)
    ray.shutdown()
    cluster.shutdown()
