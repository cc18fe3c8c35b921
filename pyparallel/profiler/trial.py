"""Measure a batch for `prediction`: its sizes, our collate, and its transport.

Note: [trials]. After its first batch, a process runs `Collate` on the samples of a few
batches, beside the script's own ``collate_fn``. So the report knows the time of both on
the samples of the script. The trials are over before the recorded steps begin.
`transports` measures the transport of an equal batch after the script, on this machine.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import Dataset

from ..batch import allocation, pytree, stack
from ..batch.collate_fields import Collate
from ..batch.container import DataContainer
from ..batch.rules import Pad
from ..core.cpu_time import CoreWait, GilWait
from ..core.torch_private import new_shared
from ..loader.data_loader import DataLoader
from ..prefetch.pre_data_loader import PreDataLoader

#: The batches of a process with a trial, counted from 0. The first one is slower.
BATCHES = range(1, 4)
#: Of `transports`: the batches of a loader, and those before the measurement, which
#: allocate memory.
_BATCHES, _WARMUP = 24, 12
_CPU = torch.device("cpu")
_Layout = list[tuple[tuple[int, ...], torch.dtype, bool]]
_T = TypeVar("_T")


class _Slab:
    """Memory that is used again, as that of the workers of `DataLoader`."""

    def __init__(self) -> None:
        self._data, self._used = torch.empty(0, dtype=torch.uint8), 0

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor | None:
        """Return the next free bytes as a tensor; None if they are too few."""
        start, size = self._used, math.prod(shape) * dtype.itemsize
        self._used += -(-size // 64) * 64
        if self._used > len(self._data):
            return None
        return self._data[start : start + size].view(dtype).view(*shape)

    def reset(self) -> None:
        """Free all bytes; allocate at least the bytes that were needed."""
        if self._used > len(self._data):
            self._data = torch.empty(self._used, dtype=torch.uint8)
        self._used = 0


def tensors_of(batch: Any) -> list[torch.Tensor]:
    """Return the tensors of a batch, also those in a `DataContainer`."""
    found = []
    for leaf in pytree.flatten(batch)[0]:
        if isinstance(leaf, DataContainer):
            found += tensors_of(leaf.data)
        elif isinstance(leaf, torch.Tensor):
            found.append(leaf)
    return found


def size_of(sample: Any) -> list[int]:
    """Return the shape of the largest array of a sample; [] without one."""
    return list(max(_shapes(sample), key=math.prod, default=()))


def _shapes(value: Any) -> Iterator[tuple[int, ...]]:
    if isinstance(value, DataContainer):
        value = value.data
    if hasattr(value, "shape"):
        yield tuple(value.shape)
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _shapes(item)
    elif isinstance(value, list) and value and isinstance(value[0], (int, float)):
        yield (len(value),)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _shapes(item)


def held_share(run: Callable[[], _T]) -> tuple[_T, float]:
    """Return the result of a function, and the part of its time with the GIL held."""
    done, delays = threading.Event(), []

    def sample() -> None:
        wait = GilWait()
        while not done.is_set():
            delays.append(wait.delay())

    thread = threading.Thread(target=sample)
    thread.start()
    start = time.perf_counter()
    try:
        result = run()
    finally:
        took = time.perf_counter() - start
        done.set()
        thread.join()
    return result, min(1.0, sum(delays) / took)


def ours(samples: Any, batch: Any) -> dict[str, Any]:
    """Return the nanoseconds of our collate, if it makes a batch of the same bytes.

    Returns:
        ``layout``: shape, dtype and "is shared" of each tensor of the script's batch.
        ``ours``: the nanoseconds; None if another batch would result, because the
        script's function does more than to pad and stack.
    """
    tensors = tensors_of(batch)
    names = [str(tensor.dtype).removeprefix("torch.") for tensor in tensors]
    layout = [
        [list(tensor.shape), name, tensor.is_shared()]
        for tensor, name in zip(tensors, names, strict=True)
    ]
    collate, slab, took = Collate(default=Pad()), _Slab(), []
    core_wait, counter = CoreWait(), stack.active.counter
    stack.active.counter = None  # that of the script's loader
    try:
        for _ in range(3):  # the slab grows in the first call
            slab.reset()
            start, waited = time.perf_counter(), core_wait.seconds()
            with allocation.allocate_from(slab):
                made = collate(samples)
            took.append(waited - core_wait.seconds() + time.perf_counter() - start)
        nbytes = [sum(t.nbytes for t in each) for each in (tensors_of(made), tensors)]
    except Exception:  # of any kind: the samples are those of the script
        return {"layout": layout, "ours": None}
    finally:
        stack.active.counter = counter
    is_equal = abs(nbytes[0] - nbytes[1]) <= nbytes[1] / 10
    return {"layout": layout, "ours": int(1e9 * min(took)) if is_equal else None}


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
        layout: shape, dtype and "is shared" of each tensor, as `ours` returns it.
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
