"""One pass over a loader: its thread, which queues batches, and its iterator.

Note: [lifetime of the thread]. The thread refers to a `PrefetchThread`, which does not
refer to the iterator of the consumer. So the iterator can be collected, which stops the
thread.

Note: [quick loops]. To hand a batch from one thread to another costs more than to read
a tiny one, and a loop that takes no time leaves none in which the thread could read. So
after `QUICK_STEPS` such steps, the loop reads the batches of workers itself, until two
steps take longer. The loop takes the place of the thread only if no batch is there, if
the thread has parked, and if the modes of torch are those of the thread. The next pass
begins as the last one ended. In the main thread, it starts its own thread only when the
loop no longer reads.

The thread is a daemon, which is stopped and joined at the exit of the interpreter
(Note [exit] in ``core/process.py``). All threads that are not daemons have ended by
then, so each of them has got all its batches.
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from threading import get_ident
from typing import Any, Protocol

from ..core import thread_state
from ..core.errors import BatchTypeError, LoaderWarning, type_name, warn
from ..core.process import at_exit
from ..core.signals import deferred_signals
from ..core.tracing import span
from ..loader.draws import Draws, Length
from ..loader.epoch import Epoch
from ..loader.errors import is_torch_report
from ..loader.state_dict import Reading, shares_state
from ..loader.stats import Meter
from ..loader.tracebacks import clear_frames, hide_frames
from ._accelerate import Prepared
from ._to_device import DeviceStage, LoaderState, QueueItem
from ._wakeups import Wakeups
from ._workers import SourceWorkers, early_end

#: Seconds that `stop` waits for the thread.
STOP_SECONDS = 1.0
#: The same at the exit of the interpreter, which a running thread may abort.
EXIT_SECONDS = 5.0
#: Seconds after which `stop` ends workers that are still making a batch.
WORKER_SECONDS = 0.5
#: Seconds that a thread waits for its turn.
TURN_SECONDS = 0.2
#: Seconds of a copy for which the consumer of the batch before it may wait.
SHORT_SECONDS = 2e-4
#: The longest nanoseconds of a quick step, and the number of such steps: Note [quick
#: loops].
QUICK_NS, QUICK_STEPS = 1e5, 16
_TOO_LATE = (
    "PreDataLoader: an epoch must start before the interpreter exits, but it is "
    "exiting. Iterate over the loader itself."
)


@dataclass(frozen=True)
class Options:
    """The options of all passes over one loader.

    Attributes:
        inner: the loader, or the one inside the `PreDataLoader` that is the loader.
        length: the number of batches that the loops know.
    """

    loader: Any
    inner: Any
    length: Length
    device_stage: DeviceStage
    queue_size: int
    timeout: float
    meter: Meter


class Turns:
    """The turns of the passes over one loader: one at a time reads.

    Note: [turns]. Two passes over one loader share its sampler, and a sampler has one
    state. So a thread draws from it and saves its state in one turn. The thread of a
    pass that is left may still draw when the next pass begins.

    A turn does not wait longer than `TURN_SECONDS` for another one, which may be inside
    the dataset: only its draw must be over.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._owner: int | None = None

    def __enter__(self) -> None:
        if self._lock.acquire(timeout=TURN_SECONDS):
            self._owner = get_ident()

    def __exit__(self, *error: object) -> None:
        if self._owner == get_ident():
            self._owner = None
            self._lock.release()


