"""Workers that are threads: two queues for each, and nothing is pickled or copied.

Note: [ends of threads]. A thread cannot be killed. `close` tells all threads to end and
waits for a short time. A thread in the user's code ends when that code returns. They
refer to their queues, not to this object, so dropping it ends them.

The threads are daemons, so the exit of the interpreter does not wait for one that
hangs. See Note [exit]: native code that ends later would abort the process. So the exit
raises `SystemExit` in code of Python, and waits for threads that compute.
"""

from __future__ import annotations

import contextlib
import contextvars
import ctypes
import os
import sys
import threading
import time
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from typing import Any

from ..core.cpu_time import busy_seconds
from ..core.process import at_exit
from ..core.signals import deferred_signals
from .interface import Late, ThreadProgram, Woken, Workers, check_process

#: The time of all threads to finish their tasks before `close` leaves them alone.
_END_SECONDS = 0.7
#: The time for which the exit waits for threads that compute.
_EXIT_SECONDS = 60.0
#: A thread that is busy for less time in `_END_SECONDS` hangs.
_COMPUTING_SECONDS = 0.01

_pools: weakref.WeakSet[ThreadWorkers] = weakref.WeakSet()


class _Failed:
    """An exception of a program that is not an answer."""

    def __init__(self, error: BaseException) -> None:
        self.error = error


class _Worker:
    """The queues of a thread.

    Attributes:
        tasks: with None as the end.
        answers: in the order of their tasks.
        tokens: of all workers: one for each answer, to wake the receiver.
        program: the code of the thread.
    """

    def __init__(self, tokens: SimpleQueue[None], program: ThreadProgram) -> None:
        self.tasks: SimpleQueue[Any] = SimpleQueue()
        self.answers: deque[Any] = deque()
        self.tokens, self.program = tokens, program
        self.has_begun = self.is_ended = False

    def work(self, number: int) -> None:
        """Answer tasks until the end, in the thread."""
        try:
            self._work(number)
        finally:  # also after the `SystemExit` of Note [exit]
            self.program.end()

    def _work(self, number: int) -> None:
        program = self.program
        try:
            program.start(number)
        except BaseException as error:
            self._answer(_Failed(error))
        self.has_begun = True
        while (task := self.tasks.get()) is not None and not self.is_ended:
            try:
                answer = program.run(task)
            except BaseException as error:
                answer = _Failed(error)
            if not self.is_ended:
                self._answer(answer)
            del task, answer  # while waiting, refer to no batch

    def _answer(self, answer: Any) -> None:
        self.answers.append(answer)
        self.tokens.put(None)

    def end(self) -> None:
        """Let the thread end soon, and drop its answers."""
        self.is_ended = True
        self.program.stop()
        self.tasks.put(None)
        self.answers.clear()


class _Thread(threading.Thread):
    """The thread of a worker."""


