"""``examples/ray_train.py FOLDER``, whose last rank kills itself once, in step 17.

    ray_job.py FOLDER RANKS

The file FOLDER/died records it. If it exists, no rank dies.
"""

from __future__ import annotations

import itertools
import os
import runpy
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray.train.torch
from torch.optim.optimizer import register_optimizer_step_post_hook

died = Path(sys.argv[1]).resolve() / "died"


class DyingTrainer(ray.train.torch.TorchTrainer):
    """A trainer with the fault in its loop."""

    def __init__(self, loop: Callable[[], None], **options: Any) -> None:
        def loop_and_die() -> None:
            steps, context = itertools.count(1), ray.train.get_context()

            def die(*_: object) -> None:
                is_last = context.get_world_rank() == context.get_world_size() - 1
                if next(steps) == 17 and is_last and not died.exists():
                    died.touch()
                    os.kill(os.getpid(), signal.SIGKILL)

            register_optimizer_step_post_hook(die)
            loop()

        options["scaling_config"].num_workers = int(sys.argv[2])
        super().__init__(loop_and_die, **options)


example = Path(__file__).parents[3] / "examples" / "ray_train.py"
ray.train.torch.TorchTrainer = DyingTrainer
runpy.run_path(str(example), run_name="__main__")
