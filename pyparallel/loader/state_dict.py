"""Add ``state_dict`` and ``load_state_dict`` to torch's loader and its iterators.

`StatefulLoader` precedes torch's ``DataLoader`` in the bases of a loader, and
`StatefulIterator` precedes each of torch's two iterators. torch's iterators copy
arguments of the loader to attributes. `InterceptedAttribute` replaces some of these
values on assignment, so no code of torch is repeated here.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import IterableDataset, IterDataPipe

from ._dataset_state import DatasetTracker, StatefulWorkerInit, TrackedDataset
from ._loader_state import (
    VERSION,
    find_generators,
    from_version_1,
    ordering_parts,
    saved_arguments,
    set_epochs,
    state_between_epochs,
)
from ._progress import Progress
from ._random_state import SeededDataset
from .tracebacks import hide_frames


class StatefulLoader:
    """A loader that can be stopped and continued."""

    #: The progress of the last iterator; a state that waits for the next one.
    _progress: Progress | None = None
    _loaded: dict[str, Any] | None = None
    #: Whether workers report the states of their dataset from the first batch on.
    _states_wanted = False

    def state_dict(self) -> dict[str, Any]:
        """Return how far the last iterator has got, to be continued by another loader.

        The form is torchdata's ``StatefulDataLoader``'s: these two methods, and
        datasets, samplers and their iterators with the same two methods are asked for
        their state. The contents are our own: nests of dicts, lists, strings and
        numbers, which ``json``, ``torch.save`` and ``torch.load(weights_only=True)``
        take and ``==`` compares, if the states of datasets and samplers are such.

        Batches count once ``next()`` has returned them. The random states of torch
        (CPU), ``random``, NumPy and of the loader's generators are part of the state.

        Returns:
            A new dict. After the last batch it still belongs to this epoch, of which
            nothing is left; after the ``StopIteration`` to the next one.

        Raises:
            RuntimeError: ``in_order=False`` with workers; or which samples were given
                is not known, as the message tells.
            TypeError: the dataset is an ``IterDataPipe``.
        """
        self._must_be_resumable("state_dict")
        self._states_wanted = True
        if self._loaded is not None:
            return dict(self._loaded)
        if self._progress is None:
            return state_between_epochs(self, None)
        return self._progress.state(self)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Let the next ``iter()`` continue where the state was taken.

        The loader must have been made with the same arguments, and the dataset must
        have the same data. Workers of a map-style dataset may be more or fewer, unless
        the dataset has a state. When ``iter()`` returns, the random states are those of
        the moment of ``state_dict()``: seed afterwards if you want others. Persistent
        workers are started anew.

        Args:
            state_dict: what ``state_dict()`` returned; ``{}`` forgets an earlier one.

        Raises:
            ValueError: the state is of another kind or version, or of a loader with
                other arguments. Nothing has been changed then.
            RuntimeError: raised by ``iter()``, if the sampler does not give the same
                indices again; or as by ``state_dict``.
            TypeError: the dataset is an ``IterDataPipe``.
        """
        self._must_be_resumable("load_state_dict")
        if state_dict:
            state_dict = _checked(self, state_dict)
            self._states_wanted = True
        self._iterator: Any = None  # persistent workers have gone on
        self._progress = None
        self._loaded = copy.deepcopy(state_dict) or None
        if state_dict and state_dict["epoch"] is None:
            # Now, so that a set_epoch() before iter() is heard.
            set_epochs(ordering_parts(self), state_dict["epochs"])

    def _must_be_resumable(self, method: str) -> None:
        loader: Any = self
        if loader.num_workers and not loader.in_order:
            raise RuntimeError(
                f"DataLoader.{method} must know the order of batches, but the loader "
                f"has in_order=False. Leave in_order away."
            )
        if isinstance(loader.dataset, IterDataPipe):
            raise TypeError(
                f"DataLoader.{method} must have a Dataset or an IterableDataset, but "
                f"has an IterDataPipe. Wrap it into an IterableDataset."
            )


