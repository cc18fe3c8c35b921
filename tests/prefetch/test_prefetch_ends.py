"""At every end of a pass, its thread, its workers and its descriptors end too."""

from __future__ import annotations

import copy
import functools
import gc
import json
import multiprocessing
import multiprocessing.queues
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from pyparallel import PreDataLoader
from pyparallel.prefetch import iterator
from tests.support.loader.prefetch_loaders import (
    SOON,
    Numbers,
    firsts,
    nothing_left,
    passes,
    prefetch_threads,
    until,
)
from tests.support.repository.folders import ROOT, SUPPORT, python_path

pytestmark = [
    pytest.mark.one_backend,
    pytest.mark.slow,
    pytest.mark.usefixtures("patient"),
]

TOO_LATE = (
    "PreDataLoader: an epoch must start before the interpreter exits, but it is "
    "exiting. Iterate over the loader itself."
)
#: Seconds by which no end of the interpreter is later than one without any pass.
AT_ONCE = 4.0


@pytest.mark.parametrize(("num_workers", "times"), [(0, 50), (2, 8)])
def test_breaks_leave_nothing(num_workers: int, times: int, loader: Any) -> None:
    with nothing_left():
        pre = PreDataLoader(loader(num_workers))
        for _ in range(times):
            for _ in pre:
                break
        assert len(prefetch_threads()) == 0  # joined, not only asked to stop


def test_close_ends_all_iterators_and_allows_new_ones(loader: Any) -> None:
    with passes(loader()) as pre:
        its = [iter(pre), iter(pre)]
        assert [int(next(it)[0, 0]) for it in its] == [0, 0]
        pre.next()
        assert len(prefetch_threads()) == 3
        pre.close()
        assert not prefetch_threads()
        assert [next(it, "end") for it in its] == ["end", "end"]
        pre.close()
        assert int(pre.next()[0, 0]) == 0


def test_a_pass_can_be_closed_by_itself(loader: Any) -> None:
    with nothing_left():
        it = iter(PreDataLoader(loader(2)))
        next(it)
        it.close()
        it.close()
        assert not prefetch_threads() and next(it, "end") == "end"


@pytest.mark.parametrize("wrap", [lambda plain: plain, PreDataLoader])
def test_workers_in_the_middle_of_a_batch_are_ended_by_close(
    wrap: Any, loader: Any
) -> None:
    with nothing_left():
        plain = loader(2, Numbers(4, functools.partial(time.sleep, 60)))
        pre = PreDataLoader(wrap(plain))
        it = iter(pre)
        next(it)
        until(lambda: len(it._thread.items) == 1)
        until(lambda: it._thread._activity[0] == "next(loader)")
        start = time.monotonic()
        pre.close()
        assert time.monotonic() - start < SOON


def test_close_waits_for_the_threads_that_feed_the_workers(
    monkeypatch: pytest.MonkeyPatch, loader: Any
) -> None:
    feed = multiprocessing.queues.Queue._feed

    def feed_slowly(*args: Any) -> None:
        feed(*args)
        time.sleep(0.05)

    monkeypatch.setattr(
        multiprocessing.queues.Queue, "_feed", staticmethod(feed_slowly)
    )
    with nothing_left():
        it = iter(PreDataLoader(loader(2)))
        next(it)
        it.close()
        names = [thread.name for thread in threading.enumerate()]
        assert "QueueFeederThread" not in names


def test_close_waits_for_no_batch_and_keeps_persistent_workers(loader: Any) -> None:
    go_on = multiprocessing.Event()
    dataset = Numbers(4, functools.partial(go_on.wait, 60))
    plain = loader(1, dataset, persistent_workers=True)
    with passes(plain) as pre:
        assert [int(next(pre)[0, 0]) for _ in range(2)] == [0, 2]
        it: Any = pre._current
        until(lambda: it._thread._activity[0] == "next(loader)")
        start = time.monotonic()
        pre.close()
        assert time.monotonic() - start < SOON
        assert not prefetch_threads()
        assert all(worker.is_alive() for worker in plain._iterator._workers)
        go_on.set()
        assert firsts(pre) == [0, 2, 4, 6, 8, 10]
        plain._iterator = None


def test_an_iterator_with_other_references_is_closed() -> None:
    class Rows:
        closed = 0

        def __iter__(self) -> Any:
            return self

        def __next__(self) -> int:
            return 1

        def close(self) -> None:
            self.closed += 1

    rows = Rows()
    for _ in PreDataLoader(lambda: rows):
        break
    assert rows.closed == 1


def test_a_worker_death_is_raised_by_next_and_not_within_a_step(loader: Any) -> None:
    list(loader(1))  # from now on torch looks for the dead in the main thread
    with passes(loader(1, Numbers(4, functools.partial(time.sleep, 60)))) as pre:
        it = iter(pre)
        next(it)
        worker = it._thread.source._workers[0]
        poll = worker._popen.poll

        def late(*flags: int) -> Any:
            if threading.current_thread() is not threading.main_thread():
                time.sleep(0.2)  # this thread could tell torch, whose handler is first
            return poll(*flags)

        worker._popen.poll = late
        os.kill(worker.pid, signal.SIGKILL)
        items = it._thread.items
        until(lambda: items and items[-1].error is not None)  # a step
        with pytest.raises(RuntimeError, match=r"^DataLoader: .* worker \d+ \(pid \d+"):
            list(it)


def test_a_pass_in_a_cycle_is_collected(loader: Any) -> None:
    with nothing_left():
        cycle: dict[str, Any] = {"pass": iter(PreDataLoader(loader(2)))}
        cycle["itself"] = cycle
        next(cycle["pass"])
        assert len(prefetch_threads()) == 1
        del cycle
        gc.collect()
        assert not prefetch_threads()


