"""Contexts whose workers are threads are refused, and leave nothing behind."""

from __future__ import annotations

import multiprocessing
import queue
import threading
from collections.abc import Callable
from multiprocessing.context import SpawnContext
from typing import Any

import pytest

from pyparallel import DataLoader, PreDataLoader


class WorkerThread(threading.Thread):
    """A thread that torch takes for a process, as in MONAI."""

    pid = property(id)


class ThreadQueue(queue.Queue[Any]):
    """A queue that torch takes for one of processes."""

    def close(self) -> None: ...
    def cancel_join_thread(self) -> None: ...


class ClassContext(SpawnContext):
    """A context that has the class of the threads."""

    Process: Any = WorkerThread
    Queue: Any = ThreadQueue


class MethodContext(SpawnContext):
    """A context that makes the threads in a method."""

    def Process(self, *args: Any, **options: Any) -> Any:
        return WorkerThread(*args, **options)


def made_with(context: Any) -> None:
    DataLoader(range(4), num_workers=2, multiprocessing_context=context)


def set_later(context: Any) -> None:
    loader = DataLoader(range(4), num_workers=2)
    loader.multiprocessing_context = context
    iter(loader)


def read_ahead(context: Any) -> None:
    loader = DataLoader(range(4), num_workers=2, persistent_workers=True)
    loader.multiprocessing_context = context
    next(iter(PreDataLoader(loader)))


@pytest.mark.parametrize("use", [made_with, set_later, read_ahead])
@pytest.mark.parametrize("context", [ClassContext(), MethodContext()])
def test_threads_as_workers_are_refused(
    use: Callable[[Any], None], context: Any
) -> None:
    with pytest.raises(TypeError, match=r"of .*\.WorkerThread\. Remove multiproc"):
        use(context)
    assert not any(isinstance(it, WorkerThread) for it in threading.enumerate())
    # The advice, and other loaders of the program.
    loader = DataLoader(range(4), 2, num_workers=1)
    assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3]]


@pytest.mark.parametrize("method", multiprocessing.get_all_start_methods())
def test_contexts_of_processes_are_accepted(method: str) -> None:
    for context in (method, multiprocessing.get_context(method)):
        loader = DataLoader(range(4), num_workers=1, multiprocessing_context=context)
        found: Any = loader.multiprocessing_context
        assert found.get_start_method() == method