class ThreadWorkers(Workers):
    """Threads that run programs. See Note [ends of threads].

    Args:
        programs: the program of each worker.

    Raises:
        RuntimeError: the system allows no more threads.
    """

    is_whole: bool

    def __init__(self, programs: Sequence[ThreadProgram]) -> None:
        self._pid = os.getpid()
        self._is_closing = self._is_woken = False
        self._tokens: SimpleQueue[None] = SimpleQueue()
        self._workers = [_Worker(self._tokens, program) for program in programs]
        self.processes: list[Any] = []
        self._threads: list[threading.Thread] = []
        _pools.add(self)
        try:
            with deferred_signals():
                self._start()
        except BaseException:
            self.close()
            raise

    def _start(self) -> None:
        for number, worker in enumerate(self._workers):
            thread = _Thread(
                target=contextvars.copy_context().run,
                args=(worker.work, number),
                name=f"pyparallel-worker-{number}",
                daemon=True,
            )
            thread.start()
            self._threads.append(thread)

    def send(self, worker: int, task: Any) -> None:
        """See `Workers.send`."""
        check_process(self._pid)
        self._workers[worker].tasks.put(task)

    def receive(self, worker: int | None, timeout: float | None) -> tuple[int, Any]:
        """See `Workers.receive`."""
        check_process(self._pid)
        end = float("inf") if timeout is None else time.monotonic() + timeout
        asked = range(len(self._workers)) if worker is None else (worker,)
        while True:
            number = max(asked, key=self._num_answers)
            if answers := self._workers[number].answers:
                if self._tokens.qsize():  # one for each answer
                    self._tokens.get()
                answer = answers.popleft()
                if isinstance(answer, _Failed):
                    raise answer.error
                return number, answer
            self._wait(end)

    def _num_answers(self, worker: int) -> int:
        return len(self._workers[worker].answers)

    def _wait(self, end: float) -> None:
        """Wait for an answer of any worker. The tokens of older answers end it, too."""
        if self._is_closing or self._is_woken:
            self._is_woken = False
            raise Woken
        left = min(end - time.monotonic(), threading.TIMEOUT_MAX)
        if left <= 0:
            raise Late
        self.is_whole = True
        self.on_wait()
        with contextlib.suppress(Empty):
            self._tokens.get(timeout=left)
        self.is_whole = False

    def wake(self) -> None:
        """See `Workers.wake`."""
        self._is_woken = True
        self._tokens.put(None)

    def end(self, worker: int) -> None:
        """See `Workers.end`."""
        self._workers[worker].end()

    def close(self) -> None:
        """See `Workers.close`. See Note [ends of threads]."""
        if os.getpid() != self._pid:
            return
        self.end_all()
        _join(self._threads)

    def end_all(self) -> None:
        """Let all threads end soon."""
        self._is_closing = True
        for worker in self._workers:
            worker.end()
        self._tokens.put(None)

    def has_lost(self) -> bool:
        """See `Workers.has_lost`."""
        if os.getpid() != self._pid or self._is_closing or not self.is_whole:
            return True
        return not all(thread.is_alive() for thread in self._threads)

    def has_begun(self, worker: int) -> bool:
        """See `Workers.has_begun`."""
        return self._workers[worker].has_begun

    def stack(self, worker: int) -> str:
        """See `Workers.stack`."""
        frame = sys._current_frames().get(self._threads[worker].ident or 0)
        return "" if frame is None else "".join(traceback.format_stack(frame))

    def name(self, worker: int) -> str:
        """See `Workers.name`."""
        return f"thread {self._threads[worker].name}"

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        # Later, the globals of this module are gone: the argument is not one of them.
        if not is_finalizing() and hasattr(self, "_workers"):
            self.close()


def _join(threads: Sequence[threading.Thread]) -> None:
    """Wait for a short time until threads have ended."""
    deadline = time.monotonic() + _END_SECONDS
    for thread in threads:
        if thread is not threading.current_thread():  # garbage was collected in it
            thread.join(max(0.0, deadline - time.monotonic()))


@at_exit
def _end_threads() -> None:
    """End all threads, also those whose pool is gone. See Note [ends of threads]."""
    current, pid = threading.current_thread(), os.getpid()
    for pool in list(_pools):
        if pool._pid == pid:
            pool.end_all()
    threads = [each for each in threading.enumerate() if isinstance(each, _Thread)]
    _join(threads)  # an exception in the last code of a thread would be printed
    raise_in = ctypes.pythonapi.PyThreadState_SetAsyncExc
    for thread in threads:
        if thread.is_alive() and thread is not current:
            raise_in(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(SystemExit))
    deadline = time.monotonic() + _EXIT_SECONDS
    used: dict[_Thread, float] = {}
    while time.monotonic() < deadline:
        _join(threads)
        threads = [each for each in threads if each.is_alive() and each is not current]
        before, used = used, {each: busy_seconds(each) for each in threads}
        spent = [used[each] - before.get(each, -1.0) for each in threads]
        if max(spent, default=0.0) < _COMPUTING_SECONDS:  # they hang, or have ended
            return
