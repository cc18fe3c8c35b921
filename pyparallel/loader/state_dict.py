"""Add ``state_dict`` and ``load_state_dict`` to torch's loader and its iterators.

`StatefulLoader` is a second base of a loader, beside torch's ``DataLoader``.
`StatefulIterator` precedes each of torch's two iterators. torch's iterators copy
arguments of the loader to attributes. `InterceptedAttribute` replaces some of these
values on assignment, so no code of torch is repeated here.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

from torch.utils.data import IterableDataset, IterDataPipe

from . import _random_state
from ._dataset_state import DatasetTracker, StatefulWorkerInit, TrackedDataset
from ._loader_state import (
    find_epochs,
    find_generators,
    ordering_parts,
    restore_epochs,
    saved_arguments,
    state_between_epochs,
)
from ._progress import Progress
from ._sample_reader import SampleReader
from ._state_format import decode, encode
from .sample_errors import Failure, SampleError
from .tracebacks import hide_frames


class StatefulLoader:
    """A base class of loaders whose iteration can be saved and restored."""

    #: The progress of the last iterator.
    _progress: Progress | None = None
    #: The state from which the next iterator continues.
    _loaded: dict[str, Any] | None = None
    #: Whether the loader has loaded a state.
    _has_loaded = False
    #: The numbers of ``set_epoch`` when the loader was made, or loaded its last state.
    _epochs_seen: Mapping[str, int] = MappingProxyType({})
    #: Whether workers report the states of their dataset from the first batch on.
    _states_wanted = False

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the last iterator, from which a loader can continue.

        The protocol is that of torchdata's ``StatefulDataLoader``: these two methods.
        Datasets, samplers and their iterators that have the same two methods save and
        restore their own state. The contents differ from torchdata's: an integer and
        two texts under the same keys at each position, with a checksum. ``json``,
        ``torch.save``, ``torch.load(weights_only=True)`` and
        ``torch.distributed.checkpoint`` support them, and ``==`` compares them. The
        exception is a state of a dataset or a sampler with objects that
        ``weights_only=True`` refuses: the state then contains these objects.

        A batch counts once ``next()`` has returned it. The state includes the random
        states of torch (CPU), ``random``, NumPy and the loader's generators.

        Returns:
            A new dict. After the last batch, it is the end of this epoch, with no batch
            left. After ``StopIteration``, it is the start of the next epoch.

        Raises:
            RuntimeError: ``in_order=False`` with workers, a `PreDataLoader` reads the
                loader ahead, or the delivered samples are unknown. The message gives
                the reason.
            TypeError: the dataset is an ``IterDataPipe``.
        """
        return encode(self._position())

    def _position(self) -> dict[str, Any]:
        """Return the state before it is encoded."""
        self._must_be_resumable("state_dict")
        progress = self._progress
        reader = None if progress is None else progress.reader
        if reader not in (None, threading.current_thread()):
            raise RuntimeError(
                "DataLoader.state_dict: a PreDataLoader reads this loader ahead, so "
                "its position includes batches that the loop has not received. Use "
                "PreDataLoader.state_dict()."
            )
        self._states_wanted = True
        if self._loaded is not None:
            if self._loaded["epoch"] is not None:
                return self._loaded
            # The user may have called set_epoch() since.
            return {**self._loaded, "epochs": find_epochs(ordering_parts(self))}
        if progress is None:
            return state_between_epochs(self, None)
        return progress.state(self)

    @property
    def sample_errors(self) -> list[SampleError]:
        """The samples of the last epoch that raised an error, in delivered batches.

        They were skipped or replaced, see ``on_error``. In a resumed epoch this
        includes those before the loaded position.
        """
        if self._loaded is not None:
            return [SampleError(*error) for error in self._loaded["errors"]]
        return [] if self._progress is None else list(self._progress.errors)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Let the next ``iter()`` continue from a state.

        The loader must have the same arguments, and the dataset the same data. The
        number of workers may differ for a map-style dataset without a state. When
        ``iter()`` returns, the random states are those at the time of ``state_dict()``.
        To use other random states, seed after ``iter()``. Persistent workers are
        started anew.

        Args:
            state_dict: a return value of ``state_dict()``. ``{}`` discards a state that
                was loaded before.

        Raises:
            ValueError: the state has another format or version, was changed or
                damaged, or belongs to a loader with other arguments. The loader is
                unchanged.
            RuntimeError: ``in_order=False`` with workers. ``iter()`` raises this as
                well, if the sampler does not yield the same indices again.
            TypeError: the dataset is an ``IterDataPipe``.
        """
        loaded = check_state(self, state_dict)
        if loaded is not None:
            self._states_wanted = True
            if loaded["epoch"] is None:
                # Now, because the user may call set_epoch() before iter().
                restore_epochs(self, loaded["epochs"])
            self._has_loaded = True
        self._epochs_seen = find_epochs(ordering_parts(self))
        self._iterator: Any = None  # its persistent workers are at another position
        self._progress = None
        self._loaded = loaded

    def _must_be_resumable(self, method: str) -> None:
        loader: Any = self
        if loader.num_workers and not loader.in_order:
            raise RuntimeError(
                f"DataLoader.{method} must know the order of batches, but the loader "
                f"has in_order=False. Remove in_order=False."
            )
        if isinstance(loader.dataset, IterDataPipe):
            raise TypeError(
                f"DataLoader.{method} must have a Dataset or an IterableDataset, but "
                f"has an IterDataPipe. Wrap it in an IterableDataset."
            )


def check_state(loader: Any, saved: Any) -> dict[str, Any] | None:
    """Return the decoded state, None for ``{}``, and change nothing.

    Raises:
        Exception: the errors of `StatefulLoader.load_state_dict`.
    """
    loader._must_be_resumable("load_state_dict")
    if isinstance(saved, dict) and not saved:
        return None
    where = "DataLoader.load_state_dict: the state must"
    state = decode(saved)
    has_workers = state["loader"]["num_workers"] > 0 or loader.num_workers > 0
    is_fixed = bool(state["workers"]) and has_workers
    for name, value in saved_arguments(loader).items():
        found = state["loader"][name]
        if found != value and (name != "num_workers" or is_fixed):
            raise ValueError(
                f"{where} be of a loader with {name}={value!r} like this one, but is "
                f"of one with {name}={found!r}. Make the loader with {name}={found!r}."
            )
    generators = find_generators(ordering_parts(loader))
    names, found = sorted(generators), sorted(state["random"]["generators"])
    if found != names:
        raise ValueError(
            f"{where} have the generators of this loader, {names}, but has {found}. "
            f"Make the loader and its samplers with the same generators."
        )
    for random in (state["random"], (state["epoch"] or {}).get("start")):
        try:
            if random is not None:
                _random_state.check(random, generators)
        except Exception as error:
            raise ValueError(
                f"{where} have the random states of this loader's generators, but they "
                f"cannot be restored: {error}. Make the loader with the same kinds of "
                "generators."
            ) from error
    return state


def take_state(loader: Any) -> Callable[[], Any]:
    """Return a function that returns the present state of a loader of any class.

    For this package's loader the function encodes the state, which takes longer than
    to find it.
    """
    if isinstance(loader, StatefulLoader):
        return partial(encode, loader._position())
    state_dict = getattr(loader, "state_dict", None)
    state = state_dict() if callable(state_dict) else None
    return lambda: state


def read_ahead(source: Any) -> Callable[[], None]:
    """Let only this thread ask the loader of an iterator for its state.

    Returns:
        A function that lets all threads ask again. Another iterator of the loader is
        not affected.
    """
    progress = getattr(source, "_progress", None)
    if not isinstance(progress, Progress):
        return lambda: None
    progress.reader = threading.current_thread()

    def end() -> None:
        progress.reader = None

    return end


class _TrackedSampler:
    """The sampler that torch's iterators read: it yields the tasks of a `Progress`."""

    def __init__(self, sampler: Any, progress: Progress) -> None:
        self.sampler, self.progress = sampler, progress

    def __iter__(self) -> Iterator[Any]:
        return self.progress.indices()

    def __len__(self) -> int:
        return len(self.sampler)


