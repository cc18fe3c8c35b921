"""PYPARALLEL_DEBUG=poison detects writes outside a batch's own memory."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import pytest
import torch
from loader_sets import Numbers, holders, wait_for
from ring_workers import Worker

import pyparallel
from pyparallel import backend
from pyparallel.shm.ring import Ring
from pyparallel.transfer import debug

# When an iterator ends, torch closes queues that their feeder threads may still use.
pytestmark = [
    pytest.mark.usefixtures("forked"),
    pytest.mark.asan,
    pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.timeout(120),
]


@pytest.fixture(autouse=True)
def _poison(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(debug, "poison_enabled", True)


def stale(tensor: torch.Tensor) -> Any:
    """Return the memory of a tensor, which keeps nothing alive."""
    return (ctypes.c_uint8 * tensor.nbytes).from_address(tensor.data_ptr())


def test_a_write_to_a_free_slab_is_found_when_it_is_claimed() -> None:
    ring = Ring(2, 1 << 16)
    worker = Worker(ring, torch.stack)
    batch = worker.make([torch.ones(4)]).deserialize()
    memory = stale(batch)
    assert bytes(memory) == torch.ones(4).numpy().tobytes()
    del batch
    assert bytes(memory) == b"\xdb" * 16
    memory[5] = 0
    with pytest.raises(RuntimeError) as caught:
        worker.make([torch.ones(4)])
    assert str(caught.value) == (
        "slab 0 of the DataLoader's ring must not change while it is free, but "
        "it was written. Look for code that uses the memory of a batch after its last "
        "tensor was freed."
    )


def before(batch: torch.Tensor) -> int:
    return batch.data_ptr() - 1


def after(batch: torch.Tensor) -> int:
    slab = backend.memory_of(batch)
    return slab.data_ptr() + slab.nbytes


@pytest.mark.parametrize("place", [before, after])
def test_a_write_of_the_parent_beyond_a_batch_is_found(
    place: Callable[[torch.Tensor], int],
) -> None:
    ring = Ring(2, 1 << 16)
    worker = Worker(ring, torch.stack)
    batch = worker.make([torch.ones(4)]).deserialize()
    ctypes.c_uint8.from_address(place(batch)).value = 0
    del batch
    with pytest.raises(RuntimeError) as caught:
        worker.make([torch.ones(4)])
    assert str(caught.value) == (
        "slab 0 of the DataLoader's ring must be written within its 64 bytes, but "
        f"bytes {place.__name__} them were written. Look for code that writes out of "
        "the bounds of a tensor."
    )


class Beyond:
    """A collate function that still writes after its batch was serialized."""

    def __init__(self, offset: int) -> None:
        self.offset = offset

    def __call__(self, samples: Any) -> Any:
        batch = pyparallel.collate(samples)
        self.address = batch.data_ptr() + self.offset
        return batch


@pytest.mark.parametrize(("offset", "where"), [(-3, "before"), (80_063, "after")])
def test_a_write_of_a_worker_beyond_a_batch_is_found(offset: int, where: str) -> None:
    ring = Ring(2, 1 << 20)
    collate_fn = Beyond(offset)
    worker = Worker(ring, collate_fn)
    adopt = ring.adopt

    def late(*args: Any) -> torch.Tensor:
        ctypes.c_uint8.from_address(collate_fn.address).value = 1
        return adopt(*args)

    ring.adopt = late  # type: ignore[method-assign]
    with pytest.raises(
        RuntimeError, match=f"bytes {where} them were written"
    ) as caught:
        worker.make([torch.ones(20_000)])
    assert "slab 0 of the DataLoader's ring must be written within its" in str(
        caught.value
    )


def test_a_loader_works_and_its_stale_memory_is_found() -> None:
    loader = pyparallel.DataLoader(Numbers(8), num_workers=1, ring_slabs=6)
    for _ in range(2):
        assert [int(batch[0, 0]) for batch in loader] == list(range(8))
    batches = iter(loader)
    batch = next(batches)
    memory = stale(batch)
    # The worker has made all requested batches, so it claims no slab now.
    assert wait_for(lambda: sum(holder > 1 for holder in holders(loader)) == 2)
    del batch
    assert bytes(memory) == b"\xdb" * 12
    memory[0] = 1
    with pytest.raises(RuntimeError, match="must not change while it is free"):
        for batch in batches:
            del batch
