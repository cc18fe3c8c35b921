"""One pass over a loader by a thread: what it shares with its consumers, its end.

Note: [lifetime of the thread]. The thread holds a `Generation` and nothing that holds
the iterator in front of it, so that the iterator can be collected; that stops the
thread. It is a daemon, stopped and joined by ``atexit``: a daemon that is still in
native code when the interpreter is gone aborts the process, and a thread that is no
daemon would be waited for before anybody could stop it. ``atexit`` runs when all other
threads that are no daemons have ended, so that none of them loses its batches.
"""

from __future__ import annotations

import atexit
import math
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ..core import thread_state
from ..core.errors import BatchTypeError, LoaderWarning, type_name, warn
from ..core.tracing import span
from ..loader import worker_monitor
from ..loader.stats import Meter
from ._cut_short import cut_short
from ._to_device import HandOver, Item, state_of

#: How long a stop waits for the thread, in seconds.
STOP_SECONDS = 1.0
#: The same at the end of the interpreter, where what is not stopped may abort it.
EXIT_SECONDS = 5.0
#: When workers that are still at a batch are ended.
PATIENCE = 0.5
_TOO_LATE = (
    "PreDataLoader: an epoch must start before the interpreter exits, but it is "
    "exiting. Iterate over the loader itself."
)


@dataclass(frozen=True)
class Options:
    """What all passes over one loader have in common."""

    loader: Any
    hand_over: HandOver
    queue_size: int
    timeout: float
    meter: Meter


class Generation:
    """One pass over a loader, shared by its thread and its consumers.

    All that changes does so under ``changed``, whose lock may be taken again by the
    thread that has it: a collection there may run `stop` for another one.
    """

    def __init__(self, options: Options) -> None:
        self.options = options
        self.pid: int = os.getpid()
        self.changed: threading.Condition = threading.Condition()
        self.items: deque[Item] = deque()
        self.num_taken: int = 0
        self.over: bool = False  # for consumers: nothing comes any more
        self.stopping: bool = False  # for the thread: nothing is wanted any more
        self.source: Any = None
        self.home: Any = options.hand_over.home()
        self.state: thread_state.ThreadState = thread_state.take()
        self._doing = ("starting", time.monotonic())
        self.thread: threading.Thread = threading.Thread(
            target=_run, args=(self,), name="pyparallel-prefetch", daemon=True
        )

    def start(self) -> None:
        """Start the thread.

        Raises:
            RuntimeError: the interpreter is about to exit.
        """
        if _exiting.is_set():
            raise RuntimeError(_TOO_LATE)
        self.options.hand_over.prepare()
        _running.add(self)
        try:
            self.thread.start()
        except RuntimeError as error:
            _running.discard(self)
            # Python 3.12 and later start no thread after the end of the main thread.
            if "at interpreter shutdown" in str(error):
                raise RuntimeError(_TOO_LATE) from None
            raise

    # What the consumer does.

    def take(self) -> Item | None:
        """Wait for the next item and return it; None at the end.

        Raises:
            RuntimeError: this is another process; a worker died.
            TimeoutError: nothing came in time. The next call waits again.
        """
        self.check_process()
        timeout = self.options.timeout
        deadline = time.monotonic() + timeout if timeout else math.inf
        self.home = self.options.hand_over.home()
        with self.changed:
            while not self.items:
                if self.over:
                    return None
                self._wait(deadline)
            item = self.items.popleft()
            if item.land is None:
                self.over = True
            else:
                self.num_taken += 1
            self.changed.notify_all()
            return item

    def check_process(self) -> None:
        """Raise RuntimeError in a process that was forked since."""
        if os.getpid() != self.pid:
            raise RuntimeError(
                "PreDataLoader: an iterator must be used in the process that made it, "
                f"pid {self.pid}, but this is pid {os.getpid()}, where its thread does "
                "not run. Call iter() in this process."
            )

    def _wait(self, deadline: float) -> None:
        left = deadline - time.monotonic()
        if left <= 0:
            doing, since = self._doing
            raise TimeoutError(
                f"PreDataLoader: batch {self.num_taken} must come within "
                f"{self.options.timeout} s, but the thread has been at '{doing}' for "
                f"{time.monotonic() - since:.2f} s. Raise timeout, or look there."
            )
        watched = worker_monitor.has_workers(self.source)
        if watched:
            left = min(left, worker_monitor.SLICE)
        self.changed.wait(None if left == math.inf else left)
        if watched and not self.items and not self.over:
            self._check_workers()

    def _check_workers(self) -> None:
        dead = worker_monitor.find_dead_worker(self.source)
        if dead is None:
            return
        grace = time.monotonic() + worker_monitor.GRACE
        while not self.items and not self.over and time.monotonic() < grace:
            self.changed.wait(worker_monitor.SLICE)  # the thread may know better
        if not self.items and not self.over:
            self.over = self.stopping = True
            self.changed.notify_all()
            raise worker_monitor.dead_worker_error(dead)

    # What the thread does.

    def at(self, doing: str) -> None:
        """Note what the thread is at."""
        self._doing = (doing, time.monotonic())

    def set_source(self, source: Any) -> None:
        """Let consumers know the loader's iterator: its workers may die."""
        with self.changed:
            self.source = source
            self.changed.notify_all()

    def wait_for_room(self) -> bool:
        """Wait until a batch may be fetched; False if none is wanted."""
        with self.changed:
            while not self.stopping and len(self.items) >= self.options.queue_size:
                self.at("waiting for the consumer")
                self.changed.wait()
            return not self.stopping

    def put(self, item: Item) -> None:
        """Queue an item, unless nobody wants it."""
        with self.changed:
            if not self.stopping:
                self.items.append(item)
                self.changed.notify_all()


