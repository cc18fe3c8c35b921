"""``pyparallel.DataLoader``: torch's ``DataLoader`` with batches in shared memory."""

from __future__ import annotations

import math
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from multiprocessing.context import BaseContext
from numbers import Real
from typing import TYPE_CHECKING, Any, Literal

import torch.utils.data
from torch.utils.data import (
    BatchSampler,
    Dataset,
    IterableDataset,
    IterDataPipe,
    MapDataPipe,
    Sampler,
)
from typing_extensions import Self, TypeVar

from ..batch.collate import collate, collate_one_chunk
from ..batch.collate_fields import check_collate_fn
from ..core.errors import BatchTypeError, check_int, plain_number, type_name, warn
from ..core.text import plural
from ..core.torch_private import LoaderIter, TorchLoader, require
from ..shm.ring import total_nbytes
from . import _random_state, preflight
from ._batch_receiver import BatchReceiver
from ._loader_state import find_epochs, ordering_parts
from ._passes import check_bases, watched
from .applied import applied_changes
from .copies import TimeoutWithOwner, skipped_batches
from .epoch import Epoch
from .preflight import Finding, check_workers, num_cores
from .sample_errors import check_policy
from .state_dict import StatefulLoader
from .stats import LoaderStats

_T_co = TypeVar("_T_co", covariant=True, default=Any)


