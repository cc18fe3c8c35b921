"""PreDataLoader: fetch batches and copy them to the device during the step."""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.utils.data import (
    BatchSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from ..core.devices import resolve_target
from ..core.errors import (
    BatchTypeError,
    BatchValueError,
    LoaderWarning,
    check_int,
    plain_number,
    type_name,
    warn_once,
)
from ..core.torch_private import TorchLoader
from ..loader.applied import applied_changes
from ..loader.copies import TimeoutWithOwner
from ..loader.data_loader import DataLoader
from ..loader.draws import Length
from ..loader.state_dict import StatefulLoader, check_state, knows_epochs
from ..loader.stats import LoaderStats, Meter
from ..transfer.static import StaticBatches
from ._to_device import DeviceStage, LoaderState
from .iterator import Options, PrefetchIterator, PrefetchThread, is_iterable

#: Samplers of torch that do not divide samples between ranks. True: an argument of the
#: loader (``shuffle``) chooses the sampler.
_OF_ONE_RANK: dict[type, bool] = {
    SequentialSampler: True,
    RandomSampler: True,
    SubsetRandomSampler: False,
    WeightedRandomSampler: False,
}
#: The attributes of a `PreDataLoader` that its loader may have as well.
_OWN = {"loader", "device", "queue_size", "transform", "next_epoch"}
_OWN |= {"timeout", "static"}


class PreDataLoader:
    """Iterate over a loader in a thread and copy batches to a device ahead of the step.

    Each ``iter()`` starts a new pass: a thread, ``iter(loader)`` in this thread, and a
    queue. A ``break`` ends the pass and drops the fetched batches. An epoch starts with
    the iteration, so ``sampler.set_epoch`` before the loop takes effect.

    Args:
        loader: any iterable, with or without a length (a ``DataLoader``, a list, a
            generator), or a function that returns one. A loader that is its own
            iterator, or that has persistent workers, has one pass at a time: a new pass
            ends the previous one.
        device: the device for the batches: an index of an accelerator, a name, or a
            ``torch.device``. None, like -1, leaves the batches on the host.
        queue_size: number of batches to fetch ahead, at least 1. The device holds this
            number of batches in addition to those of the consumer.
        transform: called in the thread with each batch on the device. ``next()``
            returns its result, which may contain tensors as a batch does. Its kernels
            run on the copy stream.
        next_epoch: start the next pass when one ends. ``sampler.set_epoch`` must then
            be called before the end of the loop.
        timeout: seconds that ``next()`` waits for a batch; 0 means no limit.
        static: copy batches into fixed memory: the slabs, or their number for each plan
            (`StaticBatches`). ``next()`` then starts the copy of its batch.

    Raises:
        TypeError: the loader is not iterable, or a device, ``queue_size``, ``timeout``
            or ``static`` has the wrong type.
        ValueError: ``queue_size`` below 1, a negative ``timeout``, an unknown device;
            ``static`` with a transform.
        RuntimeError: this machine does not have the device.

    Batches have the loader's order and values. Tensors are copied from dicts, lists,
    tuples, namedtuples, dataclasses, `Padded`, `Ragged` and DataContainers that are not
    ``cpu_only``. Containers keep their types. All other values stay the same objects.

    If the loader, the dataset, a worker or the transform raises, ``next()`` raises the
    error in the place of its batch, with its type and traceback, and the iterator ends.
    A worker that dies causes a RuntimeError with its pid and exit code.

    Stream: all tensors of a batch are copied in one packed copy on the copy stream of
    the device, into memory of the stream that was current at the latest ``next()``. The
    stream that is current when ``next()`` returns waits for the copy; the host does
    not. The results of a transform are allocated on the copy stream and recorded on the
    consumer's stream.

    The thread uses the consumer's grad mode, inference mode, autocast and default
    device at the time of ``iter()``. Random numbers come from the generators of the
    process: a dataset without workers and the step draw from them in no fixed order.

    Example:
        >>> for batch in PreDataLoader([{"x": 1}, {"x": 2}]):
        ...     print(batch)
        {'x': 1}
        {'x': 2}
    """

    if not TYPE_CHECKING:
        timeout = TimeoutWithOwner()

    def __init__(
        self,
        loader: Any,
        device: int | str | torch.device | None = None,
        queue_size: int = 2,
        *,
        transform: Callable[[Any], Any] | None = None,
        next_epoch: bool = False,
        timeout: float = 0,
        static: StaticBatches | int | None = None,
    ) -> None:
        _check_loader(loader)
        _check_timeout(timeout)
        if transform is not None and not callable(transform):
            raise BatchTypeError(
                "PreDataLoader: transform must be a function of a batch, but is "
                f"{transform!r} ({type_name(transform)})."
            )
        target = None
        if device is not None:
            target = resolve_target(device, "PreDataLoader", "device")
        queue_size = check_int(queue_size, 1, "PreDataLoader: queue_size")
        self.loader = loader
        self.device = target
        self.queue_size = queue_size
        self.transform = transform
        self.next_epoch = next_epoch
        self.timeout = timeout
        self._meter, self._length = Meter(), Length()
        self.static: StaticBatches | None = _static_batches(static, transform)
        self._device_stage = DeviceStage(target, transform, static=self.static)
        self._loader_stats_before = self._loader_stats()
        self._reset()

    def _source_of_copies(self, cls: type, arguments: Mapping[str, Any]) -> Any:
        """Return the loader whose arguments a copy keeps, see Note [copies].

        Batches of a copy stay on the host, where a step on a device raises an error. A
        missing transform would raise none.
        """
        if self.transform is not None:
            raise RuntimeError(
                "PreDataLoader: only the inner loader must be copied, but a "
                f"{cls.__qualname__} was made from the attributes of PreDataLoader, "
                "without its transform. Prepare the loader first: "
                "PreDataLoader(prepare(loader), device)."
            )
        find = getattr(self.loader, "_source_of_copies", None)
        return None if find is None else find(cls, arguments)

    def _reset(self) -> None:
        self._pid = os.getpid()
        self._live: weakref.WeakSet[PrefetchIterator] = weakref.WeakSet()
        self._current: PrefetchIterator | None = None
        self._ahead: PrefetchIterator | None = None
        self._latest: PrefetchThread | None = None
        self._state: LoaderState | None = None
        self._num_quick = 0

    def __iter__(self) -> PrefetchIterator:
        """Start a pass over the loader, independent of other passes."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None and os.getpid() == self._pid:
            return ahead.begin()
        return self._start_pass().begin()

    def _start_pass(self, *, is_ahead: bool = False) -> PrefetchIterator:
        if os.getpid() != self._pid:
            self._reset()
        _check_ranks(self.loader)
        if _has_one_iterator(self.loader):
            self._close_iterators()
        options = Options(
            self.loader,
            self._innermost(),
            self._length,
            self._device_stage,
            self.queue_size,
            self.timeout,
            self._meter,
        )
        prefetch_thread = PrefetchThread(
            options, is_ahead=is_ahead, num_quick=self._num_quick
        )
        iterator = PrefetchIterator(self, prefetch_thread)
        try:
            self._live.add(iterator)
            self._latest, self._state = prefetch_thread, None
        except BaseException:  # of a signal handler
            iterator.close()
            raise
        return iterator

    def _on_batch(self, state: LoaderState | None) -> None:
        """Record the loader's state after the batch that ``next()`` returns."""
        self.__dict__["_state"] = state  # `__setattr__` would look at the loader

    def _on_end(self, ended: PrefetchThread, state: LoaderState | None) -> None:
        """Record the loader's state at the end of its epoch."""
        self._num_quick = ended.num_quick
        is_latest = self._latest is ended
        if is_latest:
            self._latest = None
        if is_latest and self._knows_epochs():
            self._state = None
        else:
            self._state = state or ended.reading.state()
        if self.next_epoch and self._ahead is None:
            with contextlib.suppress(Exception):  # the next iter() raises it
                self._ahead = self._start_pass(is_ahead=True)

    def __next__(self) -> Any:
        """Return the next batch of this object's pass; start a pass if none is active.

        At the end of the pass, ``StopIteration`` is raised once. The next call starts
        another pass.
        """
        if self._current is None:
            self._current = iter(self)
        try:
            return next(self._current)
        except StopIteration:
            self._current = None
            raise

    def next(self) -> Any:
        """Return the next batch; the same as ``next(self)``."""
        return next(self)

    def __len__(self) -> int:
        """Return the number of batches; TypeError if the loader has no length."""
        self._length.value = length = len(self.loader)
        return length

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the loader, such as ``sampler`` or ``dataset``."""
        if "loader" not in self.__dict__ or name.startswith("__"):
            raise AttributeError(
                f"{type(self).__name__!r} object has no attribute {name!r}"
            )
        return getattr(self.loader, name)

    def __repr__(self) -> str:
        """Return the loader and the main arguments in one line."""
        found = self.__dict__
        loader = found.get("loader")
        shown = f"<{type(loader).__name__}>"  # others may show all their data
        if isinstance(loader, DataLoader | PreDataLoader):
            shown = repr(loader)
        options = [f"{name}={found.get(name)}" for name in ("device", "queue_size")]
        return f"{type(self).__name__}({', '.join([shown, *options])})"

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute. One that only the loader has, as a DataLoader, is its own.

        So Lightning can set ``worker_init_fn``.
        """
        loader = self.__dict__.get("loader")
        own = (
            name in _OWN or name.startswith("_") or not isinstance(loader, TorchLoader)
        )
        if own or name not in vars(loader):
            super().__setattr__(name, value)
        else:
            setattr(loader, name, value)

    def close(self) -> None:
        """End all passes and their threads within a second; new passes may follow.

        A thread inside the dataset or a transform cannot be interrupted. It ends when
        that call returns, and a ``LoaderWarning`` reports it.
        """
        self._close_iterators()

    def _close_iterators(self) -> None:
        live = list(self._live)
        self._current = self._ahead = None
        for iterator in live:
            iterator.close()

    def __enter__(self) -> PreDataLoader:
        """Return this object; the end of the block calls `close`."""
        return self

    def __exit__(self, *error: object) -> None:
        """Call `close`."""
        self.close()

    def stats(self) -> LoaderStats:
        """Return statistics of all passes since this object was created.

        Values that only the loader can measure (fetch, collate, pack, bytes, padding,
        the ring, its workers) come from its own ``stats()``, if it has this method.
        """
        applied = set(applied_changes(self.loader))
        if self.next_epoch:
            applied.add("next_epoch")
        if self.device is None or self.device.type == "cpu":
            applied.add("pin_memory")  # it makes no copy faster
        self._meter.applied = frozenset(applied)
        return self._meter.snapshot(self._loader_stats(), self._loader_stats_before)

    def _loader_stats(self) -> LoaderStats | None:
        method = getattr(self.loader, "stats", None)
        stats = method() if callable(method) else None
        return stats if isinstance(stats, LoaderStats) else None

    def state_dict(self) -> Any:
        """Return the loader's state after the latest batch that ``next()`` returned.

        Batches that were fetched ahead do not count: a run that continues from this
        state gets them. Random states are those now. If reading a batch may draw in
        this process, as without workers, they are those when the batch was fetched.
        Before the first batch, it is the state at the start of the latest pass. Between
        two passes, it is that of the loader now, with the numbers of ``set_epoch``.

        Raises:
            AttributeError: the loader has no ``state_dict``.
            Exception: the error that the loader's ``state_dict`` raised.
        """
        state_dict = self._loader_method("state_dict")
        state = self._state
        if state is None and self._latest is not None:
            state = self._latest.first_state()
        return state_dict() if state is None else state()

    def load_state_dict(self, state: Any) -> None:
        """End all passes and set the loader's state, where the next pass continues.

        Raises:
            AttributeError: the loader has no ``load_state_dict``.
            ValueError: the state is refused by `pyparallel.DataLoader`. The passes
                continue.
        """
        load = self._loader_method("load_state_dict")
        loader = self._innermost()
        own = getattr(type(loader), "load_state_dict", None)
        if own is StatefulLoader.load_state_dict:
            check_state(loader, state)  # before anything changes
        self._close_iterators()
        load(state)
        self._latest = None
        self._state = None if self._knows_epochs() else (lambda: state)

    def _innermost(self) -> Any:
        """Return the loader, or the one inside another `PreDataLoader`."""
        loader = self.loader
        while isinstance(loader, PreDataLoader):
            loader = loader.loader
        return loader

    def _knows_epochs(self) -> bool:
        """Return True if the loader has a state between two epochs.

        Other loaders, such as torchdata's, begin an epoch when they are asked.
        """
        return isinstance(self.loader, PreDataLoader) or knows_epochs(self.loader)

    def _loader_method(self, name: str) -> Any:
        method = getattr(self.loader, name, None)
        if not callable(method):
            raise AttributeError(
                f"PreDataLoader.{name}: the loader must have a method {name}(), but "
                f"{type_name(self.loader)} has none. Use pyparallel.DataLoader, or "
                "torchdata's StatefulDataLoader, without another library's wrapper."
            )
        return method

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the loader and the options, without the passes."""
        options: dict[str, Any] = {
            "transform": self.transform,
            "next_epoch": self.next_epoch,
            "timeout": self.timeout,
            "static": self.static,
        }
        arguments = self.loader, self.device, self.queue_size
        return partial(type(self), *arguments, **options), ()


def _has_one_iterator(loader: Any) -> bool:
    """Return True if ``iter(loader)`` returns the same iterator every time."""
    # A PreDataLoader has `__next__`, too, but starts a new pass at each iter().
    if isinstance(loader, Iterator) and not isinstance(loader, PreDataLoader):
        return True
    keeps_workers = getattr(loader, "persistent_workers", False)
    return bool(keeps_workers and getattr(loader, "num_workers", 0))


def _check_loader(loader: Any) -> None:
    if not is_iterable(loader) and not callable(loader):
        raise BatchTypeError(
            "PreDataLoader: loader must be iterable, or a function that returns an "
            f"iterable, but is {loader!r} ({type_name(loader)})."
        )


def _check_ranks(loader: Any) -> None:
    """Raise ``BatchValueError`` if ranks would not divide the samples of a loader.

    Lightning and accelerate give a distributed sampler to objects of torch's class.
    They pass other objects on as they are.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return
    num_ranks, cls = dist.get_world_size(), type(loader)
    if num_ranks == 1:
        return
    if any(base.__name__ == "DataLoaderDispatcher" for base in cls.__mro__):
        raise BatchValueError(
            f"PreDataLoader: with {num_ranks} ranks, each rank must read its own "
            "batches, but the loader is a DataLoaderDispatcher of accelerate, which "
            "sends them between ranks. In a thread it would do so in the middle of the "
            "step. Iterate over the loader itself, or prepare it with "
            "DataLoaderConfiguration(dispatch_batches=False)."
        )
    if not issubclass(cls, TorchLoader):
        return
    sampler = loader.sampler
    if loader.batch_sampler is not None:
        sampler = getattr(loader.batch_sampler, "sampler", None)
        if type(loader.batch_sampler) is not BatchSampler:
            return
    if type(sampler) not in _OF_ONE_RANK:
        return
    shuffle = "" if type(sampler) is not SequentialSampler else ", shuffle=False"
    text = (
        f"PreDataLoader: with {num_ranks} ranks, the loader must have a sampler that "
        f"divides the samples, but has a {type(sampler).__name__}, so each rank reads "
        f"all of them. Pass sampler=DistributedSampler(dataset{shuffle}) to the loader "
        "(Lightning and accelerate only do so for a DataLoader). If each rank needs "
        "all samples of its dataset, add num_replicas=1, rank=0."
    )
    if _OF_ONE_RANK[type(sampler)]:
        raise BatchValueError(text)
    warn_once("PP220", text, LoaderWarning, type(sampler).__name__)


def _static_batches(static: Any, transform: Any) -> StaticBatches | None:
    """Return the slabs of an argument ``static``."""
    if static is None:
        return None
    if transform is not None:
        raise BatchValueError(
            "PreDataLoader: static must not come with a transform, whose results have "
            "no fixed memory. Apply the transform in the step."
        )
    if isinstance(static, StaticBatches):
        return static
    return StaticBatches(check_int(static, 1, "PreDataLoader: static"))


def _check_timeout(timeout: Any) -> None:
    timeout = plain_number(timeout)
    rule = "PreDataLoader: timeout must be a number of seconds, 0 or more, but is"
    if isinstance(timeout, bool) or not isinstance(timeout, int | float):
        raise BatchTypeError(f"{rule} {timeout!r} ({type_name(timeout)}).")
    if not 0 <= timeout <= threading.TIMEOUT_MAX:  # the upper bound is the system's
        raise BatchValueError(f"{rule} {timeout!r}.")