def test_a_forked_child_gets_an_error_at_once_and_can_iterate_anew(loader: Any) -> None:
    with passes(loader()) as pre:
        it = iter(pre)
        next(it)
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                signal.alarm(20)
                with pytest.raises(
                    RuntimeError, match=r"process that made it, pid \d+"
                ):
                    next(it)
                it.close()
                assert len(firsts(pre)) == 6
                del it
                gc.collect()
                code = 0
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert len(firsts(it)) == 5  # here nothing has changed


def test_pickles_and_copies_keep_the_loader_and_the_options() -> None:
    pre = PreDataLoader([1, 2, 3], "cpu", 5, next_epoch=False, timeout=7)
    next(pre)
    for other in (pickle.loads(pickle.dumps(pre)), copy.deepcopy(pre), copy.copy(pre)):
        assert list(other) == [1, 2, 3]
        options = (other.device.type, other.queue_size, other.timeout)
        assert options == ("cpu", 5, 7)
        assert other._current is None
    with pytest.raises(TypeError, match=r"^PreDataLoader: an iterator must stay in"):
        pickle.dumps(iter(pre))
    pre.close()


# The end of the interpreter.


@pytest.fixture(scope="module", params=["torch", "ours"])
def exits(request: pytest.FixtureRequest) -> dict[str, list[Any]]:
    """Run all ends in processes forked from one that has imported torch."""
    environment = {
        **os.environ,
        "PYTHONPATH": python_path(ROOT),
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [
            sys.executable,
            "-W",
            "error",
            str(SUPPORT / "loader" / "prefetch_exits.py"),
            request.param,
        ],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize(
    ("end", "code", "says"),
    [
        ("returns", 0, ""),
        ("raises", 1, "ValueError: on purpose"),
        ("exits", 5, ""),
        # No handler catches it, so the process ends by SIGINT: 130 in a shell.
        ("is interrupted", -signal.SIGINT, "KeyboardInterrupt"),
    ],
)
def test_the_interpreter_exits_at_once_with_its_own_code(
    exits: dict[str, list[Any]], end: str, num_workers: int, code: int, says: str
) -> None:
    tries = exits[f"{end} {num_workers}"]
    idle = min(seconds for _, seconds, _, _ in exits["is idle 0"])
    assert min(seconds for _, seconds, _, _ in tries) < idle + AT_ONCE
    for got, _, _, errors in tries:
        assert got == code, errors
        assert says in errors and errors.count("Traceback") == bool(says)
        assert says or not errors


def test_a_thread_that_outlives_the_main_thread_gets_all_its_batches(
    exits: dict[str, list[Any]],
) -> None:
    for code, _, output, errors in exits["is outlived 0"]:
        assert (code, errors) == (0, "")
        first, can_start, second = output.splitlines()
        assert first == "[0, 2, 4, 6, 8, 10]"
        # Some releases of Python 3.12 and 3.13 (3.12.1, 3.13.0) start no thread there:
        # the next pass is refused.
        if sys.version_info[:2] not in ((3, 12), (3, 13)):
            assert can_start == "True"
        assert second == ("1" if can_start == "True" else TOO_LATE)


def test_no_pass_starts_while_the_interpreter_exits(
    exits: dict[str, list[Any]],
) -> None:
    for code, _, output, errors in exits["is late 0"]:
        assert (code, errors) == (0, "")
        assert output == f"{TOO_LATE}\n"


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        ("can't create new thread at interpreter shutdown", TOO_LATE),
        ("can't start new thread", "can't start new thread"),
    ],
)
def test_a_thread_that_cannot_start_is_an_error_and_no_pass(
    monkeypatch: pytest.MonkeyPatch, error: str, raised: str, loader: Any
) -> None:
    def start(thread: threading.Thread) -> None:
        raise RuntimeError(error)

    running = set(iterator._running)
    monkeypatch.setattr(threading.Thread, "start", start)
    pre = PreDataLoader(loader())
    with pytest.raises(RuntimeError) as caught:
        next(iter(pre))
    assert str(caught.value) == raised
    assert set(iterator._running) == running
    monkeypatch.undo()
    assert firsts(pre) == [0, 2, 4, 6, 8, 10]


class GradientState:
    """The part of accelerate's class that a prepared loader calls."""

    def __init__(self) -> None:
        self.active: list[Any] = []

    def _add_dataloader(self, loader: Any) -> None:
        self.active.append(loader)

    def _remove_dataloader(self, loader: Any) -> None:
        self.active = [each for each in self.active if each is not loader]


class Prepared:
    """A loader as accelerate prepares it."""

    def __init__(self, state: GradientState) -> None:
        self.gradient_state, self.end_of_dataloader, self.remainder = state, False, -1

    def __iter__(self) -> Iterator[int]:
        self.gradient_state._add_dataloader(self)
        self.remainder = 2
        for number in range(4):
            self.end_of_dataloader = number == 3
            yield number
        self.gradient_state._remove_dataloader(self)


def test_accelerate_finds_the_end_of_an_epoch_at_the_batch_of_the_loop() -> None:
    state = GradientState()
    loader = Prepared(state)
    ahead = PreDataLoader(loader, queue_size=4)
    for _ in range(2):
        for number in ahead:
            until(lambda: all(not thread.is_alive() for thread in prefetch_threads()))
            (active,) = state.active
            assert active.end_of_dataloader is (number == 3) and active.remainder == 2
        assert state.active == [] and loader.gradient_state is state
    for _ in ahead:
        break
    until(lambda: state.active == [])
    with ahead:
        next(ahead)
        assert len(state.active) == 1
    assert state.active == []
    until(lambda: loader.gradient_state is state)