class PrefetchThread:
    """One pass over a loader, which its thread and its consumers share.

    All changes of its state hold the lock of ``wakeups``. See Note [interrupted waits].
    """

    def __init__(
        self, options: Options, *, is_ahead: bool = False, num_quick: int = 0
    ) -> None:
        """Prepare a pass.

        Args:
            options: those of all passes over the loader.
            is_ahead: the pass starts before its loop, and reads at once.
            num_quick: that of the last pass.
        """
        self.options = options
        self.pid: int = os.getpid()
        self.wakeups: Wakeups = Wakeups()
        self.items: deque[QueueItem] = deque()
        self.num_taken: int = 0
        self.num_wanted: int = int(is_ahead)  # with the batch that a consumer waits for
        self.draws: Draws = Draws(options.inner, options.length)
        self.turns: AbstractContextManager[Any] = _turns_of(options.loader)
        self.finished: bool = False  # for consumers: no more items
        self.stopping: bool = False  # for the thread: no more batches are wanted
        self.source: Any = None
        self.workers: SourceWorkers = SourceWorkers(None)
        #: The loader's state before the first batch, after `has_begun` is set.
        self.start_state: LoaderState | None = None
        self.has_begun: bool = False
        self.reading: Reading = Reading(None, None, None)
        self.made: Any = None  # the loader, also if a function makes it
        self.prepared: Prepared = Prepared()
        self.state: thread_state.ThreadState = thread_state.capture()
        self._modes: list[Any] | None = thread_state.plain_modes()
        #: The thread that reads in place of this one, see Note [quick loops].
        self.reader: int | None = None
        self.is_lost: bool = False  # an interrupt has ended such a reading
        self._is_parked = self._is_quick = self._has_ended = self._only_reads = False
        #: The number of quick steps, at most twice `QUICK_STEPS`.
        self.num_quick: int = num_quick
        self.returned_at: float = -math.inf
        self._num_batches = self._position = 0  # that were read, and that of the epoch
        self._copy_seconds = 0.0  # of the last one
        self._activity = ("starting", time.perf_counter())
        self.thread: threading.Thread = threading.Thread(
            target=_run, args=(self,), name="pyparallel-prefetch", daemon=True
        )

    def start(self) -> None:
        """Start the thread, or call ``iter(loader)`` here: Note [quick loops].

        Raises:
            RuntimeError: the interpreter is about to exit.
        """
        if _exiting.is_set():
            raise RuntimeError(_TOO_LATE)
        self.options.device_stage.prepare()
        _running.add(self)
        is_main = threading.current_thread() is threading.main_thread()
        if self.num_quick < QUICK_STEPS or self.num_wanted or not is_main:
            self.start_thread()
            return
        try:
            _begin(self)
            self.reading.belong_to(self.thread)
            self._is_parked = True
        except Exception as error:
            self.put_error(error)
            self.set_begun()

    def start_thread(self) -> None:
        """Start the thread, unless it has started."""
        try:
            with self.wakeups.lock, deferred_signals():
                if not self.thread.ident:
                    self.thread.start()
        except RuntimeError as error:
            _running.discard(self)
            # Python 3.12 and 3.13 start no thread after the end of the main thread.
            if "at interpreter shutdown" in str(error):
                raise RuntimeError(_TOO_LATE) from None
            raise

    # Called by the consumer.

    def is_reader(self, now: float) -> bool:
        """Let this thread read the next batch, or return False: Note [quick loops].

        Args:
            now: the time, in nanoseconds.

        Raises:
            RuntimeError: this process was forked.
        """
        self.check_process()
        if now - self.returned_at > QUICK_NS:
            self.num_quick = max(self.num_quick - QUICK_STEPS, 0)
        elif self.num_quick < 2 * QUICK_STEPS and self._only_reads:
            self.num_quick += 1
        if self.num_quick < QUICK_STEPS or not self._only_reads:
            self._is_quick = False
            return False
        with self.wakeups.lock:
            if self.items or self.finished:
                return False
            here = get_ident()
            self._is_quick = (
                self.reader in (None, here)  # a `leave` may have been interrupted
                and self.source._has_workers
                and thread_state.modes() == self._modes
            )
            if self._is_quick and self._is_parked:
                self.reader = here
                return True
        return False

    def leave(self) -> None:
        """Let the thread read again, if this one reads in its place."""
        if self.reader == get_ident():
            self.reader = None
            if self.stopping or not self._is_quick:
                self.wakeups.wake()

    def take(self, taken: list[QueueItem]) -> None:
        """Wait for the next item and append it to a list, unless it is the end.

        A signal handler may raise at any time. If it leaves the list empty, and
        ``is_lost`` is not set, the item remains for the next call.

        Raises:
            RuntimeError: a worker died.
            TimeoutError: no batch arrived in time. The next call waits again.
        """
        self.leave()
        if not (self.thread.ident or self.items or self.finished):
            self.start_thread()
        timeout = self.options.timeout
        deadline = time.monotonic() + timeout if timeout else math.inf
        self.wakeups.wait_until(
            lambda: self._is_given(taken), lambda: self._seconds_to_wait(deadline)
        )

    def _is_taken(self, taken: list[QueueItem]) -> bool:
        """Take an item if there is one. Return False if it must be waited for."""
        if self.items:
            taken.append(self.items[0])
            if self.items.popleft().get_batch is None:
                self.finished = True
            else:
                self.num_taken += 1
            if not self._is_quick:
                self.wakeups.wake()
        return bool(taken) or self.finished

    def _is_given(self, taken: list[QueueItem]) -> bool:
        """Take an item in a wait. Ask again if another consumer took the last one."""
        if self._is_taken(taken):
            return True
        if self.num_wanted <= self.num_taken:
            self.num_wanted = self.num_taken + 1
            self.wakeups.wake()
        return False

    def read_here(self, taken: list[QueueItem]) -> None:
        """Read a batch in place of the thread. Append it, the end, or an error.

        This is the work of `read` in less time, for a stage that is idle. The loader
        reports its wait to profilers.
        """
        source = self.source
        progress = source._progress
        before, self.is_lost = progress.num_delivered, True
        try:
            with self.turns:
                batch = next(source)
                state, self._position = self.reading.state(), progress.num_delivered
            get_batch, nbytes = self.options.device_stage.start(batch)
            if nbytes:
                self.options.meter.count_read(0.0, 0.0, nbytes)
            self._num_batches += 1
            item = QueueItem(get_batch, None, state, self._position)
        except StopIteration:  # none of the dataset, which workers read
            item = QueueItem()
        except BaseException as error:
            # A handler that raises during a wait of the loader loses no batch.
            self.is_lost = progress.failed or progress.num_delivered != before
            if not self.is_lost or not isinstance(error, Exception):
                raise
            item = self._item_of(error)
        if item.get_batch is None:
            self._has_ended = self.finished = True
        else:
            self.num_taken += 1  # others take nothing as long as this thread reads
        if not self.stopping:
            taken.append(item)
        self.is_lost = False

    def check_process(self) -> None:
        """Raise RuntimeError in a process that was forked after the thread started."""
        if os.getpid() != self.pid:
            raise RuntimeError(
                "PreDataLoader: an iterator must be used in the process that made it, "
                f"pid {self.pid}, but this is pid {os.getpid()}, where its thread does "
                "not run. Call iter() in this process."
            )

    def _seconds_to_wait(self, deadline: float) -> float:
        self.workers.find_death()  # the thread may wait without limit
        left = deadline - time.monotonic()
        if left <= 0:
            activity, since = self._activity
            raise TimeoutError(
                f"PreDataLoader: batch {self.num_taken} must arrive within "
                f"{self.options.timeout} s, but the thread has spent "
                f"{time.perf_counter() - since:.2f} s in '{activity}'. Increase "
                "timeout, or find the cause there."
            )
        return min(self.workers.wait_seconds(left), threading.TIMEOUT_MAX)

    def begin(self) -> None:
        """Let a loop begin, after the draws of ``iter(loader)``."""
        if self.draws.follows_loop:
            self._wait_for_begin()
            self.draws.begin()

    def first_state(self) -> LoaderState | None:
        """Return the loader's state before the first batch; None if iter() failed."""
        if os.getpid() == self.pid:
            self._wait_for_begin()
        return self.start_state

    def _wait_for_begin(self) -> None:
        self.wakeups.wait_until(lambda: self.has_begun)

    # Called by the thread.

    def set_activity(self, activity: str) -> None:
        """Record the activity of the thread, for messages."""
        self._activity = (activity, time.perf_counter())

    def watch_source(self) -> None:
        """Let `stop` end waits of the loader's iterator, and let consumers check it."""
        source = self.source
        with self.wakeups.lock:
            self.workers = SourceWorkers(source)
            self._only_reads = (
                isinstance(source, Epoch)
                and not self.options.timeout
                and self.options.device_stage.is_idle
                and self._modes is not None
            )
            self.wakeups.wake()
        self.workers.watch(lambda: self.stopping, self._tell)

    def _tell(self) -> None:
        """Wake consumers, unless one of them reads."""
        if self.reader is None:
            self.wakeups.wake()

    def set_begun(self) -> None:
        """Let `begin` and `first_state` return."""
        with self.wakeups.lock:
            self.has_begun = True
            self.wakeups.wake()

    def wait_for_room(self) -> bool:
        """Wait until the queue has room, and until the loop asks, see Note: [draws].

        Returns:
            False if the pass is stopping or has ended.
        """

        def is_over() -> bool:
            ends = self.stopping or self._has_ended
            self._is_parked = self.reader is not None or not (ends or self._has_room())
            if self._is_parked:
                self.set_activity("waiting for the consumer")
                self._tell()
            return not self._is_parked

        self.wakeups.wait_until(is_over)
        return not (self.stopping or self._has_ended)

    def _has_room(self) -> bool:
        if self.num_wanted > self._num_batches:
            return True
        if self._is_quick or len(self.items) >= self.options.queue_size:
            return False
        return not self.draws.waits_at(self._position or self._num_batches)

    def read(self) -> QueueItem:
        """Read a batch, and return it, or the end. One thread at a time."""
        source, reading, stage = self.source, self.reading, self.options.device_stage
        start = time.perf_counter()
        self._activity = ("next(loader)", start)
        with self.turns:
            try:
                with span("pyparallel.fetch"):
                    batch = next(source)
            except StopIteration as end:
                if error := early_end(end, self.made, self._num_batches):
                    raise error from end
                return QueueItem(state=reading.state())
            fetched = time.perf_counter()
            state, self._position = reading.state(), reading.mark()
            facts = self.prepared.read()
        self._activity = ("the copy or the transform", fetched)
        if self._copy_seconds > SHORT_SECONDS or stage.transform is not None:
            self.wakeups.wake()
        get_batch, nbytes = stage.start(batch)
        self._copy_seconds = copied = time.perf_counter() - fetched
        self.options.meter.count_read(fetched - start, copied, nbytes)
        self._num_batches += 1
        return QueueItem(get_batch, None, state, self._position, facts)

    def _item_of(self, error: BaseException) -> QueueItem:
        """Return the item of an error of `read`."""
        found = _consumer_error(error, self.workers)
        if getattr(self.source, "_workers", None):
            clear_frames(found)
        return QueueItem(error=found)

    def put_error(self, error: BaseException) -> None:
        """Queue an error."""
        self.put(self._item_of(error))

    def put(self, item: QueueItem) -> None:
        """Queue an item, unless the pass is stopping.

        Note: [wakeups]. Waking the consumer for each tiny batch would cost more than
        the batch. So batches that are there at the same time share one call of `wake`,
        which follows before the thread waits, or runs code of the user.
        """
        with self.wakeups.lock:
            self._has_ended = item.get_batch is None
            if not self.stopping:
                self.items.append(item)
                if self._has_ended or not isinstance(self.source, Epoch):
                    self._tell()


