"""Find the changes that advice must not recommend, because a loader has them.

Verdicts of `stats` and of the profiler name arguments. `applied_changes` returns their
names if they are set, or if they cannot be set.
"""

from __future__ import annotations

import functools
from typing import Any

from torch.utils.data import IterableDataset, default_collate

from ..batch.collate import collate, collate_one_chunk
from ..batch.collate_fields import Collate

#: The value of ``prefetch_factor`` that verdicts recommend.
PREFETCH_FACTOR = 8
_INTO_RING = (collate, collate_one_chunk, default_collate)


def applied_changes(loader: Any) -> frozenset[str]:
    """Return the names of the recommended changes that a loader has.

    ``"by size"``: its batches have samples of similar sizes. ``"stream"``: its dataset
    is iterable, so it has no batch sampler. ``"thread"``: its workers are threads.
    Other names are those of arguments.

    Args:
        loader: a loader of torch or pyparallel, or an iterator of one.
    """

    def get(name: str) -> Any:
        return getattr(loader, name, getattr(loader, f"_{name}", None))

    collate_fn, dataset = get("collate_fn"), get("dataset")
    while isinstance(collate_fn, functools.partial):
        collate_fn = collate_fn.func
    samplers = [get("batch_sampler"), get("index_sampler"), dataset]
    samplers += [getattr(each, "sampler", None) for each in samplers]
    samplers += [getattr(each, "dataset", None) for each in samplers]
    prefetch_factor = get("prefetch_factor")
    found = {
        "persistent_workers": get("persistent_workers") is True,
        "pin_memory": get("pin_memory") is True,
        "prefetch_factor": isinstance(prefetch_factor, int)
        and prefetch_factor >= PREFETCH_FACTOR,
        "collate_fn": isinstance(collate_fn, Collate) or collate_fn in _INTO_RING,
        "by size": any(map(_is_by_size, samplers)),
        "stream": isinstance(dataset, IterableDataset),
        "thread": "thread" in (get("worker_method"), get("start_method")),
    }
    return frozenset(name for name, is_applied in found.items() if is_applied)


def _is_by_size(value: Any) -> bool:
    """Return True for a `SizeBatchSampler` or a `SizeBatcher`, which import this."""
    names = {cls.__name__ for cls in type(value).__mro__}
    return not names.isdisjoint({"SizeBatchSampler", "SizeBatcher"})


def padding_advice(applied: frozenset[str]) -> str:
    """Return the change that reduces padding."""
    if "by size" in applied:
        return "leave the samples ragged, with Concat(), or use smaller batches"
    if "stream" in applied:
        return "use SizeBatcher(stream, size_of, batch_size)"
    return "use SizeBatchSampler(sizes, batch_size)"
