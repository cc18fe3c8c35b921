"""Users copy batches of a pinned ring in many ways: no slab is written before."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from pyparallel import scatter
from pyparallel.shm import pinning
from pyparallel.shm.ring import FREE, PARENT, Ring
from pyparallel.transfer import to_device
from tests.support.devices import fake_cuda
from tests.support.loader.loader_sets import wait_for
from tests.support.loader.ring_workers import Worker

pytestmark = [pytest.mark.cuda, pytest.mark.fake_cuda]  # streams are held

Copy = Callable[[torch.Tensor], torch.Tensor]
SHAPE = (4, 5000)


@pytest.fixture(autouse=True)
def needs_a_tracker() -> None:
    if pinning.accelerator_pinner() is None:
        pytest.skip("torch pins batches in its own memory")


def by_copy(batch: torch.Tensor) -> torch.Tensor:
    return torch.zeros(SHAPE, device="cuda").copy_(batch, non_blocking=True)


def by_rows(batch: torch.Tensor) -> torch.Tensor:
    return torch.stack([row.to("cuda", non_blocking=True) for row in batch])


def by_other_owner(batch: torch.Tensor) -> torch.Tensor:
    """Copy the memory as numpy's."""
    return torch.from_numpy(batch.numpy()).to("cuda", non_blocking=True)


#: The functions that copy a batch on the current stream. Some copy it before they give
#: it to `scatter`.
COPIES: dict[str, Copy] = {
    "to": lambda batch: batch.to("cuda", non_blocking=True),
    "copy_": by_copy,
    "rows": by_rows,
    "other owner": by_other_owner,
    "scatter": lambda batch: scatter(batch, [0])[0],
    "to and scatter": lambda batch: (by_copy(batch), scatter(batch, [0]))[0],
    "scatter and to": lambda batch: (scatter(batch, [0]), by_rows(batch))[1],
}


def on_current(copy: Copy, batch: list[Any], side: Any) -> torch.Tensor:
    with torch.cuda.stream(side):
        copied = copy(batch[0])
        batch.clear()
    return copied


def on_side(copy: Copy, batch: list[Any], side: Any) -> torch.Tensor:
    with torch.cuda.stream(side):
        copied = copy(batch[0])
    batch.clear()
    return copied


def under_another(copy: Copy, batch: list[Any], side: Any) -> torch.Tensor:
    with torch.cuda.stream(torch.cuda.Stream()):
        copied = on_side(copy, batch, side)
    return copied


def of_another_library(copy: Copy, batch: list[Any], side: Any) -> torch.Tensor:
    """Use a handle of a stream, as a library that has made it."""
    return on_side(copy, batch, torch.cuda.ExternalStream(side.cuda_stream))


def on_two(copy: Copy, batch: list[Any], side: Any) -> torch.Tensor:
    idle = torch.cuda.Stream()
    with torch.cuda.stream(idle):
        copy(batch[0])
    with torch.cuda.stream(side):
        copied = copy(batch[0])
    with torch.cuda.stream(idle):
        copy(batch[0])
    batch.clear()
    idle.synchronize()
    return copied


def in_threads(copy: Copy, batch: list[Any], side: Any) -> torch.Tensor:
    """Copy in one thread, and drop in another one."""
    copied: list[torch.Tensor] = []

    def work() -> None:
        with torch.cuda.stream(side):
            copied.append(copy(batch[0]))

    for target in (work, batch.clear):
        thread = threading.Thread(target=target)
        thread.start()
        thread.join()
    return copied[0]


WAYS = (
    on_current,
    on_side,
    under_another,
    of_another_library,
    on_two,
    in_threads,
)


@contextlib.contextmanager
def pinned_ring() -> Iterator[tuple[Ring, Worker]]:
    ring = Ring(2, 1 << 20)
    ring.pin(pinning.accelerator_pinner())  # type: ignore[arg-type]
    yield ring, Worker(ring, torch.stack)
    torch.cuda.synchronize()
    to_device.release_done()


def batch_of(worker: Worker, value: float) -> list[torch.Tensor]:
    """Return a new batch as the only reference to it."""
    received = worker.make([torch.full(SHAPE[1:], value)] * SHAPE[0])
    assert received.is_pinned
    return [received.batch]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", COPIES)
def test_no_slab_is_written_before_a_copy_has_read_it(name: str, way: Any) -> None:
    with pinned_ring() as (ring, worker):
        side = torch.cuda.Stream()
        scatter(batch_of(worker, 0.0)[0], [0])  # its streams and events exist now
        torch.cuda.synchronize()
        to_device.release_done()
        assert ring.holders() == [FREE, FREE]
        with fake_cuda.held(side):
            copied = way(COPIES[name], batch_of(worker, 7.0), side)
            to_device.release_done()
            assert ring.holders() == [PARENT, FREE]
            for value in (8.0, 9.0):  # a worker writes into the other slab
                other = batch_of(worker, value)
                assert float(other[0][0, 0]) == value
                del other
            assert ring.holders() == [PARENT, FREE]
        side.synchronize()
        assert copied.unique().tolist() == [7.0]
        torch.cuda.synchronize()
        to_device.release_done()
        assert ring.holders() == [FREE, FREE]


def test_a_slab_returns_before_later_work_of_its_stream() -> None:
    """A training loop copies on its own stream, and drops the batch a step later."""
    with pinned_ring() as (ring, worker):
        side = torch.cuda.Stream()
        batch = batch_of(worker, 7.0)
        with torch.cuda.stream(side):
            copied = batch[0].to("cuda", non_blocking=True)
        side.synchronize()
        with fake_cuda.held(side), torch.cuda.stream(side):
            step = copied + 1
            batch.clear()
            assert ring.holders() == [FREE, FREE]
        side.synchronize()
        assert step.unique().tolist() == [8.0]


def test_results_that_the_device_writes_into_a_slab_arrive_first() -> None:
    with pinned_ring() as (ring, worker):
        side = torch.cuda.Stream()
        batch, result = batch_of(worker, 7.0), torch.ones(SHAPE, device="cuda")
        torch.cuda.synchronize()
        with fake_cuda.held(side):
            with torch.cuda.stream(side):
                batch[0].copy_(result, non_blocking=True)
            batch.clear()
            assert ring.holders() == [PARENT, FREE]
        assert wait_for(lambda: ring.holders() == [FREE, FREE])


@pytest.mark.parametrize("name", ["to", "scatter"])
def test_slabs_are_unpinned_after_the_last_copy_without_another_call(name: str) -> None:
    with fake_cuda.calls(fake_cuda.EXTENSION) as calls, pinned_ring() as (ring, worker):
        side = torch.cuda.Stream()
        with fake_cuda.held(side):
            copied = on_side(COPIES[name], batch_of(worker, 7.0), side)
            del ring, worker
            assert fake_cuda.problems() == []
        assert wait_for(lambda: not pinning_is_held())
    assert calls.count("cudaHostRegister") == calls.count("cudaHostUnregister") == 1
    assert copied.unique().tolist() == [7.0]


def pinning_is_held() -> bool:
    """Return True while `KeepAlive` holds sources; ask it for nothing."""
    return bool(to_device.keep_alive._sources)
