"""Memory that a device reads is freed once, and never early."""

from __future__ import annotations

import gc
import os
import random
import threading
import weakref
from collections.abc import Callable

import pytest
import torch

from pyparallel.transfer import engine
from pyparallel.transfer.pinned_results import HostSlabs
from tests.support.processes import interpreters

pytestmark = pytest.mark.one_backend


class Source:
    """Memory that records when it is freed."""

    def __init__(self, dropped: list[bool], ready: threading.Event | None = None):
        self.dropped, self.ready = dropped, ready

    def __del__(self):
        self.dropped.append(self.ready is None or self.ready.is_set())


def test_a_device_that_fails_frees_no_source():
    keep_alive = engine.KeepAlive()
    dropped: list[bool] = []
    ticket = keep_alive.hold([Source(dropped)])
    assert keep_alive.release_done() == 1  # without an event so far
    keep_alive.release_when(ticket, lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        keep_alive.release_done()
    assert not dropped
    keep_alive.release_when(ticket, lambda: True)
    assert keep_alive.release_done() == 0 and dropped


class InCycle:
    """Garbage that only a collection finds; it then calls a function."""

    def __init__(self, function: Callable[[], object]) -> None:
        self.me, self.function = self, function

    def __del__(self) -> None:
        self.function()


@pytest.mark.parametrize("what", ["sources", "slabs"])
def test_a_destructor_may_add_memory_during_any_check(what: str) -> None:
    """A collection starts when objects are allocated, as by lists of pairs."""
    keep_alive, slabs = engine.KeepAlive(), HostSlabs(1 << 20)
    kept: list[object] = []

    def hold() -> None:
        keep_alive.release_when(keep_alive.hold(0), lambda: False)

    def take() -> None:
        kept.append(slabs.take(1, lambda n: torch.empty(n, dtype=torch.uint8))[0])

    add, check = {
        "sources": (hold, keep_alive.release_done),
        "slabs": (take, slabs.in_use),
    }[what]
    for _ in range(2000):
        add()
    gc.collect()
    gc.disable()
    garbage = [InCycle(add) for _ in range(3)]
    del garbage
    gc.enable()
    assert 2000 <= check() <= 2003
    gc.collect()
    assert check() == 2003


def test_a_forked_child_destroys_no_event():
    class Event:
        def is_done(self):
            return bool(done)

    done: list[bool] = []
    event, destroyed = Event(), []
    weakref.finalize(event, destroyed.append, True).atexit = False
    keep_alive = engine.keep_alive
    keep_alive.release_when(keep_alive.hold("a source"), event.is_done)
    del event
    child = os.fork()
    if child == 0:
        os._exit(10 + len(destroyed))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 10
    done.append(True)
    assert keep_alive.release_done() == 0 and destroyed


def test_many_threads_free_every_source_once_and_none_early():
    keep_alive = engine.KeepAlive()
    dropped: list[bool] = []

    def work(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(300):
            ready = threading.Event()
            ticket = keep_alive.hold([Source(dropped, ready)])
            keep_alive.release_done()
            keep_alive.release_when(ticket, ready.is_set)
            keep_alive.release_done()
            if rng.random() < 0.1:
                threading.Timer(rng.random() / 100, ready.set).start()
            else:
                ready.set()

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert keep_alive.drain(30)
    assert dropped == [True] * 1200


def assert_thread_ends(keep_alive: engine.KeepAlive) -> None:
    assert keep_alive._thread_exists.acquire(timeout=30)
    keep_alive._thread_exists.release()


def test_a_thread_frees_sources_without_another_call_and_ends():
    keep_alive = engine.KeepAlive(in_background=True)
    for _ in range(2):
        dropped, ready = [], threading.Event()
        for _ in range(3):
            ticket = keep_alive.hold([Source(dropped, ready)])
            # A destructor may interrupt code that holds this lock.
            with threading._active_limbo_lock:
                keep_alive.release_when(ticket, ready.is_set)
        assert keep_alive._thread_exists.locked() and not dropped
        ready.set()
        assert_thread_ends(keep_alive)
        assert dropped == [True] * 3


def test_without_the_background_no_thread_asks_the_device():
    keep_alive = engine.KeepAlive()
    keep_alive.release_when(keep_alive.hold("a source"), lambda: True)
    assert not keep_alive._thread_exists.locked()


def test_a_device_that_fails_in_the_background_frees_no_source():
    keep_alive = engine.KeepAlive(in_background=True)
    dropped: list[bool] = []
    ticket = keep_alive.hold([Source(dropped)])
    keep_alive.release_when(ticket, lambda: 1 / 0)
    assert_thread_ends(keep_alive)
    assert not dropped
    with pytest.raises(ZeroDivisionError):
        keep_alive.release_done()
    keep_alive.release_when(ticket, lambda: True)
    assert_thread_ends(keep_alive)
    assert dropped


def test_sources_that_are_leaked_are_neither_freed_nor_waited_for(monkeypatch):
    leaked: list[object] = []
    monkeypatch.setattr(engine, "_leak", leaked.append)
    keep_alive = engine.KeepAlive()
    dropped: list[bool] = []
    keep_alive.leak(keep_alive.hold([Source(dropped)]))
    assert keep_alive.release_done() == 0 and not dropped
    leaked.clear()
    assert dropped


def test_a_forked_child_has_a_thread_of_its_own():
    keep_alive = engine.KeepAlive(in_background=True)
    ready = threading.Event()
    keep_alive.release_when(keep_alive.hold("a source"), ready.is_set)
    child = os.fork()
    if child == 0:
        keep_alive.release_when(keep_alive.hold("a source"), lambda: True)
        assert_thread_ends(keep_alive)
        os._exit(10 + keep_alive.release_done())
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 10
    ready.set()
    assert_thread_ends(keep_alive)


IMPORTS = """
import os, threading
from pyparallel.transfer import engine
assert engine.EXIT_SECONDS == 1
engine.EXIT_SECONDS = 0.1
"""
EXIT = """
class Source:
    def __del__(self, write=os.write):  # works until the very end
        write(1, b"dropped\\n")
ready = threading.Event()
ticket = engine.keep_alive.hold([Source()])
engine.keep_alive.release_when(ticket, ready.is_set)
"""
LATE = """
engine.EXIT_SECONDS = 30  # of a busy machine
timer = threading.Timer(0.1, ready.set)
timer.daemon = True
timer.start()
"""
BACKGROUND = "engine.keep_alive._in_background = True"
FAILS = "engine.keep_alive.release_when(ticket, lambda: 1 / 0)"


def test_the_end_of_the_interpreter_waits_a_little_and_drops_nothing_early():
    ways = [EXIT + LATE, EXIT, EXIT + FAILS]
    in_background = [BACKGROUND + way for way in ways]
    late, never, fails, *same = interpreters.run(IMPORTS, ways + in_background)
    assert late == (0, "dropped\n", "")
    assert never == fails == (0, "", "")
    assert same == [late, never, fails]
