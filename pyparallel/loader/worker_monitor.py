"""Detect workers of torch's DataLoader that died or hang, and never wait for them.

torch reports a dead worker at once only in the main thread, as an exception between any
two instructions. In another thread, the report takes five seconds or is a broken pipe.
A thread that waits for a batch here checks the workers itself, every `SLICE` seconds.

These functions access iterators of ``torch.utils.data.DataLoader`` by private names.
They do nothing to other iterators, which have no such names.

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
import re
import select
import signal
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Sequence
from multiprocessing import connection, process, queues, synchronize
from typing import Any, NamedTuple

from ..core.torch_private import forget_workers, pin_memory_loop
from .tracebacks import format_indices, is_of_worker, message_of, rank_text

#: The interval at which a wait checks the workers, in seconds.
SLICE = 0.1
#: The longest time in seconds until a dead worker is known as dead, or until its error
#: arrives.
GRACE = 0.3
#: The longest time in seconds for which a live worker holds a lock of all workers.
_LOCK_SECONDS = 5.0
#: Errors of a broken connection to a worker.
_BROKEN = (EOFError, FileNotFoundError, ConnectionError)
#: Signals that end a process after a fault in native code.
_CRASHES = {
    *(signal.SIGABRT, signal.SIGBUS, signal.SIGFPE),
    *(signal.SIGILL, signal.SIGSEGV),
}
#: The most batches that a message lists.
_MAX_SHOWN = 8
_ITERATOR = (
    *("_workers", "_try_get_data", "_shutdown_workers", "_persistent_workers"),
    "_worker_pids_set",
)
_TORCH_SAYS_DEAD = "DataLoader worker (pid"
_TORCH_SAYS_LATE = "DataLoader timed out after"
#: The start of `dead_worker_error`.
_DEATH = "DataLoader: a worker must live"

#: Keeps the queues of each iterator alive as long as the iterator, by its `id`.
#:
#: Note: [garbage]. When the garbage collector frees an iterator in a reference cycle,
#: it first calls the finalizers of each ``multiprocessing.Queue``. These end the thread
#: that feeds the queue. The iterator's ``__del__`` can then not send its workers the
#: order to end, so it waits 5 s for each and kills them. The collector does not touch
#: the queues in this dict.
_queues: dict[int, list[Any]] = {}

#: The workers that this process has started, and not the parent of a fork.
_workers_of_process: weakref.WeakSet[Any] = weakref.WeakSet()


class Stopped(Exception):
    """The wait for a batch was cancelled."""

    def __str__(self) -> str:
        return (
            "PreDataLoader: one pass at a time must read an iterator with workers, but "
            "a pass that was closed still reads it. Make a new iterator."
        )


def has_workers(source: Any) -> bool:
    """Return True for an iterator of torch or torchdata with worker processes."""
    return all(hasattr(source, name) for name in _ITERATOR) and bool(source._workers)


def shares_iterator(loader: Any) -> bool:
    """Return True if ``iter(loader)`` returns the same iterator every time."""
    return bool(
        getattr(loader, "persistent_workers", False)
        and getattr(loader, "num_workers", 0)
    )


def persistent_iterator(loader: Any) -> Any:
    """Return the iterator whose persistent workers the next epoch needs, or None.

    None for `pyparallel.DataLoader`, which replaces workers that died.
    """
    source = getattr(loader, "_iterator", None) if shares_iterator(loader) else None
    return None if hasattr(source, "has_lost_worker") else source


class _DoneEvent:
    """The event that makes workers end, in the process that sets it.

    Workers read the event between batches, under its lock. A worker that is killed
    there never releases the lock. torch would then wait for it without limit when it
    handles the death, and when it ends the other workers. This class reads the event
    without the lock, because only this process sets it. If it cannot acquire the lock
    to set the event, it terminates the workers, which could not acquire it either.
    """

    def __init__(
        self, event: synchronize.Event, workers: Sequence[Any], is_set: bool
    ) -> None:
        # The parts of multiprocessing's events are private.
        parts: Any = event
        self._lock, self._flag = parts._cond, parts._flag
        self._workers, self._is_set = workers, is_set

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True
        has_lost = any(worker.exitcode for worker in self._workers)
        if self._lock.acquire(True, GRACE if has_lost else _LOCK_SECONDS):
            self._flag.acquire(False)  # its highest value is one
            self._flag.release()
            self._lock.release()
            return
        for worker in self._workers:
            worker.terminate()


def guard(source: Any) -> None:
    """Let waits for this iterator's workers end if a worker died.

    Otherwise they could wait for a lock of that worker, or for the rest of its message.
    Call this as soon as the workers have started.
    """
    event = getattr(source, "_workers_done_event", None)
    if isinstance(event, synchronize.Event):
        done = _DoneEvent(event, source._workers, source._shutdown)
        source._workers_done_event = done
    if has_workers(source):
        workers, key = source._workers, id(source)
        _workers_of_process.update(workers)
        results = getattr(source, "_worker_result_queue", None)
        _queues[key] = [results, *getattr(source, "_index_queues", ())]
        weakref.finalize(source, _queues.pop, key, None).atexit = False
        weak = weakref.ref(source)  # the iterator owns the queue: no cycle
        outlive_writers(results, lambda: _has_lost_worker(workers, weak()))


def serves_queue() -> bool:
    """Return whether this thread feeds or reads a queue of an iterator.

    The garbage collector may free an iterator in such a thread. Ending workers there
    would wait for a lock that the thread holds, or for the thread itself.
    """
    target = getattr(threading.current_thread(), "_target", None)
    # A static method that typeshed does not declare.
    feed: Any = queues.Queue._feed  # type: ignore[attr-defined]
    return target in (feed, pin_memory_loop)


def _has_lost_worker(workers: Sequence[Any], source: Any) -> bool:
    """Return True if a worker has ended while the parent waits for its messages.

    A worker that has read its whole dataset ends by itself with code 0: that is no
    loss.
    """
    codes = [worker.exitcode for worker in workers]
    if any(codes) or None not in codes:
        return True
    is_waited_for = getattr(source, "_workers_status", codes)
    return (0, True) in zip(codes, is_waited_for, strict=True)


def take_over(source: Any) -> None:
    """Monitor the workers of this iterator here, and make torch forget them.

    Once an iterator was made in the main thread, torch raises the death of any worker
    that it knows in that thread, in the middle of other code. If the main thread
    continues to use persistent workers, torch reports a death there within five
    seconds, as in any other thread.
    """
    guard(source)
    if has_workers(source) and source._worker_pids_set:
        forget_workers(source)


def watch(source: Any, stopped: Callable[[], bool]) -> None:
    """Let waits of this iterator end within `SLICE` after a stop or a worker's death.

    Args:
        source: the iterator.
        stopped: returns True if the batch is not needed any more. The wait then raises
            `Stopped`.
    """
    if not has_workers(source):
        return
    weak = weakref.ref(source)  # a reference cycle would outlive the epoch

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
            # Without a timeout, the caller loops and checks its own thread.
            if done or deadline is None or time.monotonic() >= deadline:
                return done, data

    source._try_get_data = try_get_data


def release(source: Any, loader: Any) -> None:
    """End an iterator, also in the middle of its epoch."""
    with contextlib.suppress(AttributeError, TypeError):  # no __dict__
        vars(source).pop("_try_get_data", None)
    if source is loader:  # the user's iterator, which may be used elsewhere
        return
    if has_workers(source):
        if not source._persistent_workers:  # persistent workers belong to the loader
            source._shutdown_workers()
            _join_feeders(source)
    elif callable(close := getattr(source, "close", None)):
        close()


def _join_feeders(source: Any) -> None:
    """Wait up to `GRACE` for the threads that feed the queues of ended workers.

    A feeder drops the semaphores of its queue last. If the interpreter exits between
    the removal of a semaphore and its report to Python's resource tracker, the tracker
    prints an error. A feeder may wait without limit for a worker that died.
    """
    deadline = time.monotonic() + GRACE
    for index_queue in getattr(source, "_index_queues", ()):
        feeder = getattr(index_queue, "_thread", None)
        if feeder not in (None, threading.current_thread()):
            feeder.join(max(0.0, deadline - time.monotonic()))


def terminate(source: Any) -> None:
    """Terminate workers, which would otherwise end after their current batch."""
    if has_workers(source) and not source._persistent_workers:
        for worker in source._workers:
            if worker.is_alive():
                worker.terminate()


class DeadWorker(NamedTuple):
    """A worker that died.

    Attributes:
        number: the number of the worker in its loader.
        pid: its process id.
        code: its exit code. Negative: the signal that killed it.
        pending: the indices of each of its batches that did not arrive, if known.
    """

    number: int
    pid: int
    code: int
    pending: list[Any]


def find_dead_worker(
    source: Any, *, any_code: bool = False, report: str = ""
) -> DeadWorker | None:
    """Return a worker that died, None if all are alive or have finished.

    Args:
        source: the iterator.
        any_code: include workers with exit code 0, which may have called ``exit``.
        report: torch's report of a dead worker. It names the process.
    """
    workers = list(enumerate(getattr(source, "_workers", ())))
    dead = [pair for pair in workers if pair[1].exitcode is not None]
    failed = [pair for pair in dead if pair[1].exitcode]
    if any_code and not failed:  # a worker that has read its whole dataset ends, too
        is_waited_for = getattr(source, "_workers_status", None)
        pids = re.findall(r"\d+", report)
        failed = [
            (number, worker)
            for number, worker in dead
            if is_waited_for is None or is_waited_for[number] or str(worker.pid) in pids
        ]
    for number, worker in failed:
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
    pending = ", ".join(map(format_indices, dead.pending[:_MAX_SHOWN]))
    if pending:
        more = ", ..." if len(dead.pending) > _MAX_SHOWN else ""
        pending = f" Indices of its pending batches: {pending}{more}."
    advice = "Look for its traceback above, or for code in the dataset that exits."
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
        f"{_DEATH} to the end of its epoch, but worker "
        f"{dead.number} (pid {dead.pid}{', ' if rank else ''}{rank}) died "
        f"(exit code {dead.code}{name}).{pending} {advice}"
    )


def is_torch_report(error: BaseException) -> bool:
    """Return True for torch's report of a dead worker."""
    return isinstance(error, RuntimeError) and message_of(error).startswith(
        _TORCH_SAYS_DEAD
    )


