"""The iterators of a loader are freed without references, and also in cycles."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Iterator
from itertools import islice, product
from typing import Any

import pytest
import torch

import pyparallel
from tests.support.loader.loader_sets import Making, Numbers, Stream

pytestmark = [pytest.mark.one_backend, pytest.mark.timeout(120)]


class Stateful(Numbers):
    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


@pytest.fixture(autouse=True)
def _no_collector() -> Iterator[None]:
    """Leave garbage alone until a test collects it."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.collect()


def failing(index: int) -> torch.Tensor:
    if index == 3:
        raise ValueError("no sample 3")
    return torch.ones(3)


class Unstartable:
    def __iter__(self) -> Iterator[Any]:
        raise LookupError("no indices")

    def __len__(self) -> int:
        return 3


@pytest.mark.parametrize("kind", ["sampler", "batch_sampler", "device"])
@pytest.mark.parametrize("method", ["multiprocessing", "thread"])
@pytest.mark.parametrize("persistent", [False, True])
def test_an_iterator_that_cannot_begin_is_freed_without_another_error(
    monkeypatch: Any, kind: str, method: Any, persistent: bool
) -> None:
    ignored: list[Any] = []
    monkeypatch.setattr("sys.unraisablehook", ignored.append)
    options: dict[str, Any] = {"worker_method": method, "num_workers": 1}
    if kind != "device":
        options[kind] = Unstartable()
    if kind == "sampler":
        options["batch_size"] = None  # torch's BatchSampler calls iter() later
    loader = pyparallel.DataLoader(Numbers(6), persistent_workers=persistent, **options)
    with torch.device("meta" if kind == "device" else "cpu"):
        with pytest.raises((LookupError, RuntimeError)):
            iter(loader)
    gc.collect()
    assert ignored == []


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize(
    ("dataset", "how"),
    [
        (Making(failing, 6), "error"),
        *product((Numbers(6), Stateful(6), Stream(6)), ("end", "one")),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_no_cycle_keeps_an_iterator(dataset: Any, how: str, num_workers: int) -> None:
    loader = pyparallel.DataLoader(dataset, num_workers=num_workers)
    batches = iter(loader)
    with pytest.raises(ValueError) if how == "error" else contextlib.nullcontext():
        assert len([*islice(batches, 1 if how == "one" else None)]) in (1, 6)
    workers = getattr(batches, "_workers", [])
    dead, loader_dead = weakref.ref(batches), weakref.ref(loader)
    del batches
    assert dead() is None
    assert [worker.exitcode for worker in workers] == [0] * num_workers
    del loader
    assert loader_dead() is None


def test_a_stream_is_closed_with_its_epoch() -> None:
    closed: list[str] = []

    class Opened(Stream):
        def __iter__(self) -> Iterator[Any]:
            try:
                yield from range(4)
            finally:
                closed.append("closed")

    loader = pyparallel.DataLoader(Opened(4), 2)
    for _ in loader:
        break
    assert closed == ["closed"]


def test_the_collector_ends_workers() -> None:
    batches: Any = iter(pyparallel.DataLoader(Numbers(6), num_workers=2))
    for _ in range(2):  # a worker that still starts would be terminated
        next(batches)
    workers, batches.cycle = batches._workers, batches
    del batches
    gc.collect()
    assert [worker.exitcode for worker in workers] == [0, 0]
