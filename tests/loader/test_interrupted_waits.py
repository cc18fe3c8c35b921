"""An error that a signal handler raises loses no batch, and leaves no workers."""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import IterableDataset

from pyparallel import DataLoader, PreDataLoader

pytestmark = pytest.mark.one_backend

KINDS: dict[str, dict[str, Any]] = {
    "processes": {"num_workers": 2},
    "processes, any order": {"num_workers": 2, "in_order": False},
    "persistent": {"num_workers": 2, "persistent_workers": True},
    "a stream": {"num_workers": 1},
    "threads": {"num_workers": 2, "worker_method": "thread"},
    "timeout": {"num_workers": 2, "timeout": 60},
    "timeout of threads": {"num_workers": 2, "worker_method": "thread", "timeout": 60},
}


class Gate:
    """Twelve numbers. From the sixth on, they wait for a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> int:
        deadline = time.monotonic() + 60
        while index >= 6 and not self.path.exists():
            assert time.monotonic() < deadline
            time.sleep(0.002)
        return index


class Stream(IterableDataset[int]):
    """The same as a stream."""

    def __init__(self, gate: Gate) -> None:
        self.gate = gate

    def __iter__(self) -> Any:
        return (self.gate[i] for i in range(12))


def is_waiting(thread: int) -> bool:
    """Return True while a thread waits for a batch."""
    frame, names = sys._current_frames().get(thread), set()
    while frame is not None:
        names.add(frame.f_code.co_name)
        frame = frame.f_back
    return not names.isdisjoint({"_wait", "wait_until"})


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("error", [KeyboardInterrupt, TimeoutError, OSError, KeyError])
@pytest.mark.parametrize("is_ahead", [False, True])
def test_the_next_call_goes_on(
    kind: str, error: type[BaseException], is_ahead: bool, tmp_path: Path
) -> None:
    here, raised = threading.get_ident(), []

    def handle(*_: Any) -> None:
        if not raised:
            raised.append(error("by the handler"))
            raise raised[0]

    def interrupt() -> None:
        while not raised:  # a signal that comes just before a wait does not end it
            if is_waiting(here):
                os.kill(os.getpid(), signal.SIGUSR1)
            time.sleep(0.05)

    dataset: Any = Gate(tmp_path / "open")
    dataset = Stream(dataset) if kind == "a stream" else dataset
    loader: Any = DataLoader(dataset, 2, **KINDS[kind])
    source = PreDataLoader(loader) if is_ahead else loader
    before = signal.signal(signal.SIGUSR1, handle)
    thread = threading.Thread(target=interrupt)
    try:
        batches = iter(source)
        found = [next(batches).tolist() for _ in range(3)]
        state = source.state_dict() if loader.in_order else None
        thread.start()
        with pytest.raises(error, match="by the handler"):
            next(batches)
        thread.join()
        assert loader.in_order is False or source.state_dict() == state
        (tmp_path / "open").touch()
        found.append(next(batches).tolist())
        assert loader.in_order is False or source.state_dict() != state
        found += [batch.tolist() for batch in batches]
    finally:
        signal.signal(signal.SIGUSR1, before)
        (tmp_path / "open").touch()
    assert sorted(found) == [[i, i + 1] for i in range(0, 12, 2)]
    assert found == sorted(found) or not loader.in_order


#: A kind of loader and the part of its loop that is interrupted.
INTERRUPTED = [
    *itertools.product(
        ["multiprocessing", "multiprocessing ahead", "thread", "thread ahead"],
        ["iter", "next"],
    ),
    ("multiprocessing quick ahead", "next"),
    *itertools.product(["multiprocessing quickest ahead"], ["iter", "next"]),
]


@pytest.fixture(scope="module")
def interrupted() -> Iterator[Callable[[str, str], Any]]:
    """Return a function that waits for the result of a row. One program runs all."""
    words = itertools.chain.from_iterable(INTERRUPTED)
    program = [sys.executable, "-m", "tests.support.loader.interrupts", *words]
    streams: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    found: dict[tuple[str, str], Any] = {}

    def result(*row: str) -> Any:
        while row not in found:
            line = process.stdout.readline()
            found[INTERRUPTED[len(found)]] = line and json.loads(line)
        if len(found) == len(INTERRUPTED):
            assert process.wait(60) == 0
        return found[row]

    with subprocess.Popen(program, text=True, **streams) as process:
        yield result
        process.kill()


@pytest.mark.parametrize(("kind", "part"), INTERRUPTED)
def test_an_interrupt_anywhere_leaves_nothing(
    kind: str, part: str, interrupted: Callable[[str, str], Any]
) -> None:
    cases, problems = interrupted(kind, part)
    assert cases >= 10 and problems == {}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_an_error_of_iter_leaves_no_workers(
    kind: str, error: type[BaseException]
) -> None:
    def indices() -> Any:
        yield 0
        raise error("by the sampler")

    loader: Any = DataLoader(range(12), 1, sampler=indices(), **KINDS[kind])
    before = {*threading.enumerate()}
    with pytest.raises(error, match="by the sampler") as kept:
        iter(loader)
    assert {*threading.enumerate()} <= before
    assert multiprocessing.active_children() == []
    assert kept.traceback
