"""The recorder: runs inside a script and its workers, writes down what happens when.

Note: [what is replaced while a profile is taken]. Nothing of this is in the way of a
script that is not profiled. While one is, the ranges of `core.tracing` come here;
``next()`` of torch's loaders and of `PreDataLoader` is a *wait*; and the function that
gets samples for a batch, in a worker or in the process itself, is a *fetch*, with its
``collate_fn`` in it. torch's loaders are so seen whether or not they are ours.

Every process writes a file of its own, a line for an event as it ends: what was written
is there whatever happens next. The clock is ``time.perf_counter_ns``, which on Linux is
the same for all processes of a machine.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch.utils.data import get_worker_info

from ..batch.padding_stats import Stacked
from ..core.cpu_time import CoreWait, cpu_seconds
from .environment import describe, place, synchronize
from .record import END, STOP, WAIT

#: Holds the settings of a profile that this process is a part of.
VARIABLE = "PYPARALLEL_PROFILE"
#: The thread of a `PreDataLoader` is called so.
_PREFETCH = "pyparallel-prefetch"
#: What a loop is told apart by that waits for no loader known here.
_STEPS = ("collate", "scatter", "step")


@dataclass(frozen=True)
class Settings:
    """What the processes of a profile know.

    Attributes:
        folder: where they write.
        steps: how many steps to watch after the warm-up.
        warmup: how many steps come before those.
        synchronize: end a step when the device has done its work.
        leave: end the script behind the last step.
    """

    folder: str
    steps: int
    warmup: int
    synchronize: bool = True
    leave: bool = False


class EnoughSteps(SystemExit):
    """Ends a script whose steps have been seen, as ``sys.exit(0)`` does."""


class Watch:
    """Writes down what happens in this process and in those that it starts."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.on = True
        self._pid = 0
        self._file = -1
        self._counts: dict[int | str, int] = {}
        self._loaders: dict[int, int] = {}
        self._epochs = 0
        self._local = threading.local()

    def write(self, kind: str, start: int, end: int, **more: int) -> None:
        """Write an event of this thread."""
        thread = threading.current_thread()
        worker = get_worker_info()
        lane = "loop" if thread is threading.main_thread() else f"thread {thread.name}"
        if worker is not None:
            lane = f"worker {worker.id}"
        elif thread.name == _PREFETCH:
            lane = "prefetch"
        row = {"lane": lane, "kind": kind, "start": start, "end": end, **more}
        self._line({**row, "thread": thread.ident})

    def _line(self, row: dict[str, Any]) -> None:
        try:
            if self._pid != os.getpid():
                self._open()
            os.write(self._file, json.dumps(row).encode() + b"\n")
        except OSError:  # the folder is gone, or full: the profile is over
            self.on = False

    def _open(self) -> None:
        """Begin the file of this process; a forked one does not write into another's.

        Two threads may both do so; what they write is put together by the pid.
        """
        pid, settings = os.getpid(), self.settings
        path = Path(settings.folder, f"{pid}-{time.perf_counter_ns()}.jsonl")
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        file = os.open(path, flags, 0o600)
        parent = multiprocessing.parent_process() if get_worker_info() else None
        head = {
            **asdict(settings),
            "pid": pid,
            "parent": None if parent is None else parent.pid,
            "script": Path(sys.argv[0]).name or "python",
            **(place() if parent is None else {}),
            "environment": describe() if parent is None else {},
        }
        os.write(file, json.dumps(head).encode() + b"\n")
        self._file, self._pid = file, pid

    def range(
        self, name: str, inner: AbstractContextManager[object], **more: int
    ) -> Any:
        """Return a context manager around another one that writes an event."""
        kind = name.removeprefix("pyparallel.")
        # A wait is known by its `next()`, with the loader that it is for.
        if not self.on or kind == WAIT:
            return inner
        if kind in _STEPS and not self._loaders and self._is_loop():
            self._count(kind)
        return _Range(self, kind, inner, more)

    def times(self) -> tuple[int, int]:
        """Return the CPU time and the time without a core so far, in nanoseconds."""
        cpu = time.thread_time()
        if get_worker_info() is not None or self._is_loop():
            cpu = cpu_seconds()
        pid, core_wait = getattr(self._local, "core_wait", (0, None))
        if core_wait is None or pid != os.getpid():
            core_wait = CoreWait()
            self._local.core_wait = os.getpid(), core_wait
        return int(1e9 * cpu), int(1e9 * core_wait.seconds())

    def _is_loop(self) -> bool:
        is_main = threading.current_thread() is threading.main_thread()
        return is_main and get_worker_info() is None

    def _count(self, key: int | str, **more: int) -> None:
        """Stop if the steps that are over are as many as were asked for."""
        limit = self.settings.steps + self.settings.warmup
        if self._counts.get(key, 0) >= limit:
            now = time.perf_counter_ns()
            self.write(STOP, now, now, **more)
            self.stop()
            if self.settings.leave and self._is_loop():
                raise EnoughSteps(0)
        elif isinstance(key, str):
            self._counts[key] = self._counts.get(key, 0) + 1

    def stop(self) -> None:
        """Write no more, neither here nor in workers."""
        self.on = False
        try:
            self._stopped(os.getpid()).touch()
        except OSError:
            pass

    def _stopped(self, pid: int | None) -> Path:
        return Path(self.settings.folder, f"{pid}.stopped")

    def fetches(self) -> bool:
        """Tell whether a fetch is to be written; a worker asks what its parent says."""
        parent = multiprocessing.parent_process()
        if self.on and parent is not None and self._stopped(parent.pid).exists():
            self.on = False
        return self.on

    def wait(self, source: Any, get: Callable[[], Any]) -> Any:
        """Return the next batch of a loader's iterator; see Note [what is replaced]."""
        local = self._local
        if not self.on or getattr(local, "waits", False):
            return get()
        is_ahead = threading.current_thread().name == _PREFETCH
        loader = 0 if is_ahead else self._loader(source)
        if not is_ahead:
            if self.settings.synchronize:
                synchronize()
            epoch: int | None = getattr(source, "_profiled_epoch", None)
            self._count(loader, loader=loader, epoch=epoch or 0)
            if not self.on:
                return get()
        start, kind, local.waits = time.perf_counter_ns(), END, True
        try:
            batch = get()
            kind = WAIT
            return batch
        finally:
            local.waits = False
            end = time.perf_counter_ns()
            marker = {}
            if not is_ahead:
                marker = {"loader": loader, "epoch": self._epoch(source, kind == END)}
                if kind == WAIT and getattr(source, "_in_order", True):
                    marker["batch"] = getattr(source, "_rcvd_idx", 0) - 1
                self._counts[loader] = self._counts.get(loader, 0) + (kind == WAIT)
            if not is_ahead or kind == WAIT:
                self.write(kind, start, end, **marker)

    def _loader(self, source: Any) -> int:
        """Return the number of the loader that an iterator belongs to."""
        options = getattr(getattr(source, "_generation", None), "options", None)
        loader = source if options is None else options.loader
        # An iterator of torch's knows the dataset, not the loader that made it.
        key = id(getattr(loader, "_dataset", loader))
        if key not in self._loaders:
            self._loaders[key] = len(self._loaders) + 1
            name = "DataLoader" if options is None else "PreDataLoader"
            row = {"kind": "loader", "name": name, **_sizes(loader)}
            self._line(row)
        return self._loaders[key]

    def _epoch(self, source: Any, is_over: bool) -> int:
        """Return the number of the pass that an iterator is at."""
        epoch: int | None = getattr(source, "_profiled_epoch", None)
        if epoch is None:
            self._epochs += 1
            epoch = self._epochs
        # One with persistent workers is used again.
        source._profiled_epoch = None if is_over else epoch
        return epoch


