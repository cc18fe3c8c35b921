"""Data sets, collate functions and comparisons for the tests of the loader.

Spawned workers import this module, so all its functions are at the top level.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import psutil
import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info

import pyparallel


def messages(caught: Any) -> list[str]:
    """Return the texts of warnings, without those of Python 3.12 about forks."""
    return [str(w.message) for w in caught if w.category is not DeprecationWarning]


class Numbers(Dataset[torch.Tensor]):
    """Sample ``i`` is a tensor full of ``i``."""

    def __init__(
        self, length: int = 16, shape: tuple[int, ...] = (3,), dtype: Any = torch.float
    ) -> None:
        self.length, self.shape, self.dtype = length, shape, dtype

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, i: int) -> torch.Tensor:
        return torch.full(self.shape, i, dtype=self.dtype)


class Sizes(Dataset[torch.Tensor]):
    """Sample ``i`` has as many float64 elements as ``sizes[i]`` says, each ``i``."""

    def __init__(self, sizes: list[int]) -> None:
        self.sizes = sizes

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, i: int) -> torch.Tensor:
        return torch.full((self.sizes[i],), float(i), dtype=torch.float64)


class Records(Numbers):
    """Samples as dictionaries of several kinds."""

    def __getitem__(self, i: int) -> Any:
        return {
            "x": torch.full((2, 3), float(i)),
            "array": np.full(5, i),
            "name": f"sample {i}",
            "pair": (i, torch.tensor(i)),
            "float": i / 2,
        }


class Stream(IterableDataset[torch.Tensor]):
    """``length`` numbers, split unevenly among workers: one has one, the last all."""

    def __init__(self, length: int, has_len: bool = False) -> None:
        self.length = length
        if has_len:
            self.__class__ = StreamWithLen

    def __iter__(self) -> Iterator[torch.Tensor]:
        info = get_worker_info()
        for i in range(self.length):
            owner = 0 if info is None else min(i, info.num_workers - 1)
            if info is None or owner == info.id:
                yield torch.tensor(i)


class StreamWithLen(Stream):
    def __len__(self) -> int:
        return self.length


class Making(Numbers):
    """Samples are the results of a function of their index."""

    def __init__(self, make: Callable[[int], Any], length: int = 4) -> None:
        super().__init__(length)
        self.make = make

    def __getitem__(self, i: int) -> Any:
        return self.make(i)


def standard_stream(i: int) -> str:
    """Return the name of the file that is stdin, stdout or stderr; "" if none is."""
    try:
        return os.readlink(f"/proc/self/fd/{i}")
    except FileNotFoundError:
        return ""


def many_tensors(i: int) -> list[torch.Tensor]:
    return [torch.full((3,), i) for _ in range(112)]


def only(batch: list[Any]) -> Any:
    """Return the only sample."""
    (sample,) = batch
    return sample


def as_list(batch: list[Any]) -> list[Any]:
    return batch


def slowly(batch: list[Any]) -> torch.Tensor:
    time.sleep(0.002 * (int(batch[0].flatten()[0]) % 3))
    return torch.stack(batch)


def seeds(batch: list[Any]) -> Any:
    """Return random numbers, to show the seed of the worker."""
    return torch.rand(2), np.random.rand(2), torch.initial_seed()


@dataclasses.dataclass
class Boxes:
    tensor: torch.Tensor
    names: list[str]


class Scene:
    """A class of a user, with tensors in attributes."""

    def __init__(self, i: int) -> None:
        self.image = torch.full((2, 2), i)
        self.parts = {"boxes": Boxes(torch.full((1, 4), i), [str(i)])}
        self.again = self.image

    def __eq__(self, other: object) -> bool:
        return type(other) is Scene and same(vars(self), vars(other))


class Tagged(torch.Tensor):
    """A subclass of Tensor."""


def bits(tensor: torch.Tensor) -> bytes:
    dense = tensor.detach().resolve_conj().resolve_neg()
    # A single value may have any stride and count as contiguous.
    flat = dense.clone(memory_format=torch.contiguous_format).view(-1)
    return flat.view(torch.uint8).numpy().tobytes()


def same_tensors(a: torch.Tensor, b: torch.Tensor) -> bool:
    if (a.dtype, a.shape, a.layout) != (b.dtype, b.shape, b.layout):
        return False
    if a.requires_grad != b.requires_grad:
        return False
    if a.layout is not torch.strided:
        return same(a.to_dense(), b.to_dense())
    return bits(a.as_subclass(torch.Tensor)) == bits(b.as_subclass(torch.Tensor))


def same(a: Any, b: Any) -> bool:
    """Compare two batches: types, dtypes, shapes and bits; keys in their order."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return same_tensors(a, b)
    if isinstance(a, np.ndarray):
        if a.dtype != b.dtype or a.shape != b.shape:
            return False
        return a.tolist() == b.tolist() if a.dtype == object else bytes(a) == bytes(b)
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, pyparallel.Ragged | pyparallel.DataContainer | Boxes):
        return same(attributes(a), attributes(b))
    if isinstance(a, float):
        return a == b or (a != a and b != b)
    return bool(a == b)


def attributes(value: Any) -> Any:
    """Return the attributes of an object, with or without slots."""
    names = [n for cls in type(value).__mro__ for n in getattr(cls, "__slots__", ())]
    names = [name for name in names if hasattr(value, name) and name[:2] != "__"]
    return {**getattr(value, "__dict__", {}), **{n: getattr(value, n) for n in names}}


def holders(loader: pyparallel.DataLoader) -> list[int]:
    """Return the holders of the slabs of a loader, after garbage collection."""
    gc.collect()
    ring = loader._receiver.ring
    assert ring is not None
    return ring.holders()


def all_free(loader: pyparallel.DataLoader) -> bool:
    """Wait until all pending batches of workers have arrived or were dropped."""
    return wait_for(lambda: not any(holders(loader)))


def wait_for(reached: Callable[[], bool], seconds: float = 10.0) -> bool:
    end = time.monotonic() + seconds
    while not reached():
        if time.monotonic() > end:
            return False
        time.sleep(0.005)
    return True


def feeders() -> list[threading.Thread]:
    """Return the threads of queues, which end shortly after their workers."""
    threads = threading.enumerate()
    return [thread for thread in threads if thread.name.startswith("QueueFeeder")]


def no_feeders() -> bool:
    """Wait for the feeders of earlier tests to end."""
    gc.collect()
    return wait_for(lambda: not feeders())


def num_fds() -> int:
    return len(os.listdir("/proc/self/fd"))


def children() -> list[psutil.Process]:
    """Return the child processes; some may just have ended."""
    found = []
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if child.status() != psutil.STATUS_ZOMBIE:
                found.append(child)
    return found
