"""Small fields: the time to send many tensors from a worker to the parent."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.multiprocessing
import torch.utils.data

from pyparallel import DataLoader

from .epochs import Counted, Epochs, Items, contenders, peer, per_batch
from .images import Comparison, Goal

#: 28 samples of 4 tensors: a batch of 112.
SAMPLES = 28

BY_TORCH = "torch's loader"
BY_NAME = "torch's loader, file_system"
FLOOR, FLOOR_OF_OURS = "no tensors, torch's loader", "no tensors, our loader"

_NOTE = (
    f"synthetic: {SAMPLES} samples of boxes, labels, areas and ids, new in every batch"
)


def cases(quick: bool) -> list[Comparison]:
    """Return the cases: the time to send a batch, and the batches in a second."""
    # One floor for all: so our own overhead in a message without tensors counts.
    floors = dict.fromkeys(("ours, native", "ours, Python", BY_TORCH, BY_NAME), FLOOR)
    return [
        Comparison(
            "112 small fields, to cross",
            "fields",
            f"{_NOTE}; from the end of collate_fn to the end of next(), which waits",
            partial(_contenders, 8 if quick else 16, 0.002, _crossing),
            [Goal(BY_TORCH, 15, "net"), Goal(BY_TORCH, 15)],
            floors,
        ),
        Comparison(
            "112 small fields, 1 worker",
            "fields",
            f"{_NOTE}; a whole epoch, in which collate_fn copies them and nothing else",
            partial(_contenders, 8 if quick else 24, 0.0, per_batch(lambda _: None)),
            floors=floors,
        ),
    ]


def _contenders(
    num: int, pause: float, run: Callable[[Any], float], clock: Counted
) -> list[Any]:
    """Return loaders of ``num`` batches with a pause of the worker before each."""

    def loader(kind: Any, sends: bool, **options: Any) -> Callable[[], Any]:
        return partial(
            kind,
            Items([targets()], num),
            None,  # an item is a batch
            num_workers=1,
            prefetch_factor=1 if pause else 2,
            collate_fn=Remaking(sends, pause),
            persistent_workers=True,
            multiprocessing_context="fork",
            **options,
        )

    def epochs(make: Callable[[], Any]) -> Epochs:
        return Epochs(make, run, clock, _fields)

    torchs: Any = torch.utils.data.DataLoader
    by_name = loader(torchs, True, worker_init_fn=share_by_name)
    return [
        *contenders(epochs, loader(DataLoader, True)),
        peer(BY_TORCH, epochs(loader(torchs, True))),
        peer(BY_NAME, epochs(by_name)),
        peer(FLOOR, epochs(loader(torchs, False)), "limit"),
        peer(FLOOR_OF_OURS, epochs(loader(DataLoader, False)), "limit"),
    ]


class Remaking:
    """A collate function that copies a batch, and records the time when it is ready.

    Args:
        sends: send the batch to the parent, not only the time.
        pause: seconds to sleep first, so that the parent already waits when the batch
            is ready, and the measurement covers the whole transfer.
    """

    def __init__(self, sends: bool, pause: float) -> None:
        self.sends, self.pause = sends, pause

    def __call__(self, batch: list[dict[str, torch.Tensor]]) -> dict[str, Any]:
        """Return the batch."""
        time.sleep(self.pause)
        new = [{name: each.clone() for name, each in one.items()} for one in batch]
        return {"fields": new if self.sends else None, "ready": time.perf_counter()}


def share_by_name(worker_id: int) -> None:
    """Let a worker send the names of files instead of descriptors."""
    torch.multiprocessing.set_sharing_strategy("file_system")


def targets() -> list[dict[str, torch.Tensor]]:
    """Return the targets of a batch for detection."""
    generator = torch.Generator().manual_seed(0)
    rng = random.Random(0)
    found = []
    for i in range(SAMPLES):
        num = rng.randint(1, 20)
        boxes = torch.rand(num, 4, generator=generator)
        labels = torch.randint(80, (num,), generator=generator)
        areas = torch.rand(num, generator=generator)
        ids = torch.tensor([i])
        found.append({"boxes": boxes, "labels": labels, "areas": areas, "ids": ids})
    return found


def _crossing(loader: Any) -> float:
    """Return the mean time to send a batch of an epoch.

    All processes on Linux share one monotonic clock. The first batch is left out,
    because the worker makes it while the epoch starts.
    """
    seconds, num = 0.0, 0
    for batch in loader:
        num += 1
        if num > 1:
            seconds += time.perf_counter() - batch["ready"]
    return seconds / (num - 1)


def _fields(batch: dict[str, Any]) -> Any:
    return batch["fields"]