def stop(generation: Generation, seconds: float = STOP_SECONDS) -> None:
    """End the thread, its workers and what is queued; wait for it that long.

    A thread inside the dataset, a transform or a native call cannot be interrupted: it
    ends when that returns, and a warning says where it is.
    """
    if os.getpid() != generation.pid:
        return  # the thread is in another process, and locks may be held by nobody
    with generation.changed:
        generation.stopping = generation.over = True
        dropped = list(generation.items)
        generation.items.clear()
        generation.changed.notify_all()
    del dropped  # memory is given back without our lock
    thread = generation.thread
    if thread is threading.current_thread() or thread.ident is None:
        return
    thread.join(min(PATIENCE, seconds))
    if thread.is_alive():
        worker_monitor.terminate(generation.source)
        thread.join(seconds - PATIENCE)
    if thread.is_alive():
        warn(
            f"[PP210] PreDataLoader: the thread must end within {seconds} s, but is "
            f"still at '{generation._doing[0]}'. It ends when that returns.",
            LoaderWarning,
        )


def iterate(loader: Any) -> Any:
    """Return an iterator of a loader, or of what a function returns."""
    made = loader if is_iterable(loader) else loader()
    if not is_iterable(made):
        raise BatchTypeError(
            "PreDataLoader: loader must be a function that returns an iterable, but "
            f"returned {type_name(made)}."
        )
    return iter(made)


def is_iterable(loader: Any) -> bool:
    """Tell whether ``iter(loader)`` works; by items from 0 on it does, too."""
    return isinstance(loader, Iterable) or hasattr(loader, "__getitem__")


def _run(generation: Generation) -> None:
    try:
        with thread_state.entered(generation.state):
            _produce(generation)
    except worker_monitor.Stopped:
        pass
    except BaseException as error:
        explained = _explained(error, generation.source)
        worker_monitor.clear_error_frames(explained, generation.source)
        generation.put(Item(error=explained))
        del explained  # it holds this frame
    finally:
        generation.at("the end of the loader's iterator")
        try:
            worker_monitor.release(generation.source, generation.options.loader)
        finally:
            generation.source = None
            _running.discard(generation)


def _explained(error: BaseException, source: Any) -> BaseException:
    """Return what the consumer is to see: an error must not pass for the end."""
    if isinstance(error, StopIteration):
        found = RuntimeError(
            "PreDataLoader: StopIteration must come from next(loader) alone, but the "
            "transform or iter(loader) raised it. Raise another error there."
        )
        found.__cause__ = error
        return found
    return worker_monitor.explain_error(error, source)


def _produce(generation: Generation) -> None:
    options = generation.options
    loader, meter = options.loader, options.meter
    generation.at("iter(loader)")
    dead = worker_monitor.find_dead_worker(worker_monitor.persistent_iterator(loader))
    if dead is not None:  # torch would wait five seconds for an answer from it
        raise worker_monitor.dead_worker_error(dead)
    source = iterate(loader)
    generation.set_source(source)
    worker_monitor.take_over(source)
    worker_monitor.watch(source, lambda: generation.stopping)
    num_batches = 0
    while generation.wait_for_room():
        generation.at("next(loader)")
        start = time.perf_counter()
        try:
            with span("pyparallel.fetch"):
                batch = next(source)
        except StopIteration as end:
            if error := cut_short(end, loader, num_batches):
                raise error from end
            generation.put(Item(state=state_of(loader)))
            return
        fetched = time.perf_counter()
        state = state_of(loader)
        generation.at("the copy or the transform")
        land, nbytes = options.hand_over.start(batch, generation.home)
        copied = time.perf_counter() - fetched
        meter.add(load_seconds=fetched - start, copy_seconds=copied, nbytes=nbytes)
        generation.put(Item(land, state=state))
        num_batches += 1
        del batch, land, state  # the consumer decides how long a batch lives


_running: weakref.WeakSet[Generation] = weakref.WeakSet()
_exiting = threading.Event()


@atexit.register
def _stop_all() -> None:
    _exiting.set()
    for generation in list(_running):
        stop(generation, EXIT_SECONDS)