class _Range:
    """An event of the block inside."""

    __slots__ = (
        *("_inner", "_kind", "_more", "_recording", "_stacked", "_start", "_times"),
        "_watch",
    )

    def __init__(
        self,
        watch: Watch,
        kind: str,
        inner: AbstractContextManager[object],
        more: dict[str, int],
    ) -> None:
        self._watch, self._kind, self._inner, self._more = watch, kind, inner, more
        self._recording: AbstractContextManager[Stacked] | None = None

    def __enter__(self) -> None:
        self._inner.__enter__()
        if self._kind == "collate":
            self._recording = Stacked()
            self._stacked = self._recording.__enter__()
        self._times = self._watch.times()
        self._start = time.perf_counter_ns()

    def __exit__(self, *error: Any) -> None:
        end, more = time.perf_counter_ns(), self._more
        times = zip(("cpu", "core_wait"), self._times, self._watch.times(), strict=True)
        more |= {name: max(0, last - first) for name, first, last in times}
        if self._recording is not None:
            self._recording.__exit__(*error)
            stacked = self._stacked
            more["stacked_nbytes"] = stacked.stacked_nbytes
            more["padding_nbytes"] = stacked.padding_nbytes
        self._inner.__exit__(*error)
        self._watch.write(self._kind, self._start, end, **more)


def batch_number() -> int:
    """Return which batch torch's loop in this worker makes; -1: this is no worker."""
    frame = sys._getframe() if get_worker_info() is not None else None
    while frame is not None and frame.f_code.co_name != "_worker_loop":
        frame = frame.f_back
    number = -1 if frame is None else frame.f_locals.get("idx", -1)
    return number if type(number) is int else -1


def _sizes(loader: Any) -> dict[str, int | None]:
    """Return what a loader, or an iterator of torch's, says of itself, if it does."""
    sampler = getattr(loader, "_index_sampler", None)
    owners = (loader, sampler, getattr(sampler, "sampler", None))
    sizes = [getattr(owner, "batch_size", None) for owner in owners]
    workers = getattr(loader, "_num_workers", getattr(loader, "num_workers", 0))
    return {
        "num_workers": workers if type(workers) is int else None,
        "batch_size": next((size for size in sizes if type(size) is int), None),
    }
