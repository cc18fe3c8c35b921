"""Workers that are processes, with a socket pair for each.

Note: [start of workers]. A fork inherits the program. Other processes import the main
module and torch again, which takes seconds of a core. So as many start at a time as
there are cores, and the first answer needs one import. All programs are pickled at
once, so a later change of the data set reaches no worker. Each one is pickled for its
worker, because objects may count their copies. It is the first message of the worker.
In the pipe of `multiprocessing`, it would wait until the process has imported.
"""

from __future__ import annotations

import contextlib
import errno
import os
import pickle
import select
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from multiprocessing import process
from typing import Any

from ..core import standard_streams
from ..core.cpu_time import cores_allowed
from ..core.process import Living
from ..core.signals import deferred_signals
from ..core.versions import VERSION
from . import deaths, descriptors
from ._channel import Channel, pair, pipe
from ._run import FAILED, LAST, READY, work
from ._start import start
from .interface import (
    Late,
    PackedProgram,
    ProgramError,
    Woken,
    WorkerDied,
    Workers,
    check_process,
)

#: A process that holds a copy of a worker's socket hides its end. So the parent also
#: asks the system after each wait of this number of seconds.
_CHECK_SECONDS = 0.5
#: The time in which only the worker that is asked ends a wait. The answers of others
#: would wake the caller for nothing. After that, they may have filled their sockets.
_ALONE_SECONDS = 1e-3
#: The longest time from the end of the file of a process to its exit code.
_EXIT_SECONDS = 2.0
#: The time of workers to finish their task, and to end after each of two signals. On a
#: busy system, many killed processes need seconds to get a core and to end.
_END_SECONDS = (0.7, 0.5, 10.0)
#: The most calls of `wake` that one `Woken` answers.
_WAKEUPS = 4096
#: Opcode of pickles that refer to a class or a function.
_GLOBAL = b"\x93"


class _Worker:
    """A worker, as its parent knows it."""

    def __init__(
        self, number: int, made: Any, ours: Channel, theirs: socket.socket
    ) -> None:
        self.number, self.process = number, made
        self.channel, self.end = ours, theirs
        self.poll: Any = select.poll()  # for messages of this worker alone
        self.poll.register(ours.fd, select.POLLIN)
        self.answers: deque[Any] = deque()
        self.num_pending = 0  # tasks without an answer that was delivered
        self.has_begun = self.is_last = self.has_ended = False
        self.error = ""  # the traceback of a program that could not start