def stop(prefetch_thread: PrefetchThread, seconds: float = STOP_SECONDS) -> None:
    """Stop the thread and its workers, and drop the queued items.

    A thread inside the dataset, a transform or a native call cannot be interrupted. It
    ends when that call returns, and a warning names the call.

    Args:
        prefetch_thread: the pass.
        seconds: time to wait for the thread before the warning.
    """
    if os.getpid() != prefetch_thread.pid:
        return  # a forked copy, whose locks may be held forever
    with prefetch_thread.wakeups.lock:
        prefetch_thread.stopping = prefetch_thread.finished = True
        dropped = list(prefetch_thread.items)
        prefetch_thread.items.clear()
        prefetch_thread.wakeups.wake()
    del dropped  # free memory without holding the lock
    prefetch_thread.prepared.end()
    prefetch_thread.workers.wake()
    source = prefetch_thread.source
    is_nested = isinstance(getattr(source, "_thread", None), PrefetchThread)
    if is_nested and source is not prefetch_thread.options.loader:
        source.close()  # the thread may wait for a batch of it
    thread = prefetch_thread.thread
    if thread is threading.current_thread():
        return
    prefetch_thread.leave()
    if not thread.ident and prefetch_thread.reader is None:
        _end(prefetch_thread)
    else:
        if not thread.ident:  # it waits for the one that reads in its place
            prefetch_thread.start_thread()
        thread.join(min(WORKER_SECONDS, seconds))
    if thread.is_alive():
        prefetch_thread.workers.terminate()
        thread.join(seconds - WORKER_SECONDS)
    if thread.is_alive():
        is_read = prefetch_thread.reader is not None  # by a consumer, in its place
        activity = "next(loader)" if is_read else prefetch_thread._activity[0]
        warn(
            f"[PP210] PreDataLoader: the thread must end within {seconds} s, but is "
            f"still in '{activity}'. It ends when that returns.",
            LoaderWarning,
        )
    elif not (prefetch_thread.num_wanted or prefetch_thread.num_taken):
        prefetch_thread.draws.undo()


