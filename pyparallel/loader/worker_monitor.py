"""Detect workers of torch's DataLoader that died or hang, and never wait for them.

torch reports a dead worker at once only in the main thread, as an exception between any
two instructions. In another thread, the report takes five seconds or is a broken pipe.
A thread that waits for a batch here checks the workers itself, every `SLICE` seconds.

These functions access iterators of ``torch.utils.data.DataLoader`` by private names.
They do nothing to other iterators, which have no such names.

Note: [fork locks]. A lock that another thread of the parent holds during ``fork`` stays
locked in the child for ever, because that thread does not exist there. Every worker
seeds torch and NumPy, and so acquires the locks of their random states. If a thread of
the parent drew random numbers at that moment, for dropout or for a sampler, the worker
would hang before its first batch. The forking thread therefore acquires these locks
first, with a timeout. It holds the locks of Python here. The extension acquires the
mutex of torch's generator inside ``fork`` (``csrc/ops/generator.cpp``). Acquiring it
here could deadlock with a thread that waits for that mutex and holds the GIL.

Note: [half a message]. A message between processes is a length and that many bytes.
``multiprocessing`` applies the caller's timeout to the first byte only, and waits for
the last byte without limit. If a writer is killed between them, its reader waits for
ever: other workers and the reader itself hold the pipe open for writing, so the end of
the file never comes. No other message comes either, because the lock of the writers
died with the worker. `outlive_writers` ends such a wait.
"""

from __future__ import annotations

import contextlib
import io
import os
import queue
import select
import signal
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Sequence
from multiprocessing import connection, queues, synchronize
from typing import Any, NamedTuple

from ..batch import pytree
from ..core.torch_private import forget_workers, pin_memory_loop, seed_locks
from .tracebacks import format_indices, rank_text

#: How often a wait looks whether the workers live, in seconds.
SLICE = 0.1
#: How long one that died may take to be known as dead, or an error to arrive from it.
GRACE = 0.3
#: How long one that lives may hold a lock that all of them take, in seconds.
_LOCKED = 5.0
#: What a broken connection to a worker looks like.
_BROKEN = (EOFError, FileNotFoundError, ConnectionError)
#: Signals of a process whose code is at fault.
_CRASHES = {
    *(signal.SIGABRT, signal.SIGBUS, signal.SIGFPE),
    *(signal.SIGILL, signal.SIGSEGV),
}
#: How many batches a message shows.
_MOST_SHOWN = 8
_ITERATOR = (
    *("_workers", "_try_get_data", "_shutdown_workers", "_persistent_workers"),
    "_worker_pids_set",
)
_TORCH_SAYS_DEAD = "DataLoader worker (pid"
_TORCH_SAYS_LATE = "DataLoader timed out after"

#: Keeps the queues of an iterator alive until the iterator is dead, by its `id`.
#:
#: Note: [garbage]. The garbage collector frees an iterator in a reference cycle. It
#: first calls the finalizers of each ``multiprocessing.Queue``, which end the thread
#: that feeds it. Then the iterator's ``__del__`` cannot send its workers the order to
#: end, waits 5 s for each and kills them. The collector leaves alone the queues of
#: this dict.
_queues: dict[int, list[Any]] = {}


class Stopped(Exception):
    """Nobody wants the batch that the thread waits for."""


def has_workers(source: Any) -> bool:
    """Tell whether an iterator is torch's, or torchdata's, with processes below."""
    return all(hasattr(source, name) for name in _ITERATOR) and bool(source._workers)


def shares_iterator(loader: Any) -> bool:
    """Tell whether persistent workers make every ``iter(loader)`` the same object."""
    return bool(
        getattr(loader, "persistent_workers", False)
        and getattr(loader, "num_workers", 0)
    )


def persistent_iterator(loader: Any) -> Any:
    """Return the iterator whose persistent workers the next epoch needs alive, or None.

    `pyparallel.DataLoader` starts others for those that died.
    """
    source = getattr(loader, "_iterator", None) if shares_iterator(loader) else None
    return None if hasattr(source, "has_lost_worker") else source