class DataLoader(TorchLoader[_T_co], StatefulLoader):
    """torch's ``DataLoader``, whose workers write batches into reused shared memory.

    Workers write all tensors of a batch into one slab of a ring, with any
    ``collate_fn``. `Collate`, `pyparallel.collate` and torch's ``default_collate``
    write directly into the slab. The worker sends one short message and no file
    descriptor. The tensors in the parent are views of the slab, which is reused when
    the last of them is freed. With ``pin_memory`` and CUDA, the slabs are pinned until
    the loader is freed, so copies to the device read the slab directly. A batch may be
    dropped right after a copy on any stream.

    If no slab is free or large enough, the batch is written into one new shared memory.
    Nothing waits. `stats` counts such a batch, and one warning names the
    argument to change. torch sends sparse and nested tensors and those of a device.
    There is no ring without workers, or on systems other than Linux.

    With ``collate_fn=pyparallel.collate``, each batch is one chunk, also a smaller last
    batch: ``samples_per_gpu`` is the number of its samples. `MMDataParallel` with
    several devices needs one chunk for each device:
    ``partial(collate, samples_per_gpu=n)``. With ``batch_size=None``, the loader calls
    `collate` with its own default.

    `state_dict` saves the position of the last iterator. After `load_state_dict`, the
    next iterator continues with the next batch.

    The tensors of one batch share memory, so one small tensor keeps the whole slab in
    use. Tensors of a batch that shared memory with each other no longer do.

    Args:
        dataset: as in torch. So are all arguments that are not described here. torch's
            own iterators read a ``DataPipe``, without the features of this class.
        worker_method: the kind of workers. ``"multiprocessing"``: processes, as in
            torch. ``"thread"``: threads of this process, which share the dataset, so
            nothing is pickled or copied. They suit datasets whose work releases the
            GIL, as that of image decoders. See ``docs/threads.md``.
        ring_slabs: the number of slabs. Every batch that is prepared, sent or in use
            needs one. 0 disables the ring. None: the number of batches that workers
            prepare, and 6 more.
        max_ring_bytes: the upper limit of the memory of the ring in bytes, with its
            header and whole pages. 0 disables the ring. A slab allocates the bytes that
            its batches need, and keeps them as long as the loader exists. None: half of
            the available memory.
        sample_seeds: set the random states of torch (CPU), ``random`` and NumPy before
            each sample of a map-style dataset, from a seed, the number of the epoch and
            the index of the sample. A function is called as well, with a seed of the
            sample below ``2**32``, for transforms with generators of their own. See
            ``docs/resume.md``.
        on_error: the treatment of an exception that a sample raises. ``"raise"``:
            raise it. ``"skip"``: leave the sample out of its batch. ``"replace"``: put
            another sample of the dataset in its place, if it has integer indices and a
            length. See ``docs/loader.md``.
        max_errors: the largest number of samples of an epoch that may fail.
        replay_dataset: do not use ``state_dict`` of an iterable dataset. A resumed
            epoch reads the delivered samples again and drops them. For datasets whose
            state is not exact. See ``docs/resume.md``.
        snapshot_every_n_steps: if 1 or more, workers report the state of a stateful
            dataset from the first batch on. If None or 0, they do so after the first
            call of ``state_dict``. The state is exact at every step, for any number.

    Raises:
        TypeError: ``num_workers``, ``prefetch_factor``, ``ring_slabs``,
            ``max_ring_bytes`` or ``snapshot_every_n_steps`` is not an integer, which
            may be a scalar of NumPy or torch, ``timeout`` is no number,
            ``sample_seeds`` is no bool or function, ``replay_dataset`` is not a bool,
            ``sample_seeds`` is set with an iterable dataset, ``replay_dataset`` with
            another one, ``worker_method="thread"`` with a ``DataPipe``, or
            ``multiprocessing_context`` starts threads.
        ValueError: a number is negative, a sampler of this package is for another
            number of samples, or torch's ``DataLoader`` raises it.

    Example:
        >>> loader = DataLoader(torch.arange(4), batch_size=2)
        >>> [batch.tolist() for batch in loader]
        [[0, 1], [2, 3]]
    """

    if TYPE_CHECKING:
        worker_method: str
        ring_slabs: int | None
        max_ring_bytes: int | None
        sample_seeds: bool
        on_error: str
        max_errors: int
        replay_dataset: bool
        snapshot_every_n_steps: int | None
    else:
        timeout = TimeoutWithOwner()
    #: The loader whose arguments the constructor takes, see Note [copies].
    _source: Self | None = None
    #: The class of its sampler, if this loader has another one.
    _replaced: str | None = None
    #: The number of batches that another library skips in front of the loop.
    _num_skipped = 0

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Watch ``__iter__`` of a subclass, see Note [passes].

        Raises:
            TypeError: another base makes iterators of its own.
        """
        super().__init_subclass__(**kwargs)
        check_bases(cls, DataLoader)
        method = cls.__iter__
        if method is not DataLoader.__iter__ and not hasattr(method, "watched"):
            cls.__iter__ = watched(method)  # type: ignore[method-assign]  # of cls

    def __init__(
        self,
        dataset: Dataset[_T_co] | Any,
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
        worker_method: Literal["multiprocessing", "thread"] = "multiprocessing",
        ring_slabs: int | None = None,
        max_ring_bytes: int | None = None,
        sample_seeds: bool | Callable[[int], Any] = False,
        on_error: Literal["raise", "skip", "replace"] = "raise",
        max_errors: int = 100,
        replay_dataset: bool = False,
        snapshot_every_n_steps: int | None = None,
    ) -> None:
        batch_size, drop_last = plain_number(batch_size), plain_number(drop_last)
        num_workers = _check_num_workers(num_workers)
        prefetch_factor = _check_optional("prefetch_factor", prefetch_factor)
        ring_slabs = _check_optional("ring_slabs", ring_slabs)
        max_ring_bytes = _check_optional("max_ring_bytes", max_ring_bytes)
        snapshot_every_n_steps = _check_optional(
            "snapshot_every_n_steps", snapshot_every_n_steps
        )
        _check_timeout(timeout)
        if not callable(sample_seeds):
            _check_bool("sample_seeds", sample_seeds, "True, False or a function")
        _check_bool("replay_dataset", replay_dataset)
        if sample_seeds is not False:
            _random_state.check_sample_seeds(dataset)
        check_collate_fn(collate_fn)
        if replay_dataset and not isinstance(dataset, IterableDataset):
            raise BatchTypeError(
                "DataLoader: replay_dataset=True must have an IterableDataset, but has "
                f"{type_name(dataset)}, whose samples are read by their index. Remove "
                "replay_dataset."
            )
        has_batches = batch_size is not None or batch_sampler is not None
        if collate_fn is collate and has_batches:
            # Set here, so that other libraries that copy this loader copy it, too.
            collate_fn = collate_one_chunk
        source = vars(self).get("_source")  # torch warns before the other arguments
        vars(self)["worker_method"] = getattr(source, "worker_method", worker_method)
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
        self._set_own_arguments(
            worker_method=worker_method,
            ring_slabs=ring_slabs,
            max_ring_bytes=max_ring_bytes,
            sample_seeds=sample_seeds,
            on_error=on_error,
            max_errors=max_errors,
            replay_dataset=replay_dataset,
            snapshot_every_n_steps=snapshot_every_n_steps,
        )
        check_policy(self)
        check_workers(self)
        for part in ordering_parts(self).values():  # such as SizeBatchSampler
            if callable(check := getattr(part, "check_loader", None)):
                check(self)
        self._epochs_seen = find_epochs(ordering_parts(self))

    def _set_own_arguments(self, **own: Any) -> None:
        """Set the attributes that torch's class lacks, or take those of a source."""
        source: Self | None = vars(self).pop("_source", None)
        if source is not None:
            own = {name: getattr(source, name) for name in (*own, *_STATE)}
            source._copy = (weakref.ref(self), source._progress)
            self._num_skipped = skipped_batches()
            if self._index_sampler is not source._index_sampler:
                self._replaced = type_name(source._index_sampler)
        vars(self).update(own, _self=weakref.ref(self))
        self._states_wanted = bool(self.snapshot_every_n_steps)
        self._receiver = BatchReceiver(self.ring_slabs, self.max_ring_bytes)
        if source is not None:
            self._receiver.meter = source._receiver.meter

    def _source_of_copies(self, cls: type, arguments: Mapping[str, Any]) -> Self | None:
        """Return this loader, None if the user makes another loader of its class."""
        is_same = arguments.get("collate_fn") is vars(self).get("collate_fn")
        is_made = "_receiver" in vars(self)
        self._load_again()
        return self if is_made and (is_same or cls is not DataLoader) else None

    def _class_of_copy(self, cls: type) -> type:
        """Return the class of a loader made from this one, see Note [copies]."""
        if issubclass(cls, DataLoader):
            return cls
        if cls is TorchLoader and self._obstacle("state_dict") is None:
            return DataLoader
        own = {"on_error": self.on_error, "sample_seeds": self.sample_seeds}
        lost = [f"{k}={v!r}" for k, v in own.items() if v not in ("raise", False)]
        if self._loaded is not None:
            lost.append("the state that it loaded")
        if lost:
            raise RuntimeError(
                "DataLoader: a copy of this loader must keep all of its arguments, but "
                f"a {cls.__module__}.{cls.__qualname__} cannot keep {lost[0]}. Use the "
                "loader itself, with a DistributedSampler for several processes, or "
                "without this argument."
            )
        return cls

    def stats(self) -> LoaderStats:
        """Return the statistics since the loader was made."""
        self._receiver.meter.applied = applied_changes(self)
        found = self._receiver.meter.snapshot()
        return replace(found, num_workers=self.num_workers, cores=num_cores())

    def preflight(self) -> list[Finding]:
        """Check whether limits of this machine are too low for this loader.

        The loader does this as well when its workers start for the first time. It then
        warns of findings that put batches at risk, with a `LoaderWarning`.

        Returns:
            One finding for each limit that is too low, with the required number.
        """
        ring = self._receiver.ring_for(self.num_workers, self.prefetch_factor or 2)
        return preflight.check(
            num_workers=self.num_workers,
            prefetch_factor=self.prefetch_factor,
            ring_nbytes=total_nbytes(ring.num_slabs, ring.slab_nbytes) if ring else 0,
            pin_memory=self.pin_memory,
            start_method=preflight.start_method_of(self),
        )

    def check_worker_number_rationality(self) -> None:
        """Warn of more workers than processors, with the user's line as the source."""
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            super().check_worker_number_rationality()
        for warning in caught:
            text = str(warning.message)
            if vars(self).get("worker_method") == "thread":
                text = text.replace("worker processes", "worker threads")
            warn(text, warning.category)

    def __iter__(self) -> LoaderIter:
        """Start an epoch."""
        if isinstance(self._iterator, Epoch):
            self._iterator = self._iterator.next_pass()
        self._load_again()
        return super().__iter__()

    def __repr__(self) -> str:
        """Return the main arguments in one line. This never raises an exception."""
        found = self.__dict__
        dataset, batches = found.get("dataset"), found.get("batch_sampler")
        parts = [f"dataset=<{_describe(dataset)}>"]
        if batches is None or type(batches) is BatchSampler:
            parts.append(f"batch_size={found.get('batch_size')}")
            if not isinstance(dataset, IterableDataset):
                parts.append(f"sampler=<{type(found.get('sampler')).__name__}>")
        else:
            parts.append(f"batch_sampler=<{type(batches).__name__}>")
        parts.append(f"num_workers={found.get('num_workers')}")
        return f"{type(self).__name__}({', '.join(parts)})"

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes that another process can use."""
        local = {"_iterator": None, "_progress": None, "_pass": None, "_copy": None}
        state = {**self.__dict__, **local}
        state.pop("_self", None)
        if "_receiver" in state:  # not in a subclass with an __init__ of its own
            fresh = BatchReceiver(self.ring_slabs, self.max_ring_bytes)
            state["_receiver"] = fresh
        return state

    def _get_iterator(self) -> Any:
        require("pyparallel.DataLoader", TorchLoader)
        if isinstance(self.dataset, IterDataPipe | MapDataPipe):
            return super()._get_iterator()
        self._receiver.meter.applied = applied_changes(self)  # warnings use it
        return Epoch(self)


#: The state of a loader that its copies continue.
_STATE = ("_loaded", "_has_loaded", "_iterators")


def _check_num_workers(value: Any) -> int:
    value = plain_number(value)
    if isinstance(value, int):
        return value  # torch checks its sign
    is_zero = isinstance(value, float) and value == 0  # as in torch
    return 0 if is_zero else check_int(value, 0, "DataLoader: num_workers")


def _check_optional(name: str, value: Any) -> int | None:
    if value is None:
        return None
    where, rule = f"DataLoader: {name}", "None or an integer"
    return check_int(plain_number(value), 0, where, rule)


def _check_timeout(value: Any) -> None:
    value = plain_number(value)
    if not isinstance(value, Real) or math.isnan(value):
        raise BatchTypeError(
            "DataLoader: timeout must be a number of seconds, 0 for no limit, but is "
            f"{value!r} ({type_name(value)})."
        )


def _check_bool(name: str, value: Any, rule: str = "True or False") -> None:
    if not isinstance(value, bool):
        raise BatchTypeError(
            f"DataLoader: {name} must be {rule}, but is {value!r} ({type_name(value)})."
        )


def _describe(dataset: Any) -> str:
    """Return the class of a dataset and its length, if it has one."""
    name = type(dataset).__name__
    try:
        return f"{name}: {plural(len(dataset), 'sample')}"
    except Exception:  # a dataset may raise anything, and a repr must not
        return name
