"""Batches as messages: every kind arrives equal, small or large, in every memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves

import pyparallel
from pyparallel.batch import allocation
from pyparallel.shm.messages import INLINE_NBYTES, LazySlab, Packed, pack, unpack
from pyparallel.shm.ring import FREE, PARENT, Ring
from pyparallel.workers import descriptors
from tests.support.batch.batch_kinds import ALL, FOREIGN, OWN
from tests.support.loader.loader_sets import num_fds, same

pytestmark = [
    pytest.mark.asan,
    pytest.mark.filterwarnings("ignore:Sparse (CSR|invariant):UserWarning"),
]
HOLDER = 2
#: Kinds of more bytes than a message takes, and of none that are not in the pickle.
LARGE = ("large", "Fortran")
NO_BYTES = ("empty", "arrays", "scalars", "text")


def sent(
    make: Any, ring: Ring | None = None, limit: int = INLINE_NBYTES, kept: Any = None
) -> tuple[Any, Packed]:
    """Make a batch as a worker does, and receive it from a buffer that changes."""
    lazy = LazySlab(ring, HOLDER, limit)
    with allocation.allocate_from(lazy):
        held = [make()]
    if kept is not None:
        kept += tree_leaves(held)
    return arrive(held, lazy)


def arrive(held: Any, lazy: LazySlab) -> tuple[Any, Packed]:
    with descriptors.Sending() as sent:
        packed = pack(held, lazy)
    buffer = bytearray(packed.body)
    with descriptors.arriving(sent):
        batch, _ = unpack(memoryview(buffer))
    buffer[:] = bytes(len(buffer))
    return batch, packed


def reason(packed: Packed) -> str | None:
    return None if packed.miss is None else packed.miss.reason


@pytest.mark.parametrize("has_ring", [True, False])
@pytest.mark.parametrize("limit", [INLINE_NBYTES, 0])
@pytest.mark.parametrize("name", ALL)
def test_every_kind_arrives_through_every_memory(
    name: str, limit: int, has_ring: bool
) -> None:
    ring, make = Ring(1, 4 << 20) if has_ring else None, ALL[name]
    num_files = num_fds()
    batch, packed = sent(lambda: make(3), ring, limit)
    if name == "storage":
        assert batch.tolist() == make(3).tolist()
    else:
        assert same(batch, make(3))
    if name not in FOREIGN:
        assert num_fds() == num_files
        in_memory = name in LARGE or (
            limit == 0 and name in OWN and name not in NO_BYTES
        )
        assert reason(packed) == (None if has_ring or not in_memory else "off")
        assert (packed.nbytes > 0) is (name in OWN and name not in NO_BYTES)
        if ring is not None:
            assert ring.holders() == [PARENT if in_memory else FREE]
    del batch
    assert ring is None or ring.holders() == [FREE]


def test_tensors_of_a_small_batch_have_memory_of_their_own() -> None:
    batch, packed = sent(lambda: [torch.ones(3), {"x": torch.ones(2, 2).bool()}])
    assert packed.nbytes == 16
    tensors = tree_leaves(batch)
    for tensor in tensors:
        assert tensor.data_ptr() % 64 == 0
        assert tensor.untyped_storage().nbytes() == tensor.nbytes
        assert pyparallel.backend.memory_of(tensor).numel() == tensor.nbytes
    tensors[0].resize_(100).zero_()
    assert tensors[1].all()


@pytest.mark.parametrize("tree", [[1], (1,), {"x": 1}, torch.ones(2)])
def test_an_object_that_occurs_twice_stays_one_object(tree: Any) -> None:
    (first, second), _ = sent(lambda: [tree, tree])
    assert first is second
    assert same(first, tree)


def collated(rows: int) -> Any:
    return pyparallel.collate([torch.full((rows, 100), float(i)) for i in range(4)])


@pytest.mark.parametrize(
    ("rows", "in_ring", "missed"),
    [(8, False, None), (9, True, None), (100, True, None), (20_000, False, "large")],
)
def test_a_slab_is_claimed_by_the_first_large_tensor(
    rows: int, in_ring: bool, missed: str | None
) -> None:
    ring = Ring(1, 1 << 20)
    lazy = LazySlab(ring, HOLDER, INLINE_NBYTES)
    with allocation.allocate_from(lazy):
        held = [{"small": collated(2), "x": collated(rows)}]
    assert ring.holders() == [HOLDER if rows > 10 else FREE]
    batch, packed = arrive(held, lazy)
    assert ring.holders() == [PARENT if in_ring else FREE]
    assert same(batch, {"small": collated(2), "x": collated(rows)})
    assert reason(packed) == missed


def test_without_a_free_slab_the_batch_gets_one_descriptor() -> None:
    ring = Ring(1, 1 << 20)
    assert ring.claim(HOLDER + 1) is not None
    num_files = num_fds()
    batch, packed = sent(lambda: [collated(100), collated(200)], ring)
    assert same(batch, [collated(100), collated(200)])
    assert num_fds() == num_files
    assert reason(packed) == "full"


@pytest.mark.parametrize("rows", [2, 100])
def test_a_tensor_that_the_worker_keeps_is_not_overwritten(rows: int) -> None:
    ring, kept = Ring(1, 1 << 20), []
    batch, packed = sent(lambda: collated(rows), ring, kept=kept)
    kept.pop().zero_()
    assert same(batch, collated(rows))
    assert reason(packed) == ("kept" if rows == 100 else None)
    assert ring.holders() == [FREE]


@pytest.mark.parametrize("rows", [2, 100])
@pytest.mark.parametrize("has_ring", [True, False])
def test_a_batch_that_cannot_be_pickled_leaves_nothing_behind(
    rows: int, has_ring: bool
) -> None:
    ring = Ring(1, 1 << 20) if has_ring else None
    num_files = num_fds()
    with pytest.raises((AttributeError, TypeError)):
        sent(lambda: [collated(rows), lambda: 1], ring)
    freed = torch.ones(30_000)
    freed.untyped_storage().resize_(0)  # pack raises, and it is pickled instead
    batch, _ = sent(lambda: [collated(rows), freed], ring)
    assert same(batch[0], collated(rows))
    del batch
    assert num_fds() == num_files
    assert ring is None or ring.holders() == [FREE]
