"""Add ``state_dict`` and ``load_state_dict`` to torch's loader.

`StatefulLoader` is a second base of a loader, beside torch's ``DataLoader``. Its
iterator, `epoch.Epoch`, calls a `Progress` for each batch.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

from torch.utils.data import IterDataPipe, MapDataPipe

from ..core.errors import type_name
from ..core.stateful import is_stateful
from . import _random_state
from ._loader_state import (
    find_epochs,
    find_generators,
    ordering_parts,
    restore_epochs,
    saved_arguments,
    state_between_epochs,
)
from ._passes import Pass, repeats_iterator
from ._progress import Progress
from ._sampler_state import unwrap_batch_sampler
from ._state_format import decode, encode
from .arguments import Loader
from .sample_errors import SampleError


class StatefulLoader:
    """A base class of loaders whose iteration can be saved and restored."""

    #: The progress of the last iterator.
    _progress: Progress | None = None
    #: The last pass of a subclass whose ``__iter__`` is a generator.
    _pass: Pass | None = None
    #: The state from which the next iterator continues.
    _loaded: dict[str, Any] | None = None
    #: Whether the loader has loaded a state.
    _has_loaded = False
    #: The calls of ``iter()`` of the sampler that begin an epoch of the loaded run.
    _iterators: int | None = None
    #: The numbers of ``set_epoch`` when the loader was made, or loaded its last state.
    _epochs_seen: Mapping[str, int] = MappingProxyType({})
    #: The last loader that another library made from this one, and the progress then.
    _copy: tuple[Callable[[], Any], Progress | None] | None = None
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
            RuntimeError: ``in_order=False`` with workers, a `PreDataLoader` or a
                subclass reads the loader ahead, or the delivered samples are unknown.
                The message gives the reason.
            TypeError: the dataset is a ``DataPipe``.
        """
        return self._position()()

    def _position(self) -> Callable[[], dict[str, Any]]:
        """Return a function that returns the state at this position."""
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
        state = self._loaded
        if state is None:
            if progress is not None:
                if (found := self._pass) is not None:
                    is_own = progress.outer is found and not repeats_iterator(self)
                    found.check("state_dict", is_own=is_own)
                return progress.position(self._loader)
            state = state_between_epochs(self._loader, None)
        elif state["epoch"] is None:
            # The user may have called set_epoch() since.
            state = {**state, "epochs": find_epochs(ordering_parts(self._loader))}
        return partial(encode, state)

    @property
    def sample_errors(self) -> list[SampleError]:
        """The samples of the last epoch that raised an error, in delivered batches.

        They were skipped or replaced, see ``on_error``. In a resumed epoch this
        includes those before the loaded position.
        """
        if (copy := self._copy_in_use()) is not None:
            return list(copy.sample_errors)
        if self._loaded is not None:
            return [SampleError(*error) for error in self._loaded["errors"]]
        return [] if self._progress is None else list(self._progress.errors)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Let the next ``iter()`` continue from a state.

        The loader must have the same arguments, and the dataset the same data. The
        number of workers may differ for a map-style dataset without a state. When
        ``iter()`` returns, the random states are those at the time of ``state_dict()``.
        To use other random states, seed after ``iter()``. Persistent workers are
        started anew. Until a loop has received a batch, further calls of ``iter()``
        continue from the state as well.

        Args:
            state_dict: a return value of ``state_dict()``. ``{}`` discards a state that
                was loaded before.

        Raises:
            ValueError: the state has another format or version, was changed or
                damaged, or belongs to a loader with other arguments. The loader is
                unchanged.
            RuntimeError: ``in_order=False`` with workers. ``iter()`` raises this as
                well, if the sampler does not yield the same indices again.
            TypeError: the dataset is a ``DataPipe``.
        """
        loaded = check_state(self, state_dict)
        if loaded is not None:
            self._states_wanted = True
            if loaded["epoch"] is None:
                # Now, because the user may call set_epoch() before iter().
                restore_epochs(self._loader, loaded["epochs"])
            self._has_loaded = True
        self._epochs_seen = find_epochs(ordering_parts(self._loader))
        self._iterator: Any = None  # its persistent workers are at another position
        self._progress = None
        self._loaded = loaded
        self._iterators = None if loaded is None else loaded["loader"]["iterators"]

    def _load_again(self) -> None:
        """Load the last state once more if no loop has received a batch since."""
        progress = self._progress
        if self._loaded is None and progress is not None:
            self._loaded = progress.unread_state()
            if self._loaded is not None:
                self._iterator = self._progress = None
                # The next iterator counts them again.
                self._loader._receiver.meter.add(sample_errors=-len(progress.errors))

    @property
    def _loader(self) -> Loader:
        own: Any = self
        loader: Loader = own
        return loader

    def _copy_in_use(self) -> Any:
        """Return the last copy, unless this loader has been used since.

        A wrapper that has copied the attributes of a loader returns that loader.
        """
        origin = vars(self).get("_self", lambda: self)()
        if origin is not self:
            return origin
        copy, progress = self._copy or (lambda: None, None)
        return copy() if self._progress is progress else None

    def _must_be_resumable(self, method: str) -> None:
        if self._copy_in_use() is not None:
            raise RuntimeError(
                f"DataLoader.{method} must be called on the loader that is iterated, "
                "but another library has made a loader from this one, or reads it "
                f"ahead. Call {method} on the loader that this library returned, if "
                "that has the method. Else use this loader without that library."
            )
        if (found := self._obstacle(method)) is not None:
            kind, text = found
            raise kind(text)

    def _obstacle(self, method: str) -> tuple[type[Exception], str] | None:
        """Return the error for arguments that leave no position to save, or None."""
        loader = self._loader
        if loader.num_workers and not loader.in_order:
            return RuntimeError, (
                f"DataLoader.{method} must know the order of batches, but the loader "
                "has in_order=False. Remove in_order=False."
            )
        is_shared = loader.worker_method == "thread" and loader.num_workers > 1
        if is_shared and is_stateful(loader.dataset) and not loader.replay_dataset:
            raise RuntimeError(
                f"DataLoader.{method} must know the state of the dataset in each "
                f"worker, but {loader.num_workers} threads share one state of "
                f"{type_name(loader.dataset)}. Use num_workers=1, replay_dataset=True, "
                "or worker_method='multiprocessing', or give the state to the iterator "
                "of an iterable dataset."
            )
        if isinstance(loader.dataset, IterDataPipe | MapDataPipe):
            return TypeError, (
                f"DataLoader.{method} must have a Dataset or an IterableDataset, but "
                "has a DataPipe, which torch's own iterator reads. Wrap it in an "
                "IterableDataset."
            )
        return None


def check_state(stateful: StatefulLoader, saved: Any) -> dict[str, Any] | None:
    """Return the decoded state, None for ``{}``, and change nothing.

    Raises:
        Exception: the errors of `StatefulLoader.load_state_dict`.
    """
    stateful._must_be_resumable("load_state_dict")
    loader = stateful._loader
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


class Reading:
    """A loop whose batches this thread reads ahead, with the states of its loader.

    Only this thread may ask the loader for its state, until `end`.

    Args:
        loader: a loader of any class, or a function that makes one. Such a function
            has no state.
        made: the loader.
        source: its iterator. Other iterators of the loader are not affected.
    """

    _progress: Progress | None = None

    def __init__(self, loader: Any, made: Any, source: Any) -> None:
        self._loader, self._is_checked = loader, False
        state_dict = getattr(type(loader), "state_dict", None)
        self._is_ours = state_dict is StatefulLoader.state_dict
        # The source of a subclass may be an iterator around ours.
        own = isinstance(getattr(source, "_progress", None), Progress)
        self._owner: Any = made if isinstance(made, StatefulLoader) else None
        if own:
            self._owner = source
        self.mark()

    def mark(self) -> int:
        """Find the iterator that is read. Return its position."""
        owner = self._owner
        found: Progress | None = None if owner is None else owner._progress
        if found is None:
            return 0
        if found is not self._progress:
            found.num_in_loop = found.num_delivered
            found.reader = threading.current_thread()
            self._progress = found
        return found.num_delivered

    def belong_to(self, thread: threading.Thread) -> None:
        """Let this be the thread that may ask for the state, in place of this one."""
        if self._progress is not None:
            self._progress.reader = thread

    def release(self) -> None:
        """Forget the iterator: this thread reads no more batches."""
        self._owner = None

    def receive(self, position: int) -> None:
        """Record that the loop has received the batch that ends at a position."""
        if self._progress is not None:
            self._progress.num_in_loop = position

    def end(self) -> None:
        """Let all threads ask again: the loop has received the whole epoch."""
        if self._progress is not None:
            self._progress.reader = None

    def state(self) -> Callable[[], Any]:
        """Return a function that returns the present state, or raises its error.

        For a loader of this package the function makes the state, which takes longer
        than to find the position.
        """
        loader, progress = self._loader, self._progress
        try:
            if not self._is_ours:
                state_dict = getattr(loader, "state_dict", None)
                state = state_dict() if callable(state_dict) else None
                return lambda: state
            is_same = loader._progress is progress and loader._copy is None
            if progress is not None and is_same and self._is_checked:
                return progress.position(loader)
            position: Callable[[], Any] = loader._position()
            self._is_checked = loader._pass is None
            return position
        except Exception as error:  # raised only by callers that need the state
            error.__context__ = None  # it would keep the ended iterator alive
            return partial(_fail, error.with_traceback(None))


def _fail(error: Exception) -> None:
    raise error


def shares_state(loader: Any) -> bool:
    """Return True if all passes over a loader share a state of its data or sampler."""
    if not isinstance(loader, StatefulLoader):
        return False
    parts = loader._loader.dataset, unwrap_batch_sampler(loader._loader._index_sampler)
    return any(map(is_stateful, parts))


def knows_epochs(loader: Any) -> bool:
    """Return True if ``state_dict`` is that of this package, or extends it.

    Classes of other libraries, such as torchdata's, may replace it in a subclass.
    """
    owners = (cls for cls in type(loader).__mro__ if "state_dict" in vars(cls))
    return issubclass(next(owners, object), StatefulLoader)
