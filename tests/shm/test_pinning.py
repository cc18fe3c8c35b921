"""Pinned slabs on a slow device: none is free before it was read."""

from __future__ import annotations

import contextlib
import copy
import ctypes
import gc
import mmap
import os
import threading
from collections.abc import Iterator
from typing import Any
from unittest.mock import Mock

import pytest
import torch

import pyparallel
from pyparallel.shm import pinning
from pyparallel.shm.messages import LazySlab, pack, unpack
from pyparallel.shm.pinning import Pinner
from pyparallel.shm.ring import FREE, PARENT, Ring
from pyparallel.transfer import engine, to_device
from pyparallel.workers import descriptors
from tests.support.loader.ring_workers import Worker


class Mark:
    """A fence that is done when the test says so."""

    def __init__(self) -> None:
        self.done = False
        self.error: Exception | None = None
        self.thread = threading.get_ident()

    def is_done(self) -> bool:
        if self.error is not None:
            raise self.error
        return self.done


class Lock(Pinner):
    """A device whose fences are done when the test says so."""

    def __init__(self, refuses: bool = False) -> None:
        locks.append(self)
        self.refuses = refuses
        self.calls: list[tuple[Any, ...]] = []
        self.locked: dict[int, int] = {}
        self.marks: list[Mark] = []
        self.captured: set[int] = set()  # addresses that a graph reads

    def pin(self, address: int, nbytes: int) -> bool:
        assert address % os.sysconf("SC_PAGESIZE") == 0
        assert address not in self.locked, "locked twice"
        self.calls.append(("pin", nbytes))
        if not self.refuses:
            self.locked[address] = nbytes
        return not self.refuses

    def unpin(self, address: int) -> None:
        if address not in self.locked:
            raise RuntimeError("it is not pinned")
        self.calls.append(("unpin", self.locked.pop(address)))

    def fence(self, address: int) -> Mark | None:
        assert address in self.locked, "not tracked"
        if address in self.captured:
            return None
        self.marks.append(Mark())
        return self.marks[-1]

    def end(self) -> None:
        """Do all that is queued."""
        for mark in self.marks:
            mark.done = True
        to_device.release_done()


@pytest.fixture(autouse=True)
def nothing_is_held() -> Iterator[None]:
    yield
    for lock in locks:
        lock.end()
    locks.clear()
    assert to_device.release_done() == 0


locks: list[Lock] = []


def ring_with(lock: Lock, num_slabs: int = 2) -> tuple[Ring, Worker]:
    ring = Ring(num_slabs, 16 << 20)
    ring.pin(lock)
    return ring, Worker(ring, torch.stack)


def samples(nbytes: int = 8) -> list[torch.Tensor]:
    return [torch.ones(nbytes, dtype=torch.uint8)]


def test_a_slab_is_not_free_before_its_mark_is_done() -> None:
    lock = Lock()
    ring, worker = ring_with(lock)
    received = worker.make(samples())
    assert received.is_pinned and lock.calls == [("pin", 2 << 20)]
    del received
    assert ring.holders() == [PARENT, FREE]
    to_device.release_done()
    assert ring.holders() == [PARENT, FREE]
    second = worker.make(samples())
    assert second.message.location.slab == 1
    lock.marks[0].done = True
    to_device.release_done()
    assert ring.holders() == [FREE, PARENT]
    assert worker.make(samples()).message.location.slab == 0
    assert lock.calls == [("pin", 2 << 20)] * 2


def test_a_slab_that_grows_is_unpinned_and_pinned_again() -> None:
    lock = Lock()
    _, worker = ring_with(lock, 1)
    for nbytes in (8, 3 << 20, 100, 9 << 20):
        assert worker.make(samples(nbytes)).is_in_ring
        lock.end()
    assert lock.calls == [
        ("pin", 2 << 20),
        ("unpin", 2 << 20),
        ("pin", 4 << 20),
        ("unpin", 4 << 20),
        ("pin", 12 << 20),
    ]


