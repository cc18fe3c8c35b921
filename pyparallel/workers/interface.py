"""The interface of all kinds of workers. It knows no batches and no loader."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol


class Outgoing(NamedTuple):
    """The answer of a worker process to a task.

    Attributes:
        head: bytes that are not empty.
        tail: more bytes, which the receiver gets apart.
        descriptors: sent with the bytes, and closed in this process after that.
        ends: the worker ends after this answer.
    """

    head: bytes
    tail: bytes | bytearray | memoryview = b""
    descriptors: Sequence[int] = ()
    ends: bool = False


class Program(Protocol):
    """The code of workers that share the memory of the caller."""

    def start(self, worker: int) -> None:
        """Prepare worker number ``worker``, in the worker."""

    def run(self, task: Any) -> Any:
        """Return the answer to a task. An error of the task is an answer as well."""


class ThreadProgram(Program, Protocol):
    """The code of a worker that is a thread."""

    def stop(self) -> None:
        """Let `run` return soon, with any answer. Called in another thread."""

    def end(self) -> None:
        """Undo `Program.start`, in the thread. No task follows."""


class PackedProgram(Protocol):
    """The code of worker processes.

    A fork inherits it. Otherwise it is pickled for each worker, with its descriptors.
    """

    def start(self, worker: int) -> None:
        """See `Program.start`."""

    def answer(self, task: Any) -> Outgoing:
        """See `Program.run`."""

    def failed(self, error: Exception) -> Outgoing:
        """Return the answer to a task that could not be unpickled."""


class Workers:
    """Workers of one kind. One thread at a time sends and receives.

    Attributes:
        packs: whether an answer is a tuple of head, tail and descriptors, which its
            receiver closes. Otherwise it is the object that `Program.run` returned.
        processes: the processes, of `multiprocessing`. Empty without processes.
        is_whole: whether an interrupt would lose nothing now. The caller sets it to
            False for its calls. `receive` sets it to True during a wait.
        on_wait: called before `receive` has to wait.
    """

    packs: bool = False
    is_whole: bool = True
    on_wait: Callable[[], object] = bool
    processes: list[Any]

    def send(self, worker: int, task: Any) -> None:
        """Send a task without waiting.

        Raises:
            Exception: the task cannot be pickled. Nothing was sent.
        """
        raise NotImplementedError

    def receive(self, worker: int | None, timeout: float | None) -> tuple[int, Any]:
        """Return the number of a worker and its next answer.

        Args:
            worker: the worker to wait for. None: any worker.
            timeout: in seconds. None: no limit.

        Raises:
            WorkerDied: a worker with tasks has ended, and no answer is there to return.
            ProgramError: a worker could not prepare its program.
            Late: no answer arrived in time.
            Woken: `wake` was called, or `close` in another thread.
            OSError: a worker cannot be started, or no descriptor is left for an answer.
                All workers have been ended.
        """
        raise NotImplementedError

    def wake(self) -> None:
        """Let a `receive` that waits raise `Woken`, or the next one that has to wait.

        For any thread. A receiver that did not ask for it calls `receive` again.
        """

    def end(self, worker: int) -> None:
        """End one worker that gets no more tasks."""

    def close(self) -> None:
        """End all workers, also in the middle of their tasks.

        For any thread. It does nothing a second time, and nothing in a forked child.
        """

    def has_lost(self) -> bool:
        """Return True if these workers cannot run another epoch.

        One has ended, an interrupt may have lost a message, or this process is a fork.
        """
        return False

    def has_begun(self, worker: int) -> bool:
        """Return True if a worker has prepared its program."""
        return True

    def stack(self, worker: int) -> str:
        """Return the stacks of a worker's threads. Empty if they cannot be known."""
        return ""

    def name(self, worker: int) -> str:
        """Return the name by which a user finds a worker."""
        return f"pid {self.processes[worker].pid}"


class InlineWorkers(Workers):
    """The worker of ``num_workers=0``: the calling thread. It reads nothing ahead.

    Attributes:
        answer: returns the answer to a task, in place of `send` and `receive`.
    """

    def __init__(self, program: Program) -> None:
        self.processes: list[Any] = []
        self.answer: Callable[[Any], Any] = program.run
        program.start(0)


def check_process(pid: int) -> None:
    """Raise RuntimeError in a process that is not the one of these workers."""
    if os.getpid() != pid:
        raise RuntimeError(
            "DataLoader: an iterator with workers must be used in the process that "
            f"made it, pid {pid}, but this is pid {os.getpid()}, to which "
            "its batches do not belong. Call iter() of the loader in this process."
        )


class WorkerDied(RuntimeError):
    """A worker ended before it had answered all of its tasks.

    Attributes:
        worker: its number.
        pid: its process id.
        code: its exit code. Negative: the signal that killed it. None: the system has
            not kept it, or the worker runs, but has closed its end of the channel.
    """

    def __init__(self, worker: int, pid: int, code: int | None) -> None:
        super().__init__(worker, pid, code)
        self.worker: int = worker
        self.pid: int = pid
        self.code: int | None = code


class ProgramError(RuntimeError):
    """Worker number `worker` could not prepare its program. The text says why."""

    def __init__(self, worker: int, text: str) -> None:
        super().__init__(
            f"worker {worker} must unpickle and start its program, but raised:\n{text}"
        )
        self.worker = worker


class Late(Exception):
    """No answer arrived in time. A signal handler may raise a `TimeoutError`."""


class Woken(Exception):
    """Another thread called `Workers.wake` or `Workers.close`."""
