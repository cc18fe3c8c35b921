"""Workers that are threads: two queues for each, and nothing is pickled or copied.

Note: [ends of threads]. A thread cannot be killed. `close` tells all threads to end and
waits for a short time. A thread in the user's code ends when that code returns. The
threads are daemons, so the exit of the interpreter does not wait for one that hangs.
They refer to their queues, not to this object, so dropping it ends them.
"""

from __future__ import annotations

import contextlib
import contextvars
import os
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from typing import Any

from ..core.process import Living
from .interface import ThreadProgram, Woken, Workers, check_process

#: The time of all threads to finish their tasks before `close` leaves them alone.
_END_SECONDS = 0.7

_pools: Living[ThreadWorkers] = Living(at_exit=lambda pool: pool.close())


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
    """

    def __init__(self, tokens: SimpleQueue[None]) -> None:
        self.tasks: SimpleQueue[Any] = SimpleQueue()
        self.answers: deque[Any] = deque()
        self.tokens = tokens
        self.has_begun = self.is_ended = False

    def work(self, program: ThreadProgram, number: int) -> None:
        """Answer tasks until the end, in the thread."""
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
        program.end()

    def _answer(self, answer: Any) -> None:
        self.answers.append(answer)
        self.tokens.put(None)

    def end(self) -> None:
        """Let the thread end after its task, and drop its answers."""
        self.is_ended = True
        self.tasks.put(None)
        self.answers.clear()


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
        self._workers = [_Worker(self._tokens) for _ in programs]
        self.processes: list[Any] = []
        self._threads: list[threading.Thread] = []
        _pools.add(self)
        try:
            for number, program in enumerate(programs):
                target = self._workers[number].work
                thread = threading.Thread(
                    target=contextvars.copy_context().run,
                    args=(target, program, number),
                    name=f"pyparallel-worker-{number}",
                    daemon=True,
                )
                thread.start()
                self._threads.append(thread)
        except BaseException:
            self.close()
            raise

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
            raise TimeoutError
        self.is_whole = True
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
        self._is_closing = True
        for worker in self._workers:
            worker.end()
        self._tokens.put(None)
        deadline = time.monotonic() + _END_SECONDS
        for thread in self._threads:
            if thread is not threading.current_thread():  # garbage was collected in it
                thread.join(max(0.0, deadline - time.monotonic()))

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