def _checked(loader: Any, state: Any) -> Any:
    """Return a state of a loader like this one in today's form; else ``ValueError``."""
    where = "DataLoader.load_state_dict: the state must"
    if not isinstance(state, dict) or "version" not in state or "loader" not in state:
        found = list(state)[:4] if isinstance(state, dict) else type(state).__name__
        raise ValueError(
            f"{where} come from DataLoader.state_dict(), but is {found}. "
            f"The state of another kind of loader cannot be continued."
        )
    if state["version"] == 1:
        state = from_version_1(state)
    if state["version"] != VERSION:
        raise ValueError(
            f"{where} be of version {VERSION}, but is of version {state['version']!r}. "
            f"Continue it with the pyparallel that wrote it."
        )
    of_workers = state["loader"]["num_workers"] > 0 or loader.num_workers > 0
    fixed = bool(state["workers"]) and of_workers
    for name, value in saved_arguments(loader).items():
        found = state["loader"][name]
        if found != value and (name != "num_workers" or fixed):
            raise ValueError(
                f"{where} be of a loader with {name}={value!r} like this one, but is "
                f"of one with {name}={found!r}. Make the loader as it was."
            )
    names = sorted(find_generators(ordering_parts(loader)))
    found = sorted(state["random"]["generators"])
    if found != names:
        raise ValueError(
            f"{where} have the generators of this loader, {names}, but has {found}. "
            f"Make the loader and its samplers with generators as they were."
        )
    return state


class _Indices:
    """A sampler as torch's iterators see it."""

    def __init__(self, sampler: Any, progress: Progress) -> None:
        self.sampler, self.progress = sampler, progress

    def __iter__(self) -> Iterator[Any]:
        return self.progress.indices()

    def __len__(self) -> int:
        return len(self.sampler)


class InterceptedAttribute:
    """An attribute that is changed when torch's iterator assigns it.

    Args:
        change: given the iterator and the value, returns what the attribute becomes.
    """

    def __init__(self, change: Callable[[Any, Any], Any]) -> None:
        self.change = change

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, iterator: Any, owner: type) -> Any:
        return iterator.__dict__[self.name]

    def __set__(self, iterator: Any, value: Any) -> None:
        iterator.__dict__[self.name] = self.change(iterator, value)


def _read(iterator: Any, dataset: Any) -> Any:
    progress = iterator._progress
    source: DatasetTracker | None = progress.dataset.read(dataset)
    read_as = dataset
    if progress.samples is not None:
        read_as = SeededDataset(dataset)
    elif isinstance(dataset, IterableDataset) and source is not None:
        read_as = TrackedDataset(source)
    if source is not None:
        source.read_as = read_as
        if not iterator._by_workers:
            source.enter(0)
    return read_as


def enter(iterator: Any, init: Callable[[int], Any] | None) -> Any:
    """Return the ``worker_init_fn`` of an iterator's workers."""
    progress = iterator._progress
    if progress.dataset.source is None and progress.samples is None:
        return init
    return StatefulWorkerInit(init, progress.dataset.source)


class StatefulIterator:
    """An iterator of a loader whose progress is known.

    It stands before one of torch's iterators among a class's bases. A type checker sees
    neither that one nor its types, so it is told not to ask at each use of it.
    """

    # torch's __del__ asks for it, also if a state was refused before torch's __init__.
    _shutdown = True

    _dataset = InterceptedAttribute(_read)
    _index_sampler = InterceptedAttribute(
        lambda it, value: _Indices(value, it._progress)
    )
    _base_seed = InterceptedAttribute(lambda it, value: it._progress.seed(value))
    _worker_init_fn = InterceptedAttribute(enter)

    def __init__(self, loader: Any) -> None:
        self._progress = progress = Progress(loader)
        self._by_workers = loader.num_workers > 0
        # The worker whose turn it is; none has a turn in the process itself.
        self._turn = (
            progress.dataset.turn % loader.num_workers if self._by_workers else 0
        )
        super().__init__(loader)  # type: ignore[call-arg]
        progress.opened()
        self._num_yielded = progress.given
        loader._progress, loader._loaded = progress, None

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
            progress.finished = True
            raise
        except Exception as error:
            progress.failed = True
            hide_frames(error)
            raise
        finally:
            if progress.samples is not None:
                self._dataset.restore()
        if self._by_workers:
            progress.give(self._rcvd_idx)  # type: ignore[attr-defined]
        else:
            progress.give_here()
        return batch
