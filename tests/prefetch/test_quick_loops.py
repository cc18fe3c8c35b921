"""A loop that takes no time reads the batches of workers itself, with equal results."""

from __future__ import annotations

import itertools
import linecache
import math
import os
import random
import re
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import pyparallel
from pyparallel import PreDataLoader
from pyparallel.core.errors import LoaderWarning
from pyparallel.prefetch import iterator
from pyparallel.prefetch._to_device import DeviceStage
from tests.support.loader.prefetch_loaders import (
    LOADERS,
    Numbers,
    Raise,
    TwoArguments,
    children,
    firsts,
    interrupt_each_line,
    nothing_left,
    passes,
    prefetch_threads,
    until,
)

pytestmark = [pytest.mark.one_backend, pytest.mark.tsan]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """Let all steps count as quick. Returns a function that changes this."""

    def set_quick(is_quick: bool) -> None:
        monkeypatch.setattr(iterator, "QUICK_NS", math.inf if is_quick else -1.0)

    monkeypatch.setattr(iterator, "QUICK_STEPS", 1)
    set_quick(True)
    return set_quick


class Readers(torch.utils.data.Sampler[int]):
    """Counts to 40, and notes the thread that draws."""

    def __init__(self) -> None:
        self.threads: list[int] = []

    def __iter__(self) -> Iterator[int]:
        for number in range(40):
            self.threads.append(threading.get_ident())
            yield number % 12

    def __len__(self) -> int:
        return 40


Case = tuple[dict[str, Any], str, dict[str, Any], Any]
#: Arguments of the loader, its class, arguments of `PreDataLoader`, and a block around
#: the loop. The loop reads itself with the first ones only.
READS_ITSELF: dict[str, Case] = {
    "processes": ({"num_workers": 1}, "ours", {}, nullcontext),
    "threads": ({"num_workers": 1, "worker_method": "thread"}, "ours", {}, nullcontext),
    "persistent": (
        {"num_workers": 1, "persistent_workers": True},
        "ours",
        {},
        nullcontext,
    ),
    "the host": ({"num_workers": 1}, "ours", {"device": "cpu"}, nullcontext),
}
LEAVES_IT_TO_THE_THREAD: dict[str, Case] = {
    "no workers": ({}, "ours", {}, nullcontext),
    "torch's loader": ({"num_workers": 1}, "torch", {}, nullcontext),
    "a transform": ({"num_workers": 1}, "ours", {"transform": abs}, nullcontext),
    "slabs": ({"num_workers": 1}, "ours", {"static": 2}, nullcontext),
    "a timeout": ({"num_workers": 1}, "ours", {"timeout": 60.0}, nullcontext),
    "no gradients": ({"num_workers": 1}, "ours", {}, torch.no_grad),
    "inference": ({"num_workers": 1}, "ours", {}, torch.inference_mode),
    "autocast": ({"num_workers": 1}, "ours", {}, lambda: torch.autocast("cpu")),
    "a default device": ({"num_workers": 1}, "ours", {}, lambda: torch.device("meta")),
}


@pytest.mark.parametrize(
    ("name", "begins_in_block"),
    [
        *((name, False) for name in [*READS_ITSELF, *LEAVES_IT_TO_THE_THREAD]),
        *((name, True) for name in ("no gradients", "inference", "autocast")),
    ],
)
def test_the_loop_reads_itself_if_the_thread_would_do_nothing_else(
    name: str, begins_in_block: bool
) -> None:
    cases = {**READS_ITSELF, **LEAVES_IT_TO_THE_THREAD}
    options, kind, own, block = cases[name]
    sampler = Readers()
    loader = LOADERS[kind](Numbers(), 1, sampler=sampler, **options)
    with PreDataLoader(loader, **own) as pre:
        with block() if begins_in_block else nullcontext():
            batches = iter(pre)
            next(batches)
        with nullcontext() if begins_in_block else block():
            until(lambda: batches._thread._is_parked)
            before = len(sampler.threads)
            for _ in range(9):
                next(batches)
                until(lambda: batches._thread._is_parked)
        here = threading.get_ident() in sampler.threads[before:]
        assert here == (name in READS_ITSELF)
        assert len([*batches]) == 30