class _DoneEvent:
    """The event that tells workers to end, for the process that sets it.

    Workers look at it between batches, under its lock. One that is killed there takes
    the lock along, and torch waits for it without limit when it notes that death and
    when it ends the other workers. Here nobody has to ask, because nobody else sets it,
    and who cannot have the lock ends the workers, which could not get it either.
    """

    def __init__(
        self, event: synchronize.Event, workers: Sequence[Any], is_set: bool
    ) -> None:
        # multiprocessing keeps the parts of its events to itself.
        parts: Any = event
        self._lock, self._flag = parts._cond, parts._flag
        self._workers, self._is_set = workers, is_set

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True
        lost = any(worker.exitcode for worker in self._workers)
        if self._lock.acquire(True, GRACE if lost else _LOCKED):
            self._flag.acquire(False)  # it counts to one
            self._flag.release()
            self._lock.release()
            return
        for worker in self._workers:
            worker.terminate()


def guard(source: Any) -> None:
    """Keep waits for this iterator's workers from waiting for what died with one.

    That is a lock, or the rest of a message. To be called as soon as the workers have
    started.
    """
    event = getattr(source, "_workers_done_event", None)
    if isinstance(event, synchronize.Event):
        done = _DoneEvent(event, source._workers, source._shutdown)
        source._workers_done_event = done
    if has_workers(source):
        queue, workers = getattr(source, "_worker_result_queue", None), source._workers
        key = id(source)
        _queues[key] = [queue, *getattr(source, "_index_queues", ())]
        weakref.finalize(source, _queues.pop, key, None).atexit = False
        weak = weakref.ref(source)  # whose queue this is
        outlive_writers(queue, lambda: _has_lost_worker(workers, weak()))


def serves_queue() -> bool:
    """Return whether this thread feeds or reads a queue of an iterator.

    The garbage collector may free an iterator in such a thread. To end workers there
    would wait for a lock that the thread holds, or for the thread itself.
    """
    target = getattr(threading.current_thread(), "_target", None)
    # A staticmethod, which typeshed does not have.
    feed: Any = queues.Queue._feed  # type: ignore[attr-defined]
    return target in (feed, pin_memory_loop)


def _has_lost_worker(workers: Sequence[Any], source: Any) -> bool:
    """Tell whether a worker has ended though somebody waits for what it sends.

    One that was at its end, and was told so, ends by itself with code 0.
    """
    codes = [worker.exitcode for worker in workers]
    if any(codes) or None not in codes:
        return True
    waited_for = getattr(source, "_workers_status", codes)
    return (0, True) in zip(codes, waited_for, strict=True)


def take_over(source: Any) -> None:
    """Let torch forget the workers of this iterator, because they are watched here.

    Once some iterator was made in the main thread, the death of any worker that torch
    knows of is raised there, in the middle of anything. Who goes on with persistent
    workers in the main thread is told within five seconds, as in any other thread.
    """
    guard(source)
    if has_workers(source) and source._worker_pids_set:
        forget_workers(source)


def watch(source: Any, stopped: Callable[[], bool]) -> None:
    """Let waits of this iterator end `SLICE` after a stop or the death of a worker."""
    if not has_workers(source):
        return
    weak = weakref.ref(source)  # an iterator that holds itself would outlive its epoch

    def try_get_data(timeout: float | None = None) -> tuple[bool, Any]:
        inner: Any = weak()
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            if stopped():
                raise Stopped
            wait = SLICE
            if deadline is not None:
                wait = min(SLICE, max(0.0, deadline - time.monotonic()))
            done, data = type(inner)._try_get_data(inner, wait)
            # Without a timeout the caller loops, and looks at its own thread.
            if done or deadline is None or time.monotonic() >= deadline:
                return done, data

    source._try_get_data = try_get_data


