"""Workers that are threads: the program of each, and its batches in recycled slabs.

Note: [batches of threads]. A thread writes the tensors of a batch into a slab of the
ring, as a worker process does. The batch is not packed: its tensors refer to the slab,
which is free when the last of them is. A batch that ``collate_fn`` allocated elsewhere
stays there, so each batch is written once.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

import torch

from ..batch import allocation
from ..core import thread_state
from ..core.errors import LoaderWarning, type_name, warn_once
from ..core.torch_private import pin_memory, worker_thread
from ..core.tracing import span
from ..shm.messages import INLINE_NBYTES, LazySlab
from ..shm.ring import Ring
from ..transfer.device import relaxed_here
from ..workers.threads import ThreadWorkers
from .fetchers import Source
from .messages import collate_tensors
from .reader import BATCH, ERROR, Answer, Reader, Task, nbytes_of

#: The longest time in which a new thread sets its number of torch's threads.
_START_SECONDS = 5.0


class ThreadReader:
    """The program of a worker thread. See Note [batches of threads].

    Its arguments are those of `BatchProgram` and `Reader`, and ``pin_device``: the
    device for which batches are pinned, None to not pin them.
    """

    def __init__(
        self,
        source: Source,
        base_seed: int,
        ring: Ring | None,
        first_holder: int,
        pin_device: str | None,
    ) -> None:
        policy = copy.copy(source.policy)
        if policy is not None:
            policy.failures = []
        tracker = source.tracker and replace(source.tracker, policy=policy)
        init = source.init and partial(_init_shared, source.init, source.dataset)
        self._source = source._replace(
            policy=policy, tracker=tracker, init=init, in_thread=True
        )
        self._reader = Reader(self._source, base_seed)
        self._base_seed, self._ring, self._holder = base_seed, ring, first_holder
        self._pin_device = pin_device
        self._limit = 0 if pin_device else INLINE_NBYTES
        self._state = thread_state.capture()  # that of the loop, as in a fork
        self.has_one_thread: SimpleQueue[None] = SimpleQueue()
        self._exit = ExitStack()

    def start(self, worker: int) -> None:
        """See `Program.start`."""
        torch.get_num_threads()  # a first call later would set it anew
        torch.set_num_threads(1)
        self.has_one_thread.put(None)
        self._holder += worker
        source = self._source
        self._exit.enter_context(thread_state.applied(self._state))
        about = worker, source.num_workers, self._base_seed + worker, source.dataset
        self._exit.enter_context(worker_thread(*about, collate_tensors))
        self._reader.start(worker)
        # Here and not in `__del__`, which would print the `SystemExit` of the exit.
        self._exit.callback(self._reader.close)

    def stop(self) -> None:
        """See `ThreadProgram.stop`."""
        self._reader.stop()

    def end(self) -> None:
        """See `ThreadProgram.end`."""
        self._exit.close()

    def run(self, task: Task) -> Answer:
        """See `Program.run`."""
        slab = LazySlab(self._ring, self._holder, self._limit)
        try:
            with allocation.allocate_from(slab):
                answer = self._reader.run(task)
            if answer.kind == BATCH:
                return self._keep(answer, slab)
        except BaseException as error:  # also of `sys.exit`, as without workers
            answer = Answer(ERROR, error)
        slab.release()
        try:
            return answer
        finally:
            del answer  # an error refers to this frame, which must not refer to it

    def _keep(self, answer: Answer, lazy: LazySlab) -> Answer:
        slab, lazy.slab = lazy.slab, None
        with span("pyparallel.pack"):
            if slab is not None and self._ring is not None:
                self._ring.keep(slab)  # this pins it
            if self._pin_device is not None:
                with relaxed_here():  # beside a graph capture of another thread
                    pinned = pin_memory(answer.value, self._pin_device)
                answer.value = pinned
        miss, is_hit = lazy.miss, slab is not None and lazy.miss is None
        nbytes = nbytes_of(answer.value)
        answer.figures = self._reader.end_message(nbytes, is_hit, miss is not None)
        answer.is_pinned, answer.miss = self._pin_device is not None, miss
        return answer


def _init_shared(init: Callable[[int], Any], dataset: Any, worker: int) -> None:
    """Call the user's function, and warn if it changes the dataset of all threads."""
    before = dict(getattr(dataset, "__dict__", {}))
    init(worker)
    for name, value in dict(getattr(dataset, "__dict__", {})).items():
        if before.get(name, before) is not value:
            warn_once(
                "PP221",
                f"DataLoader: worker_init_fn set the attribute {name!r} of "
                f"{type_name(dataset)}, which all threads share, so the last thread "
                "has set it for all. Use get_worker_info() where samples are read, an "
                "attribute of a threading.local(), or "
                "worker_method='multiprocessing'.",
                LoaderWarning,
            )


def start_threads(programs: Sequence[ThreadReader]) -> ThreadWorkers:
    """Start a thread for each program, each with one thread of torch's own.

    torch has one number of threads for each thread, and one for future threads. The
    workers set both, so this thread restores the second one.
    """
    count = torch.get_num_threads()
    workers = ThreadWorkers(programs)
    try:
        for program in programs:
            program.has_one_thread.get(timeout=_START_SECONDS)
    except Empty:
        pass  # the system is very busy, and the loop may begin
    except BaseException:
        workers.close()
        raise
    finally:
        torch.set_num_threads(count)
    return workers