class InterceptedAttribute:
    """An attribute whose value is replaced when torch's iterator assigns it.

    Args:
        replace: returns the new value, from the iterator and the assigned value.
    """

    def __init__(self, replace: Callable[[Any, Any], Any]) -> None:
        self.replace = replace

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, iterator: Any, owner: type) -> Any:
        return iterator.__dict__[self.name]

    def __set__(self, iterator: Any, value: Any) -> None:
        iterator.__dict__[self.name] = self.replace(iterator, value)


def _track_dataset(iterator: Any, dataset: Any) -> Any:
    progress = iterator._progress
    tracker: DatasetTracker | None = progress.dataset.track(dataset, progress.policy)
    read_as = dataset
    if progress.samples is not None:
        seeds = progress.seeds_samples
        read_as = SampleReader(
            dataset,
            seeds=seeds,
            policy=progress.policy,
            saves=seeds is not False and not iterator._has_workers,
        )
    elif isinstance(dataset, IterableDataset) and tracker is not None:
        read_as = TrackedDataset(tracker)
    if tracker is not None:
        tracker.read_as = read_as
        if not iterator._has_workers:
            tracker.enter(0)
    return read_as


def wrap_worker_init(iterator: Any, init: Callable[[int], Any] | None) -> Any:
    """Return the ``worker_init_fn`` of an iterator's workers."""
    progress = iterator._progress
    if progress.dataset.tracker is None and progress.samples is None:
        return init
    return StatefulWorkerInit(init, progress.dataset.tracker)