def test_the_thread_reads_again_during_steps_that_take_time(quick: Any) -> None:
    sampler = Readers()
    loader = pyparallel.DataLoader(Numbers(), 1, sampler=sampler, num_workers=1)
    with passes(loader, queue_size=3) as pre:
        batches = iter(pre)
        for _ in range(9):
            next(batches)
        assert sampler.threads[-1] == threading.get_ident()
        quick(False)
        next(batches)
        assert sampler.threads[-1] == threading.get_ident()  # one step is no rule
        next(batches)
        until(lambda: len(batches._thread.items) == 3)
        assert sampler.threads[-1] == batches._thread.thread.ident
        quick(True)
        for _ in range(9):
            next(batches)
        assert sampler.threads[-1] == threading.get_ident()


def test_a_pass_begins_as_the_last_one_ended(
    quick: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wait_for_items(thread: Any, count: int) -> None:
        until(lambda: len(thread.items) == count)
        until(lambda: thread._is_parked)
        assert len(thread.items) == count

    monkeypatch.setattr(iterator, "QUICK_STEPS", 4)
    loader = pyparallel.DataLoader(Numbers(), 1, num_workers=1)
    with passes(loader, queue_size=3) as pre:
        for is_quick, ahead in ((True, 3), (True, 0), (False, 0), (False, 3)):
            quick(is_quick)
            batches = iter(pre)
            next(batches)
            wait_for_items(batches._thread, ahead)
            assert len([*batches]) == 11


@pytest.fixture
def no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let passes begin as if the last one had been quick: without a thread."""
    monkeypatch.setattr(iterator, "QUICK_STEPS", 0)


#: How a pass without a thread goes on, and how many threads it has then.
GOES_ON: dict[str, tuple[Callable[[Any], Any], int]] = {
    "quickly": (lambda quick: None, 0),
    "slowly": (lambda quick: quick(False), 1),
    "without gradients": (lambda quick: torch.set_grad_enabled(False), 1),
}


@pytest.mark.parametrize("name", GOES_ON)
@pytest.mark.parametrize("kind", ["processes", "threads", "persistent", "the host"])
def test_a_thread_starts_when_the_loop_no_longer_reads(
    name: str, kind: str, quick: Any
) -> None:
    options, _, own, _ = READS_ITSELF[kind]
    change, number = GOES_ON[name]
    with PreDataLoader(pyparallel.DataLoader(Numbers(), 1, **options), **own) as pre:
        for _ in range(2):
            quick(True)
            pre._num_quick = 1
            batches = iter(pre)
            found = [int(next(batches)[0, 0]) for _ in range(4)]
            assert not prefetch_threads()
            with pytest.raises(RuntimeError, match="reads this loader ahead"):
                pre.loader.state_dict()
            try:
                change(quick)
                found += [int(next(batches)[0, 0]) for _ in range(2)]
                assert len(prefetch_threads()) == number
                assert [*found, *firsts(batches)] == [*range(12)]
            finally:
                torch.set_grad_enabled(True)
            until(lambda: not prefetch_threads())


#: Ways to leave a pass without a thread after two batches.
LEAVES: dict[str, Callable[[PreDataLoader, Any], Any]] = {
    "close() of the pass": lambda pre, batches: batches.close(),
    "close()": lambda pre, batches: pre.close(),
    "another thread": lambda pre, batches: in_thread(pre.close),
    "garbage collection": lambda pre, batches: None,
    "a loaded state": lambda pre, batches: pre.load_state_dict(pre.state_dict()),
    "the exit": lambda pre, batches: iterator.stop(batches._thread, 5.0),
}


def in_thread(function: Callable[[], Any]) -> None:
    thread = threading.Thread(target=function)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("name", LEAVES)
def test_a_pass_without_a_thread_can_be_left(
    name: str, persistent: bool, no_thread: None
) -> None:
    options: dict[str, Any] = {"num_workers": 1, "persistent_workers": persistent}
    with PreDataLoader(pyparallel.DataLoader(Numbers(), 1, **options)) as pre:
        batches = iter(pre)
        assert [int(next(batches)[0, 0]) for _ in range(2)] == [0, 1]
        LEAVES[name](pre, batches)
        if name != "garbage collection":
            assert firsts(batches) == []
            assert persistent or not children()
        del batches
        begin = 2 if name == "a loaded state" else 0
        assert firsts(pre) == [*range(begin, 12)]
        assert firsts(pre) == [*range(12)]


class Fails(pyparallel.DataLoader):
    """Raises an error in ``iter()``."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(Numbers(), 1, num_workers=1)
        self._error = error

    def __iter__(self) -> Any:
        raise self._error


@pytest.mark.parametrize("steps", [0, 1])
@pytest.mark.parametrize("error", [ValueError("bad"), StopIteration("bad")])
def test_an_error_of_iter_comes_from_next(
    error: Exception, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(iterator, "QUICK_STEPS", steps)
    expected = RuntimeError if isinstance(error, StopIteration) else ValueError
    with passes(Fails(error)) as pre:
        batches = iter(pre)
        with pytest.raises(expected):
            next(batches)
        assert [*batches] == []


@pytest.mark.parametrize("steps", [0, 1, 10**6])
@pytest.mark.parametrize("kind", ["ours", "torch"])
@pytest.mark.parametrize("own", [False, True])
def test_epochs_that_are_left_draw_as_those_of_the_loader(
    own: bool, kind: str, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(iterator, "QUICK_STEPS", steps)

    def run(wrap: Callable[[Any], Any]) -> list[list[int]]:
        torch.manual_seed(3)
        generator = torch.Generator().manual_seed(4) if own else None
        options: dict[str, Any] = {"generator": generator, "num_workers": 2}
        loader = wrap(LOADERS[kind](Numbers(), 1, shuffle=True, **options))
        found: list[list[int]] = []
        for epoch in range(5):
            found.append([])
            for batch in loader:
                found[-1].append(int(batch[0, 0]))
                if epoch and len(found[-1]) == 3:
                    break
        return found

    with nothing_left():
        assert run(PreDataLoader) == run(lambda loader: loader)


def test_batches_that_the_loop_reads_are_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(DeviceStage, "start", lambda *args: (int, 5))
    # The meter of the loader would count the bytes itself, in place of ours.
    with passes(lambda: pyparallel.DataLoader(Numbers(), 1, num_workers=1)) as pre:
        batches = iter(pre)
        next(batches)
        until(lambda: batches._thread._is_parked)
        for _ in [*batches._thread.items]:
            next(batches)
        before = pre.stats()
        batches._thread.read = None  # the loop reads all others
        num_read = len([*batches])
        after = pre.stats()
    load, wait = (
        getattr(after, name) - getattr(before, name)
        for name in ("load_seconds", "wait_seconds")
    )
    assert load == pytest.approx(wait) and load > 0
    assert after.nbytes - before.nbytes == 5 * num_read and num_read > 5


@pytest.mark.parametrize("seed", range(6))
def test_batches_and_states_are_those_of_the_loader(seed: int, quick: Any) -> None:
    rng = random.Random(seed)
    options: dict[str, Any] = {
        "num_workers": rng.choice([1, 2]),
        "shuffle": rng.random() < 0.5,
        "persistent_workers": rng.random() < 0.5,
        "worker_method": rng.choice(["multiprocessing", "thread"]),
    }

    def run(switches: bool, state: Any = None) -> list[Any]:
        torch.manual_seed(seed), random.seed(seed), np.random.seed(seed)
        loader = pyparallel.DataLoader(Numbers(), 1, **options)
        with PreDataLoader(loader) if switches else nullcontext(loader) as source:
            found = []
            for _ in range(3):
                for batch in source:
                    found.append((batch.tolist(), source.state_dict()))
                    quick(switches and rng.random() < 0.7)
                found.append(([], source.state_dict()))
        return found

    assert run(True) == run(False)


def in_a_batch(*error: Any) -> Callable[[], Any]:
    return lambda: pyparallel.DataLoader(Numbers(8, Raise(*error)), 1, num_workers=1)


class BadSampler(torch.utils.data.Sampler[int]):
    """Raises an error after eight indices."""

    def __iter__(self) -> Iterator[int]:
        yield from range(8)
        raise LookupError("of the sampler")

    def __len__(self) -> int:
        return 12


def dies() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


FAULTS: dict[str, Callable[[], Any]] = {
    "an error": in_a_batch(ValueError, "bad"),
    "an error that cannot be rebuilt": in_a_batch(TwoArguments, 7, "here"),
    "StopIteration": in_a_batch(StopIteration),
    "an interrupt of a worker": in_a_batch(KeyboardInterrupt),
    "a dead worker": lambda: pyparallel.DataLoader(Numbers(8, dies), 1, num_workers=1),
    "a sampler": lambda: pyparallel.DataLoader(
        Numbers(), 1, sampler=BadSampler(), num_workers=1
    ),
    "an index": lambda: pyparallel.DataLoader(
        Numbers(), 1, sampler=[*range(8), lambda: 0], num_workers=1
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_an_error_comes_in_its_place_and_ends_the_pass(name: str, quick: Any) -> None:
    def outcome(is_quick: bool) -> tuple[Any, ...]:
        quick(is_quick)
        with nothing_left(), passes(FAULTS[name]()) as pre:
            batches, found = iter(pre), []
            with pytest.raises(BaseException) as raised:
                while True:
                    found.append(int(next(batches)[0, 0]))
            text = re.sub(r"pid \d+|0x\w+", "", str(raised.value))
            error = type(raised.value), text.partition("Traceback")[0]
            ends = [*batches]
            del raised, batches
        return found, error, ends

    assert outcome(True) == outcome(False)


@pytest.mark.parametrize("base", [Exception, BaseException])
def test_an_error_of_a_signal_handler_loses_nothing_or_ends_the_pass(
    base: type[BaseException],
) -> None:
    def is_counted(frame: Any) -> bool:
        # No handler runs between the end of a block and the release of its lock.
        text = linecache.getline(iterator.__file__, frame.f_lineno)
        return not text.lstrip().startswith("with ")

    loader = pyparallel.DataLoader(Numbers(), 2, num_workers=1)
    with passes(loader, queue_size=1) as pre:

        def start() -> Any:
            it = iter(pre)
            assert [int(next(it)[0, 0]) for _ in range(2)] == [0, 2]
            until(lambda: it._thread._is_parked)
            return it

        found = interrupt_each_line(
            base, start, lambda batch: int(batch[0, 0]), is_counted
        )
    rests, last = found
    assert last == [4, 6, 8, 10]
    assert all(rest in ([4, 6, 8, 10], []) for rest in rests)
    assert [4, 6, 8, 10] in rests and [] in rests


def test_a_second_interrupt_keeps_no_place() -> None:
    with passes(pyparallel.DataLoader(Numbers(), 2, num_workers=1)) as pre:
        batches = iter(pre)
        assert int(next(batches)[0, 0]) == 0
        batches._thread.reader = threading.get_ident()  # `leave` was interrupted
        assert firsts(batches) == [2, 4, 6, 8, 10]


def test_loops_that_share_a_pass_get_each_batch_once(quick: Any) -> None:
    loader = pyparallel.DataLoader([*range(400)], 1, num_workers=2)
    found: list[list[int]] = [[], [], []]
    with passes(loader) as pre:
        batches = iter(pre)

        def consume(numbers: list[int]) -> None:
            for number, batch in enumerate(batches):
                numbers.append(int(batch))
                quick(number % 50 < 40)

        threads = [threading.Thread(target=consume, args=(each,)) for each in found]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()
    assert sorted(itertools.chain(*found)) == [*range(400)]
    assert all(each == sorted(each) for each in found)


class Waits:
    """Lets a worker wait for a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __call__(self) -> None:
        until(self.path.exists, 60)


class Blocked(torch.utils.data.Sampler[int]):
    """Waits before it draws the tenth index."""

    def __init__(self) -> None:
        self.waits, self.may_go_on = threading.Event(), threading.Event()

    def __iter__(self) -> Iterator[int]:
        for number in range(12):
            if number == 9:
                self.waits.set()
                self.may_go_on.wait(60)
            yield number

    def __len__(self) -> int:
        return 12


def test_closing_names_the_read_of_a_loop_that_cannot_be_stopped() -> None:
    sampler = Blocked()
    loader = pyparallel.DataLoader(Numbers(), 1, sampler=sampler, num_workers=1)
    with passes(loader) as pre:
        batches = iter(pre)
        loop = threading.Thread(target=lambda: [*batches])
        loop.start()
        assert sampler.waits.wait(60) and batches._thread.reader == loop.ident
        with pytest.warns(LoaderWarning, match=r"still in 'next\(loader\)'"):
            batches.close()
        sampler.may_go_on.set()
        loop.join(20)
        assert not loop.is_alive()
        until(lambda: not prefetch_threads())


@pytest.mark.parametrize("persistent", [False, True])
def test_a_loop_that_reads_itself_can_be_closed(
    persistent: bool, tmp_path: Path
) -> None:
    waits = Waits(tmp_path / "open")
    options: dict[str, Any] = {"num_workers": 1, "persistent_workers": persistent}
    loader = pyparallel.DataLoader(Numbers(8, waits), 1, **options)
    pre = PreDataLoader(loader)
    found: list[int] = []
    batches = iter(pre)

    def consume() -> None:
        for batch in batches:
            found.append(int(batch[0, 0]))
            until(lambda: batches._thread._is_parked)

    loop = threading.Thread(target=consume)
    loop.start()
    until(lambda: batches._thread.reader == loop.ident and len(found) == 8)
    pre.close()
    loop.join(20)
    assert not loop.is_alive() and found == [*range(8)]
    until(lambda: not prefetch_threads())
    waits.path.touch()
    assert firsts(pre) == [*range(12)]
    pre.close()
