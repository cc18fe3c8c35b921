"""Parts for the configs of the runner tests: real ragged data, models, a metric.

The names of Unicode characters are 3 to 75 letters long; the model predicts the kind of
the character.
"""

from __future__ import annotations

import random
import unicodedata
from functools import cache
from typing import Any

import torch
from mmengine.evaluator import BaseMetric
from mmengine.model import BaseDataPreprocessor, BaseModel
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

from pyparallel import DataContainer

KINDS = "LMNPS"  # letter, mark, number, punctuation, symbol


@cache
def characters() -> list[tuple[str, int]]:
    """Return names, and the numbers of their kinds, in a fixed random order."""
    found = []
    for code in range(0x20, 0x3000):
        kind, name = unicodedata.category(chr(code))[0], unicodedata.name(chr(code), "")
        if name and kind in KINDS:
            found.append((name, KINDS.index(kind)))
    random.Random(0).shuffle(found)
    return found


class Names(Dataset[dict[str, Any]]):
    """``count`` names from ``first`` on; as tensors, or in DataContainers."""

    def __init__(self, first: int, count: int, containers: bool = False) -> None:
        self.rows = characters()[first : first + count]
        self.containers = containers

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        name, kind = self.rows[index]
        letters, label = torch.tensor([list(name.encode())]), torch.tensor(kind)
        if not self.containers:
            return {"inputs": letters, "data_samples": label, "names": name}
        return {
            "inputs": DataContainer(letters, stack=True, pad_dims=1),
            "data_samples": DataContainer(label, stack=True, pad_dims=None),
            "names": DataContainer(name, cpu_only=True),
        }


class PaddingPreprocessor(BaseDataPreprocessor):  # type: ignore[misc]  # no types
    """Code for mmengine alone: it pads the names and copies each."""

    def forward(self, data: Any, training: bool = False) -> Any:
        data = self.cast_data(data)
        inputs = pad_sequence([each[0] for each in data["inputs"]], batch_first=True)
        labels = torch.stack(data["data_samples"])
        return {**data, "inputs": inputs[:, None], "data_samples": labels}


class Reader(BaseModel):  # type: ignore[misc]  # mmengine has no types
    """Letters, a convolution over five of them, and the maximum over the name."""

    def __init__(self, data_preprocessor: Any = None) -> None:
        super().__init__(data_preprocessor=data_preprocessor)
        self.letters = nn.Embedding(128, 16, padding_idx=0)
        self.words = nn.Conv1d(16, 32, 5, padding=2)
        self.kind = nn.Linear(32, len(KINDS))

    def forward(
        self, inputs: Any, data_samples: Any, names: Any = None, mode: str = "tensor"
    ) -> Any:
        if not isinstance(inputs, torch.Tensor):
            raise TypeError(f"inputs are a {type(inputs).__name__}")
        found = self.words(self.letters(inputs.flatten(1)).transpose(1, 2)).relu()
        scores = self.kind(found.amax(2))
        if mode == "loss":
            return {"loss": nn.functional.cross_entropy(scores, data_samples)}
        if mode == "predict":
            return [(scores.argmax(1) == data_samples).tolist()]
        return scores


class Accuracy(BaseMetric):  # type: ignore[misc]  # mmengine has no types
    """The share of names with the correct kind."""

    def process(self, data_batch: Any, data_samples: Any) -> None:
        self.results += [{"right": each} for each in data_samples[0]]

    def compute_metrics(self, results: list[Any]) -> dict[str, float]:
        return {"accuracy": sum(each["right"] for each in results) / len(results)}