def _turns_of(loader: Any) -> AbstractContextManager[Any]:
    """Return the turns of the passes over a loader, whose state may be one."""
    if not shares_state(loader):
        return contextlib.nullcontext()
    for other in list(_running):
        if other.options.loader is loader and other.pid == os.getpid():
            return other.turns
    return Turns()


def call_loader(loader: Any) -> Any:
    """Return a loader, or the result of a function."""
    made = loader if is_iterable(loader) else loader()
    if not is_iterable(made):
        raise BatchTypeError(
            "PreDataLoader: loader must be a function that returns an iterable, but "
            f"returned {type_name(made)}."
        )
    return made


def is_iterable(loader: Any) -> bool:
    """Return True if ``iter(loader)`` works, also by ``__getitem__`` alone."""
    return isinstance(loader, Iterable) or hasattr(loader, "__getitem__")


def _run(prefetch_thread: PrefetchThread) -> None:
    try:
        with thread_state.applied(prefetch_thread.state):
            if not prefetch_thread.has_begun:
                _begin(prefetch_thread)
            while prefetch_thread.wait_for_room():
                prefetch_thread.put(prefetch_thread.read())
    except BaseException as error:
        prefetch_thread.put_error(error)
    finally:
        _end(prefetch_thread)


def _end(prefetch_thread: PrefetchThread) -> None:
    prefetch_thread.set_activity("the end of the loader's iterator")
    try:
        _release(prefetch_thread)
    finally:
        prefetch_thread.source = None
        prefetch_thread.reading.release()
        prefetch_thread.prepared.release()
        prefetch_thread.workers = SourceWorkers(None)
        prefetch_thread.set_begun()
        _running.discard(prefetch_thread)