def is_death_report(error: BaseException) -> bool:
    """Return True for torch's or this package's report of a dead worker."""
    return is_torch_report(error) or (
        isinstance(error, RuntimeError) and message_of(error).startswith(_DEATH)
    )


def explain_error(error: BaseException, source: Any) -> BaseException:
    """Return an error that explains ``error``, or ``error`` itself.

    If a dead worker is the reason, the new error names it. If a batch is late, the new
    error describes the worker that makes it.
    """
    text = message_of(error)
    if text.startswith(_TORCH_SAYS_LATE) and hasattr(source, "describe_late"):
        return RuntimeError(f"{error}: {source.describe_late()}")
    is_broken = isinstance(error, _BROKEN) and not is_of_worker(error)
    if not has_workers(source) or not (is_torch_report(error) or is_broken):
        return error
    deadline = time.monotonic() + GRACE
    report = text if is_torch_report(error) else ""
    while (dead := find_dead_worker(source, any_code=True, report=report)) is None:
        if time.monotonic() >= deadline:
            return error
        time.sleep(GRACE / 30)
    explanation = dead_worker_error(dead)
    # torch's report adds nothing. A broken connection may have another reason.
    explanation.__cause__ = None if is_torch_report(error) else error
    return explanation


class ExplainedErrors:
    """A context manager that raises explained errors: see `explain_error`.

    Args:
        source: the iterator that waits in the block.
    """

    def __init__(self, source: Any) -> None:
        self._source = source

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, Exception):
            explanation = explain_error(error, self._source)
            try:
                if explanation is not error:
                    raise explanation from explanation.__cause__
            finally:
                del explanation, error  # a cycle would keep the iterator's workers


