"""If a worker ends in the middle of a message, no process waits for its rest."""

from __future__ import annotations

import gc
import multiprocessing
import os
import queue
import threading
from typing import Any

import pytest
from prefetch_loaders import (
    DieInMessage,
    Numbers,
    children,
    firsts,
    loader,
    nothing_left,
    num_fds,
    passes,
    until,
)
from torch.utils.data import DataLoader

import pyparallel
from pyparallel.loader import worker_monitor

pytestmark = [
    pytest.mark.one_backend,
    pytest.mark.tsan,
    pytest.mark.usefixtures("patient"),
]

ENDS = {
    "killed": DieInMessage(),
    "killed in the length": DieInMessage(-2),
    "killed behind the length": DieInMessage(0),
    "exited": DieInMessage(code=0),
    "failed": DieInMessage(code=3),
}


@pytest.mark.slow
@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize(
    "cls, end",
    [*((pyparallel.DataLoader, end) for end in ENDS), (DataLoader, "killed")],
)
def test_a_prefetcher_names_the_worker_and_leaves_nothing(
    cls: Any, end: str, persistent: bool
) -> None:
    plain = cls(Numbers(6, ENDS[end]), 2, num_workers=2, persistent_workers=persistent)
    with passes(plain, more_fds=20) as pre:  # a loader keeps its ring
        it = iter(pre)
        with pytest.raises(
            RuntimeError,
            match=r"^DataLoader: a worker must live to the end of its epoch, but "
            r"worker \d \(pid \d+\) died \(exit code (-9, SIGKILL|0|3)\)\.",
        ):
            firsts(it)
        assert next(it, "end") == "end"
        if persistent:
            plain._iterator._shutdown_workers()
            plain._iterator = None


@pytest.mark.slow
@pytest.mark.parametrize("persistent", [False, True])
def test_a_close_meanwhile_ends_the_thread_without_a_warning(persistent: bool) -> None:
    plain = loader(1, Numbers(2, DieInMessage()), persistent_workers=persistent)
    with nothing_left():
        pre = pyparallel.PreDataLoader(plain)
        it = iter(pre)
        generation = it._thread
        until(lambda: worker_monitor.find_dead_worker(generation.source))
        pre.close()  # warnings are errors
        assert not generation.thread.is_alive()
        if persistent:
            plain._iterator._shutdown_workers()
            plain._iterator = None


def test_without_a_prefetcher_an_iterating_thread_gets_the_error() -> None:
    plain = pyparallel.DataLoader(Numbers(6, DieInMessage()), 2, num_workers=2)
    errors: list[BaseException] = []

    def consume() -> None:
        try:
            firsts(plain)
        except RuntimeError as error:
            errors.append(error.with_traceback(None))

    others, before = set(children()), num_fds()
    thread = threading.Thread(target=consume, daemon=True)
    thread.start()
    thread.join(30)
    assert not thread.is_alive()
    assert str(errors.pop()).startswith("DataLoader: a worker must live")
    until(lambda: set(children()) <= others)
    gc.collect()
    until(lambda: num_fds() <= before + 20)


def begun(messages: Any, *parts: bytes) -> threading.Thread:
    """Send a message in pieces, the next one when nothing of the last is left."""

    def send() -> None:
        messages._sem.acquire()  # it counts messages
        for part in parts:
            until(lambda: not messages._reader.poll(0))
            os.write(messages._writer.fileno(), part)

    thread = threading.Thread(target=send)
    thread.start()
    return thread


@pytest.fixture
def messages() -> Any:
    made: Any = multiprocessing.Queue()
    yield made
    made.close()
    made.join_thread()


def test_a_message_that_arrives_slowly_is_complete(messages: Any) -> None:
    asked: list[None] = []
    worker_monitor.outlive_writers(messages, lambda: asked.append(None) is not None)
    messages.put(list(range(20_000)))  # more than a pipe holds
    assert messages.get(timeout=30) == list(range(20_000))
    text = b"\0\0\0\5\x80\x04K\7."  # pickled 7
    pieces = begun(messages, text[:2], text[2:6], text[6:])
    assert messages.get(timeout=30) == 7
    pieces.join()


def test_messages_written_before_the_death_are_read(messages: Any) -> None:
    worker_monitor.outlive_writers(messages, lambda: True)
    for i in range(3):
        messages.put([i] * 1000)
    assert [messages.get(timeout=30)[0] for _ in range(3)] == [0, 1, 2]


def test_an_incomplete_message_of_a_dead_worker_is_no_message(messages: Any) -> None:
    worker_monitor.outlive_writers(messages, lambda: True)
    os.write(messages._writer.fileno(), b"\0\0\0\5\x80")
    with pytest.raises(queue.Empty):
        messages.get(timeout=30)
    assert messages._reader.is_broken
    os.write(messages._writer.fileno(), b"\0\0\0\5\x80\x04K\7.")  # who can tell?
    for _ in range(2):
        with pytest.raises(queue.Empty):
            messages.get(timeout=0.01)
    assert not messages._reader.poll(0)
