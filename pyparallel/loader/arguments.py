"""The attributes of a ``DataLoader`` that other modules of the folder read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch


class Loader(Protocol):
    """A ``pyparallel.DataLoader``, as its iterator, its state and its checks see it."""

    dataset: Any
    batch_size: int | None
    sampler: Any
    batch_sampler: Any
    num_workers: int
    collate_fn: Callable[[Any], Any]
    pin_memory: bool
    drop_last: bool
    timeout: float
    worker_init_fn: Callable[[int], None] | None
    multiprocessing_context: Any
    worker_method: str
    generator: torch.Generator | None
    prefetch_factor: int | None
    persistent_workers: bool
    pin_memory_device: str
    in_order: bool
    sample_seeds: Any
    on_error: str
    max_errors: int
    replay_dataset: bool

    # A `BatchReceiver`, a `Progress` and a `Pass`, whose modules import this one.
    _receiver: Any
    _progress: Any
    _pass: Any
    _loaded: dict[str, Any] | None
    _has_loaded: bool
    _iterators: int | None
    _epochs_seen: Mapping[str, int]
    _states_wanted: bool
    _replaced: str | None
    _num_skipped: int
    _dataset_kind: int

    @property
    def _auto_collation(self) -> bool: ...

    @property
    def _index_sampler(self) -> Any: ...

    def preflight(self) -> list[Any]:
        """Return the limits of this machine that are too low."""
