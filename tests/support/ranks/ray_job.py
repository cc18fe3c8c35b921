"""``examples/ray_train.py FOLDER``, whose rank 1 kills itself once, in step 17."""

from __future__ import annotations

import itertools
import os
import signal
import sys
from pathlib import Path

import ray
import ray.train
from torch.optim.optimizer import register_optimizer_step_post_hook

from tests.support.repository.folders import ROOT

sys.path.insert(0, str(ROOT / "examples"))

import ray_train  # needs the path of the example

died = Path(sys.argv[1]).resolve() / "died"


def train_and_die() -> None:
    steps = itertools.count(1)

    def die(*_: object) -> None:
        rank = ray.train.get_context().get_world_rank()
        if next(steps) == 17 and rank == 1 and not died.exists():
            died.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    register_optimizer_step_post_hook(die)
    ray_train.train()


# Ray's workers have other paths.
ray.cloudpickle.register_pickle_by_value(ray_train)
ray_train.main(train_and_die, died.parent)
