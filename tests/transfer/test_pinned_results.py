"""Pinned memory of results: counted while a tensor is alive, within its limit."""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from pyparallel import LoaderWarning, memory
from pyparallel.core import errors
from pyparallel.scatter_gather.to_host import HostCopy
from pyparallel.transfer import pinned_results, to_device
from pyparallel.transfer.pinned_results import HostSlabs, host_slabs
from tests.support.devices.fake_device import FakeDevice


def pinned(nbytes: int) -> torch.Tensor:
    """Stand in for an allocator of pinned memory."""
    return torch.empty(nbytes, dtype=torch.uint8)


@pytest.fixture
def two_more() -> Iterator[None]:
    """Leave room for two results of 64 bytes, and for a warning."""
    before = host_slabs.limit
    host_slabs.limit = host_slabs.in_use() + 128
    errors._warned.discard("PP213 ")
    yield
    host_slabs.limit = before


def results(fake: FakeDevice, value: float, snapshot: bool = False) -> HostCopy:
    there = fake.put(torch.full((4, 4), float(value)))
    return HostCopy({"x": there}, fake, snapshot)


@pytest.mark.parametrize("snapshot", [False, True])
def test_beyond_the_limit_results_are_in_pageable_memory(
    two_more: None, snapshot: bool
) -> None:
    with FakeDevice() as fake:
        kept = [results(fake, i, snapshot).get()["x"] for i in range(2)]
        with pytest.warns(LoaderWarning) as caught:
            kept.append(results(fake, 2, snapshot).get()["x"])
        (warning,) = caught
        assert str(warning.message) == (
            f"[PP213] to_host: {host_slabs.in_use()} bytes of results are alive in "
            "pinned memory, and 64 bytes more exceed the limit of "
            f"{host_slabs.limit} bytes. This result uses ordinary memory, so the host "
            "waits for its copy. clone() results that you keep, or raise "
            "memory.set_pinned_limit."
        )
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            kept.append(results(fake, 3, snapshot).get()["x"])
        assert [fake.is_pinned(x) for x in kept] == [True, True, False, False]
        assert [x.unique().tolist() for x in kept] == [[0], [1], [2], [3]]
        del kept[0]
        kept.append(results(fake, 4, snapshot).get()["x"])
        assert fake.is_pinned(kept[-1]) and kept[-1].eq(4).all()


def test_pageable_results_are_kept_alive_until_they_are_written(
    two_more: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[pinned_results.StorageWeakRef] = []
    real = host_slabs.take

    def take(*args: Any) -> tuple[torch.Tensor, bool]:
        slab, is_pinned = real(*args)
        assert not is_pinned
        made.append(pinned_results.StorageWeakRef(slab.untyped_storage()))
        return slab, is_pinned

    host_slabs.limit -= 128
    monkeypatch.setattr(host_slabs, "take", take)
    errors._warned.add("PP213 ")
    go = threading.Event()
    with FakeDevice() as fake:
        fake.copies.queue(go.wait, 30)
        results(fake, 1, snapshot=True)  # and the handle is dropped
        to_device.release_done()
        was_held = [not each.expired() for each in made]
        go.set()
        assert fake.record(fake.copies).wait(30)
        to_device.release_done()
        assert was_held == [True] and made[0].expired()


def test_threads_that_allocate_at_a_time_stay_within_the_limit() -> None:
    slabs, most, lock = HostSlabs(500), [0, 0], threading.Lock()
    all_here = threading.Barrier(8, timeout=30)
    kept: list[tuple[torch.Tensor, bool]] = []

    def slow(nbytes: int) -> torch.Tensor:
        with lock:
            most[0] += nbytes
            most[1] = max(most)
        allocating.wait(0.2)  # for all that think there is room
        return pinned(nbytes)

    def work() -> None:
        all_here.wait()
        kept.append(slabs.take(100, slow))

    allocating = threading.Event()
    errors._warned.add("PP213 ")
    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most[1] == 500 and slabs.in_use() == 500
    assert sorted(is_pinned for _, is_pinned in kept) == [False] * 3 + [True] * 5


def test_the_checks_for_a_result_do_not_grow_with_kept_results(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[None] = []

    class Counted(pinned_results.StorageWeakRef):
        def expired(self) -> bool:
            asked.append(None)
            return bool(super().expired())

    monkeypatch.setattr(pinned_results, "StorageWeakRef", Counted)
    slabs, kept = HostSlabs(2000 * 64), []
    for _ in range(2000):
        kept.append(slabs.take(64, pinned))
    assert all(is_pinned for _, is_pinned in kept)
    assert 2000 <= len(asked) <= 2000 * 16
    asked.clear()
    errors._warned.add("PP213 ")
    beyond = [slabs.take(64, pinned) for _ in range(500)]
    assert not any(is_pinned for _, is_pinned in beyond)
    assert 500 <= len(asked) <= 500 * 128
    del kept[100:]
    later = [slabs.take(64, pinned)[1] for _ in range(2000 // 64)]
    assert later[-1] and slabs.in_use() == 100 * 64


def test_a_signal_handler_may_query_while_slabs_are_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As of a signal, which prints `memory.pinned_info` whatever is under way."""
    inner: list[int] = [0]

    class Interrupted(pinned_results.StorageWeakRef):
        def expired(self) -> bool:
            if not inner:
                inner.append(0)
                inner[0] = slabs.in_use()
                kept.append(slabs.take(7, pinned)[0])
            return bool(super().expired())

    monkeypatch.setattr(pinned_results, "StorageWeakRef", Interrupted)
    slabs = HostSlabs(1000)
    kept = [slabs.take(100, pinned)[0] for _ in range(3)]
    inner.clear()
    del kept[:2]
    assert slabs.in_use() == 107 and inner == [100]
    del kept[:]
    assert slabs.in_use() == 0


def test_memory_that_cannot_be_pinned_does_not_count() -> None:
    def refused(nbytes: int) -> torch.Tensor:
        raise RuntimeError("no more pages")

    slabs = HostSlabs(1000)
    with pytest.raises(RuntimeError, match=r"^no more pages$"):
        slabs.take(1000, refused)
    assert slabs.in_use() == 0 and slabs.take(1000, pinned)[1]


def test_a_forked_child_starts_empty_and_waits_for_no_lock() -> None:
    before = host_slabs.in_use()
    slab, _ = host_slabs.take(100, pinned)
    assert memory.pinned_info().results == before + slab.numel()
    with host_slabs._lock:
        child = os.fork()
        if not child:
            code = 1
            try:
                code = 40 + (memory.pinned_info().results == 0)
            finally:
                os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 41


def test_the_limit_is_that_of_blocks() -> None:
    before, all_pages = memory.pinned_info().limit, os.sysconf("SC_PHYS_PAGES")
    eighth = all_pages // 8 * os.sysconf("SC_PAGESIZE")
    assert before == host_slabs.limit == min(1 << 30, eighth)
    try:
        memory.set_pinned_limit(7 << 20)
        assert memory.pinned_info().limit == host_slabs.limit == 7 << 20
    finally:
        memory.set_pinned_limit(before)
