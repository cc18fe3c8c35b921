"""Locks are free in a forked worker, even if a thread of the parent holds them."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from pyparallel import backend
from pyparallel.batch import pytree
from pyparallel.core import fork_locks

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork"),
    pytest.mark.timeout(60),
]

NATIVE = pytest.mark.skipif(
    backend.name != "native", reason="pure Python cannot lock torch's generator"
)


class _Late(threading.Thread):
    """Holds a lock until the fork waits for the lock, as far as a test can know."""

    def __init__(self, lock: Any) -> None:
        super().__init__()
        self.lock, self.held = lock, threading.Event()
        self.start()
        assert self.held.wait(30)

    def run(self) -> None:
        assert self.lock.acquire(True, 30)
        self.held.set()
        threading.Event().wait(0.2)
        self.lock.release()


def child(action: Callable[[], Any]) -> int:
    """Return the exit code of a forked child that does this; 99: it did not end."""
    pid = os.fork()
    if not pid:
        try:
            action()
        except BaseException:
            os._exit(1)
        os._exit(0)
    waiter = threading.Thread(target=lambda: codes.append(os.waitpid(pid, 0)[1]))
    codes: list[int] = []
    waiter.start()
    waiter.join(20)
    if not codes:
        os.kill(pid, 9)
        waiter.join()
        return 99
    return os.waitstatus_to_exitcode(codes[0])


LOCKS: dict[str, Callable[[], Any]] = {
    "registered classes": lambda: pytree.registration_lock,
    "torch.manual_seed": lambda: torch.cuda._initialization_lock,
    "numpy.random": lambda: np.random.get_bit_generator().lock,
}


@pytest.mark.parametrize("name", LOCKS)
def test_a_lock_that_another_thread_holds_is_free_in_the_child(name: str) -> None:
    thread = _Late(LOCKS[name]())
    assert child(lambda: LOCKS[name]().acquire(True, 60)) == 0
    thread.join()
    assert LOCKS[name]().acquire(True, 1)
    LOCKS[name]().release()


def test_a_lock_that_is_never_released_does_not_stop_a_fork(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fork_locks, "_SECONDS", 0.01)
    with pytree.registration_lock:
        assert child(lambda: None) == 0
    assert not fork_locks._held.locks


NUMBERS = torch.empty(4_000_000)


@NATIVE
@pytest.mark.parametrize(
    ("use", "num_threads", "times"),
    [
        (NUMBERS.uniform_, 1, 4),  # has the mutex nearly all the time
        (torch.get_rng_state, 2, 20),  # waits for it with the GIL
    ],
    ids=["draws", "asks"],
)
def test_a_child_seeds_torch_while_a_thread(
    use: Callable[[], Any], num_threads: int, times: int
) -> None:
    end = threading.Event()

    def run() -> None:
        while not end.is_set():
            use()

    threads = [threading.Thread(target=run) for _ in range(num_threads)]
    for thread in threads:
        thread.start()
    try:
        codes = [child(lambda: torch.manual_seed(3)) for _ in range(times)]
    finally:
        end.set()
        for thread in threads:
            thread.join()
    assert codes == [0] * times
    assert torch.rand(2).shape == (2,)
