"""End waits for the workers of an iterator after a stop or a death.

An iterator of `pyparallel.DataLoader` can be woken, and finds deaths itself. In another
thread than the main one, torch looks for dead workers every five seconds. It waits
without limit for a lock or for the rest of a message that a killed worker took along.
So `SourceWorkers` accesses iterators of torch and torchdata by private names.
"""

from __future__ import annotations

import os
import queue
import threading
import time
import traceback
import weakref
from collections.abc import Callable
from typing import Any

from torch.utils.data import IterableDataset

from ..core.torch_private import TorchLoader, forget_workers
from ..loader.epoch import Epoch, Stopped
from ..loader.errors import dead_worker_error, is_torch_report
from ..workers.interface import WorkerDied

#: The interval at which a wait checks for a stop and for dead workers, in seconds.
SLICE = 0.1
#: The longest time in seconds until a dead worker is known as dead.
GRACE = 0.3
#: Errors of a broken connection to a worker.
_BROKEN = (EOFError, OSError)
_ITERATOR = ("_workers", "_data_queue", "_try_get_data", "_worker_pids_set")
#: The functions of torch that raise an error of the dataset, and their files.
_OF_DATASET = {("fetch", "fetch.py"), ("reraise", "_utils.py")}


class SourceWorkers:
    """The workers of an iterator: ours, or one of torch or torchdata. Others have none.

    Args:
        source: the iterator.
    """

    def __init__(self, source: Any) -> None:
        self._own: Epoch | None = source if isinstance(source, Epoch) else None
        is_torchs = all(hasattr(source, name) for name in _ITERATOR)
        self._source: Any = source if is_torchs and self._own is None else None
        self._processes = [] if self._source is None else [*source._workers]
        self._death: RuntimeError | None = None
        self._lock = threading.Lock()

    def watch(
        self, is_stopped: Callable[[], bool], on_wait: Callable[[], object]
    ) -> None:
        """Let waits of the iterator end after a stop or a death.

        Our iterator is woken. torch's looks within `SLICE`, and forgets the workers: it
        would raise a death in the main thread, in the middle of other code.

        Args:
            is_stopped: returns True if no batch is needed any more. The wait then
                raises `Stopped`.
            on_wait: our iterator calls it before it waits, or runs code that may wait.
        """
        if self._own is not None:
            self._own.attend(is_stopped, on_wait)
        source: Any = self._source
        if not self._processes:
            return
        if source._worker_pids_set:
            forget_workers(source)

        this = weakref.ref(self)  # frames of a kept error refer to the function

        def try_get_data(timeout: float | None = None) -> tuple[bool, Any]:
            workers: Any = this()
            end = None if timeout is None else time.monotonic() + timeout
            while not is_stopped():
                left = SLICE if end is None else min(SLICE, end - time.monotonic())
                try:
                    return True, workers._source._data_queue.get(timeout=max(left, 0.0))
                except queue.Empty:
                    if (death := workers.find_death()) is not None:
                        raise death from None
                if end is not None and time.monotonic() >= end:
                    return False, None
            raise Stopped

        source._try_get_data = try_get_data

    def wake(self) -> None:
        """Let a wait of our iterator look for a stop."""
        if self._own is not None:
            self._own.wake()

    def unwatch(self) -> None:
        """Undo `watch`."""
        if self._own is not None:
            self._own.attend()
        elif self._source is not None:
            vars(self._source).pop("_try_get_data", None)

    def join_feeders(self) -> None:
        """Wait up to `GRACE` for the threads that feed ended workers of torch.

        A feeder drops the semaphores of its queue last. If the interpreter exits
        meanwhile, Python's resource tracker prints an error.
        """
        if self._source is not None and self._source._shutdown:
            deadline = time.monotonic() + GRACE
            for tasks in self._source._index_queues:
                if tasks._thread is not None:
                    tasks._thread.join(max(0.0, deadline - time.monotonic()))

    def wait_seconds(self, seconds: float) -> float:
        """Return how long another thread may wait before it calls `find_death`."""
        return min(seconds, SLICE) if self._processes else seconds

    def find_death(self, *, reported: bool = False) -> RuntimeError | None:
        """Return the error for a dead worker of torch, None if none has died.

        The first death ends all workers.

        Args:
            reported: torch has reported a death, also with exit code 0.
        """
        with self._lock:
            for number, process in enumerate(self._processes):
                code = process.exitcode
                is_expected = code is None or (
                    code == 0
                    and not reported
                    and not self._source._workers_status[number]
                )
                if self._death is None and not is_expected:
                    dead = WorkerDied(number, process.pid, code)
                    self._death = dead_worker_error(dead, [])
                    self._abandon()
            return self._death

    def terminate(self) -> None:
        """End workers, which would otherwise end after their current batch.

        Persistent workers belong to the loader. They end if one of them died.
        """
        if self._own is not None and not self._own._persistent_workers:
            for worker in self._own._workers:
                worker.terminate()
        if self._processes and self.find_death() is None:
            if not self._source._persistent_workers:
                self._abandon()

    def _abandon(self) -> None:
        """End the workers of an iterator that reads no more, whatever locks they hold.

        A worker that is killed between two batches may hold the lock of torch's event.
        One that is killed inside a message leaves the reader waiting for its rest,
        until all ends for writing are closed. A thread that pins batches has to write.
        """
        source: Any = self._source
        for process in self._processes:
            process.terminate()
        source._workers_done_event = threading.Event()
        if not source._pin_memory:
            source._worker_result_queue._writer.close()

    def explain(self, error: BaseException) -> BaseException:
        """Return the error for a dead worker, if that is the reason of ``error``."""
        is_reported = is_torch_report(error)
        is_broken = isinstance(error, _BROKEN) and not _frames(error) & _OF_DATASET
        if not self._processes or not (is_reported or is_broken):
            return error
        deadline = time.monotonic() + GRACE
        while (death := self.find_death(reported=is_reported)) is None:
            if time.monotonic() >= deadline:
                return error
            time.sleep(GRACE / 30)
        # torch's report adds nothing. A broken connection may have another reason.
        death.__cause__ = None if is_reported or self._source._shutdown else error
        return death


def early_end(end: StopIteration, loader: Any, num_batches: int) -> RuntimeError | None:
    """Return an error if the dataset of torch's loader ended the epoch.

    With a map-style dataset, ``StopIteration`` from the dataset or ``collate_fn`` is a
    mistake, but torch takes it for the end of the epoch.
    """
    is_map_style = isinstance(loader, TorchLoader) and not isinstance(
        loader.dataset, IterableDataset
    )
    if not is_map_style or not _frames(end) & _OF_DATASET:
        return None
    try:
        length = f"{len(loader)}"
    except TypeError:  # the sampler has no length
        length = "an unknown number of"
    return RuntimeError(
        "PreDataLoader: an epoch must end with its sampler, but the dataset or "
        f"collate_fn raised StopIteration after {num_batches} of {length} batches. "
        "Raise another error there."
    )


def _frames(error: BaseException) -> set[tuple[str, str]]:
    """Return the names of the functions that an error passed, and of their files."""
    codes = [frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)]
    return {(code.co_name, os.path.basename(code.co_filename)) for code in codes}
