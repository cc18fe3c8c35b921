"""Every error below a PreDataLoader is raised in place of its batch."""

from __future__ import annotations

import functools
import gc
import itertools
import multiprocessing
import os
import re
import signal
import sysconfig
import threading
import time
import traceback
import weakref
from typing import Any

import psutil
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

import pyparallel
from pyparallel import LoaderWarning, PreDataLoader
from pyparallel.loader.epoch import Stopped
from pyparallel.prefetch import iterator
from tests.support.loader.prefetch_loaders import (
    SOON,
    Gate,
    Numbers,
    Raise,
    TwoArguments,
    die_in_a_message,
    die_with_the_lock,
    firsts,
    interrupt_each_line,
    nothing_left,
    passes,
    prefetch_threads,
    until,
)
from tests.support.loader.prefetch_loaders import loader as torch_loader

pytestmark = [
    pytest.mark.one_backend,
    pytest.mark.usefixtures("patient"),
]

#: Errors of a sample; what arrives from this process and from a worker; the message.
FAULTS: dict[str, tuple[Raise, type[BaseException], type[BaseException], str]] = {
    "key": (Raise(KeyError, "nonesuch"), KeyError, KeyError, "nonesuch"),
    "two arguments": (
        *(Raise(TwoArguments, 7, "here"), TwoArguments, RuntimeError),
        "7 at here",
    ),
    "file": (  # the system's error for a connection that a dead worker broke
        *(Raise(FileNotFoundError, "x.jpg"), FileNotFoundError, FileNotFoundError),
        "x.jpg",
    ),
    "stop": (
        *(Raise(StopIteration, "early"), RuntimeError, RuntimeError),
        "raised StopIteration a",
    ),
    "exit": (Raise(SystemExit, 3), SystemExit, RuntimeError, "3"),
    "interrupt": (Raise(KeyboardInterrupt), KeyboardInterrupt, RuntimeError, ""),
    "long": (Raise(ValueError, "x" * 1000), ValueError, ValueError, "x" * 1000),
}


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize(
    ("fault", "bad"),
    [*((fault, 5) for fault in FAULTS), *itertools.product(["stop", "exit"], [0, 11])],
)
def test_an_error_arrives_in_the_place_of_its_batch_and_ends_the_iterator(
    fault: str, bad: int, num_workers: int, loader: Any
) -> None:
    act, here, there, words = FAULTS[fault]
    with passes(loader(num_workers, Numbers(bad, act))) as pre:
        cls = there if num_workers else here
        if fault == "two arguments" and isinstance(pre.loader, pyparallel.DataLoader):
            cls = here  # the text of torch's loader only tells the class
        it = iter(pre)
        got = []
        start = time.monotonic()
        with pytest.raises(cls) as caught:
            for batch in it:
                got.append(int(batch[0, 0]))
        assert time.monotonic() - start < SOON
        assert type(caught.value) is cls and words in str(caught.value)
        worker_died = num_workers and fault in ("exit", "interrupt")
        # Batches that a dead worker had sent may be lost with it.
        assert got == [*range(0, bad - bad % 2, 2)][: len(got)]
        assert worker_died or len(got) == bad // 2
        if worker_died:
            assert re.search(r"worker \d \(pid \d+\) died", str(caught.value))
        if not num_workers and fault != "stop":
            frames = traceback.extract_tb(caught.value.__traceback__)
            assert frames[-1].name == "__call__"  # of Raise: the very place
        assert [next(it, "end") for _ in range(3)] == ["end"] * 3


class TwoShards(IterableDataset):
    """The first shard ends at once. The second one fails after its worker ended."""

    def __init__(self) -> None:
        self.first_pid = multiprocessing.Value("i", 0)

    def __iter__(self) -> Any:
        yield 0
        if get_worker_info().id == 0:
            self.first_pid.value = os.getpid()
            return
        until(lambda: self.first_pid.value)
        first = psutil.Process(self.first_pid.value)
        until(lambda: first.status() == psutil.STATUS_ZOMBIE)
        raise ConnectionError("the second shard")


@pytest.mark.parametrize(
    ("cls", "wrap"),
    [
        (DataLoader, PreDataLoader),
        (pyparallel.DataLoader, PreDataLoader),
        (pyparallel.DataLoader, iter),
    ],
)
def test_a_connection_error_of_a_dataset_is_no_death_of_another_worker(
    cls: Any, wrap: Any
) -> None:
    got = []
    with pytest.raises(ConnectionError) as caught:
        for batch in wrap(cls(TwoShards(), num_workers=2)):
            got.append(batch.tolist())
    first, *_, last = str(caught.value).strip().splitlines()
    where = "" if cls is DataLoader else ", at sample 1"
    assert first == f"Caught ConnectionError in DataLoader worker process 1{where}."
    assert last == "ConnectionError: the second shard"
    assert got == [[0], [0]]


