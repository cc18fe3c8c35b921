"""DataLoader: torch's, whose workers write a batch where its reader finds it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from dataclasses import replace
from multiprocessing.context import BaseContext
from typing import Any, TypeVar

import torch.utils.data
from torch.utils.data import Sampler

from ..batch.collate import collate, collate_one_chunk
from ..core.errors import BatchTypeError, check_int, type_name, warn
from ..core.torch_private import WorkersIter, require
from . import _random_state
from ._iterators import BatchReceiver, InProcessIterator, WorkersIterator
from .preflight import Finding, num_cores
from .state_dict import StatefulLoader
from .stats import LoaderStats

_T_co = TypeVar("_T_co", covariant=True)


class DataLoader(StatefulLoader, torch.utils.data.DataLoader[_T_co]):
    """torch's ``DataLoader``; what its workers make lies in recycled shared memory.

    Workers write every tensor of a batch, whatever the ``collate_fn``, into one slab of
    a ring; `pyparallel.collate` and torch's ``default_collate`` write there at once.
    One short message and no file descriptor crosses to the parent, whose tensors are
    views of the slab. The slab is used again when the last of them dies. With
    ``pin_memory`` and CUDA the slabs are page-locked while there are workers: copies to
    the device read what the worker wrote.

    A batch that finds no slab takes other shared memory, as with torch: nothing waits,
    `stats` counts it, and one warning has the number to raise. So does all else that
    has no place in the ring; tensors that are not dense CPU tensors cross as torch
    sends them. Without workers, and on systems other than Linux, there is no ring.

    With ``collate_fn=pyparallel.collate`` itself a batch is one chunk, also a smaller
    last one: ``samples_per_gpu`` is the number of its samples. `MMDataParallel` on
    several devices needs a chunk for each: ``partial(collate, samples_per_gpu=n)``.
    With ``batch_size=None`` `collate` is called as it is.

    `state_dict` says how far the last iterator has got; after `load_state_dict` the
    next one continues with the very next batch.

    Args:
        dataset: as for torch, and so are all arguments that are not below.
        ring_slabs: how many slabs there are, one for every batch that is on its way
            or in use; 0: no ring. None: enough for all that workers are asked for,
            and 6 more.
        max_ring_bytes: the most bytes of memory that the ring ever takes, its header
            and the rest of every page included; 0: no ring. A slab takes what the
            batches in it need, and keeps it as long as the loader lives. None: half of
            the memory that is available now.
        sample_seeds: set the random states of torch (CPU), ``random`` and NumPy before
            each sample of a map-style dataset, from a seed, the number of the epoch and
            the index of the sample. See ``docs/resume.md``.
        snapshot_every_n_steps: 1 or more: workers report the state of a stateful
            dataset from the first batch on. None or 0: after the first call of
            ``state_dict``. The state is exact at every step, whatever the number is.

    Raises:
        TypeError: ``ring_slabs``, ``max_ring_bytes`` or ``snapshot_every_n_steps`` is
            not an integer, or ``sample_seeds`` not a bool; ``sample_seeds`` with an
            iterable dataset.
        ValueError: a number is negative; as torch.

    The tensors of one batch share memory: one small tensor that is kept keeps the slab.
    Tensors of one batch that shared memory before no longer do.

    Example:
        >>> loader = DataLoader(torch.arange(4), batch_size=2)
        >>> [batch.tolist() for batch in loader]
        [[0, 1], [2, 3]]
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int | None = 1,
        shuffle: bool | None = None,
        sampler: Sampler[Any] | Iterable[Any] | None = None,
        batch_sampler: Sampler[list[Any]] | Iterable[list[Any]] | None = None,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        pin_memory: bool = False,
        drop_last: bool = False,
        timeout: float = 0,
        worker_init_fn: Callable[[int], None] | None = None,
        multiprocessing_context: str | BaseContext | None = None,
        generator: torch.Generator | None = None,
        *,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
        pin_memory_device: str = "",
        in_order: bool = True,
        ring_slabs: int | None = None,
        max_ring_bytes: int | None = None,
        sample_seeds: bool = False,
        snapshot_every_n_steps: int | None = None,
    ) -> None:
        for name, value in (
            ("ring_slabs", ring_slabs),
            ("max_ring_bytes", max_ring_bytes),
            ("snapshot_every_n_steps", snapshot_every_n_steps),
        ):
            if value is not None:
                check_int(value, 0, f"DataLoader: {name}", "None or an integer")
        if not isinstance(sample_seeds, bool):
            raise BatchTypeError(
                "DataLoader: sample_seeds must be True or False, but is "
                f"{sample_seeds!r} ({type_name(sample_seeds)})."
            )
        if sample_seeds:
            _random_state.check_sample_seeds(dataset)
        has_batches = batch_size is not None or batch_sampler is not None
        if collate_fn is collate and has_batches:
            # As an attribute, so that loaders which others make from this one have it.
            collate_fn = collate_one_chunk
        super().__init__(
            dataset,
            batch_size=batch_size,
            shuffle=shuffle,
            sampler=sampler,
            batch_sampler=batch_sampler,
            num_workers=num_workers,
            collate_fn=collate_fn,
            pin_memory=pin_memory,
            drop_last=drop_last,
            timeout=timeout,
            worker_init_fn=worker_init_fn,
            multiprocessing_context=multiprocessing_context,
            generator=generator,
            prefetch_factor=prefetch_factor,
            persistent_workers=persistent_workers,
            pin_memory_device=pin_memory_device,
            in_order=in_order,
        )
        self.ring_slabs = ring_slabs
        self.max_ring_bytes = max_ring_bytes
        self.sample_seeds = sample_seeds
        self.snapshot_every_n_steps = snapshot_every_n_steps
        self._states_wanted = bool(snapshot_every_n_steps)
        self._receiver = BatchReceiver(ring_slabs, max_ring_bytes)

    def stats(self) -> LoaderStats:
        """Return what has been measured since the loader was made."""
        found = self._receiver.meter.snapshot()
        return replace(found, num_workers=self.num_workers, cores=num_cores())

    def preflight(self) -> list[Finding]:
        """Return what this machine is short of for this loader, each with its number.

        The same is looked at when workers first start; what puts batches at risk is
        then a `LoaderWarning`.
        """
        return self._receiver.preflight(self)

    def check_worker_number_rationality(self) -> None:
        """Warn, at the user's line, of more workers than there are processors."""
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            super().check_worker_number_rationality()
        for warning in caught:
            warn(str(warning.message), warning.category)

    def __iter__(self) -> Any:
        """Start an epoch."""
        if (
            isinstance(self._iterator, WorkersIterator)
            and self._iterator.has_lost_worker()
        ):
            self._iterator = None
        return super().__iter__()

    def __getstate__(self) -> dict[str, Any]:
        """Return what another process can use."""
        fresh = BatchReceiver(self.ring_slabs, self.max_ring_bytes)
        local = {"_receiver": fresh, "_iterator": None, "_progress": None}
        return {**self.__dict__, **local}

    def _get_iterator(self) -> Any:
        require("pyparallel.DataLoader", torch.utils.data.DataLoader, WorkersIter)
        if self.num_workers == 0:
            return InProcessIterator(self, self._receiver)
        return WorkersIterator(self, self._receiver)
