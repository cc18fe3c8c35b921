"""The recorder: writes the events of a script and its workers to files.

Note: [replaced methods]. A script that is not profiled runs the original methods. While
a profile is recorded, `hooks` replaces ``next()`` of torch's loaders and of
`PreDataLoader`: each call is a *wait*. It replaces their ``iter()`` as well. It also
replaces the method that gets the samples of a batch, in workers and in the process
itself: each call is a *fetch*, and contains the call of ``collate_fn``. Therefore
loaders of torch and of pyparallel are recorded alike. The ranges of `core.tracing` are
recorded as well.

Every process writes a file of its own, with a line for each event at its end. A process
that dies loses no earlier event. The clock is ``time.perf_counter_ns``, which on Linux
is the same for all processes of a machine.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import platform
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.utils.data import get_worker_info

from .. import backend
from ..batch.allocation import in_worker as in_worker_process
from ..batch.stack import PaddingCounter
from ..core import versions
from ..core.cpu_time import CoreWait, GilWait, cpu_seconds
from ..core.errors import restoring
from ..core.torch_private import in_worker_thread
from ..loader.applied import applied_changes
from ..loader.preflight import initialised_device, num_cores
from ..loader.reader import Reader, nbytes_of
from ..prefetch.pre_data_loader import PreDataLoader
from . import trial
from .record import END, FIRST_ITER, ITER, STOP, WAIT

#: Holds the settings of the profile to which this process belongs.
VARIABLE = "PYPARALLEL_PROFILE"
#: The name of the thread of a `PreDataLoader`.
_PREFETCH = "pyparallel-prefetch"
#: Ranges that count the steps of a loop without a known loader.
_STEP_RANGES = ("collate", "scatter", "step")


@dataclass(frozen=True)
class Settings:
    """The settings that all processes of a profile share."""

    folder: str  # the folder for their files
    steps: int  # the number of steps to record after the warm-up
    warmup: int  # the number of steps before those
    synchronize: bool = True  # end a step when the device has finished its work
    leave: bool = False  # end the script after the last step


class ProfileComplete(SystemExit):
    """Ends a script whose steps were recorded, as ``sys.exit(0)`` does."""


class Recorder:
    """Writes the events of this process and of the processes that it starts."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.is_recording: bool = True
        self._pid = 0
        self._file = -1
        self._counts: dict[int | str, int] = {}
        # Each number with the dataset of its key: a freed object's id is used again.
        self._loaders: dict[tuple[str, int], tuple[int, Any]] = {}
        self._begun: weakref.WeakSet[Any] = weakref.WeakSet()  # loaders
        # The loader's number of each iterator.
        self._numbers: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._epochs = 0
        self._fetches: Counter[int] = Counter()  # by process
        self._local = threading.local()

    # Not earlier: a thread may still end a range.
    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        if self._file >= 0:
            close(self._file)

    def write(self, kind: str, start: int, end: int, **more: int) -> None:
        """Write an event of the current thread."""
        thread = threading.current_thread()
        worker = get_worker_info()
        lane = "loop" if thread is threading.main_thread() else f"thread {thread.name}"
        if worker is not None:
            lane = f"worker {worker.id}"
        elif thread.name == _PREFETCH:
            lane = "prefetch"
        row = {"lane": lane, "kind": kind, "start": start, "end": end, **more}
        self._write_line({**row, "thread": thread.ident})

    def _write_line(self, row: dict[str, Any]) -> None:
        try:
            if self._pid != os.getpid():
                self._open()
            os.write(self._file, json.dumps(row).encode() + b"\n")
        except OSError:  # the folder was removed or is full: end the profile
            self.is_recording = False

    def _open(self) -> None:
        """Open the file of this process; a forked process opens a file of its own.

        Two threads may both open one: `record.collect` merges files by their pid.
        """
        pid, settings = os.getpid(), self.settings
        path = Path(settings.folder, f"{pid}-{time.perf_counter_ns()}.jsonl")
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        file = os.open(path, flags, 0o600)
        parent = multiprocessing.parent_process() if in_worker_process() else None
        head: dict[str, Any] = {"pid": pid, "parent": parent and parent.pid}
        if parent is None:
            head["record"] = {
                "script": Path(*sys.argv[:1]).name or "python",
                **rank_info(),
                "steps": settings.steps,
                "warmup": settings.warmup,
                "synchronized": settings.synchronize,
                "environment": environment_info(),
            }
        os.write(file, json.dumps(head).encode() + b"\n")
        inherited, self._file, self._pid = self._file, file, pid
        if inherited >= 0:
            os.close(inherited)

    def range(
        self, name: str, inner: AbstractContextManager[object], **more: int
    ) -> Any:
        """Return a context manager around ``inner`` that writes an event at its end."""
        kind = name.removeprefix("pyparallel.")
        # `wait` records the calls of `next()`, with their loader.
        is_trial = getattr(self._local, "is_trial", False)
        if not self.is_recording or kind == WAIT or is_trial:
            return inner
        if kind in _STEP_RANGES and not self._loaders and self._is_loop():
            self._count_step(kind)
        return self._record(kind, inner, more)

    @restoring
    def _record(
        self, kind: str, inner: AbstractContextManager[object], more: dict[str, int]
    ) -> Generator[None, None, None]:
        counting = PaddingCounter() if kind == "collate" else nullcontext()
        with inner, counting as stacked:
            gil_wait = self._begin_gil_wait() if kind == "fetch" else None
            before, start = self.times(), time.perf_counter_ns()
            yield
            end = time.perf_counter_ns()
            more |= _passed(before, self.times(), end - start)
            if gil_wait is not None:
                blocked = end - start - more["cpu"] - more["core_wait"]
                more["gil_wait"] = int(1e9 * gil_wait.end(blocked / 1e9))
                self._local.gil_waits.append(gil_wait)
            if stacked is not None:
                more["stacked_nbytes"] = stacked.stacked_nbytes
                more["padding_nbytes"] = stacked.padding_nbytes
            self.write(kind, start, end, **more)

    def times(self) -> Times:
        """Return the CPU times and the time without a core so far."""
        thread = others = int(1e9 * time.thread_time())
        if in_worker_process() or self._is_loop():
            others = int(1e9 * cpu_seconds())
        pid, core_wait = getattr(self._local, "core_wait", (0, None))
        if core_wait is None or pid != os.getpid():
            core_wait = CoreWait()
            self._local.core_wait = os.getpid(), core_wait
        return Times(thread, others - thread, int(1e9 * core_wait.seconds()))

    def _begin_gil_wait(self) -> GilWait | None:
        """Begin a measurement in a worker thread. None elsewhere, and inside of one."""
        if not in_worker_thread():
            return None
        free: list[GilWait] = vars(self._local).setdefault("gil_waits", [GilWait()])
        found = free.pop() if free else None
        if found is not None:
            found.begin()
        return found

    def _is_loop(self) -> bool:
        is_main = threading.current_thread() is threading.main_thread()
        return is_main and get_worker_info() is None

    def _count_step(self, key: int | str, **more: int) -> None:
        """Stop if all requested steps have ended.

        A loop that makes a dataset and a loader in every step is as long as the number
        of its loaders.
        """
        limit = self.settings.steps + self.settings.warmup
        if self._counts.get(key, 0) >= limit or len(self._loaders) > limit:
            now = time.perf_counter_ns()
            self.write(STOP, now, now, **more)
            self.stop()
            if self.settings.leave and self._is_loop():
                raise ProfileComplete(0)
        elif isinstance(key, str):
            self._counts[key] = self._counts.get(key, 0) + 1

    def stop(self) -> None:
        """End the recording, in this process and in its workers."""
        self.is_recording = False
        self._loaders = {}
        try:
            self._stop_file(os.getpid()).touch()
        except OSError:
            pass

    def _stop_file(self, pid: int | None) -> Path:
        return Path(self.settings.folder, f"{pid}.stopped")

    def records_fetches(self) -> bool:
        """Return True if fetches are recorded; a worker follows its parent."""
        parent = multiprocessing.parent_process()
        if self.is_recording and parent is not None:
            stop = self._stop_file(parent.pid)
            # The folder is removed at the end of the profile.
            self.is_recording = stop.parent.exists() and not stop.exists()
        return self.is_recording

    def run(self, fetch: Callable[[], Any]) -> tuple[Any, float | None]:
        """Return the result of a fetch. If it has a trial, also `trial.held_share`."""
        if self._fetches[os.getpid()] in trial.BATCHES:
            return trial.held_share(fetch)
        return fetch(), None

    def write_batch(self, samples: Any, batch: Any, held: float | None) -> None:
        """Write the sizes of the samples in a batch; see Note [trials] in `trial`."""
        self._fetches[os.getpid()] += 1
        # The objects of the script may raise any exception.
        with contextlib.suppress(Exception), self._set("is_trial"):
            sizes = list(map(trial.size_of, samples))
            row: dict[str, Any] = {"kind": "batch", "sizes": sizes}
            if held is not None:
                row |= {"held": held, **trial.ours(samples, batch)}
            self._write_line(row)

    def _is_recorded(self) -> bool:
        """Return False for a loader inside of another one, or in a worker."""
        is_inside = getattr(self._local, "is_inside", False)
        return self.is_recording and not is_inside and get_worker_info() is None

    @restoring
    def _set(self, flag: str) -> Generator[None, None, None]:
        """Set a flag of this thread within a block."""
        setattr(self._local, flag, True)
        yield
        setattr(self._local, flag, False)

    def begin(self, loader: Any, start: Callable[[], Any]) -> Any:
        """Return ``start()``, a new iterator of a loader, and record the call."""
        if not self._is_recorded():
            return start()
        if _in_prefetch():
            with self.range(ITER, nullcontext()):
                return start()
        kind = ITER if loader in self._begun else FIRST_ITER
        self._begun.add(loader)
        is_ahead = isinstance(loader, PreDataLoader)
        number = (
            self._number(loader.loader, loader) if is_ahead else self._number(loader)
        )
        with self._set("is_inside"), self.range(kind, nullcontext(), loader=number):
            iterator = start()
        self._numbers[iterator] = number
        return iterator

    def wait(self, iterator: Any, get: Callable[[], Any]) -> Any:
        """Return ``get()``, the next batch of a loader's iterator, and record the wait.

        Stream: the host first waits for the accelerator, if ``synchronize`` is set.
        """
        if not self._is_recorded():
            return get()
        if _in_prefetch():
            start = time.perf_counter_ns()
            with self._set("is_inside"):
                batch = get()
            self.write(WAIT, start, time.perf_counter_ns())
            return batch
        loader = self._loader_number(iterator)
        if self.settings.synchronize and initialised_device() is not None:
            torch.accelerator.synchronize()
        epoch: int | None = getattr(iterator, "_profiled_epoch", None)
        self._count_step(loader, loader=loader, epoch=epoch or 0)
        if not self.is_recording:
            return get()
        step = _passed(getattr(self._local, "times", None), self.times())
        start, kind, marker = time.perf_counter_ns(), END, {"loader": loader, **step}
        try:
            with self._set("is_inside"):
                batch = get()
            kind = WAIT
        finally:
            end = time.perf_counter_ns()
            marker["epoch"] = self._epoch_number(iterator, is_over=kind == END)
            if kind == WAIT:
                self._counts[loader] = self._counts.get(loader, 0) + 1
                marker |= _marker_of(iterator, batch)
            self._local.times = self.times()
            self.write(kind, start, end, **marker)
        return batch

    def _loader_number(self, iterator: Any) -> int:
        """Return the number of the loader of an iterator."""
        number = self._numbers.get(iterator)
        if number is not None:
            return number
        options = getattr(getattr(iterator, "_thread", None), "options", None)
        if options is None:
            return self._number(iterator)
        owner = getattr(iterator, "_owner", None)
        return self._number(options.loader, owner and owner())

    def _number(self, source: Any, ahead: Any = None) -> int:
        """Return the number of a loader.

        Args:
            source: a loader of torch, or its iterator. The iterator has no reference to
                its loader, only to its dataset.
            ahead: the `PreDataLoader` that reads it.
        """
        name = "DataLoader" if ahead is None else "PreDataLoader"
        owner = getattr(source, "_dataset", getattr(source, "dataset", source))
        loaders = self._loaders  # another thread may stop
        if (name, id(owner)) not in loaders:
            loaders[name, id(owner)] = len(loaders) + 1, owner
            applied = set(applied_changes(source))
            if getattr(ahead, "next_epoch", False):
                applied.add("next_epoch")
            row = {"kind": "loader", "name": name, **_loader_sizes(source)}
            self._write_line({**row, "applied": sorted(applied)})
        return loaders[name, id(owner)][0]

    def _epoch_number(self, iterator: Any, is_over: bool) -> int:
        """Return the number of the current epoch of an iterator."""
        epoch: int | None = getattr(iterator, "_profiled_epoch", None)
        if epoch is None:
            self._epochs += 1
            epoch = self._epochs
        # Persistent workers use one iterator for all epochs.
        iterator._profiled_epoch = None if is_over else epoch
        return epoch