def test_all_is_unlocked_when_the_ring_dies_after_all_marks() -> None:
    lock = Lock()
    ring, worker = ring_with(lock, 3)
    batches = [worker.make(samples()).batch for _ in range(3)]
    late = batches.pop()
    del late, ring, worker
    gc.collect()
    assert lock.calls == [("pin", 2 << 20)] * 3
    batches.clear()
    gc.collect()
    assert len(lock.marks) == 3
    assert lock.calls == [("pin", 2 << 20)] * 3
    lock.end()
    gc.collect()
    assert lock.locked == {}
    assert lock.calls[3:] == [("unpin", 2 << 20)] * 3


def test_a_batch_outside_of_the_ring_frees_slabs_that_were_read() -> None:
    lock = Lock()
    ring, worker = ring_with(lock, 1)
    worker.make(samples())
    lock.marks[0].done = True
    assert ring.holders() == [PARENT]
    assert not worker.make(samples()).is_in_ring
    assert ring.holders() == [FREE]


@pytest.fixture
def leaked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return a list of the objects that are kept until the process ends."""
    found: list[Any] = []
    monkeypatch.setattr(engine, "_leak", found.append)
    return found


def test_a_slab_that_a_graph_reads_is_never_used_again(leaked: list[Any]) -> None:
    lock = Lock()
    ring, worker = ring_with(lock)
    batch = worker.make(samples()).batch
    lock.captured.add(ring.slab_address(0))
    del batch
    for _ in range(3):
        assert worker.make(samples()).message.location.slab == 1
        lock.end()
    assert ring.holders() == [PARENT, FREE]
    del ring, worker
    gc.collect()
    assert to_device.release_done() == 0, "an exit would wait"
    assert len(lock.locked) == 2, "it stays mapped and pinned"
    leaked.clear()
    assert lock.locked == {}


class KeepsFromChildren(Lock):
    """A device whose driver keeps pinned pages from forked processes."""

    def pin(self, address: int, nbytes: int) -> bool:
        self._advise(address, nbytes, mmap.MADV_DONTFORK)
        return super().pin(address, nbytes)

    def unpin(self, address: int) -> None:
        self._advise(address, self.locked[address], mmap.MADV_DOFORK)
        super().unpin(address)

    def _advise(self, address: int, nbytes: int, advice: int) -> None:
        pages = ctypes.c_void_p(address), ctypes.c_size_t(nbytes)
        assert ctypes.CDLL(None).madvise(*pages, advice) == 0


@pytest.mark.usefixtures("forked")
@pytest.mark.filterwarnings("ignore:.PP201")
@pytest.mark.filterwarnings("ignore:.*no accelerator is found:UserWarning")
@pytest.mark.parametrize("persistent", [False, True])
def test_slabs_are_pinned_once_as_long_as_a_loader_exists(
    persistent: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = KeepsFromChildren()
    monkeypatch.setattr(pinning, "accelerator_pinner", lambda: lock)
    loader = pyparallel.DataLoader(
        torch.arange(40.0),
        num_workers=1,
        ring_slabs=2,
        pin_memory=True,
        persistent_workers=persistent,
    )
    for _ in range(3):
        for i, batch in enumerate(loader):
            assert batch.tolist() == [i]
            del batch
            lock.end()
    assert lock.calls == [("pin", 2 << 20)] * 2
    kept = next(iter(loader))
    del loader
    gc.collect()
    lock.end()
    assert len(lock.locked) == 2 and kept.tolist() == [0]
    del kept
    assert len(lock.locked) == 2, "the device reads the batch"
    lock.end()
    assert lock.locked == {}


def test_a_fence_that_cannot_be_queried_keeps_its_slab() -> None:
    lock = Lock()
    ring, worker = ring_with(lock)
    worker.make(samples())
    lock.marks[0].error = RuntimeError("the device failed")
    with pytest.raises(RuntimeError, match="the device failed"):
        to_device.release_done()
    assert ring.holders() == [PARENT, FREE]
    lock.marks[0].error = None
    lock.end()
    assert ring.holders() == [FREE, FREE]


def test_pages_that_could_not_be_unpinned_stay_mapped(
    leaked: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = Lock()
    ring, worker = ring_with(lock)
    worker.make(samples())
    lock.end()
    monkeypatch.setattr(lock, "unpin", Mock(side_effect=RuntimeError("it failed")))
    memory = ring._memory
    del ring, worker
    gc.collect()
    assert leaked == [memory]


def test_a_slab_that_could_not_be_pinned_is_not_tried_again() -> None:
    lock = Lock(refuses=True)
    ring, worker = ring_with(lock)
    for _ in range(3):
        received = worker.make(samples())
        assert not received.is_pinned
        assert received.batch.sum() == 8
        del received
        assert ring.holders() == [FREE, FREE]
    assert lock.calls == [("pin", 2 << 20)] and not lock.marks
    del ring, worker
    gc.collect()
    assert len(lock.calls) == 1


def test_an_error_of_the_device_does_not_cost_a_slab() -> None:
    lock = Lock()
    ring, worker = ring_with(lock)
    lock.locked[ring.slab_address(0)] = 1  # so that locking it raises
    with pytest.raises(AssertionError, match="locked twice"):
        worker.make(samples())
    gc.collect()
    assert ring.holders() == [FREE, FREE]


class Interrupted(Lock):
    """A device during whose calls signals arrive; their handler runs when they end."""

    interrupts = ""

    def pin(self, address: int, nbytes: int) -> bool:
        is_pinned = super().pin(address, nbytes)
        self._end("pin")
        return is_pinned

    def unpin(self, address: int) -> None:
        super().unpin(address)
        self._end("unpin")

    def _end(self, call: str) -> None:
        if self.interrupts == call:
            self.interrupts = ""
            raise KeyboardInterrupt


@pytest.mark.parametrize("call", ["pin", "unpin"])
def test_a_signal_while_a_slab_is_pinned_costs_no_slab(
    call: str, leaked: list[Any]
) -> None:
    lock = Interrupted()
    ring, worker = ring_with(lock, 1)
    for nbytes in (8, 3 << 20):
        lock.interrupts = call
        with contextlib.suppress(KeyboardInterrupt):
            worker.make(samples(nbytes))
        gc.collect()
        lock.end()
        assert ring.holders() == [FREE]
        received = worker.make(samples(nbytes))
        assert received.is_pinned and lock.locked == {
            ring.slab_address(0): ring.committed(0)
        }
        del received
        lock.end()
    memory = ring._memory
    del ring, worker
    gc.collect()
    assert lock.locked == {}
    assert leaked == [memory] * (call == "unpin"), "it may still be pinned"


def test_a_forked_child_neither_waits_nor_unlocks() -> None:
    lock = Lock()
    ring, worker = ring_with(lock)
    batch = worker.make(samples()).batch
    child = os.fork()
    if not child:
        code = 1
        try:
            del batch, ring, worker
            gc.collect()
            code = 40 + len(lock.calls) + 8 * len(lock.marks)
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 41
    assert ring.holders() == [PARENT, FREE]
    assert batch.sum() == 8


PINNED: dict[str, tuple[Any, bool]] = {
    "tensor": (torch.ones(3), False),
    "nested": ({"a": [torch.ones(3), "text", None]}, False),
    "leaf": ([torch.ones(3), torch.ones(2, requires_grad=True)], False),
    "sparse": ([torch.ones(3), torch.eye(2).to_sparse()], True),
    "array": ([torch.ones(3), torch.ones(5000).numpy()], True),
}


@pytest.mark.parametrize("name", PINNED)
@pytest.mark.parametrize("locks", [True, False])
def test_a_batch_is_pinned_if_all_its_bytes_are_in_pinned_pages(
    name: str, locks: bool
) -> None:
    ring = Ring(2, 1 << 20)
    if locks:
        ring.pin(Lock())
    batch, is_copied = copy.deepcopy(PINNED[name])  # torch may share its memory
    with descriptors.Sending() as sent:
        packed = pack([batch], LazySlab(ring, ring.new_holders(1), 0))
    with descriptors.arriving(sent):
        assert unpack(packed.body)[1] is (locks and not is_copied)
