"""Train by every recipe of ``docs/mmengine-runner.md``, in a process of one rank.

    docs_recipes.py FOLDER

``test_runner.py`` covers the rest of the page, with two ranks.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
from pathlib import Path
from typing import Any, ClassVar

import torch
from mmengine.config import Config
from mmengine.logging import MMLogger
from mmengine.model import BaseModel
from mmengine.registry import DATASETS, MODELS, OPTIM_WRAPPER_CONSTRUCTORS, RUNNERS
from mmengine.runner import Runner
from torch import nn

from pyparallel import DataContainer
from pyparallel.mmengine import OptimWrapper, OptimWrapperDict
from tests.support.repository.docs_blocks import split_section


@DATASETS.register_module()
class Letters(torch.utils.data.Dataset[Any]):
    """Pictures of several sizes, in DataContainers or not."""

    METAINFO: ClassVar[dict[str, Any]] = {}

    def __init__(self, containers: bool = True) -> None:
        self.containers = containers

    def __len__(self) -> int:
        return 8

    def __getitem__(self, i: int) -> dict[str, Any]:
        picture = torch.full((1, 8 + i, 9), i)
        if self.containers:
            return dict(inputs=DataContainer(picture, stack=True))
        return dict(inputs=picture.to(torch.uint8))


@MODELS.register_module()
class Tiny(BaseModel):
    """A minimal model."""

    def __init__(self, data_preprocessor: Any = None) -> None:
        super().__init__(data_preprocessor)
        self.net = nn.Conv2d(1, 1, 3)

    def forward(self, inputs: Any, data_samples: Any = None, mode: str = "") -> Any:
        assert isinstance(inputs, torch.Tensor) and inputs.shape[0] == 4
        return dict(loss=self.net(inputs.float()).mean())


@MODELS.register_module()
class Several(Tiny):
    """Has an optimizer for its only child, by name."""

    def train_step(self, data: Any, optim_wrapper: Any) -> Any:
        inputs = self.data_preprocessor(data, True)["inputs"]
        with optim_wrapper["net"].optim_context(self.net):
            loss = self.net(inputs.float()).mean()
        optim_wrapper["net"].update_params(loss)
        return dict(loss=loss)


@OPTIM_WRAPPER_CONSTRUCTORS.register_module()
class ByName:
    """Makes an OptimWrapperDict."""

    def __init__(self, **_: Any) -> None:
        """Accept the arguments of mmengine."""

    def __call__(self, model: nn.Module) -> OptimWrapperDict:
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        return OptimWrapperDict(net=OptimWrapper(sgd))


def train(number: int, changes: Config, first: Config, folder: Path) -> list[str]:
    """Train by the first recipe with the changes of another one."""
    common = dict(
        train_cfg=dict(by_epoch=True, max_epochs=1),
        default_hooks=dict(checkpoint=None),
        work_dir=str(folder / str(number)),
        experiment_name=f"recipe{number}",
        log_level="ERROR",
    )
    cfg = Config({**dict(first), **common})
    if "model_wrapper_cfg" in changes and "Separate" in str(changes.model_wrapper_cfg):
        cfg.model["type"], cfg.launcher = "Several", "pytorch"
        cfg.optim_wrapper = dict(constructor="ByName")
    cfg.merge_from_dict(dict(changes))
    if "pseudo_collate" in str(cfg.train_dataloader.collate_fn):
        cfg.train_dataloader.collate_fn.pop("samples_per_gpu")
        cfg.train_dataloader.dataset.containers = False
    runner = (RUNNERS.build if "runner_type" in cfg else Runner.from_cfg)(cfg)
    runner.train()
    assert runner.iter == 2
    MMLogger.check_instance_created(cfg.experiment_name)
    used = (runner.model, runner.optim_wrapper, runner.train_dataloader)
    return [f"{type(it).__module__}.{type(it).__qualname__}" for it in used]


def main() -> None:
    """Print the classes of the model, optimizer wrapper and loader of each recipe."""
    folder = Path(sys.argv[1])
    rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    os.environ |= {**rank, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    tempfile.tempdir = sys.argv[1]
    text, _ = split_section("docs/mmengine-runner.md", "Recipes")
    recipes = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    for number, recipe in enumerate(recipes):
        first = Config.fromstring(recipes[0], ".py")
        changes = Config.fromstring(recipe, ".py")  # does what custom_imports says
        print(*train(number, changes, first, folder))


if __name__ == "__main__":
    main()
