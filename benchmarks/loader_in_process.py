"""Loaders without workers: the CPU time for a batch of cheap samples."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.utils.data

from pyparallel import DataLoader

from .loader_cases import Comparison, Goal
from .loader_epochs import Counted, Epochs, Items, contenders, peer

BY_TORCH = "torch's loader"

#: At most 0.8 of torch's time.
_GOALS = (Goal(BY_TORCH, 1 / 0.8),)


def cases(quick: bool) -> list[Comparison]:
    """Return the cases: batches of samples that need no time to fetch."""
    num = 16 if quick else 1024
    kinds = {"tensors of 4 floats": _vectors(), "dicts of 3 fields": _dicts()}
    return [
        Comparison(
            f"{name}, no workers",
            "fields",
            "synthetic: 8 samples in a batch, default_collate; CPU time of the thread",
            partial(_contenders, samples, num),
            _GOALS,
        )
        for name, samples in kinds.items()
    ]


def _contenders(samples: Sequence[Any], num: int, clock: Counted) -> list[Any]:
    """Return loaders of ``num`` batches."""

    def loader(kind: Any) -> Callable[[], Any]:
        return partial(kind, Items(samples, 8 * num), 8)

    def epochs(make: Callable[[], Any]) -> Epochs:
        return Epochs(make, cpu_per_batch, clock)

    torchs: Any = torch.utils.data.DataLoader
    return [
        *contenders(epochs, loader(DataLoader)),
        peer(BY_TORCH, epochs(loader(torchs))),
    ]


def cpu_per_batch(loader: Any) -> float:
    """Return the CPU time of an epoch in this thread, per batch."""
    num, start = 0, time.thread_time()
    for _ in loader:
        num += 1
    return (time.thread_time() - start) / num


def _vectors() -> list[torch.Tensor]:
    return list(torch.rand(64, 4, generator=torch.Generator().manual_seed(0)))


def _dicts() -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(0)
    images = torch.rand(64, 3, 16, 16, generator=generator)
    return [
        {"image": image, "label": i % 10, "path": f"{i}.jpg"}
        for i, image in enumerate(images)
    ]
