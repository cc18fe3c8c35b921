"""Budgets of host memory are hard limits."""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import pyparallel
from pyparallel import backend, memory
from pyparallel.core import errors
from pyparallel.core.errors import BatchTypeError, BatchValueError, LoaderWarning
from pyparallel.shm.ring import Ring, largest_slab, total_nbytes
from pyparallel.transfer import to_device
from tests.support.devices.host_device import CPU, HostDevice
from tests.support.loader.loader_sets import Sizes, messages
from tests.support.loader.prefetch_loaders import passes, until
from tests.support.processes.backends import check

MIB = 1 << 20
blocks = pytest.mark.skipif(
    backend.name != "native", reason="pure Python leaves staging memory to torch"
)


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    errors._warned.clear()
    limit = memory.pinned_info().limit
    yield
    if limit:
        memory.set_pinned_limit(limit)


# The ring.


def taken(ring: Ring) -> int:
    """Return the bytes of memory behind a ring, as the system counts them."""
    return os.fstat(ring.fd).st_blocks * 512


@settings(max_examples=60, deadline=None)
@given(num_slabs=st.integers(1, 40), limit=st.integers(1, 4 * MIB))
@example(num_slabs=1, limit=8192)
@example(num_slabs=64, limit=8192 + 64 * 4096)
def test_a_full_ring_stays_within_its_limit(num_slabs: int, limit: int) -> None:
    nbytes = largest_slab(num_slabs, limit)
    assert total_nbytes(num_slabs, nbytes + 1) > limit, "slabs could be larger"
    if not nbytes:
        return
    ring = Ring(num_slabs, nbytes)
    for holder in range(2, num_slabs + 2):
        slab = ring.claim(holder)
        assert slab is not None
        whole = slab.take(nbytes)
        assert whole is not None
        whole.fill_(1)
    assert taken(ring) == total_nbytes(num_slabs, nbytes) <= limit


def test_the_ring_of_a_loader_stays_within_max_ring_bytes() -> None:
    sizes = [10, 100_000, 20_000, 300_000, 30_000, 31_000, 5] * 4
    loader = pyparallel.DataLoader(
        Sizes(sizes), num_workers=2, ring_slabs=4, max_ring_bytes=MIB
    )
    with pytest.warns(LoaderWarning) as caught:
        for i, batch in enumerate(loader):
            assert batch.unique().tolist() == [i]
            ring = loader._receiver.ring
            assert ring is not None and taken(ring) <= MIB
    stats = loader.stats()
    assert stats.ring_hits > 0 and stats.ring_misses >= 8  # 300,000 and 100,000
    found = [str(w.message) for w in caught if "[PP202]" in str(w.message)]
    assert len(found) == 1 and "Increase max_ring_bytes to " in found[0]


def test_a_ring_that_may_have_too_little_is_a_warning_that_names_the_number() -> None:
    loader = pyparallel.DataLoader(
        Sizes([3]), num_workers=1, ring_slabs=4, max_ring_bytes=20_000
    )
    with pytest.warns(LoaderWarning) as caught:
        assert len(list(loader)) == 1
    assert messages(caught) == [
        "[PP206] DataLoader: a ring of 4 slabs needs at least 20480 bytes, but the "
        "limit is 20000. Every batch is allocated outside the ring, which is slower. "
        "Increase max_ring_bytes, or decrease ring_slabs (0 disables the ring)."
    ]
    enough = pyparallel.DataLoader(
        Sizes([3]), num_workers=1, ring_slabs=4, max_ring_bytes=20_480
    )
    assert len(list(enough)) == 1 and enough.stats().ring_hits == 1


# PreDataLoader.


class Counted:
    """An iterable of batches that knows how many of them are alive."""

    def __init__(self, num: int) -> None:
        self.num, self.asked, self.most = num, 0, 0
        self.alive: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()

    def __iter__(self) -> Iterator[torch.Tensor]:
        for i in range(self.num):
            self.asked += 1
            yield self._make(i)

    def _make(self, i: int) -> torch.Tensor:
        batch = torch.tensor(i)
        self.alive.add(batch)
        self.most = max(self.most, len(self.alive))
        return batch


@pytest.mark.slow
@pytest.mark.parametrize("queue_size", [1, 2, 5])
@pytest.mark.parametrize("num_held", [1, 3])
def test_prefetching_keeps_queue_size_batches_with_the_one_in_preparation(
    queue_size: int, num_held: int
) -> None:
    source, held = Counted(20), []
    with passes(source, queue_size=queue_size) as pre:
        it = iter(pre)
        for i in range(20):
            # Not before the thread has made all that it may.
            until(lambda i=i: source.asked == min(i + queue_size, 20))
            if len(held) == num_held:
                del held[0]
            held.append(next(it))
            assert held[-1] == i
    assert source.most == queue_size + num_held
    del held, it
    assert len(source.alive) == 0


# Pinned blocks.


@blocks
def test_blocks_stay_within_their_limit_whatever_is_sent() -> None:
    memory.set_pinned_limit(4 * MIB)
    device = HostDevice()
    for size in (10, 3_000_000, 100_000, 12_000_000, 700, 50_000):
        leaves = [torch.arange(size, dtype=torch.int32), torch.ones(7)]
        copied = to_device.send(leaves, CPU, device).wait()
        assert all(map(torch.equal, copied, leaves))
        info = memory.pinned_info()
        assert info.limit == 4 * MIB
        assert 0 < info.in_use + info.cached <= 4 * MIB


@blocks
def test_a_forked_child_reads_zeros_and_waits_for_no_lock() -> None:
    to_device.send([torch.ones(10)], CPU, HostDevice()).wait()
    assert sum(memory.pinned_info()[:2]) > 0
    limit = memory.pinned_info().limit
    child = os.fork()
    if not child:
        code = 1
        try:
            memory.set_pinned_limit(5 * MIB)
            code = 40 + (memory.pinned_info() == (0, 0, 5 * MIB, 0, 0))
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 41
    assert memory.pinned_info().limit == limit


@pytest.mark.parametrize(
    ("nbytes", "error", "text"),
    [
        (
            1e9,
            BatchTypeError,
            "an integer of 4194304 or more, but is 1000000000.0 (float).",
        ),
        (
            4 * MIB - 1,
            BatchValueError,
            "an integer of 4194304 or more, but is 4194303.",
        ),
        (2**63, BatchValueError, f"less than 2**63, but is {2**63}."),
    ],
)
def test_impossible_limits_are_refused(
    nbytes: object, error: type[Exception], text: str
) -> None:
    before = memory.pinned_info()
    message = f"set_pinned_limit: nbytes must be {text}"
    check(memory.set_pinned_limit, (nbytes,), error, message)
    assert memory.pinned_info() == before