class ProcessWorkers(Workers):
    """Processes that run a program. See Note [start of workers].

    Args:
        context: a context of ``multiprocessing``.
        program: the program.
        count: the number of workers.

    Raises:
        Exception: the program cannot be pickled.
        OSError: no descriptor, process or memory is left.
    """

    packs = True
    is_whole: bool

    def __init__(self, context: Any, program: PackedProgram, count: int) -> None:
        self._pid = os.getpid()
        self._lock, self._wake_lock = threading.RLock(), threading.RLock()
        self._is_closing = self._is_closed = False
        self.processes: list[Any] = []
        self._workers: list[_Worker] = []
        self._waiting: deque[_Worker] = deque()  # not started
        self._starting: set[int] = set()
        self._method = context.get_start_method()
        self._poll = select.poll()
        self._by_descriptor: dict[int, _Worker] = {}
        try:
            with deferred_signals(), standard_streams.opened():
                self._woken, self._waker = pair()  # first, because `close` wakes
                # What to close, beside the channels.
                self._open: list[Any] = [self._woken, self._waker]
                _pools.add(self)
                self._set_up(context, program, count)
                self._start_more()
        except BaseException:
            if hasattr(self, "_open"):
                self.close()
            raise

    def _set_up(self, context: Any, program: PackedProgram, count: int) -> None:
        self._waker.setblocking(False)
        self._poll.register(self._woken, select.POLLIN)
        self._stacks = deaths.new_stacks()
        # The system closes the second end with this process: see `_end_with_parent`.
        self._life, parents_end = pipe()
        self._open += [self._stacks, self._life, parents_end]
        forks = self._method == "fork"
        self._num_starts = count if forks else cores_allowed()
        data = b""
        for number in range(count):
            ours, theirs = pair()
            self._open += [ours, theirs]
            arguments = theirs, self._life, number, self._stacks
            made = context.Process(
                target=work, args=(*arguments, program if forks else None), daemon=True
            )
            worker = _Worker(number, made, Channel(ours), theirs)
            self._workers.append(worker)
            self.processes.append(made)
            if not forks:
                pickled, sent = descriptors.dump(program)
                data = data if pickled == data else pickled  # keep equal ones once
                worker.channel.send(VERSION.encode(), data, sent)
            self._watch(worker)
        self._waiting.extend(self._workers)

    def _start_more(self) -> None:
        """Start workers, as many side by side as there are cores."""
        while self._waiting and len(self._starting) < self._num_starts:
            worker = self._waiting.popleft()
            if not worker.has_ended:  # by `end`
                self._starting.add(worker.number)
                ends = worker.end, self._life
                start(worker.process, self._method, ends, self._stacks)
                self._by_descriptor[worker.process.sentinel] = worker
                self._poll.register(worker.process.sentinel, select.POLLIN)
            worker.end.close()
        if not self._waiting:
            self._life.close()

    def _watch(self, worker: _Worker) -> None:
        """Wait for messages of a worker, and until it accepts the rest of ours."""
        writes = select.POLLOUT if worker.channel.has_unsent else 0
        self._by_descriptor[worker.channel.fd] = worker
        self._poll.register(worker.channel.fd, select.POLLIN | writes)

    # ------------------------------------------------------------- tasks and answers

    def send(self, worker: int, task: Any) -> None:
        """See `Workers.send`."""
        check_process(self._pid)
        data, sent = _dump(task)
        with self._lock:
            each = self._workers[worker]
            each.num_pending += 1
            if each.has_ended:  # `receive` says so
                descriptors.close(sent)
                return
            had_unsent = each.channel.has_unsent
            try:
                each.channel.send(b"t", data, sent)
            except OSError:  # dead: a read says so
                return
            if each.channel.has_unsent != had_unsent:
                self._watch(each)

    def receive(self, worker: int | None, timeout: float | None) -> tuple[int, Any]:
        """See `Workers.receive`."""
        check_process(self._pid)
        asked = self._workers if worker is None else [self._workers[worker]]
        end = float("inf") if timeout is None else time.monotonic() + timeout
        self._waits = False
        try:
            with self._lock:
                alone = None
                if worker is not None and not asked[0].channel.has_unsent:
                    alone = asked[0].poll
                while (found := self._take(asked)) is None:
                    self._raise_failure()
                    most = _ALONE_SECONDS if alone else _CHECK_SECONDS
                    left = min(most, end - time.monotonic())
                    if left <= 0:
                        raise Late
                    self._wait(left, alone)
                    alone = None
                return found
        except OSError:
            if not self._waits:  # otherwise a signal handler raised it
                self.close()
            raise

    def _take(self, asked: list[_Worker]) -> tuple[int, Any] | None:
        """Return a worker's number and its answer, None if no answer has arrived.

        All answers that were read go first, so no worker waits for ever.
        """
        for reads in (False, True):
            for each in asked if reads else ():
                self._read(each, 1)  # no more: one call of the system is enough
            for each in asked:
                if each.answers:
                    each.num_pending -= 1
                    return each.number, each.answers.popleft()
        return None

    def _raise_failure(self) -> None:
        """Raise an error if any worker has failed, or if the workers are closed."""
        if self._is_closing:
            raise Woken
        for worker in self._workers:
            if worker.num_pending > len(worker.answers):
                if worker.error:
                    raise ProgramError(worker.number, worker.error)
                # An end that an answer announces is no death before its delivery.
                if worker.has_ended and not (worker.is_last and worker.answers):
                    made = worker.process
                    raise WorkerDied(worker.number, made.pid, made.exitcode)

    def _wait(self, seconds: float, alone: Any = None) -> None:
        """Wait until a worker answers or ends. Read and write without waiting."""
        found, self.is_whole = self.is_whole, True
        self.on_wait()
        self._waits = True
        events = (alone or self._poll).poll(seconds * 1000)
        self._waits, self.is_whole = False, found
        for descriptor, event in events:
            worker = self._by_descriptor.get(descriptor)
            if worker is None:  # it has ended just now, or this is a call of `wake`
                with contextlib.suppress(OSError):
                    if self._woken.recv(_WAKEUPS):
                        raise Woken
                continue
            if event & select.POLLOUT:
                with contextlib.suppress(OSError):  # dead: a read says so
                    worker.channel.flush()
                self._watch(worker)
            if descriptor == worker.channel.fd:
                # One message: a call that finds no other would cost as much.
                self._read(worker, len(worker.answers) + 1)
            else:
                self._read(worker)
                self._set_ended(worker)
        if not (events or alone):
            for worker in self._workers:
                if worker.process.exitcode is not None:
                    self._read(worker)
                    self._set_ended(worker)

    def _read(self, worker: _Worker, num_answers: float = float("inf")) -> None:
        """Read messages that have arrived, up to this number of answers."""
        while not worker.has_ended and len(worker.answers) < num_answers:
            try:
                message = worker.channel.receive()
            except (EOFError, OSError) as error:
                if getattr(error, "errno", None) == errno.EMFILE:
                    raise
                self._set_ended(worker)
                return
            if message is None:
                return
            if message[0]:
                worker.answers.append(message)
            else:
                self._note(worker, bytes(message[1]))

    def _note(self, worker: _Worker, report: bytes) -> None:
        """Note how far a worker has come."""
        if report == LAST:
            worker.is_last = True
            return
        if report[:1] == FAILED:
            worker.error = report[1:].decode(errors="replace")
        worker.has_begun = report == READY
        self._leave_start(worker)

    def _leave_start(self, worker: _Worker) -> None:
        """Start the next worker when this one has its program, or has ended."""
        self._starting.discard(worker.number)
        if self._waiting and not self._is_closing:
            with deferred_signals(), standard_streams.opened():
                self._start_more()

    def _set_ended(self, worker: _Worker) -> None:
        if not worker.has_ended:
            self._forget(worker)
            end = time.monotonic() + _EXIT_SECONDS  # its end of file comes first
            while worker.process.exitcode is None and time.monotonic() < end:
                is_forgotten = self._is_forgotten(worker.process)
                worker.process.join(_CHECK_SECONDS / 10)
                if is_forgotten:
                    break
            self._leave_start(worker)

    def _is_forgotten(self, made: Any) -> bool:
        """Return True if the system has no exit code of a process that has ended.

        The program ignores SIGCHLD, or has waited for all of its children. A fork
        server keeps the exit code, and sends it later. Another process of the system
        may have the number by now, but no other child.
        """
        if self._method != "forkserver":
            try:
                os.waitid(os.P_PID, made.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return True
        return False

    def _forget(self, worker: _Worker) -> None:
        """Wait for this worker no more, and close its channel."""
        worker.has_ended, worker.poll = True, None
        for descriptor, each in list(self._by_descriptor.items()):
            if each is worker:
                del self._by_descriptor[descriptor]
                self._poll.unregister(descriptor)
        worker.channel.close()

    # ------------------------------------------------------------- from any thread

    def wake(self) -> None:
        """See `Workers.wake`."""
        with self._wake_lock, contextlib.suppress(OSError):
            self._waker.send(b"w")

    def has_begun(self, worker: int) -> bool:
        """See `Workers.has_begun`."""
        return self._workers[worker].has_begun

    def stack(self, worker: int) -> str:
        """See `Workers.stack`."""
        found = self.processes[worker]
        with self._wake_lock:  # `close` closes the file: another may get its number
            if self._is_closing or found.pid is None or found.exitcode is not None:
                return ""
            stacks = os.dup(self._stacks.fileno())
        try:
            return deaths.read(stacks, found.pid)
        finally:
            os.close(stacks)

    def has_lost(self) -> bool:
        """See `Workers.has_lost`."""
        if os.getpid() != self._pid or self._is_closing or not self.is_whole:
            return True
        return any(
            each.has_ended or each.error or each.process.exitcode is not None
            for each in self._workers
        )

    # ------------------------------------------------------------- the end

    def end(self, worker: int) -> None:
        """See `Workers.end`."""
        each = self._workers[worker]
        each.num_pending = 0
        if os.getpid() == self._pid and not each.has_ended:
            self._forget(each)

    def close(self) -> None:
        """See `Workers.close`."""
        if os.getpid() != self._pid:
            return
        with deferred_signals():
            self._is_closing = True
            self.wake()
            # A thread that receives leaves the lock at once. One that pickles may not.
            has_lock = self._lock.acquire(timeout=_END_SECONDS[0])
            try:
                if not self._is_closed:
                    self._is_closed = True
                    self._close()
            finally:
                if has_lock:
                    self._lock.release()

    def _close(self) -> None:
        for worker in self._workers:
            worker.channel.close()
            while worker.answers:
                descriptors.close(worker.answers.pop()[2])
        left = started = [each for each in self.processes if each.pid]
        for seconds, stop in zip(_END_SECONDS, ("terminate", "kill", ""), strict=True):
            deadline = time.monotonic() + seconds
            for each in left:
                each.join(max(0.0, deadline - time.monotonic()))
            left = [each for each in left if each.exitcode is None]
            for each in left if stop else ():
                if not self._is_forgotten(each):
                    getattr(each, stop)()
        # `multiprocessing` would keep them, and send SIGTERM to their numbers at exit.
        _disown({each for each in left if self._is_forgotten(each)})
        with self._wake_lock:
            for end in self._open:
                end.close()
        for each in started:
            each._popen.close()  # its descriptors; its exit code stays

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        # Later, the globals of this module are gone: the argument is not one of them.
        # If they are closed, a Ctrl-C that arrives in here would be lost for nothing.
        if not is_finalizing() and hasattr(self, "_waker") and not self._is_closed:
            self.close()


def _dump(task: Any) -> tuple[bytes, list[int]]:
    """Return a task as bytes and descriptors."""
    try:
        data = pickle.dumps(task, pickle.HIGHEST_PROTOCOL)
    except Exception:  # the general way may know how, or says why
        data = _GLOBAL
    if _GLOBAL not in data:  # plain data: there is nothing to pickle otherwise
        return data, []
    return descriptors.dump(task)


def _disown(ended: set[Any]) -> None:
    """Make ``multiprocessing`` forget processes that are no children of this one."""
    children: Any = process._children  # type: ignore[attr-defined]  # private
    children -= ended


def _disown_in_child(pool: ProcessWorkers) -> None:
    # Otherwise a child of `os.fork` terminates the parent's workers when it exits.
    _disown({*pool.processes})


_pools: Living[ProcessWorkers] = Living(_disown_in_child, at_exit=ProcessWorkers.close)
