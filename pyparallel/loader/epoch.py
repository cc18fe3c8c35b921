"""The iterator of a loader: one class for all kinds of workers.

It sends tasks so that each worker has ``prefetch_factor`` of them, and delivers the
answers in the order of the tasks. A worker answers its tasks in their order. So the
pending tasks are one queue of the numbers of workers.
"""

from __future__ import annotations

import copy
import operator
import os
import pickle
import sys
from collections import deque
from collections.abc import Callable, Iterator
from threading import get_ident
from typing import Any, NamedTuple

import torch
from torch.utils.data import IterableDataset, dataloader

from ..core.errors import LoaderWarning, add_note, type_name, warn, warn_once
from ..core.torch_private import LoaderIter, RangeInC, is_profiling, pin_memory
from ..core.tracing import span
from ..shm import pinning
from ..shm.messages import INLINE_NBYTES
from ..transfer.device import relaxed_here
from ..workers.interface import InlineWorkers, Late, Woken, WorkerDied, Workers
from ..workers.processes import ProcessWorkers
from ._batch_receiver import BatchReceiver
from ._loader_state import unread_numbers
from ._progress import Progress
from ._random_state import SampleTask
from .arguments import Loader
from .errors import (
    dead_worker_error,
    early_end,
    late_text,
    raise_error,
    raise_thread_error,
)
from .fetchers import Source
from .messages import BatchProgram, unpack_answer
from .preflight import check_workers, raise_lack_of_files, start_method_of
from .reader import BATCH, END, ERROR, NOT_STARTED, Answer, Reader
from .sample_errors import count_failures
from .stats import PADDING
from .thread_reader import ThreadReader, start_threads
from .tracebacks import clear_frames, format_indices, hide_frames, message_of

_LENGTH_ADVICE = (
    "For multiprocessing data-loading, this could be caused by not properly "
    "configuring the IterableDataset replica at each worker. Please see "
    "https://pytorch.org/docs/stable/data.html#torch.utils.data.IterableDataset for "
    "examples."
)
#: A warning follows if a worker does not begin its first batch for this time.
_IDLE_SECONDS = 60.0
#: The globals of torch's methods. Methods of other libraries have other globals.
_TORCH_GLOBALS = vars(dataloader)


class Stopped(Exception):
    """The wait for a batch was cancelled."""

    def __str__(self) -> str:
        return (
            "PreDataLoader: one pass at a time must read an iterator with workers, but "
            "a pass that was closed still reads it. Make a new iterator."
        )


def _never() -> bool:
    return False


class _Pending(NamedTuple):
    """A task without an answer: its worker, and the error if it was not sent."""

    worker: int
    indices: Any
    error: Exception | None