def release(source: Any, loader: Any) -> None:
    """End an iterator that may be in the middle of its epoch."""
    if source is loader:  # it is not ours: it may go on elsewhere
        return
    with contextlib.suppress(AttributeError, TypeError):  # slots; no __dict__
        vars(source).pop("_try_get_data", None)
    if has_workers(source):
        if not source._persistent_workers:  # those are the loader's
            source._shutdown_workers()
    elif callable(close := getattr(source, "close", None)):
        close()


def terminate(source: Any) -> None:
    """End workers that would not end by themselves for as long as their batch takes."""
    if has_workers(source) and not source._persistent_workers:
        for worker in source._workers:
            if worker.is_alive():
                worker.terminate()


class DeadWorker(NamedTuple):
    """A worker that died.

    Attributes:
        number: of the worker in its loader.
        pid: of its process.
        code: its exit code; negative: the signal that killed it.
        pending: the indices of each of its batches that did not arrive, if known.
    """

    number: int
    pid: int
    code: int
    pending: list[Any]


def find_dead_worker(source: Any, *, any_code: bool = False) -> DeadWorker | None:
    """Return a worker that died; None if all live or finished.

    Args:
        source: the iterator.
        any_code: take one that exited with code 0 too: it may have called ``exit``.
    """
    workers = list(enumerate(getattr(source, "_workers", ())))
    dead = [found for found in workers if found[1].exitcode is not None]
    failed = [found for found in dead if found[1].exitcode]
    for number, worker in failed or (dead if any_code else []):
        pending = source.pending(number) if hasattr(source, "pending") else []
        return DeadWorker(number, worker.pid, worker.exitcode, pending)
    return None


def dead_worker_error(dead: DeadWorker) -> RuntimeError:
    """Return the error for a dead worker."""
    name = ""
    if dead.code < 0:
        with contextlib.suppress(ValueError):
            name = f", {signal.Signals(-dead.code).name}"
    rank = rank_text()
    pending = ", ".join(map(format_indices, dead.pending[:_MOST_SHOWN]))
    if pending:
        more = ", ..." if len(dead.pending) > _MOST_SHOWN else ""
        pending = f" Indices of its pending batches: {pending}{more}."
    advice = "Look for its traceback above, or for what ends processes in the dataset."
    if dead.code == -signal.SIGKILL:
        advice = (
            "Look for an out-of-memory kill in the system's log (dmesg). Use fewer "
            "workers, smaller batches or a smaller prefetch_factor."
        )
    elif -dead.code in _CRASHES:
        advice = (
            "Native code crashed. To see the line, run the loader with num_workers=0 "
            "under python -X faulthandler."
        )
    return RuntimeError(
        "DataLoader: a worker must live to the end of its epoch, but worker "
        f"{dead.number} (pid {dead.pid}{', ' if rank else ''}{rank}) died "
        f"(exit code {dead.code}{name}).{pending} {advice}"
    )


def is_torch_report(error: BaseException) -> bool:
    """Tell whether this is torch's report of a dead worker."""
    return isinstance(error, RuntimeError) and str(error).startswith(_TORCH_SAYS_DEAD)


def explain_error(error: BaseException, source: Any) -> BaseException:
    """Return the error for a dead worker if that is what ``error`` comes from.

    An error for a batch that is late gets the state of its worker.
    """
    if str(error).startswith(_TORCH_SAYS_LATE) and hasattr(source, "unfinished"):
        return RuntimeError(f"{error}: {source.unfinished()}")
    if not has_workers(source) or not (
        is_torch_report(error) or isinstance(error, _BROKEN)
    ):
        return error
    deadline = time.monotonic() + GRACE
    while (dead := find_dead_worker(source, any_code=True)) is None:
        if time.monotonic() >= deadline:
            return error
        time.sleep(GRACE / 30)
    found = dead_worker_error(dead)
    # torch's report says less. A broken connection may have another reason.
    found.__cause__ = None if is_torch_report(error) else error
    return found


