"""A worker that does not start is reported with its stack."""

from __future__ import annotations

import re
import threading
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

import pyparallel
from pyparallel.core.errors import LoaderWarning
from pyparallel.loader import epoch as epoch_module
from pyparallel.shm import memfd

pytestmark = [
    pytest.mark.one_backend,
    pytest.mark.skipif(not memfd.is_supported(), reason="needs memfd_create"),
    pytest.mark.timeout(120),
]

ADVICE = {
    "fork": "It may wait for a lock that a thread held during fork: use "
    'multiprocessing_context="forkserver", or start the workers before the threads.',
    "forkserver": "With forkserver it first imports the main module and unpickles the "
    "dataset. Look for a slow import, or for a call in worker_init_fn that blocks.",
}


class Waiting(Dataset[torch.Tensor]):
    """Waits at index 2 until the parent sets an event."""

    def __init__(self, event: Any) -> None:
        self.event = event

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 2:
            self.event.wait(60)
        return torch.tensor(index)


def wait_in_init(event: Any, worker: int) -> None:
    """Wait as a worker does that inherited a lock."""
    event.wait(60)


class Init:
    def __init__(self, event: Any) -> None:
        self.event = event

    def __call__(self, worker: int) -> None:
        wait_in_init(self.event, worker)


def loader(method: str, **options: Any) -> tuple[Any, Any]:
    context = torch.multiprocessing.get_context(method)
    event = context.Event()
    dataset = Waiting(event)
    if options.pop("init", False):
        options["worker_init_fn"] = Init(event)
    made = pyparallel.DataLoader(
        dataset, 2, num_workers=1, multiprocessing_context=context, **options
    )
    return made, event


@pytest.mark.slow
@pytest.mark.parametrize(("method", "seconds"), [("fork", 3), ("forkserver", 8)])
def test_a_timeout_of_a_worker_that_has_not_begun(method: str, seconds: int) -> None:
    made, event = loader(method, init=True, timeout=seconds)
    batches = iter(made)
    pid = batches._workers[0].pid
    with pytest.raises(RuntimeError) as caught:
        next(batches)
    event.set()
    head, _, stack = str(caught.value).partition(" The stack of the worker:\n")
    assert head == (
        f"DataLoader timed out after {seconds} seconds: worker 0 (pid {pid}) is alive "
        f"but has not begun the batch of indices [0, 1]. {ADVICE[method]}"
    )
    assert re.search(r'File "[^"]+", line \d+ in wait_in_init', stack)


def test_a_timeout_of_a_worker_that_makes_its_batch() -> None:
    made, event = loader("fork", timeout=3)
    batches = iter(made)
    assert next(batches).tolist() == [0, 1]
    with pytest.raises(RuntimeError) as caught:
        next(batches)
    event.set()
    assert str(caught.value) == (
        f"DataLoader timed out after 3 seconds: worker 0 (pid "
        f"{batches._workers[0].pid}) has not finished the batch of indices [2, 3]. "
        "Increase timeout, or look for a call in the dataset that blocks."
    )


def test_a_warning_without_a_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(epoch_module, "_IDLE_SECONDS", 0.5)
    made, event = loader("fork", init=True)
    batches = iter(made)
    pid = batches._workers[0].pid
    with pytest.warns(LoaderWarning) as caught:
        threading.Timer(1.5, event.set).start()
        assert next(batches).tolist() == [0, 1]  # the wait goes on
        assert next(batches).tolist() == [2, 3]
    (warning,) = caught
    head, _, stack = str(warning.message).partition(" The stack of the worker:\n")
    assert head == (
        f"[PP214] DataLoader: worker 0 (pid {pid}) is alive but has not begun the "
        f"batch of indices [0, 1]. {ADVICE['fork']}"
    )
    assert "in wait_in_init" in stack


def test_a_slow_dataset_does_not_warn(monkeypatch: pytest.MonkeyPatch) -> None:
    made, event = loader("fork")
    batches = iter(made)
    monkeypatch.setattr(epoch_module, "_IDLE_SECONDS", 0.3)
    assert next(batches).tolist() == [0, 1]
    threading.Timer(1.0, event.set).start()
    assert next(batches).tolist() == [2, 3]


def test_an_epoch_that_waits_for_an_old_task_does_not_warn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    event = torch.multiprocessing.get_context("fork").Event()
    options: Any = {"persistent_workers": True, "prefetch_factor": 1}
    made = pyparallel.DataLoader(
        Waiting(event),
        2,
        num_workers=2,
        multiprocessing_context="fork",
        **options,
    )
    assert next(iter(made)).tolist() == [0, 1]
    monkeypatch.setattr(epoch_module, "_IDLE_SECONDS", 0.3)
    threading.Timer(1.0, event.set).start()
    assert [batch.tolist() for batch in made] == [[0, 1], [2, 3]]