class StatefulIterator:
    """A base class of iterators that tracks the progress of an epoch.

    A subclass inherits from this class first and then from one of torch's iterators.
    Type checkers do not know torch's iterator here, hence each ``type: ignore``.
    """

    # torch's __del__ reads it, also after an error before torch's __init__.
    _shutdown = True

    _dataset = InterceptedAttribute(_track_dataset)
    _index_sampler = InterceptedAttribute(
        lambda it, value: _TrackedSampler(value, it._progress)
    )
    _base_seed = InterceptedAttribute(
        lambda it, value: it._progress.choose_base_seed(value)
    )
    _worker_init_fn = InterceptedAttribute(wrap_worker_init)

    def __init__(self, loader: Any) -> None:
        self._progress = progress = Progress(loader)
        self._has_workers = loader.num_workers > 0
        # The worker that sends the next batch.
        self._turn = (
            progress.dataset.turn % loader.num_workers if self._has_workers else 0
        )
        super().__init__(loader)  # type: ignore[call-arg]
        progress.finish_setup()
        self._num_yielded = progress.num_delivered
        if loader._loaded is not None and progress.errors:
            loader._receiver.meter.add(sample_errors=len(progress.errors))
        loader._progress, loader._loaded = progress, None

    def _count_failures(self, failures: tuple[Failure, ...]) -> None:
        """Count the failures of the batch that the consumer is about to receive."""
        self._progress.count_failures(failures)
        self._receiver.meter.add(sample_errors=len(failures))  # type: ignore[attr-defined]

    def _reset(self, loader: Any, first_iter: bool = False) -> None:
        if not first_iter:
            self._progress = loader._progress = Progress(loader, reset=True)
            self._index_sampler.progress = self._progress
        super()._reset(loader, first_iter)  # type: ignore[misc]

    def __next__(self) -> Any:
        progress = self._progress
        try:
            batch = super().__next__()  # type: ignore[misc]
        except StopIteration:
            progress.finish()
            raise
        except BaseException as error:
            progress.failed = True
            if isinstance(error, Exception):
                hide_frames(error)
            raise
        finally:
            if progress.samples is not None:
                self._dataset.restore()
        if self._has_workers:
            progress.count_batch(self._rcvd_idx)  # type: ignore[attr-defined]
        else:
            progress.count_local_batch()
        return batch