def _release(prefetch_thread: PrefetchThread) -> None:
    """End the iterator, also in the middle of its epoch."""
    prefetch_thread.workers.unwatch()
    source = prefetch_thread.source
    # Otherwise it is the user's iterator, which may be used elsewhere.
    if source is not prefetch_thread.options.loader:
        end = getattr(source, "_shutdown_workers", getattr(source, "close", None))
        # Persistent workers belong to the loader.
        if callable(end) and not getattr(source, "_persistent_workers", False):
            end()
    prefetch_thread.workers.join_feeders()


def _consumer_error(error: BaseException, workers: SourceWorkers) -> BaseException:
    """Return the error for the consumer, which must not take it for the end."""
    if not isinstance(error, StopIteration):
        return workers.explain(error)
    found = RuntimeError(
        "PreDataLoader: StopIteration must come from next(loader) only, but the "
        "transform or iter(loader) raised it. Raise another error there."
    )
    found.__cause__ = error
    return found


def _begin(prefetch_thread: PrefetchThread) -> None:
    options = prefetch_thread.options
    loader = options.loader
    prefetch_thread.set_activity("iter(loader)")
    death = SourceWorkers(getattr(loader, "_iterator", None)).find_death()
    if death is not None:  # torch would wait for it
        raise death
    made = call_loader(loader)
    prefetch_thread.made, prefetch_thread.prepared = made, Prepared(made)
    with prefetch_thread.turns:
        source = prefetch_thread.source = iter(made)  # `stop` may have to end it
        prefetch_thread.watch_source()
        prefetch_thread.reading = reading = Reading(loader, made, source)
        prefetch_thread.start_state = reading.state()
    prefetch_thread._position = reading.mark()
    prefetch_thread.set_begun()