class Epoch(LoaderIter):
    """An iterator over one epoch, or over several with persistent workers.

    torch's class is a base for ``isinstance`` alone: nothing of it runs.
    """

    _has_workers = _is_closed = _has_unstarted = False
    _reader = 0  # the thread of the pass, 0 if it has ended
    _pid = 0  # of the process with the workers
    _pool: Any = None
    _ring: Any = None
    _pins_ring = False
    _is_stopped: Callable[[], bool]

    def __init__(self, loader: Loader) -> None:
        if loader.num_workers:
            check_workers(loader)  # the context may be another one now
        self._receiver: BatchReceiver = loader._receiver
        self._meter = self._receiver.meter
        self._meter.pause()
        self._progress = progress = Progress(loader)
        self._num_workers = count = loader.num_workers
        self._has_workers = count > 0
        self._dataset, self._dataset_kind = loader.dataset, loader._dataset_kind
        self._in_order = loader.in_order or not count
        self._timeout, self._max_errors = loader.timeout, loader.max_errors
        self._persistent_workers = loader.persistent_workers
        self._prefetch_factor = loader.prefetch_factor
        self._window_size = (loader.prefetch_factor or 1) * max(count, 1)
        self._profile_name = f"enumerate(DataLoader)#{type(self).__name__}.__next__"
        self._range = RangeInC(self._profile_name)  # for profilers outside of Python
        self._start_method = start_method_of(loader) if count else ""
        self._worker_init_fn = loader.worker_init_fn  # the profiler may replace it
        self._choose_pinning(loader)
        # The base seed comes first, see Note [iterators of a sampler].
        self._index_sampler = loader._index_sampler
        progress.indices()
        drawn = torch.empty((), dtype=torch.int64).random_(generator=loader.generator)
        self._base_seed: Any = progress.choose_base_seed(int(drawn))
        self._epoch: tuple[int, int | None] = (0, None)
        self._is_stopped = _never
        self._stale = [0] * max(count, 1)
        self._window: deque[_Pending] = deque()
        self._prepare_ring(loader)
        try:
            self._start_workers(loader)
            self._begin(loader, progress.dataset.turn % count if count else 0)
            progress.finish_setup()
            self._reader = get_ident()
            self._num_returned = progress.num_delivered
            if loader._loaded is not None:
                self._meter.add(sample_errors=len(progress.errors))
            loader._progress, loader._loaded = progress, None
        except BaseException:  # of the sampler or of a signal handler
            self._shutdown_workers()
            raise

    def _choose_pinning(self, loader: Loader) -> None:
        """Pin batches where torch does, with its warnings."""
        if loader.pin_memory and loader.pin_memory_device:
            text = (
                "pin_memory_device is deprecated, the current accelerator will be used "
                f"as the device,ignore pin_memory_device='{loader.pin_memory_device}'."
            )
            warn(text, UserWarning)
        found = torch.accelerator.current_accelerator()
        self._pin_memory = bool(loader.pin_memory) and torch.accelerator.is_available()
        text = "'pin_memory' argument is set as true but "
        if loader.pin_memory and not self._pin_memory:
            text += "no accelerator is found, then device pinned memory won't be used."
            warn(text, UserWarning)
        elif self._pin_memory and found is not None and found.type == "mps":
            self._pin_memory = False
            text += "not supported on MPS now, device pinned memory won't be used."
            warn(text, UserWarning)
        self._pin_memory_device = found.type if found and self._pin_memory else None

    def _prepare_ring(self, loader: Loader) -> None:
        """Create the ring, or use that of the last epoch."""
        if not self._has_workers:
            return
        receiver, self._pid = self._receiver, os.getpid()
        self._ring = receiver.ring_for(self._num_workers, self._prefetch_factor or 2)
        if receiver.is_new:
            receiver.is_new = False
            for finding in filter(operator.attrgetter("warns"), loader.preflight()):
                warn_once("PP209", finding.text, LoaderWarning, finding.name)
        self._first_holder = 0
        if self._ring is not None:
            self._first_holder = self._ring.new_holders(self._num_workers)
            pinner = pinning.accelerator_pinner() if loader.pin_memory else None
            if pinner is not None:
                self._ring.pin(pinner)
                self._pins_ring = True

    def _start_workers(self, loader: Loader) -> None:
        progress = self._progress
        seeds = progress.seeds_samples
        source = Source(
            dataset=loader.dataset,
            collate_fn=loader.collate_fn,
            is_iterable=isinstance(loader.dataset, IterableDataset),
            auto_collation=loader._auto_collation,
            drop_last=loader.drop_last,
            num_workers=self._num_workers,
            init=self._worker_init_fn if self._has_workers else None,
            tracker=progress.dataset.track(loader.dataset, progress.policy),
            policy=progress.policy,
            has_keys=progress.samples is not None,
            seeds=seeds,
        )
        if loader.worker_method == "thread" and self._has_workers:
            self._start_threads(source)
            return
        reader = Reader(source, self._base_seed)
        if not self._has_workers:
            self._pool = InlineWorkers(reader)
            return
        context = loader.multiprocessing_context or torch.multiprocessing.get_context()
        program = BatchProgram(
            reader,
            self._ring,
            self._first_holder,
            # The ring is pinned. Pinning small tensors would cost more.
            inline_nbytes=0 if self._pins_ring else INLINE_NBYTES,
        )
        self._numbers = unread_numbers(loader.dataset)
        try:
            self._pool = ProcessWorkers(context, program, self._num_workers)
        except OSError as error:
            raise_lack_of_files(error, self._num_workers)
            raise
        if self._pin_memory_device == "cuda":
            # `is_pinned` is False before. Workers that fork later could not use CUDA.
            torch.cuda.init()

    def _start_threads(self, source: Source) -> None:
        running = self._receiver.threads
        if any(pid != os.getpid() for pid in running.values()):
            raise RuntimeError(
                "DataLoader: with worker_method='thread' iter() must not be called in "
                "a process that was forked while the threads ran, because they may "
                "have held locks of the dataset then. Fork before the first iter() or "
                "after the epoch, or start the process by spawn or forkserver."
            )
        if self._pin_memory:  # the first pinned block: a fork beside it can deadlock
            torch.empty(1, pin_memory=True)
        device = self._pin_memory_device
        own = source, self._base_seed, self._ring, self._first_holder, device
        running[id(self)] = self._pid
        self._pool = start_threads([ThreadReader(*own) for _ in self._stale])

    def _reset(self, loader: Loader, first_iter: bool = False) -> None:
        """Begin the next epoch of persistent workers, by torch's name."""
        self._pool.is_whole = False
        if self._pool.packs and unread_numbers(self._dataset) != self._numbers:
            self._numbers = unread_numbers(self._dataset)
            warn_once(
                "PP222",
                f"DataLoader: set_epoch of {type_name(self._dataset)} must set an "
                "integer attribute 'epoch', because persistent workers have copies of "
                "the dataset, but it has none. So their copies keep the old number. "
                "Set self.epoch as well, or use persistent_workers=False.",
                LoaderWarning,
            )
        self._progress = loader._progress = progress = Progress(loader, reset=True)
        for pending in self._window:
            self._stale[pending.worker] += pending.error is None
        self._window.clear()
        # Threads share the dataset, which has the number already.
        number = progress.dataset.number if self._pool.packs else None
        self._epoch = (self._epoch[0] + 1, number)
        self._begin(loader, 0)
        self._num_returned = 0
        self._pool.is_whole = True

    def _begin(self, loader: Loader, first_worker: int) -> None:
        self._sampler_iter = self._progress.indices()
        self._progress.pass_over(loader)
        self._IterableDataset_len_called = vars(loader)["_IterableDataset_len_called"]
        self._turn = first_worker
        self._active = [True] * max(self._num_workers, 1)
        self._num_sent = 0  # of this epoch
        self._num_passed = 0  # batches that were delivered, raised or left out
        self._end_failures: tuple[Any, ...] = ()
        self._drawn_all = False
        for _ in range(self._window_size if self._has_workers else 0):
            self._send_next()

    # ------------------------------------------------------------------- tasks

    def _send_next(self) -> None:
        """Draw the next indices and send them to a worker."""
        if self._drawn_all:
            return
        worker = self._choose_worker()
        if worker is None:
            return
        if not self._progress.program_draws:  # the sampler may wait for the loop
            self._pool.on_wait()
        try:
            task = next(self._sampler_iter)
        except StopIteration:
            self._drawn_all = True
            return
        is_plain = not isinstance(task, SampleTask)
        indices, error = _copied(task if is_plain else task.indices), None
        task = indices if is_plain else (*task[:-1], indices)
        sent = (self._epoch, self._num_sent, task)
        self._num_sent += 1
        try:
            self._pool.send(worker, sent)
        except Exception as cause:  # raised at its turn, so that no batch is lost
            sampler = getattr(self._index_sampler, "sampler", self._index_sampler)
            error = RuntimeError(
                f"DataLoader: the indices {format_indices(indices)} of the sampler "
                f"{type(sampler).__name__} must pickle to reach a worker, but raised "
                f"{type(cause).__name__}: {message_of(cause)}. Yield indices that "
                "pickle."
            )
            error.__cause__ = cause
        self._window.append(_Pending(worker, indices, error))

    def _choose_worker(self) -> int | None:
        """Return the next worker in turn that has not ended, None if all have."""
        for _ in range(self._num_workers):
            worker, self._turn = self._turn, (self._turn + 1) % self._num_workers
            if self._active[worker] and (self._in_order or not self._is_full(worker)):
                return worker
        return None

    def _is_full(self, worker: int) -> bool:
        num_pending = sum(each.worker == worker for each in self._window)
        return num_pending >= self._window_size // max(sum(self._active), 1)

    # ----------------------------------------------------------------- answers

    def _next_data(self) -> Any:
        """Return the next batch. Raise its error, or ``StopIteration`` at the end."""
        meter = self._meter
        start = meter.clock()
        try:
            with span("pyparallel.wait"):
                answer = self._next_answer() if self._has_workers else self._read_here()
        except BaseException as error:
            meter.count_wait(start)
            if isinstance(error, StopIteration):
                self._end_epoch()
            raise
        if answer.failures:
            self._count_failures(answer.failures)
        if answer.report is not None:
            self._progress.dataset.report = pickle.loads(answer.report)
        meter.count_wait(start, 1, answer.figures)
        if answer.miss is not None or answer.figures[PADDING]:
            self._receiver.check(answer)
        if self._pin_memory and not answer.is_pinned:
            # In this thread, unlike torch: few batches are outside of a pinned ring.
            # Without such a ring, a `PreDataLoader` pins them during the step.
            self._pool.on_wait()
            with relaxed_here():  # beside a graph capture of another thread
                return pin_memory(answer.value, self._pin_memory_device)
        return answer.value

    def _end_epoch(self) -> None:
        self._meter.pause()
        # Not earlier: the workers of a resumed epoch send them again.
        failures, self._end_failures = self._end_failures, ()
        self._count_failures(failures)
        self._progress.check_end()

    def _next_answer(self) -> Answer:
        """Return the answer of a worker with the next batch."""
        while self._window:
            if (error := self._window[0].error) is not None:
                self._window.popleft()
                self._pass_task()
                raise error
            worker, answer = self._receive()
            self._forget_task(worker)
            if answer.kind == END:
                self._end_worker(worker, answer.failures)
                continue
            self._pass_task()
            if answer.kind in (ERROR, NOT_STARTED):
                self._has_unstarted |= answer.kind == NOT_STARTED
                if not self._pool.packs:
                    raise_thread_error(answer.value, worker, answer.location)
                raise_error(answer.value)
            if answer.kind == BATCH:
                return answer
            self._leave_out(answer)
        if not self._persistent_workers:
            self._shutdown_workers()
        raise StopIteration

    def _read_here(self) -> Answer:
        """Return the answer with the next batch, read in this thread.

        No task is pending, so this is the work of `_next_answer` in less time.
        """
        self._pool.on_wait()
        while not self._drawn_all:
            try:
                task = next(self._sampler_iter)
            except StopIteration:
                self._drawn_all = True
                break
            answer: Answer = self._pool.answer((self._epoch, self._num_passed, task))
            if answer.kind == END:
                self._end_failures, self._drawn_all = answer.failures, True
                break
            self._num_passed += 1
            if answer.kind == BATCH:
                return answer
            self._leave_out(answer)
        raise StopIteration

    def _pass_task(self) -> None:
        self._num_passed += 1
        self._send_next()

    def _forget_task(self, worker: int) -> None:
        if self._window[0].worker == worker:
            self._window.popleft()
            return
        for place, pending in enumerate(self._window):  # in_order=False
            if pending.worker == worker and pending.error is None:
                del self._window[place]
                return

    def _receive(self) -> tuple[int, Answer]:
        """Wait for an answer of this epoch."""
        while True:
            number, packed = self._receive_packed()
            is_stale = self._stale[number] > 0
            self._stale[number] -= is_stale
            try:  # also if the answer is dropped: this frees its slab
                answer = unpack_answer(*packed) if self._pool.packs else packed
            except BaseException as error:  # of the user's class, or of a signal
                if is_stale and isinstance(error, Exception):
                    continue
                where = f"of worker {number}"
                if not is_stale:
                    for indices in self._pending(number)[:1]:
                        where += f", indices {format_indices(indices)}"
                    self._forget_task(number)
                    self._pass_task()
                what = "the unpickling of a batch"
                if isinstance(error, StopIteration):
                    raise early_end(what, error, where) from error
                add_note(error, f"DataLoader: {what} {where}, raised this error.")
                raise
            if not is_stale:
                return number, answer

    def _receive_packed(self) -> tuple[int, Any]:
        worker = self._window[0].worker if self._in_order else None
        while True:
            if self._is_stopped():
                raise Stopped
            try:
                found: tuple[int, Any] = self._pool.receive(
                    worker, self._timeout or _IDLE_SECONDS
                )
                return found
            except Woken:
                if self._is_closed:  # by another thread
                    raise Stopped from None
            except Late:
                self._handle_late()
            except OSError as lack:  # of a later start, or of a batch
                raise_lack_of_files(lack, self._num_workers)
                raise
            except WorkerDied as death:
                error = dead_worker_error(death, self._pending(death.worker))
                self._window.clear()
                self._drawn_all = True
                self._shutdown_workers()
                raise error from None

    def _handle_late(self) -> None:
        """Raise an error if the user has set a timeout, or warn of an idle worker."""
        worker = self._window[0].worker
        if not self._timeout and self._pool.has_begun(worker):
            return
        text = late_text(self._pool, worker, self._pending(worker), self._start_method)
        if self._timeout:
            raise RuntimeError(
                f"DataLoader timed out after {self._timeout} seconds: {text}"
            ) from None
        warn_once("PP214", f"DataLoader: {text}", LoaderWarning, text[:40])

    def _pending(self, worker: int) -> list[Any]:
        """Return the indices of each batch of a worker that has not arrived."""
        if isinstance(self._dataset, IterableDataset):
            return []
        window = self._window.copy()  # atomic, because another thread may send tasks
        return [pending.indices for pending in window if pending.worker == worker]

    def _end_worker(self, worker: int, failures: tuple[Any, ...]) -> None:
        """Handle the end of the data of one worker."""
        self._end_failures += failures
        self._active[worker] = False
        kept: deque[_Pending] = deque()
        for pending in self._window:  # these would end as well
            if pending.worker != worker:
                kept.append(pending)
            elif pending.error is None:
                self._stale[worker] += 1
        self._window = kept
        if not self._persistent_workers:
            self._pool.end(worker)
        self._send_next()

    # ------------------------------------------------------------ counters, position

    def _leave_out(self, answer: Answer) -> None:
        """Count a batch whose samples all failed."""
        progress = self._progress
        self._count_failures(answer.failures)
        progress.leave_out()
        if answer.report is not None:
            progress.dataset.report = pickle.loads(answer.report)
        progress.count_batch(self._num_passed)

    def _count_failures(self, failures: tuple[Any, ...]) -> None:
        if failures:
            count_failures(self._progress.errors, failures, self._max_errors)
            self._meter.add(sample_errors=len(failures))

    def __next__(self) -> Any:
        """Return the next batch."""
        handled = None
        try:  # nothing before it may call a signal handler
            handled, self._reader = sys.exc_info()[1], get_ident()
            self._pool.is_whole = False
            try:
                batch = self._next()
            except StopIteration:
                self._progress.finish()
                self._pool.is_whole, self._reader = True, 0
                raise
            self._progress.count_batch(self._num_passed)
            if (outer := self._progress.outer) is not None:
                outer.count_read(batch)
            self._pool.is_whole = True
            return batch
        except StopIteration:
            raise
        except BaseException as error:
            # A signal handler that raises during a wait loses no batch.
            self._progress.failed |= not self._pool.is_whole
            if isinstance(error, Exception):
                self._pool.is_whole = True
                if self._has_workers and self._pool.packs:
                    clear_frames(error, handled)
                hide_frames(error)
            else:  # a notebook keeps the error, so its frames would keep the workers
                clear_frames(error, handled)
                del self
            raise

    def _next(self) -> Any:
        """Return the next batch in torch's range for profilers."""
        inherited = LoaderIter.__next__
        if getattr(inherited, "__globals__", None) is not _TORCH_GLOBALS:
            return super().__next__()
        if is_profiling():
            recorded: Any = torch.autograd.profiler.record_function(self._profile_name)
        else:
            recorded = self._range
        with recorded:
            batch = self._next_data()
        self._num_returned += 1
        length = self._IterableDataset_len_called
        if length is not None and self._dataset_kind and self._num_returned > length:
            text = (
                f"Length of IterableDataset {self._dataset} was reported to be {length}"
                f"(when accessing len(dataloader)), but {self._num_returned} samples "
                "have been fetched. "
            )
            warn(text + (_LENGTH_ADVICE if self._has_workers else ""), UserWarning)
        return batch

    # ------------------------------------------------------------------- the end

    @property
    def _workers(self) -> list[Any]:
        """The processes, by torch's name."""
        found: list[Any] = self._pool.processes
        return found

    @property
    def _rcvd_idx(self) -> int:
        """The number of batches that have passed, by torch's name."""
        return self._num_passed

    @property
    def _num_yielded(self) -> int:
        """The position of the loop, by torch's name: SpeechBrain saves it.

        As in a state, batches count that raised an error or were left out, and those
        that a `PreDataLoader` has read ahead do not.
        """
        return self._progress.position_of_loop()

    @_num_yielded.setter
    def _num_yielded(self, value: int) -> None:
        self._num_returned = value  # of a method of torch that a library has replaced

    def attend(
        self,
        is_stopped: Callable[[], bool] = _never,
        on_wait: Callable[[], object] = bool,
    ) -> None:
        """Set functions for `next`. Without arguments, none.

        Args:
            is_stopped: waits raise `Stopped` if it returns True.
            on_wait: called before `next` waits, or runs code that may wait.
        """
        self._is_stopped, self._pool.on_wait = is_stopped, on_wait
        self._reader = 0 if is_stopped is _never else get_ident()

    def wake(self) -> None:
        """Let a wait in another thread ask the function of `attend` again."""
        self._pool.wake()

    def next_pass(self) -> Epoch | None:
        """Return an iterator with these workers for the next pass, None without them.

        Note: [passes of persistent workers]. They run one pass at a time. A pass that
        another thread reads keeps them, so the next pass gets new ones. In one thread,
        the next pass takes them from a pass that was left. It is another object, so the
        loop of the old one gets no batches of it.
        """
        reader, this = self._reader, get_ident()
        if reader not in (0, this) and reader in sys._current_frames():
            return None
        self._reader = this
        if self.has_lost_worker():
            return None
        return self if self._progress.finished else self._hand_over()

    def _hand_over(self) -> Epoch:
        """Return an iterator with these workers, and leave this one without."""
        taker: Epoch = object.__new__(type(self))
        vars(taker).update(vars(self))
        if (pid := self._receiver.threads.pop(id(self), None)) is not None:
            self._receiver.threads[id(taker)] = pid
        self._has_workers, self._has_unstarted = False, True
        self._drawn_all = self._drawn_all and not self._window
        self._sampler_iter = _end_early(self._num_passed)
        self._window, self._pool = deque(), Workers()
        self._pool.processes = []
        return taker

    def has_lost_worker(self) -> bool:
        """Return True if the next epoch needs new workers. This ends the old ones.

        A worker that could not start may start in the next epoch.
        """
        lost: bool = self._has_unstarted or self._pool.has_lost()
        if lost:
            self._shutdown_workers()
        return lost

    def _shutdown_workers(self) -> None:
        """End the workers, by torch's name: Lightning and composer call it."""
        if not self._has_workers or self._pid != os.getpid():
            return  # or the workers belong to the parent of this fork
        self._is_closed = True
        if self._pool is not None:
            self._pool.on_wait()
            self._pool.close()
        self._receiver.threads.pop(id(self), None)
        # A thread may still write into its slab, and frees it after that.
        packs = self._pool is not None and self._pool.packs
        if packs and self._ring is not None and self._ring.created_here:
            for worker in range(self._num_workers):
                self._ring.reclaim(self._first_holder + worker)

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        """End the workers, unless exit handlers of the interpreter have done so.

        Note: [interpreter exit]. After the exit handlers, the interpreter clears the
        globals of all modules and drops the remaining objects. No code of this package
        runs then. ``weakref.finalize`` calls nothing after the exit handlers. This
        method must check this itself, without a global.
        """
        if not is_finalizing():
            self._shutdown_workers()


def _end_early(num_batches: int) -> Iterator[Any]:
    """End a pass that another one has replaced, with a warning."""
    warn_once(
        "PP223",
        "DataLoader: a loop with persistent workers must end before iter() is called "
        f"again, but it was called after {num_batches} of its batches, so it ends "
        "there. If it contains another loop over this loader, make a second loader for "
        "that, or use persistent_workers=False.",
        LoaderWarning,
    )
    yield from ()


def _copied(indices: Any) -> Any:
    """Return indices that the sampler does not change for its next batch."""
    if hasattr(indices, "__array__"):  # of NumPy or torch
        return copy.deepcopy(indices)
    return indices.copy() if type(indices) is list else indices