def clear_error_frames(
    error: BaseException, source: Any, handled: BaseException | None = None
) -> None:
    """Clear the frames of an error from an iterator with workers.

    The frames refer to the iterator, and so keep its queues and descriptors as long as
    the error lives. The frames of the dataset were in the worker. The message of the
    error contains them.

    Args:
        error: the error.
        source: the iterator.
        handled: the exception that the caller of the iterator handles. It is a context
            of the error, and the caller may still use its frames.
    """
    if not has_workers(source):
        return
    seen = {id(handled)}
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        traceback.clear_frames(link.__traceback__)
        link = link.__cause__ or link.__context__


#: The interval at which a read inside a message checks its writer.
_SLICE_MS = 100
#: The most bytes to discard with one read.
_CHUNK = 1 << 16

_base: Any = connection.Connection  # its methods that read messages are private


class _PipeReader(_base):  # type: ignore[misc]  # of a class that is Any
    """The reading end of a pipe whose writers may die: see Note [half a message].

    Attributes:
        is_lost: returns True if a writer has died, possibly inside a message.
        is_broken: a message was abandoned, so the start of the next one is unknown.
    """

    is_lost: Callable[[], bool]
    is_broken = False

    def _recv(self, size: int) -> io.BytesIO:
        received: io.BytesIO = super()._recv(size, self._read)
        return received

    def _read(self, fd: int, size: int) -> bytes:
        """Return bytes. Raise ``queue.Empty`` if no more bytes can come."""
        ready = select.poll()
        ready.register(fd, select.POLLIN)
        timeout = 0
        while not self.is_broken:
            was_lost = timeout > 0 and self.is_lost()  # checked before the last wait
            if ready.poll(timeout):
                return os.read(fd, size)
            self.is_broken, timeout = was_lost, _SLICE_MS
        while ready.poll(0) and os.read(fd, _CHUNK):
            pass  # otherwise the next poll would report readable bytes at once
        raise queue.Empty


def outlive_writers(messages: Any, is_lost: Callable[[], bool]) -> None:
    """Let ``messages.get()`` raise ``queue.Empty`` if the rest of a message is lost.

    Args:
        messages: a ``multiprocessing.Queue``. Other objects are left unchanged.
        is_lost: returns True if a writer has died. Called while a message pauses.
    """
    reader = getattr(messages, "_reader", None)
    if type(reader) is connection.Connection and hasattr(select, "poll"):
        untyped: Any = reader
        # The queue holds bound methods of this object, so replace only its class.
        untyped.__class__ = _PipeReader
        untyped.is_lost = is_lost


def _leave_workers_to_parent() -> None:
    """Make ``multiprocessing`` forget the parent's workers in a child of ``os.fork``.

    Otherwise the child terminates them when it exits, as daemons of its own.
    """
    children: Any = process._children  # type: ignore[attr-defined]  # private
    children -= {*_workers_of_process}
    _workers_of_process.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_workers_to_parent)
