"""``framework_roles.py`` with Ray Train on two ranks: `python ray_roles.py FOLDER`."""

from __future__ import annotations

import sys
from pathlib import Path

import ray.train.torch
import torch

from tests.support.repository.folders import ROOT


def train(config: dict[str, str]) -> None:
    """Record the run of this rank, as examples/ray_train.py trains."""
    from tests.support.ranks import framework_roles as roles

    roles.watch_all()
    run, rank = (
        roles.begin("SizeBatchSampler"),
        ray.train.get_context().get_world_rank(),
    )
    loader = roles.make_loader(**roles.by_size())
    model = ray.train.torch.prepare_model(torch.nn.Linear(1, 1))
    counted = [loader.batch_sampler.epoch]
    while counted[-1] < 2:
        run.epochs.append([])
        for batch in loader:
            run.loss(model, batch).backward()
            state = loader.state_dict()
        counted.append(loader.batch_sampler.epoch)
    states: list[object] = [None, None]
    torch.distributed.all_gather_object(states, loader.batch_sampler.state_dict())
    run.facts |= {"counted": counted, "is_of_all": states[0] == states[1]}
    run.compare(loader, loader)
    assert state
    roles.write(Path(config["folder"]), rank)
    ray.train.report({})


if __name__ == "__main__":
    paths = {"PYTHONPATH": str(ROOT)}
    ray.init("local", num_cpus=2, runtime_env={"env_vars": paths})
    ray.train.torch.TorchTrainer(
        train,
        train_loop_config={"folder": sys.argv[1]},
        scaling_config=ray.train.ScalingConfig(num_workers=2),
        run_config=ray.train.RunConfig(storage_path=sys.argv[1]),
    ).fit()
