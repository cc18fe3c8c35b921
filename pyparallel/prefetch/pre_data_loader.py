"""PreDataLoader: the next batches are fetched, and on the device, while a step runs."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ..core.devices import resolve_target
from ..core.errors import BatchTypeError, BatchValueError, check_int, type_name
from ..loader.stats import LoaderStats, Meter
from ..loader.worker_monitor import shares_iterator
from ._thread import Generation, Options, is_iterable
from ._to_device import HandOver, State
from .iterator import Pass


class PreDataLoader:
    """Iterates over a loader in a thread, ahead of the step, and sends batches ahead.

    Every ``iter()`` starts a pass of its own: a thread, ``iter(loader)`` in it, and a
    queue. A ``break`` ends the pass with all that was fetched for it. An epoch starts
    when iteration does, so ``sampler.set_epoch`` before the loop is honoured.

    Args:
        loader: any iterable, with or without a length (a ``DataLoader``, a list, a
            generator), or a function that returns one. A loader that is its own
            iterator, or has persistent workers, has one pass at a time: a new one ends
            the one before.
        device: where batches are to be: an index of an accelerator, a name, a
            ``torch.device``; None leaves them as they are, as -1 does.
        queue_size: how many batches are fetched ahead, at least 1. That many lie on
            the device besides those that the consumer holds.
        transform: called in the thread with every batch, there already; what it
            returns is handed out, in containers as batches are. Its kernels run on the
            copy stream.
        next_epoch: start the next pass as soon as one has ended. The one thing to get
            wrong: ``sampler.set_epoch`` must then be called before the loop ends.
        timeout: how many seconds ``next()`` waits for a batch; 0: for ever.

    Raises:
        TypeError: the loader is not iterable; a device, ``queue_size`` or ``timeout``
            of another kind.
        ValueError: ``queue_size`` below 1, a negative ``timeout``, an unknown device.
        RuntimeError: this machine does not have the device.

    Batches come in the loader's order, and their values are its values. Tensors move
    wherever they sit: dicts, lists, tuples, namedtuples, dataclasses, DataContainers
    (but ``cpu_only`` ones), `Padded`, `Ragged`. Containers keep their types, everything
    that is no tensor stays the very same object.

    An exception in the loader, the dataset, a worker or the transform is raised by
    ``next()`` in the place of its batch, with its type and traceback, and ends the
    iterator. A worker that dies is a RuntimeError with its pid and exit code.

    Stream: all tensors of a batch go in one packed copy on the copy stream of the
    device, into memory of the stream that was current at the latest ``next()``. The
    stream current when ``next()`` returns waits for the copy; the host does not.
    What a transform returns was allocated on the copy stream and is recorded on the
    consumer's.

    The thread has the consumer's grad mode, inference mode, autocast and default
    device as they were at ``iter()``. Random numbers are the process's: what the
    dataset draws without workers comes in no fixed order with what the step draws.

    Example:
        >>> for batch in PreDataLoader([{"x": 1}, {"x": 2}]):
        ...     print(batch)
        {'x': 1}
        {'x': 2}
    """

    def __init__(
        self,
        loader: Any,
        device: int | str | torch.device | None = None,
        queue_size: int = 2,
        *,
        transform: Callable[[Any], Any] | None = None,
        next_epoch: bool = False,
        timeout: float = 0,
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
        self._meter = Meter()
        self._hand_over = HandOver(target, transform)
        self._below_before = self._below()
        self._reset()

    def _reset(self) -> None:
        self._pid = os.getpid()
        self._live: weakref.WeakSet[Pass] = weakref.WeakSet()
        self._current: Pass | None = None
        self._ahead: Pass | None = None
        self._state: State | None = None

    def __iter__(self) -> Pass:
        """Start a pass over the loader, independent of any other."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None and os.getpid() == self._pid:
            return ahead
        return self._begin()

    def _begin(self) -> Pass:
        if os.getpid() != self._pid:
            self._reset()
        if isinstance(self.loader, Iterator) or shares_iterator(self.loader):
            self._stop_passes()
        options = Options(
            self.loader, self._hand_over, self.queue_size, self.timeout, self._meter
        )
        begun = Pass(self, Generation(options))
        self._live.add(begun)
        return begun

    def _handed_out(self, state: State | None) -> None:
        self._state = state

    def _ended(self, state: State | None) -> None:
        self._state = state
        if self.next_epoch and self._ahead is None:
            self._ahead = self._begin()

    def __next__(self) -> Any:
        """Return the next batch of this object's own pass; start one if there is none.

        At its end ``StopIteration`` is raised, once: the call after it starts another.
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
        """Return the number of batches; TypeError if the loader does not know it."""
        return len(self.loader)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the loader, such as ``sampler`` or ``dataset``."""
        if "loader" not in self.__dict__ or name.startswith("__"):
            raise AttributeError(
                f"{type(self).__name__!r} object has no attribute {name!r}"
            )
        return getattr(self.loader, name)

    def close(self) -> None:
        """End all passes and their threads, within a second. A new one may be started.

        A thread inside the dataset or a transform cannot be interrupted: it ends when
        that returns, and a ``LoaderWarning`` says so.
        """
        self._stop_passes()

    def _stop_passes(self) -> None:
        live = list(self._live)
        self._current = self._ahead = None
        for iterator in live:
            iterator.close()

    def __enter__(self) -> PreDataLoader:
        """Return this object; the end of the block closes it."""
        return self

    def __exit__(self, *error: object) -> None:
        """Close."""
        self.close()

    def stats(self) -> LoaderStats:
        """Return what was counted over all passes since this object was made.

        What only the loader can count (fetch, collate, pack, bytes, padding, the ring,
        its workers) is taken from its own ``stats()``, if it has one.
        """
        return self._meter.snapshot(self._below(), self._below_before)

    def _below(self) -> LoaderStats | None:
        stats = getattr(self.loader, "stats", None)
        below = stats() if callable(stats) else None
        return below if isinstance(below, LoaderStats) else None

    def state_dict(self) -> Any:
        """Return the loader's state right behind the batch that was handed out last.

        Batches that were fetched ahead are not counted as seen: a run that continues
        from here gets them. Random states in it are those of the moment at which the
        batch was fetched.

        Raises:
            AttributeError: the loader has no ``state_dict``.
            Exception: what the loader's ``state_dict`` raised there.
        """
        state_dict = self._of_loader("state_dict")
        return state_dict() if self._state is None else self._state.get()

    def load_state_dict(self, state: Any) -> None:
        """End all passes and set the loader's state; the next pass continues there.

        Raises:
            AttributeError: the loader has no ``load_state_dict``.
        """
        load = self._of_loader("load_state_dict")
        self._stop_passes()
        load(state)
        self._state = State(state)

    def _of_loader(self, name: str) -> Any:
        method = getattr(self.loader, name, None)
        if not callable(method):
            raise AttributeError(
                f"PreDataLoader.{name}: the loader must have {name}() itself, but "
                f"{type_name(self.loader)} has none. Use pyparallel.DataLoader, or "
                "torchdata's StatefulDataLoader."
            )
        return method

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the loader and the options; passes stay where they run."""
        options = {
            "transform": self.transform,
            "next_epoch": self.next_epoch,
            "timeout": self.timeout,
        }
        return _rebuilt, (
            type(self),
            self.loader,
            self.device,
            self.queue_size,
            options,
        )


def _rebuilt(
    cls: type[PreDataLoader],
    loader: Any,
    device: torch.device | None,
    queue_size: int,
    options: dict[str, Any],
) -> PreDataLoader:
    return cls(loader, device, queue_size, **options)


def _check_loader(loader: Any) -> None:
    if not is_iterable(loader) and not callable(loader):
        raise BatchTypeError(
            "PreDataLoader: loader must be iterable, or a function that returns an "
            f"iterable, but is {loader!r} ({type_name(loader)})."
        )


def _check_timeout(timeout: Any) -> None:
    rule = "PreDataLoader: timeout must be a number of seconds, 0 or more, but is"
    if isinstance(timeout, bool) or not isinstance(timeout, int | float):
        raise BatchTypeError(f"{rule} {timeout!r} ({type_name(timeout)}).")
    if not 0 <= timeout <= threading.TIMEOUT_MAX:  # nor more than the system can wait
        raise BatchValueError(f"{rule} {timeout!r}.")