class Times(NamedTuple):
    """Times of the current thread, in nanoseconds."""

    cpu: int
    others: int  # the CPU time of the other threads that count as its work
    core_wait: int


def _passed(
    before: Times | None, after: Times, elapsed: int | None = None
) -> dict[str, int]:
    """Return the fields of the time between two results of `Recorder.times`.

    The thread can lose the GIL or its core between two clocks. ``elapsed``, the length
    of the event in nanoseconds, limits the times of one thread, so that this wait is no
    part of a short event.
    """
    if before is None:
        return {}
    spent = (max(0, b - a) for a, b in zip(before, after, strict=True))
    cpu, others, core_wait = spent
    if elapsed is not None:
        cpu = min(cpu, elapsed)
        core_wait = min(core_wait, elapsed - cpu)
    return {"cpu": cpu + others, "core_wait": core_wait}


def _in_prefetch() -> bool:
    return threading.current_thread().name == _PREFETCH


def _marker_of(iterator: Any, batch: Any) -> dict[str, int]:
    """Return the number of a batch, if it is known, and its bytes."""
    found = {"nbytes": nbytes_of(batch)}
    if getattr(iterator, "_in_order", True):
        found["batch"] = getattr(iterator, "_rcvd_idx", 0) - 1
    return found


def batch_number() -> int:
    """Return the number of the batch that this worker makes; -1 outside of workers."""
    frame = sys._getframe() if get_worker_info() is not None else None
    while frame is not None and frame.f_code.co_name != "_worker_loop":
        if frame.f_code is Reader.run.__code__:
            return int(frame.f_locals["self"].number)
        frame = frame.f_back
    number = -1 if frame is None else frame.f_locals.get("idx", -1)
    return number if type(number) is int else -1


