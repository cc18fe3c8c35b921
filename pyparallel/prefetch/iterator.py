"""The iterator of a training loop over the batches of a prefetch thread."""

from __future__ import annotations

import os
import sys
import weakref
from typing import Any, Protocol

from ..core.errors import BatchTypeError
from ..core.tracing import span
from ..loader.errors import is_torch_report
from ..loader.tracebacks import clear_frames, hide_frames
from ._thread import PrefetchThread, stop
from ._to_device import LoaderState, QueueItem


class Owner(Protocol):
    """The object that starts passes and records the state of the loader."""

    def _on_batch(self, state: LoaderState | None) -> None:
        """Record the loader's state after the batch that ``next()`` returns."""

    def _on_end(self, ended: PrefetchThread, state: LoaderState | None) -> None:
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
        self._stop = weakref.finalize(self, _stop_thread, prefetch_thread)
        self._stop.atexit = False  # `_thread` stops all threads at exit
        try:
            prefetch_thread.start()
        except BaseException:  # of a signal handler: the thread may run
            self.close()
            raise

    def begin(self) -> PrefetchIterator:
        """Let a loop begin, and return this iterator."""
        try:
            self._thread.begin()
        except BaseException:  # of a signal handler: the thread may run
            self.close()
            raise
        return self

    def __iter__(self) -> PrefetchIterator:
        """Return this iterator."""
        return self

    def __next__(self) -> Any:
        """Return the next batch, for the current stream; see `PreDataLoader`."""
        taken: list[QueueItem] = []
        handled = sys.exc_info()[1]
        try:
            return self._next(taken)
        except BaseException as error:
            if taken:  # an item is lost, so no later one may follow
                self.close()
                taken.clear()  # the error would refer to itself by its traceback
                hide_frames(error)
            elif isinstance(error, KeyboardInterrupt):
                clear_frames(error, handled)  # a notebook keeps the error
                del self
            raise

    def _next(self, taken: list[QueueItem]) -> Any:
        """Return the next batch. Append its item to a list before removing it."""
        meter = self._thread.options.meter
        start, batches = meter.clock(), 0
        try:
            with span("pyparallel.wait"):
                self._thread.take(taken)
                get_batch = taken[0].get_batch if taken else None
                if get_batch is not None:
                    batch = get_batch()
                    batches = 1
        finally:
            meter.count_wait(start, batches)
        if get_batch is not None:
            self._thread.reading.receive(taken[0].position)
            self._thread.prepared.show(taken[0].facts)
            if (owner := self._owner()) is not None:
                owner._on_batch(taken[0].state)
            return batch
        meter.pause()
        if taken:  # otherwise the iterator was closed, or has ended before
            self._finish(taken[0])
        raise StopIteration

    def _finish(self, item: QueueItem) -> None:
        """Join the thread; raise its error, or record the end of the epoch."""
        try:
            self.close()
        finally:  # close() may warn, and a filter may turn warnings into errors
            if item.error is not None:
                try:
                    raise item.error
                finally:
                    del item  # the error would refer to itself by its traceback
            self._thread.reading.end()
            if (owner := self._owner()) is not None:
                owner._on_end(self._thread, item.state)

    def close(self) -> None:
        """Stop the thread; from now on ``next()`` raises ``StopIteration``."""
        if os.getpid() == self._thread.pid:
            self._thread.draws.keep()
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
        if not is_torch_report(error):
            raise
        stop(prefetch_thread)
