"""Signals during the copy, the loading, or the wait for samples."""

from __future__ import annotations

import gc
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import pyparallel
from pyparallel import (
    DataContainer,
    DataLoader,
    PreDataLoader,
    collate,
    memory,
    scatter,
)
from tests.support.processes.backends import native

pytestmark = [pytest.mark.asan, pytest.mark.tsan]

ROWS = (700, 900, 500, 800)


class Interrupt(Exception):
    """The exception of a handler."""


@contextmanager
def signals(handler: Callable[[], None], pause: float = 0.002) -> Iterator[None]:
    """Send this thread one signal after the other, and let each call a handler."""
    main, done, handled = threading.get_ident(), threading.Event(), threading.Event()

    def handle(number: int, frame: Any) -> None:
        try:
            handler()
        finally:
            handled.set()

    def send() -> None:
        while not done.wait(pause):
            handled.clear()
            signal.pthread_kill(main, signal.SIGUSR1)
            handled.wait()

    before = signal.signal(signal.SIGUSR1, handle)
    thread = threading.Thread(target=send)
    thread.start()
    try:
        yield
    finally:
        done.set()
        while thread.is_alive():
            # A signal that comes just before the wait is handled after it.
            thread.join(0.1)
        signal.signal(signal.SIGUSR1, before)


def samples(number: int = 0) -> list[torch.Tensor]:
    return [torch.full((3, n, 512), float(n + number)) for n in ROWS]


def is_right(batch: torch.Tensor, number: int = 0) -> bool:
    """Whether a batch is what `samples` make, padded with zeros."""
    return all(
        bool(row[:, :n].eq(n + number).all() and row[:, n:].eq(0).all())
        for row, n in zip(batch, ROWS, strict=True)
    )


class Numbered(torch.utils.data.Dataset[torch.Tensor]):
    """Samples of eight batches."""

    def __getitem__(self, index: int) -> torch.Tensor:
        return samples(index // len(ROWS))[index % len(ROWS)]

    def __len__(self) -> int:
        return 8 * len(ROWS)


def collated() -> None:
    batch = collate([{"x": DataContainer(x, stack=True)} for x in samples()], 4)
    assert is_right(batch["x"].data[0])
    (kwargs,) = scatter(batch, [-1])
    assert is_right(kwargs["x"])


def loaded(**options: Any) -> Iterator[None]:
    loader: Any = DataLoader(
        Numbered(), batch_size=len(ROWS), collate_fn=pyparallel.pad_stack, **options
    )
    for loads in (loader, PreDataLoader(loader, device="cpu")):
        for number, batch in enumerate(loads):
            assert is_right(batch, number), number
            yield


@pytest.mark.slow
@pytest.mark.parametrize(
    "works",
    [
        lambda: (collated() for _ in range(16)),
        lambda: loaded(),
        lambda: loaded(num_workers=2),
    ],
    ids=["collate", "loader", "workers"],
)
def test_nothing_is_lost_when_handlers_run_meanwhile(
    works: Callable[[], Iterator[None]],
) -> None:
    calls: list[None] = []
    with signals(lambda: calls.append(None)):
        steps = sum(1 for _ in works())
    assert steps >= 16
    assert len(calls) >= 3, "no signal came while anything was under way"


@pytest.mark.slow
def test_an_error_of_a_signal_handler_leaks_nothing_and_spoils_no_batch() -> None:
    inputs, kept = samples(), samples()
    state = torch.get_rng_state()
    gc.collect()
    before = memory.cache_info().in_use
    armed, num_raised, num_right = False, 0, 0

    def handler() -> None:
        nonlocal armed
        if armed:
            armed = False
            raise Interrupt

    with signals(handler):
        for _ in range(100):
            try:
                armed = True
                batch = pyparallel.pad_stack(inputs)
                armed = False
            except Interrupt:
                num_raised += 1
            else:
                num_right += is_right(batch)
                del batch
    gc.collect()
    assert num_raised >= 3 and num_raised + num_right == 100
    assert memory.cache_info().in_use == before
    assert all(map(torch.equal, inputs, kept))
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.slow
@pytest.mark.skipif(native is None, reason="pure Python copies in several steps")
def test_a_handler_sees_a_copy_whole_or_not_begun() -> None:
    inputs = samples()
    dst = torch.full((4, 3, max(ROWS), 512), -1.0)  # a signal may come before the loop
    seen: list[bool] = []

    def handler() -> None:
        seen.append(bool(dst.eq(-1).all()) or is_right(dst))

    with signals(handler, pause=0.0005):
        for _ in range(20):
            dst.fill_(-1)
            native.pad_copy(dst, inputs, bytes(4))
    assert len(seen) >= 3 and all(seen)
