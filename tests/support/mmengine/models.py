"""Models written for mmengine, with a selectable base class."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def toy_model(base: Any) -> Any:
    """Return a model class with this base; the body is the same for all bases."""

    class ToyModel(base):  # type: ignore[misc]
        def __init__(self, data_preprocessor: Any = None) -> None:
            super().__init__(data_preprocessor=data_preprocessor)
            self.linear1 = nn.Linear(2, 2)
            self.linear2 = nn.Linear(2, 1)

        def forward(self, inputs: Any, data_samples: Any, mode: str = "tensor") -> Any:
            if isinstance(inputs, list | tuple):
                inputs = torch.stack(list(inputs))
            if isinstance(data_samples, list | tuple):
                data_samples = torch.stack(list(data_samples))
            outputs = self.linear2(self.linear1(inputs))
            if mode == "loss":
                error = data_samples.sum() - outputs
                return {"loss": error.sum(), "loss_l1": [error.abs()], "err": error}
            return outputs if mode == "predict" else (inputs, outputs)

    return ToyModel


def batch(seed: int = 0) -> dict[str, Any]:
    """Return samples in the form of pseudo_collate."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "inputs": [torch.rand(2, generator=generator) for _ in range(3)],
        "data_samples": [torch.rand(1, generator=generator) for _ in range(3)],
    }