@pytest.mark.parametrize("where", ["iter", "transform"])
def test_stop_iteration_from_elsewhere_is_no_end(where: str) -> None:
    def fail(*batch: Any) -> Any:
        raise StopIteration

    below: Any = type("Broken", (), {"__iter__": fail})() if where == "iter" else [1]
    with passes(below, transform=fail if where == "transform" else None) as pre:
        with pytest.raises(RuntimeError, match=r"^PreDataLoader: StopIteration must "):
            list(pre)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_stop_iteration_of_the_loader_of_a_function_is_no_end(num_workers: int) -> None:
    stops = Numbers(5, FAULTS["stop"][0])
    with passes(lambda: torch_loader(num_workers, stops)) as pre:
        with pytest.raises(RuntimeError) as caught:
            list(pre)
    assert str(caught.value) == (
        "PreDataLoader: an epoch must end with its sampler, but the dataset or "
        "collate_fn raised StopIteration after 2 of 6 batches. Raise another error "
        "there."
    )


def test_a_wait_that_another_pass_cancelled_is_an_error() -> None:
    def cancelled() -> Any:
        raise Stopped
        yield

    with passes(cancelled, timeout=SOON) as pre:
        with pytest.raises(Stopped) as caught:
            list(pre)
    assert str(caught.value) == (
        "PreDataLoader: one pass at a time must read an iterator with workers, but a "
        "pass that was closed still reads it. Make a new iterator."
    )


@pytest.mark.parametrize("cls", [DataLoader, pyparallel.DataLoader])
def test_an_iterator_works_without_the_pass_that_read_it(cls: Any) -> None:
    plain = iter(cls(Numbers(), 2, num_workers=1))
    with passes(plain, queue_size=1) as pre:
        assert int(next(pre)[0, 0]) == 0
        pre.close()
        left = firsts(plain)
    assert left[-1] == 10 and left == sorted(left)


def test_a_kept_error_keeps_neither_workers_nor_batches_alive(loader: Any) -> None:
    with nothing_left():
        pre = PreDataLoader(loader(2, Numbers(6, FAULTS["key"][0])))
        with pytest.raises(KeyError) as caught:
            list(pre)
        assert caught.value.__traceback__ is not None
        until(lambda: not prefetch_threads())


#: The ends of a worker of torch's loader, which takes a lock of all workers along.
ENDS = {"with the lock": die_with_the_lock, "in a message": die_in_a_message}


@pytest.mark.slow
@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("end", ENDS)
def test_a_killed_worker_of_torchs_loader_is_named_without_a_wait(
    end: str, persistent: bool
) -> None:
    plain = torch_loader(2, Numbers(4, ENDS[end]), persistent_workers=persistent)
    with passes(plain, more_fds=20) as pre:
        start = time.monotonic()
        with pytest.raises(
            RuntimeError,
            match=r"^DataLoader: a worker must live to the end of its epoch, but "
            r"worker \d \(pid \d+\) died \(exit code -9, SIGKILL\)\.",
        ):
            list(pre)
        assert time.monotonic() - start < SOON
        if persistent:
            plain._iterator._shutdown_workers()
            plain._iterator = None


@pytest.mark.slow
@pytest.mark.parametrize("persistent", [False, True])
def test_a_close_in_a_message_of_a_killed_worker_ends_the_thread(
    persistent: bool,
) -> None:
    plain = torch_loader(1, Numbers(2, die_in_a_message), persistent_workers=persistent)
    with nothing_left(more_fds=20):
        pre = PreDataLoader(plain)
        it = iter(pre)
        until(lambda: it._thread.source is not None)
        worker = it._thread.source._workers[0]
        until(lambda: psutil.Process(worker.pid).status() == psutil.STATUS_ZOMBIE)
        pre.close()  # warnings are errors
        assert not it._thread.thread.is_alive()
        if persistent:
            plain._iterator._shutdown_workers()
            plain._iterator = None


def test_dead_persistent_workers_of_torchs_loader_are_named_in_the_next_epoch() -> None:
    plain = torch_loader(2, persistent_workers=True)
    with passes(plain) as pre:
        for _ in pre:
            break
        victim = plain._iterator._workers[0]
        os.kill(victim.pid, signal.SIGKILL)
        victim.join(10)
        start = time.monotonic()
        with pytest.raises(RuntimeError, match=r"worker \d \(pid \d+\) died"):
            list(pre)
        assert time.monotonic() - start < SOON
        plain._iterator._shutdown_workers()
        plain._iterator = victim = None


def test_a_timeout_names_the_activity_and_can_be_repeated() -> None:
    gate = Gate()
    with passes(gate, timeout=0.2) as pre:
        it = iter(pre)
        until(lambda: it._thread._activity[0] == "next(loader)")
        start = time.monotonic()
        with pytest.raises(
            TimeoutError,
            match=r"^PreDataLoader: batch 0 must arrive within 0\.2 s, but the thread "
            r"has spent \d+\.\d+ s in 'next\(loader\)'\. Increase timeout, or find "
            r"the cause there\.",
        ):
            next(it)
        assert 0.19 < time.monotonic() - start < SOON
        gate.let(2)
        until(lambda: it._thread.items)
        assert next(it) == 0
        gate.let(100)


