"""Each CUDA call of the extension fails in turn, without a wrong byte or a hang."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from pyparallel import DataContainer, collate, memory, scatter, start_to_host, to_host
from pyparallel.shm import pinning
from pyparallel.shm.ring import Ring
from pyparallel.transfer import to_device
from pyparallel.transfer.engine import keep_alive
from tests.support.devices import fake_cuda
from tests.support.loader.ring_workers import Worker

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.device_failures,
    pytest.mark.fake_cuda,
    pytest.mark.filterwarnings(r"ignore:\[PP208\]"),  # a slab that CUDA refuses to pin
    pytest.mark.filterwarnings("ignore:CUDA warning"),  # by torch
]

#: The number of calls of each function that fail in turn during one operation.
MOST_CALLS = 6

Tensors = list[torch.Tensor]


@pytest.fixture(autouse=True, scope="module")
def no_idle_blocks() -> None:
    """Free the staging blocks of other files: with an idle one no event is queried."""
    torch.cuda.synchronize()
    before = memory.pinned_info()
    memory.set_pinned_limit((4 << 20) + before.in_use)  # failed copies keep blocks
    try:
        send_packed(0)
    finally:
        memory.set_pinned_limit(before.limit)


@pytest.fixture(autouse=True)
def nothing_held() -> Iterator[None]:
    """Free device memory and sources that a test has dropped, of any file."""
    free_dropped()
    yield
    free_dropped()


def free_dropped() -> None:
    gc.collect()
    for _ in range(2):  # the first call records events, the second finds them done
        send([torch.zeros(1)])
        torch.cuda.synchronize()
    to_device.release_done()
    keep_alive._sources.clear()  # of slabs without a fence


def device() -> torch.device:
    return torch.device("cuda", 0)


def small(value: int) -> Tensors:
    return [torch.full((50 + i,), value, dtype=torch.uint8) for i in range(20)]


def pinned(num: int, value: int) -> Tensors:
    shape = (1 << 20) + 64
    return [torch.full((shape,), value, dtype=torch.uint8).pin_memory()] * num


def send(leaves: Tensors) -> tuple[Tensors, Tensors]:
    return to_device.send(leaves, device()).wait(), leaves


def send_packed(value: int) -> tuple[Tensors, Tensors]:
    return send([*small(value), torch.full((5 << 20,), value, dtype=torch.uint8)])


def send_direct(value: int) -> tuple[Tensors, Tensors]:
    return send(small(value) + pinned(2, value))


def send_batch(value: int) -> tuple[Tensors, Tensors]:
    return send(pinned(9, value))


def send_from_side_stream(value: int) -> tuple[Tensors, Tensors]:
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        found, expected = send_packed(value)
    side.synchronize()
    return found, expected


def drop(value: int) -> tuple[Tensors, Tensors]:
    """Drop a copy that is not waited for; its memory is the next result's."""
    to_device.send([torch.full((1 << 20,), value, dtype=torch.uint8)], device())
    found = torch.full((1 << 20,), value + 1, dtype=torch.uint8, device=device())
    return [found], [torch.full((1 << 20,), value + 1, dtype=torch.uint8)]


def results(value: int) -> tuple[Tensors, Tensors]:
    hosts = [*small(value), torch.full((2 << 20,), value, dtype=torch.uint8)]
    return [host.to(device()) for host in hosts], hosts


def fetch(value: int) -> tuple[Tensors, Tensors]:
    there, hosts = results(value)
    return to_host(there), hosts


def start_to_fetch(value: int) -> tuple[Tensors, Tensors]:
    there, hosts = results(value)
    return start_to_host(there).get(), hosts


def scatter_ragged(value: int) -> tuple[Tensors, Tensors]:
    samples = [torch.full((3, i + 1), float(value)) for i in range(8)]
    batch = collate(
        [{"x": DataContainer(x, stack=True, pad_dims=1)} for x in samples], 4
    )
    parts = scatter(batch, [0, 0])
    hosts = [host for host in batch["x"].data]
    return [part["x"] for part in parts], hosts


def adopt_slab(
    value: int, copy: Callable[[torch.Tensor], Any] = lambda batch: scatter(batch, [0])
) -> tuple[Tensors, Tensors]:
    """Copy two batches of a pinned ring of one slab, and drop each at once."""
    ring = Ring(1, 16 << 20)
    ring.pin(pinning.accelerator_pinner())
    worker = Worker(ring, torch.stack)
    found, expected = [], []
    for sign in (1.0, -1.0):
        batch = worker.make([torch.full((1 << 16,), sign * value)] * 4).batch
        found += copy(batch)
        expected.append(batch.clone())
        del batch
    torch.cuda.synchronize()
    to_device.release_done()
    return found, expected


def copy_slab_on_side_stream(value: int) -> tuple[Tensors, Tensors]:
    def copy(batch: torch.Tensor) -> Tensors:
        with torch.cuda.stream(torch.cuda.Stream()):
            return [batch.to(device(), non_blocking=True)]

    return adopt_slab(value, copy)


OPERATIONS: list[Callable[[int], tuple[Tensors, Tensors]]] = [
    send_packed,
    send_direct,
    send_batch,
    send_from_side_stream,
    drop,
    fetch,
    start_to_fetch,
    scatter_ragged,
    adopt_slab,
    copy_slab_on_side_stream,
]


def check(operation: Callable[[int], tuple[Tensors, Tensors]], value: int) -> None:
    found, expected = operation(value)
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.dtype == theirs.dtype and mine.cpu().equal(theirs.cpu())


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda each: each.__name__)
def test_each_call_may_fail(operation: Any) -> None:
    for value in range(3):  # until its memory, events and streams exist
        check(operation, value)
    always = []
    value = 4
    failed = set()
    with fake_cuda.delayed(100):
        for _ in range(3):  # some calls depend on the time of others
            with fake_cuda.calls(caller=fake_cuda.EXTENSION) as names:
                check(operation, 3)
            always.append(set(names))
        for name in sorted(set(names)):
            for nth in range(1, min(names.count(name), MOST_CALLS) + 1):
                before = fake_cuda.num_failed()
                with fake_cuda.failing(name, nth, caller=fake_cuda.EXTENSION):
                    try:
                        check(operation, value)
                    except RuntimeError as error:
                        assert "CUDA error: invalid argument" in str(error)
                if fake_cuda.num_failed() > before:
                    failed.add(name)
                check(operation, value + 1)
                value = (value + 2) % 200
    assert failed >= set.intersection(*always)
