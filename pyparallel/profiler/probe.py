"""Measure on this machine the CPU time in which batches get from workers to a loop."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import Dataset

from ..batch import allocation
from ..core.torch_private import new_shared
from ..loader.data_loader import DataLoader
from ..prefetch.pre_data_loader import PreDataLoader

#: The batches of a loader, and those before the measurement: they allocate memory.
_BATCHES, _WARMUP = 24, 12
_CPU = torch.device("cpu")
_Layout = list[tuple[tuple[int, ...], torch.dtype, bool]]


class _Batches(Dataset[Any]):
    """Empty batches of a layout, with the CPU time of their worker."""

    def __init__(self, layout: _Layout, where: str) -> None:
        self.layout, self.where = layout, where

    def __len__(self) -> int:
        return _BATCHES

    def __getitem__(self, index: int) -> Any:
        return index

    def collate(self, index: int) -> Any:
        made = [self._empty(*each) for each in self.layout]
        return [*made, torch.tensor(time.process_time_ns())]

    def _empty(self, shape: tuple[int, ...], dtype: Any, is_shared: bool) -> Any:
        if self.where == "ring":
            return allocation.empty(shape, dtype, _CPU)
        result = torch.empty(shape, dtype=dtype)
        if self.where == "torch" and is_shared and result.nbytes:
            storage = new_shared(result.nbytes)
            result = result.new(storage).view(shape)
        return result


def _loader(data: _Batches, cls: Any = DataLoader, **options: Any) -> Any:
    return cls(data, None, num_workers=1, collate_fn=data.collate, **options)


#: The ways to send a batch; the memory of its tensors in the worker; and the loader.
_WAYS: dict[str, tuple[str, Callable[[_Batches], Any]]] = {
    "torch": ("torch", lambda data: _loader(data, TorchLoader)),
    "slabs": ("fresh", lambda data: _loader(data)),
    "direct": ("ring", lambda data: _loader(data)),
    "ahead": ("ring", lambda data: PreDataLoader(_loader(data))),
    "threads": ("ring", lambda data: _loader(data, worker_method="thread")),
}


def transports(layout: list[Any]) -> dict[str, list[int]]:
    """Return the CPU nanoseconds of a batch for each way.

    They are those of the worker, of the loop to get the batch, and of the loop to read
    a byte of each page. The time of a thread is a part of the loop's.

    Args:
        layout: shape, dtype and "is shared" of each tensor, as `trial.ours` returns it.
    """
    parsed: _Layout = [
        (tuple(shape), getattr(torch, dtype), shared) for shape, dtype, shared in layout
    ]
    return {
        name: _cpu_times(make(_Batches(parsed, where)), name == "threads")
        for name, (where, make) in _WAYS.items()
    }


def _cpu_times(loader: Any, in_thread: bool) -> list[int]:
    rows, read = [], 0
    for *tensors, clock in loader:
        start = time.process_time_ns()
        for tensor in tensors:
            if tensor.numel():
                tensor.view(-1)[:: max(1, 4096 // tensor.itemsize)].max()
        end = time.process_time_ns()
        read += end - start
        rows.append((0 if in_thread else int(clock), end - read, read))
    first, last = rows[_WARMUP], rows[-1]
    count = len(rows) - 1 - _WARMUP
    return [(b - a) // count for a, b in zip(first, last, strict=True)]
