"""Measure a batch for `prediction`: its sizes, and this package's collate on it.

Note: [trials]. After its first batch, a process runs `Collate` on the samples of a few
batches, beside the script's own ``collate_fn``. So the report knows the time of both on
the samples of the script. The trials are over before the recorded steps begin.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch

from ..batch import allocation, pytree, stack
from ..batch.collate_fields import Collate
from ..batch.container import DataContainer
from ..batch.rules import Pad
from ..core.cpu_time import CoreWait, GilWait

#: The batches of a process with a trial, counted from 0. The first one is slower.
BATCHES = range(1, 4)
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
