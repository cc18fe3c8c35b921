"""Failing datasets, dying workers and leaving consumers, with real processes."""

from __future__ import annotations

import os
import pickle
import signal
import sys
import threading
import time
from typing import Any

import psutil
import pytest
import torch

import pyparallel
from tests.support.loader.loader_sets import Making, Numbers, all_free, children, only
from tests.support.loader.prefetch_loaders import TwoArguments

# When an iterator ends, torch closes queues that their feeder threads may still use.
pytestmark = [
    pytest.mark.one_backend,
    pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.timeout(120),
]

both_lives = pytest.mark.parametrize("persistent", [False, True])


class RefusingError(Exception):
    """An error that does not pickle, though its class does."""

    def __reduce__(self) -> Any:
        raise TypeError("never")


def local_error() -> type[Exception]:
    class LocalError(Exception):
        pass

    return LocalError


def fail(error: BaseException) -> Any:
    raise error


class Evil:
    """Pickling it raises an error that does not pickle."""

    def __reduce__(self) -> Any:
        raise local_error()("pickled")


def explode() -> None:
    raise ZeroDivisionError


class Bad:
    """Unpickling it raises an error."""

    def __reduce__(self) -> Any:
        return explode, ()


UNPICKLABLE = (AttributeError, pickle.PicklingError)
#: The error of a sample, the class that arrives, and a part of the message.
ERRORS: list[tuple[Any, Any, str]] = [
    (lambda: fail(KeyError("key")), KeyError, "KeyError: 'key'"),
    (lambda: fail(ValueError("v" * 5000)), ValueError, "v" * 5000),
    (lambda: fail(MemoryError()), MemoryError, "MemoryError"),
    (lambda: fail(TwoArguments(3, "here")), TwoArguments, "3 at here"),
    (lambda: fail(local_error()("l")), RuntimeError, "LocalError, which does not p"),
    (lambda: fail(RefusingError("r")), RefusingError, "RefusingError: r"),
    (lambda: torch.ones(2) + torch.ones(3), RuntimeError, "must match the size"),
    (lambda: [torch.ones(2), lambda: 1], UNPICKLABLE, "<lambda>"),
    (lambda: {"a": torch.ones(2), "b": (i for i in "x")}, TypeError, "cannot pickle"),
    (lambda: [torch.ones(2), Evil()], RuntimeError, "LocalError, which does not pickl"),
    (lambda: leaf() * 2, RuntimeError, "autograd graph cannot be sent"),
    (lambda: [torch.ones(2), Bad()], ZeroDivisionError, ""),
]


def leaf() -> torch.Tensor:
    return torch.ones(2, requires_grad=True)


def make(i: int) -> Any:
    return torch.full((20_000,), i) if i >= 100 else ERRORS[i][0]()


def test_errors_arrive_and_the_epoch_continues() -> None:
    # The first, the last and every other batch is one that arrives.
    order = [100, *(n for i in range(len(ERRORS)) for n in (i, 101 + i))]
    loader = pyparallel.DataLoader(
        Making(make), num_workers=1, sampler=order, collate_fn=only
    )
    batches = iter(loader)
    for i in order:
        if i >= 100:
            assert next(batches).unique().tolist() == [i]
            continue
        _, kind, text = ERRORS[i]
        with pytest.raises(kind) as caught:
            next(batches)
        assert text in str(caught.value)
        if kind is not ZeroDivisionError:  # which this process raises
            # The text of torch, or a cause with it.
            shown = f"{caught.value} {caught.value.__cause__}"
            assert "in DataLoader worker process 0" in shown
            assert "Traceback" in shown
    with pytest.raises(StopIteration):
        next(batches)
    del caught  # its traceback has the slab
    assert all_free(loader)


class Dying:
    """A collate function that ends its worker at the third batch, if a file says so."""

    def __init__(self, path: Any, how: str) -> None:
        self.path, self.how = path, how

    def __call__(self, batch: list[torch.Tensor]) -> Any:
        made = pyparallel.collate(batch)
        if batch[0][0] == 2 and self.path.exists():
            if self.how == "SIGKILL":
                os.kill(os.getpid(), signal.SIGKILL)
            elif self.how == "_exit":
                os._exit(3)
            sys.exit(4)
        return made


@both_lives
@pytest.mark.parametrize("how", ["SIGKILL", "_exit", "exit"])
def test_a_worker_that_dies_with_a_slab(
    how: str, persistent: bool, tmp_path: Any
) -> None:
    path = tmp_path / "die"
    path.touch()
    loader = pyparallel.DataLoader(
        Numbers(6, (30_000,)),
        num_workers=1,
        collate_fn=Dying(path, how),
        persistent_workers=persistent,
    )
    started = time.monotonic()
    code = {"_exit": "3", "exit": "4"}.get(how, "-9, SIGKILL")
    rule = rf"worker 0 \(pid \d+\) died \(exit code {code}\)\. Indices of its pending"
    with pytest.raises(RuntimeError, match=rule) as caught:
        for _ in loader:
            pass
    assert time.monotonic() - started < 15
    del caught
    path.unlink()
    for _ in range(2):
        assert [int(batch[0, 0]) for batch in loader] == [0, 1, 2, 3, 4, 5]
    assert all_free(loader)


@pytest.mark.parametrize("how", ["SIGKILL", "_exit", "exit"])
def test_a_thread_that_iterates_gets_the_error_of_a_death(
    how: str, tmp_path: Any
) -> None:
    path = tmp_path / "die"
    path.touch()
    loader = pyparallel.DataLoader(
        Numbers(6, (30_000,)),
        num_workers=2,
        collate_fn=Dying(path, how),
        multiprocessing_context="fork",
    )
    errors: list[str] = []

    def consume() -> None:
        try:
            for _ in loader:
                pass
        except RuntimeError as error:
            errors.append(str(error))

    thread = threading.Thread(target=consume, daemon=True)
    thread.start()
    thread.join(30)
    assert not thread.is_alive()
    assert errors.pop().startswith("DataLoader: a worker must live")
    assert all_free(loader)


@both_lives
def test_a_consumer_that_leaves_early(persistent: bool) -> None:
    loader = pyparallel.DataLoader(
        Numbers(12), num_workers=1, persistent_workers=persistent
    )
    batches = iter(loader)
    next(batches)
    del batches
    # A persistent iterator stays, and drops its remaining batches at the next start.
    assert [int(batch[0, 0]) for batch in loader] == list(range(12))
    assert all_free(loader)


@pytest.mark.usefixtures("forked")
def test_a_lost_worker_ends_the_others() -> None:
    loader = pyparallel.DataLoader(
        Numbers(8), num_workers=2, persistent_workers=True, prefetch_factor=1
    )
    assert len(list(loader)) == 8
    workers = [worker.pid for worker in loader._iterator._workers]
    os.kill(workers[1], signal.SIGKILL)
    # Until all of its threads have ended. A zombie may still have some.
    os.waitid(os.P_PID, workers[1], os.WEXITED | os.WNOWAIT)
    assert [int(batch[0, 0]) for batch in loader] == list(range(8))
    assert not {process.pid for process in children()} & set(workers)
    assert len(psutil.Process().children()) >= 2
    assert all_free(loader)
