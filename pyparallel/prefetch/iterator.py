"""The iterator in front of a thread that loads ahead."""

from __future__ import annotations

import os
import weakref
from typing import Any, Protocol

from ..core.errors import BatchTypeError
from ..core.tracing import span
from ..loader import worker_monitor
from ..loader.tracebacks import hide_frames
from ._thread import Generation, stop
from ._to_device import Item, State


class Owner(Protocol):
    """Whoever starts passes, and learns how far they have come."""

    def _handed_out(self, state: State | None) -> None:
        """Take the loader's state behind the batch that is handed out."""

    def _ended(self, state: State | None) -> None:
        """Take the loader's state at the end of its epoch."""


class Pass:
    """One pass over a loader. Its end, ``close()`` and collecting it stop the thread.

    Several threads may share it: every batch is handed out once.
    """

    def __init__(self, owner: Owner, generation: Generation) -> None:
        self._owner = weakref.ref(owner)
        self._generation = generation
        generation.options.meter.pause()
        generation.start()
        self._stop = weakref.finalize(self, _stop_surely, generation)
        self._stop.atexit = False  # `_thread` stops all that run

    def __iter__(self) -> Pass:
        """Return the pass itself."""
        return self

    def __next__(self) -> Any:
        """Return the next batch on the current stream; see `PreDataLoader`."""
        meter = self._generation.options.meter
        with meter.waiting(), span("pyparallel.wait"):
            item = self._generation.take()
            if item is not None and item.land is not None:
                batch = self._land(item)
        if item is None or item.land is None:
            meter.pause()
            try:
                self._finish(item)
            except BaseException as error:
                hide_frames(error)
                raise
            finally:
                del item  # or the traceback would hold the error that holds it
            raise StopIteration
        meter.add(batches=1)
        owner = self._owner()
        if owner is not None:
            owner._handed_out(item.state)
        return batch

    def _land(self, item: Item) -> Any:
        try:
            return item.land() if item.land else None
        except BaseException:  # the batch is lost: none may follow as if it were not
            self.close()
            raise

    def _finish(self, item: Item | None) -> None:
        """Join the thread; raise its error, or tell that the epoch has ended."""
        if item is None:  # closed, or ended before
            return
        self.close()
        if item.error is not None:
            try:
                raise item.error
            finally:
                del item  # or the traceback would hold the error that holds it
        owner = self._owner()
        if owner is not None:
            owner._ended(item.state)

    def close(self) -> None:
        """Stop the thread; ``next()`` raises ``StopIteration`` from now on."""
        if os.getpid() == self._generation.pid:
            self._stop()

    def __reduce__(self) -> Any:
        """Refuse to be pickled.

        Raises:
            TypeError: always.
        """
        raise BatchTypeError(
            "PreDataLoader: an iterator must stay in its process, but is pickled. "
            "Pickle the PreDataLoader."
        )


def _stop_surely(generation: Generation) -> None:
    """Stop a thread, also if torch reports a dead worker in the middle of it.

    torch does so in the main thread between any two instructions, once some iterator
    was made there. A finalizer has nobody to tell: whoever waits for a batch is told.
    """
    try:
        stop(generation)
    except RuntimeError as error:
        if not worker_monitor.is_torch_report(error):
            raise
        stop(generation)