def test_a_timeout_of_the_loader_itself_is_passed_on(loader: Any) -> None:
    sleeping = Numbers(0, functools.partial(time.sleep, 60))
    with passes(loader(1, sleeping, timeout=0.3)) as pre:
        with pytest.raises(RuntimeError, match=r"timed out after 0\.3 seconds"):
            next(iter(pre))


def test_an_interrupt_while_waiting_is_immediate() -> None:
    gate = Gate()
    with passes(gate) as pre:
        it = iter(pre)
        sent: list[float] = []

        def interrupt() -> None:
            until(lambda: it._thread.wakeups._waiters)
            sent.append(time.monotonic())
            os.kill(os.getpid(), signal.SIGINT)

        thread = threading.Thread(target=interrupt)
        with pytest.raises(KeyboardInterrupt):
            thread.start()
            next(it)
        assert time.monotonic() - sent[0] < SOON
        thread.join()
        gate.let(100)
        assert next(it) == 0  # nothing was lost


@pytest.mark.parametrize("base", [Exception, BaseException])
def test_an_error_of_a_signal_handler_loses_nothing_or_ends_the_iterator(
    base: type[BaseException],
) -> None:
    with passes(range(3), queue_size=5) as pre:

        def start() -> Any:
            it = iter(pre)
            until(lambda: len(it._thread.items) == 4)
            return it

        rests, last = interrupt_each_line(base, start, int)
    assert last == [0, 1, 2]
    assert all(rest in ([0, 1, 2], []) for rest in rests)
    assert [0, 1, 2] in rests and [] in rests


def test_an_error_of_a_signal_handler_ends_the_thread_that_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    start = threading.Thread.start

    def interrupted(thread: threading.Thread) -> None:
        start(thread)
        raise KeyboardInterrupt

    with nothing_left(), pytest.raises(KeyboardInterrupt) as caught:
        monkeypatch.setattr(threading.Thread, "start", interrupted)
        iter(PreDataLoader(itertools.count()))
    assert caught.value.__traceback__ is not None  # it keeps the iterator


def test_an_error_of_the_loader_precedes_a_warning_of_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def warn(prefetch_thread: Any) -> None:
        raise LoaderWarning("[PP210]")

    def failing() -> Any:
        raise LookupError("the cause")
        yield

    monkeypatch.setattr(iterator, "stop", warn)
    with nothing_left(), pytest.raises(LookupError, match=r"^'the cause'$|^the cause$"):
        list(PreDataLoader(failing))


def test_a_stuck_thread_is_warned_about_and_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(iterator.stop, "__defaults__", (iterator.STOP_SECONDS,))
    let_go = threading.Event()

    def stuck() -> Any:
        let_go.wait(60)
        yield 1

    pre = PreDataLoader(stuck)
    it = iter(pre)
    until(lambda: it._thread._activity[0] == "next(loader)")
    start = time.monotonic()
    with pytest.warns(LoaderWarning, match=r"but is still in 'next\(loader\)'\."):
        pre.close()
    assert time.monotonic() - start < SOON
    let_go.set()
    until(lambda: not prefetch_threads())


def test_a_report_of_torch_does_not_keep_a_thread_alive(monkeypatch: Any) -> None:
    real, reports = iterator.stop, ["DataLoader worker (pid 7) is killed by"]

    def reporting(generation: Any) -> None:
        if reports:
            raise RuntimeError(reports.pop())
        real(generation)

    monkeypatch.setattr(iterator, "stop", reporting)
    with nothing_left():
        next(iter(PreDataLoader(range(5))))
        gc.collect()
        assert not reports

    def failing(generation: Any) -> None:
        raise RuntimeError("another")

    monkeypatch.setattr(iterator, "stop", failing)
    it = iter(PreDataLoader(range(5)))
    with pytest.raises(RuntimeError, match=r"^another$"):
        it.close()
    real(it._thread)


def test_a_batch_whose_wait_fails_ends_the_iterator() -> None:
    with passes(range(20)) as pre:
        it = iter(pre)

        def fail(batch: Any) -> Any:
            return Raise(MemoryError, "on the device"), 0

        it._thread.options.device_stage.start = fail
        with pytest.raises(MemoryError, match="on the device"):
            list(it)
        assert next(it, "end") == "end"


@pytest.mark.skipif(
    bool(sysconfig.get_config_var("Py_GIL_DISABLED")),
    reason="free-threaded Python frees an object when its thread runs again",
)
def test_only_the_consumer_keeps_a_batch_alive() -> None:
    blocked = threading.Event()

    class OneThenNone:
        """Unlike a generator, it keeps no reference to its values."""

        given = False

        def __iter__(self) -> Any:
            return self

        def __next__(self) -> torch.Tensor:
            if self.given and blocked.wait(30):
                raise StopIteration
            self.given = True
            return torch.ones(3)

    with passes(OneThenNone()) as pre:
        it = iter(pre)
        alive = weakref.ref(next(it))
        until(lambda: alive() is None)
        blocked.set()
        assert next(it, "end") == "end"
