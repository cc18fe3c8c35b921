"""A loop that is interrupted ends its workers, also if its error is kept."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from typing import Any

import pytest

from pyparallel import DataLoader, PreDataLoader


class Slow:
    """Samples that take longer to read than the interrupt to arrive."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> int:
        time.sleep(0.2)
        return index


@pytest.mark.one_backend
@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("method", ["multiprocessing", "thread"])
def test_an_interrupt_keeps_no_worker(method: str, ahead: bool) -> None:
    before = threading.enumerate()  # of `parallel_apply`, which keeps its threads

    def left() -> list[str]:
        names = [it.name for it in threading.enumerate() if it not in before]
        return [name for name in names if name.startswith("pyparallel-")]

    options: Any = {"num_workers": 1, "worker_method": method}
    loader: Any = DataLoader(Slow(), 4, **options)
    children = multiprocessing.active_children()
    with pytest.raises(KeyboardInterrupt) as kept:  # like a notebook
        for _ in PreDataLoader(loader) if ahead else loader:
            timer = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT))
            timer.start()
    deadline = time.monotonic() + 60
    while left() or multiprocessing.active_children() != children:
        assert time.monotonic() < deadline, (left(), multiprocessing.active_children())
        time.sleep(0.05)
    assert kept.value.__traceback__ is not None
