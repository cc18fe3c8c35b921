"""The iterator of a training loop over the batches of a prefetch thread."""

from __future__ import annotations

import os
import weakref
from typing import Any, Protocol

from ..core.errors import BatchTypeError
from ..core.tracing import span
from ..loader import worker_monitor
from ..loader.tracebacks import hide_frames
from ._thread import PrefetchThread, stop
from ._to_device import LoaderState, QueueItem


class Owner(Protocol):
    """The object that starts passes and records the state of the loader."""

    def _on_batch(self, state: LoaderState | None) -> None:
        """Record the loader's state after the batch that ``next()`` returns."""

    def _on_end(self, state: LoaderState | None) -> None:
        """Record the loader's state at the end of its epoch."""


class PrefetchIterator:
    """One pass over a loader, whose batches a thread fetches ahead.

    The thread stops at the end of the pass, by ``close()``, and when the iterator is
    collected. Several threads may share an iterator: each batch is returned once.
    """

    def __init__(self, owner: Owner, prefetch_thread: PrefetchThread) -> None:
        self._owner = weakref.ref(owner)
        self._thread = prefetch_thread
        prefetch_thread.options.meter.pause()
        prefetch_thread.start()
        self._stop = weakref.finalize(self, _stop_thread, prefetch_thread)
        self._stop.atexit = False  # `_thread` stops all threads at exit

    def __iter__(self) -> PrefetchIterator:
        """Return this iterator."""
        return self

    def __next__(self) -> Any:
        """Return the next batch, for the current stream; see `PreDataLoader`."""
        meter = self._thread.options.meter
        with meter.waiting(), span("pyparallel.wait"):
            item = self._thread.take()
            if item is not None and item.get_batch is not None:
                batch = self._get_batch(item)
        if item is None or item.get_batch is None:
            meter.pause()
            try:
                self._finish(item)
            except BaseException as error:
                hide_frames(error)
                raise
            finally:
                del item  # the error would refer to itself by its traceback
            raise StopIteration
        meter.add(batches=1)
        owner = self._owner()
        if owner is not None:
            owner._on_batch(item.state)
        return batch

    def _get_batch(self, item: QueueItem) -> Any:
        try:
            return item.get_batch() if item.get_batch else None
        except BaseException:  # the batch is lost, so no later one may follow
            self.close()
            raise

    def _finish(self, item: QueueItem | None) -> None:
        """Join the thread; raise its error, or record the end of the epoch."""
        if item is None:  # the iterator was closed, or has ended before
            return
        self.close()
        if item.error is not None:
            try:
                raise item.error
            finally:
                del item  # the error would refer to itself by its traceback
        owner = self._owner()
        if owner is not None:
            owner._on_end(item.state)

    def close(self) -> None:
        """Stop the thread; from now on ``next()`` raises ``StopIteration``."""
        if os.getpid() == self._thread.pid:
            self._stop()

    def __reduce__(self) -> Any:
        """Raise TypeError: an iterator cannot be pickled."""
        raise BatchTypeError(
            "PreDataLoader: an iterator must stay in its process, but is pickled. "
            "Pickle the PreDataLoader."
        )


def _stop_thread(prefetch_thread: PrefetchThread) -> None:
    """Stop a thread, even if torch reports a dead worker meanwhile.

    torch raises that error in the main thread, between any two instructions, after an
    iterator with workers was created there. A finalizer can raise it to no caller; the
    consumer that waits for a batch gets the error.
    """
    try:
        stop(prefetch_thread)
    except RuntimeError as error:
        if not worker_monitor.is_torch_report(error):
            raise
        stop(prefetch_thread)