class ExplainedErrors:
    """Raises the error for a dead worker in the place of torch's report.

    Args:
        source: the iterator that waits in the block.
    """

    def __init__(self, source: Any) -> None:
        self._source = source

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, Exception):
            found = explain_error(error, self._source)
            try:
                if found is not error:
                    raise found from found.__cause__
            finally:
                del found, error  # or a cycle would keep the iterator's workers


def clear_error_frames(error: BaseException, source: Any) -> None:
    """Empty the frames of an error that came out of an iterator with workers.

    They hold the iterator, hence queues and descriptors, for as long as somebody keeps
    the error. The dataset's own frames are in the worker, and in the message.
    """
    link: BaseException | None = error
    while link is not None and has_workers(source):
        traceback.clear_frames(link.__traceback__)
        link = link.__cause__ or link.__context__


#: How often a read in the middle of a message looks whether its writer lives.
_SLICE_MS = 100
#: How much is thrown away at a time.
_CHUNK = 1 << 16

_base: Any = connection.Connection  # it keeps the parts of a message to itself


class _PipeReader(_base):  # type: ignore[misc]  # of a class that is Any
    """The reading end of a pipe whose writers may die.

    Attributes:
        is_lost: tells whether a writer has died that may have been at a message.
        is_broken: a message was given up, so nobody knows where the next one begins.
    """

    is_lost: Callable[[], bool]
    is_broken = False

    def _recv(self, size: int) -> io.BytesIO:
        received: io.BytesIO = super()._recv(size, self._read)
        return received

    def _read(self, fd: int, size: int) -> bytes:
        """Return some bytes; as soon as none can come any more, say: no message."""
        ready = select.poll()
        ready.register(fd, select.POLLIN)
        timeout = 0
        while not self.is_broken:
            was_lost = timeout > 0 and self.is_lost()  # known before the last wait
            if ready.poll(timeout):
                return os.read(fd, size)
            self.is_broken, timeout = was_lost, _SLICE_MS
        while ready.poll(0) and os.read(fd, _CHUNK):
            pass  # or who asks again is told at once that something can be read
        raise queue.Empty


def outlive_writers(messages: Any, is_lost: Callable[[], bool]) -> None:
    """Let ``messages.get()`` raise `queue.Empty` for a message whose rest cannot come.

    Args:
        messages: a ``multiprocessing.Queue``; anything else is left as it is.
        is_lost: tells whether a writer has died; asked when a message has a pause.
    """
    reader = getattr(messages, "_reader", None)
    if type(reader) is connection.Connection and hasattr(select, "poll"):
        untyped: Any = reader
        untyped.__class__ = _PipeReader  # the queue has taken down its methods
        untyped.is_lost = is_lost


#: The longest wait for a lock, in seconds. After that the process forks without it.
_FORK_LOCK_SECONDS = 1.0


def _locks_of_workers() -> list[Any]:
    """Return the locks, in the order of their acquisition."""
    locks: list[Any] = [pytree.registration_lock, *seed_locks()]
    numpy = sys.modules.get("numpy")
    if numpy is not None and hasattr(numpy.random, "get_bit_generator"):  # 1.24
        locks.append(numpy.random.get_bit_generator().lock)
    return locks


class _ForkLocks(threading.local):
    """The locks that this thread acquired for a fork."""

    def __init__(self) -> None:
        self.held: list[Any] = []


_fork_locks = _ForkLocks()


def _acquire_fork_locks() -> None:
    for lock in _locks_of_workers():
        if lock.acquire(True, _FORK_LOCK_SECONDS):
            _fork_locks.held.append(lock)


def _release_fork_locks() -> None:
    while _fork_locks.held:
        _fork_locks.held.pop().release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_acquire_fork_locks,
        after_in_parent=_release_fork_locks,
        after_in_child=_release_fork_locks,
    )
