"""Batches of cheap samples: the time of a loader alone, with and without workers."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
import torch.utils.data

from pyparallel import DataLoader, PreDataLoader

from .epochs import (
    Counted,
    Epochs,
    Items,
    contenders,
    in_our_loader,
    peer,
    per_batch,
)
from .images import Comparison, Goal

BY_TORCH = "torch's loader"
#: Ours with fewer workers, and without `PreDataLoader`.
FOUR, ALONE = "4 workers", "the loader alone"

#: At most 0.8 of torch's time.
_GOALS = (Goal(BY_TORCH, 1 / 0.8),)
#: The least times of torch's loader with workers, by the number of fields.
_FIELDS = {1: 10, 8: 20, 112: 60}


def cases(quick: bool) -> list[Comparison]:
    """Return the cases: batches of samples that need no time to fetch."""
    num = 16 if quick else 1024
    kinds = {"tensors of 4 floats": _vectors(), "dicts of 3 fields": _dicts()}
    alone = [
        Comparison(
            f"{name}, no workers",
            "fields",
            "synthetic: 8 samples in a batch, default_collate; CPU time of the thread",
            partial(_contenders, samples, 8, num, cpu_per_batch, {}),
            _GOALS,
        )
        for name, samples in kinds.items()
    ]
    num = 16 if quick else 128
    options: dict[str, Any] = {"num_workers": 2, "persistent_workers": True}
    options["multiprocessing_context"] = "fork"
    return [
        *alone,
        *(
            Comparison(
                f"fields of 4 floats, {count} in a sample, 2 workers",
                "fields",
                "synthetic: 4 samples in a batch, default_collate; a whole epoch",
                partial(_contenders, _many(count), 4, num, _drop_each, options),
                [Goal(BY_TORCH, factor)],
            )
            for count, factor in _FIELDS.items()
        ),
        *_starts_and_ends(quick, options),
    ]


def _starts_and_ends(quick: bool, options: dict[str, Any]) -> list[Comparison]:
    """Return the cases about starts, many workers and prefetching."""
    vectors, num = _vectors(), 16 if quick else 512
    method, count = ("fork", 1) if quick else ("spawn", 8)
    starting = {"num_workers": count, "multiprocessing_context": method}
    large = 3 if quick else 32
    many, few = ({**options, "num_workers": each} for each in (large, 4))
    return [
        Comparison(
            f"first batch of {count} workers, {method}",
            "fields",
            "from iter() to the first batch; 4 samples of 4 floats",
            partial(_contenders, vectors, 4, 16, first_batch, starting),
            [Goal(BY_TORCH, 3)],
        ),
        Comparison(
            f"tensors of 4 floats, {large} persistent workers",
            "fields",
            "synthetic: 4 samples in a batch; a whole epoch",
            partial(_contenders, vectors, 4, num, _drop_each, many, others={FOUR: few}),
            [Goal(FOUR, 1)],
        ),
        Comparison(
            "tensors of 4 floats, PreDataLoader",
            "fields",
            "synthetic: 4 samples in a batch, 2 workers; CPU time of the parent",
            partial(_prefetched, vectors, num, options),
            [Goal(ALONE, 1 / 1.5)],
        ),
    ]


_drop_each = per_batch(lambda batch: None)


def _contenders(
    samples: Sequence[Any],
    batch_size: int,
    num: int,
    run: Callable[[Any], float],
    options: dict[str, Any],
    clock: Counted,
    others: Mapping[str, dict[str, Any]] = MappingProxyType({}),
) -> list[Any]:
    """Return loaders of ``num`` batches, also of ours with other options."""

    def loader(kind: Any, options: dict[str, Any] = options) -> Callable[[], Any]:
        return partial(kind, Items(samples, batch_size * num), batch_size, **options)

    def epochs(make: Callable[[], Any]) -> Epochs:
        return Epochs(make, run, clock)

    torchs: Any = torch.utils.data.DataLoader
    return [
        *contenders(epochs, loader(DataLoader)),
        peer(BY_TORCH, epochs(loader(torchs))),
        *(
            in_our_loader(name, epochs(loader(DataLoader, each)))
            for name, each in others.items()
        ),
    ]


def _prefetched(
    samples: Sequence[Any], num: int, options: dict[str, Any], clock: Counted
) -> list[Any]:
    """Return `PreDataLoader` and the loader that it reads."""
    make = partial(DataLoader, Items(samples, 4 * num), 4, **options)
    return [
        *contenders(
            lambda loader: Epochs(loader, _cpu_of_all, clock),
            lambda: PreDataLoader(make(), "cpu"),
        ),
        peer(ALONE, Epochs(make, _cpu_of_all, clock)),
    ]


def first_batch(loader: Any) -> float:
    """Return the seconds from ``iter()`` to the first batch."""
    start = time.perf_counter()
    batches = iter(loader)
    next(batches)
    return time.perf_counter() - start


def _cpu_of_all(loader: Any) -> float:
    """Return the CPU time of an epoch in all threads of this process, per batch."""
    num, start = 0, time.process_time()
    for _ in loader:
        num += 1
    return (time.process_time() - start) / num


def cpu_per_batch(loader: Any) -> float:
    """Return the CPU time of an epoch in this thread, per batch."""
    num, start = 0, time.thread_time()
    for _ in loader:
        num += 1
    return (time.thread_time() - start) / num


def _many(count: int) -> list[dict[str, torch.Tensor]]:
    rows = torch.rand(64, count, 4, generator=torch.Generator().manual_seed(0))
    return [{f"field{i}": each for i, each in enumerate(row)} for row in rows]


def _vectors() -> list[torch.Tensor]:
    return list(torch.rand(64, 4, generator=torch.Generator().manual_seed(0)))


def _dicts() -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(0)
    images = torch.rand(64, 3, 16, 16, generator=generator)
    return [
        {"image": image, "label": i % 10, "path": f"{i}.jpg"}
        for i, image in enumerate(images)
    ]