class Owner(Protocol):
    """The object that starts passes and records the state of the loader."""

    def _on_batch(self, state: LoaderState | None) -> None:
        """Record the loader's state after the batch that ``next()`` returns."""

    def _on_end(self, ended: PrefetchThread, state: LoaderState | None) -> None:
        """Record the loader's state at the end of its epoch; None: find it."""


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
        self._stop.atexit = False  # `_stop_all` stops all threads at exit
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
        handled = None
        try:  # nothing before it may call a signal handler
            handled = sys.exc_info()[1]
            batch = self._next(taken)
            return batch
        except BaseException as error:
            # Nothing may follow a lost batch.
            if taken or self._thread.is_lost:
                self.close()
                taken.clear()  # the error would refer to itself by its traceback
                hide_frames(error)
            elif isinstance(error, KeyboardInterrupt):
                clear_frames(error, handled)  # a notebook keeps the error
                del self
            raise

    def _next(self, taken: list[QueueItem]) -> Any:
        """Return the next batch. Append its item to a list before removing it."""
        thread = self._thread
        meter = thread.options.meter
        start, batches, is_read = meter.clock(), 0, False
        try:
            if is_read := thread.is_reader(start):
                thread.read_here(taken)
            else:
                with span("pyparallel.wait"):
                    thread.take(taken)
            get_batch = taken[0].get_batch if taken else None
            if get_batch is not None:
                batch = get_batch()
                batches = 1
        finally:
            thread.leave()
            thread.returned_at = meter.count_wait(start, batches, is_read=is_read)
        if get_batch is not None:
            _, _, state, position, facts = taken[0]
            thread.reading.receive(position)
            if facts is not None:
                thread.prepared.show(*facts)
            if (owner := self._owner()) is not None:
                owner._on_batch(state)
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
    """Stop a thread, even if an error of a signal handler comes meanwhile.

    torch reports a dead worker by one, if an iterator with workers was created in the
    main thread. A finalizer can raise it to no caller; the consumer that waits for a
    batch gets the error.
    """
    try:
        stop(prefetch_thread)
    except BaseException as error:
        is_report = is_torch_report(error)
        if is_report or not isinstance(error, Exception):
            stop(prefetch_thread)
        if not is_report:
            raise


_running: weakref.WeakSet[PrefetchThread] = weakref.WeakSet()
_exiting = threading.Event()


@at_exit
def _stop_all() -> None:
    _exiting.set()
    for prefetch_thread in list(_running):
        stop(prefetch_thread, EXIT_SECONDS)