def _loader_sizes(loader: Any) -> dict[str, int | None]:
    """Return the number of workers and the batch size of a loader or an iterator.

    ``slabs``: it is a loader of this package, which sends batches in shared memory.
    """
    sampler = getattr(loader, "_index_sampler", None)
    owners = (loader, sampler, getattr(sampler, "sampler", None))
    sizes = [getattr(owner, "batch_size", None) for owner in owners]
    workers = getattr(loader, "_num_workers", getattr(loader, "num_workers", 0))
    sends = any(
        cls.__module__.startswith("pyparallel.") for cls in type(loader).__mro__
    )
    return {
        **({"slabs": True} if sends else {}),
        "num_workers": workers if type(workers) is int else None,
        "batch_size": next((size for size in sizes if type(size) is int), None),
    }


def environment_info() -> dict[str, str]:
    """Return versions and the machine, without names of users or folders."""
    used, device = initialised_device(), "CPU"
    if used is not None:
        module = torch.get_device_module(used)
        device = str(getattr(module, "get_device_name", lambda: device)())
    return {
        "pyparallel": f"{versions.VERSION}, {backend.name} backend",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "cores": str(num_cores()),
        "threads of torch": str(torch.get_num_threads()),
        "device": device,
    }


def rank_info() -> dict[str, int | None]:
    """Return the rank of this process and the number of ranks; None without ranks."""
    texts = [os.environ.get(name, "") for name in ("RANK", "WORLD_SIZE")]
    numbers = [int(text) if text.isdecimal() else None for text in texts]
    if dist.is_available() and dist.is_initialized():
        numbers = [dist.get_rank(), dist.get_world_size()]
    return {"rank": numbers[0], "world_size": numbers[1]}
