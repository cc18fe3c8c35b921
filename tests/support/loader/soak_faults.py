"""A dataset and a collate function with the planned faults of a soak.

Spawned workers import this module, so all its functions are at the top level. A fault
occurs once: the first process at its sample creates a file, which also counts it.
"""

from __future__ import annotations

import os
import resource
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset

import pyparallel
from tests.support.loader.worker_programs import cut_answer, die

PADDING = -7.0


class Planned(Exception):
    """The error that a sample or a collate function raises on purpose."""


def refuse() -> None:
    raise Planned("on purpose")


def slow() -> None:
    time.sleep(0.03)


def hang() -> None:
    time.sleep(600)


def stopped() -> None:
    """Stop this worker; the soak finds stopped workers and continues them."""
    os.kill(os.getpid(), signal.SIGSTOP)


def without_memory() -> None:
    """Let the next allocation of memory for a slab fail."""
    fallocate = os.posix_fallocate

    def refused(fd: int, start: int, nbytes: int) -> None:
        os.posix_fallocate = fallocate
        raise OSError(28, "No space left on device")

    os.posix_fallocate = refused


def without_descriptors() -> None:
    """Let the next descriptor of this worker fail."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    used = max(map(int, os.listdir("/proc/self/fd")))
    resource.setrlimit(resource.RLIMIT_NOFILE, (used, hard))


#: The action of a worker at a sample.
IN_DATASET: dict[str, Callable[[], Any]] = {
    "sample raises": refuse,
    "sample is slow": slow,
    "sample hangs": hang,
    "worker killed": die,
    "worker killed in a message": lambda: cut_answer(30),
    "worker exits": lambda: os._exit(3),
    "worker stopped": stopped,
    "no memory for a slab": without_memory,
    "no descriptors": without_descriptors,
}
IN_COLLATE: dict[str, Callable[[], Any]] = {"collate raises": refuse}
IN_WORKERS = IN_DATASET | IN_COLLATE


class Faults:
    """The planned faults by sample; each occurs once.

    Args:
        folder: the folder of the files that record faults.
        plan: the kinds of faults, by the index of their sample.
    """

    def __init__(self, folder: Path, plan: dict[int, str]) -> None:
        self.folder, self.plan = folder, plan

    def meet(self, index: int, kinds: dict[str, Callable[[], Any]]) -> None:
        kind = self.plan.get(index)
        if kind not in kinds:
            return
        path = self.folder / f"{index}"
        try:
            os.close(os.open(path, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return
        kinds[kind]()

    def happened(self) -> list[str]:
        return [self.plan[int(path.name)] for path in self.folder.iterdir()]


class Scenes(Dataset[Any]):
    """Sample ``i`` is a ragged tensor of ``i``, of up to 12 KB, and its index."""

    def __init__(self, length: int, faults: Faults) -> None:
        self.length, self.faults = length, faults

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, i: int) -> Any:
        self.faults.meet(i, IN_DATASET)
        return {"index": i, "data": torch.full(size_of(i), float(i))}


class Collating:
    """Pads the samples in the form that `is_right` checks."""

    def __init__(self, faults: Faults) -> None:
        self.faults = faults

    def __call__(self, samples: list[Any]) -> Any:
        for sample in samples:
            self.faults.meet(sample["index"], IN_COLLATE)
        return {
            "index": torch.tensor([sample["index"] for sample in samples]),
            "data": pyparallel.pad_stack(
                [sample["data"] for sample in samples], padding_value=PADDING
            ),
        }


def size_of(i: int) -> tuple[int, int]:
    return 1 + i * 7 % 60, 1 + i * 5 % 50


def is_right(batch: Any) -> bool:
    """Return True if a batch contains exactly its samples, padded."""
    sizes = [size_of(i) for i in batch["index"].tolist()]
    height, width = (max(size[dim] for size in sizes) for dim in (0, 1))
    expected = torch.full((len(sizes), height, width), PADDING)
    for row, size, i in zip(expected, sizes, batch["index"].tolist(), strict=True):
        row[: size[0], : size[1]] = i
    return torch.equal(batch["data"], expected)
