"""Train with mmengine's Runner and with `Runner`; both change their process.

The only argument is a folder. The program writes the results to ``results.pt`` there.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from mmengine.model import BaseModel
from mmengine.registry import DATASETS, MODELS, RUNNERS
from mmengine.runner import Runner
from torch.utils.data import IterableDataset


class Rows:
    """Rows with random numbers; row 5 raises an error on request."""

    def __init__(self, broken: bool = False) -> None:
        self.broken = broken

    def __len__(self) -> int:
        return 21

    def __getitem__(self, index: int) -> dict[str, Any]:
        if self.broken and index == 5:
            raise OSError("a broken file")
        scale = torch.rand(1)  # from the seed of the worker
        return {"inputs": torch.ones(4) * scale, "data_samples": index}


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(7))


class Fit(BaseModel):  # type: ignore[misc]  # mmengine has no types
    """A linear model that records the samples of its batches."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 1)
        torch.nn.init.ones_(self.linear.weight)
        self.seen: list[Any] = []

    def forward(self, inputs: Any, data_samples: Any, mode: str) -> dict[str, Any]:
        self.seen.append(list(data_samples))
        return {"loss": self.linear(torch.stack(list(inputs))).square().mean()}


def register() -> None:
    """Add the classes to mmengine's registries."""
    for registry, cls in ((DATASETS, Rows), (DATASETS, Stream), (MODELS, Fit)):
        registry.register_module(module=cls, name=cls.__name__, force=True)


def loader(**options: Any) -> dict[str, Any]:
    """Return the config of a loader."""
    return {
        "batch_size": 4,
        "num_workers": 1,
        "dataset": {"type": "Rows"},
        "sampler": {"type": "DefaultSampler", "shuffle": True},
        "collate_fn": {"type": "pseudo_collate"},
        **options,
    }


def train(folder: Path, name: str, **config: Any) -> dict[str, Any]:
    """Train two epochs; return the class of the loader, the batches and the weights."""
    build = RUNNERS.build if "runner_type" in config else Runner.from_cfg
    runner = build(
        {
            "model": {"type": "Fit"},
            "work_dir": str(folder / name),
            "train_dataloader": loader(),
            "optim_wrapper": {"optimizer": {"type": "SGD", "lr": 0.1}},
            "train_cfg": {"by_epoch": True, "max_epochs": 2},
            "randomness": {"seed": 3},
            "log_level": "ERROR",
            "experiment_name": name,
            **config,
        }
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        runner.train()
    cls = type(runner.train_dataloader)
    return {
        "loader": f"{cls.__module__}.{cls.__qualname__}",
        "seen": runner.model.seen,
        "weights": [each.detach() for each in runner.model.parameters()],
        "warnings": [str(each.message) for each in caught],
    }


def main() -> None:
    folder = Path(sys.argv[1])
    register()
    broken = loader(dataset={"type": "Rows", "broken": True}, on_error="skip")
    ours = {"runner_type": "pyparallel.Runner"}
    results = {
        "stock": train(folder, "stock"),
        "ours": train(folder, "ours", **ours),
        "skip": train(folder, "skip", train_dataloader=broken, **ours),
    }
    torch.save(results, folder / "results.pt")


if __name__ == "__main__":
    main()
