"""Recycled memory as users see it; csrc/memory/test_block_cache.cpp tests the cache."""

from __future__ import annotations

import functools
import gc
import math
import multiprocessing
import pickle
import time

import pytest
import torch
from torch.utils.data import DataLoader

import pyparallel
from pyparallel import DataContainer, collate, memory
from pyparallel import backend as backend_module
from tests.support.processes.backends import both, check

pytestmark = [pytest.mark.cuda_torch, pytest.mark.asan, pytest.mark.tsan]

MIB = 1 << 20
recycles = pytest.mark.skipif(
    backend_module.name != "native", reason="pure Python leaves its memory to torch"
)


@pytest.fixture(autouse=True)
def empty_before_and_default_after():
    gc.collect()
    limit = memory.cache_info().limit
    memory.empty_cache()
    yield
    memory.set_cache_limit(limit)
    memory.empty_cache()


def batch_of(num_rows):
    """Two ragged samples, (2, 1, num_rows, 1024) bytes when collated."""
    rows = (num_rows, num_rows - 1)
    samples = [torch.full((1, n, 1024), n % 251, dtype=torch.uint8) for n in rows]
    return [DataContainer(sample, stack=True) for sample in samples]


def collated(num_rows):
    return collate(batch_of(num_rows), samples_per_gpu=2).data[0]


@recycles
def test_the_memory_of_a_large_batch_serves_the_next_one():
    before = memory.cache_info()
    first = collated(2048)
    address = first.data_ptr()
    assert memory.cache_info().in_use == before.in_use + 4 * MIB
    view = first[0, 0]
    del first
    assert memory.cache_info().cached == 0, "a view keeps the memory alive"
    assert view[0, 0] == 2048 % 251
    del view
    assert memory.cache_info().cached == 4 * MIB
    again = collated(2047)
    assert again.data_ptr() == address
    after = memory.cache_info()
    assert (after.hits - before.hits, after.misses - before.misses) == (1, 1)
    del again
    assert [memory.empty_cache(), memory.empty_cache()] == [4 * MIB, 0]


@recycles
def test_equal_samples_are_recycled_too():
    samples = [{"x": torch.ones(MIB, dtype=torch.uint8)} for _ in range(2)]
    batch = collate(samples)
    assert memory.cache_info().in_use >= 2 * MIB
    del batch
    assert memory.cache_info().cached == 2 * MIB


def test_small_batches_use_memory_of_torch():
    before = memory.cache_info()
    batch = collated(32)
    assert batch.shape == (2, 1, 32, 1024)
    del batch
    assert memory.cache_info() == before


@recycles
def test_the_cache_stays_within_its_limit():
    memory.set_cache_limit(3 * MIB)
    kept = collated(1024)
    del kept
    assert memory.cache_info().cached == 2 * MIB
    dropped = collated(2048)
    del dropped
    assert memory.cache_info().cached == 2 * MIB
    memory.set_cache_limit(0)
    assert memory.cache_info().cached == 0
    assert memory.cache_info().limit == 0


@recycles
def test_unused_blocks_are_freed_in_time():
    memory.set_cache_limit(64 * MIB, idle_seconds=0.05)
    batch = collated(2048)
    del batch
    end = time.monotonic() + 8  # before the default of 10 s
    while memory.cache_info().cached and time.monotonic() < end:
        time.sleep(0.01)
    assert memory.cache_info().cached == 0


def test_a_recycled_tensor_supports_all_operations():
    batch = collated(2048)
    copy = batch.clone()
    assert torch.equal(pickle.loads(pickle.dumps(batch)), copy)
    assert (collated(2048).numpy() == copy.numpy()).all()
    batch.resize_(3, 1, 2048, 1024)
    assert torch.equal(batch[:2], copy)
    shared = collated(2048).share_memory_()
    assert shared.is_shared() and torch.equal(shared, copy)
    weights = torch.nn.Parameter(collated(2048).float())
    weights.sum().backward()
    assert weights.grad.sum() == weights.numel()
    kept = collated(2048).untyped_storage()
    assert len(kept) == 4 * MIB


@recycles
def test_deterministic_mode_uses_memory_of_torch():
    before = memory.cache_info().in_use
    torch.use_deterministic_algorithms(True)
    try:
        junk = backend_module.empty((MIB,), torch.float32)
    finally:
        torch.use_deterministic_algorithms(False)
    assert junk.isnan().all()
    assert memory.cache_info().in_use == before


def sum_of(batch):
    return batch.data[0].sum().item()


def test_batches_of_workers_are_in_shared_memory_and_not_recycled():
    items = [each for _ in range(3) for each in batch_of(2048)]
    loader = DataLoader(
        items,
        batch_size=2,
        num_workers=1,
        collate_fn=functools.partial(collate, samples_per_gpu=2),
    )
    expected = sum_of(collate(batch_of(2048), 2))
    before = memory.cache_info()
    for batch in loader:
        assert batch.data[0].is_shared()
        assert sum_of(batch) == expected
    assert memory.cache_info() == before


def child_collates(queue):
    torch.set_num_threads(1)  # OpenMP's threads are the parent's
    before = memory.cache_info()
    sums = [int(collated(2048).sum()) for _ in range(2)]
    after = memory.cache_info()
    queue.put((before.cached, after.cached, after.hits - before.hits, sums))


@recycles
def test_a_forked_child_has_its_own_cache():
    batch = collated(2048)
    expected = int(batch.sum())
    del batch
    assert memory.cache_info().cached == 4 * MIB
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=child_collates, args=(queue,))
    child.start()
    assert queue.get(timeout=60) == (0, 4 * MIB, 1, [expected] * 2)
    child.join(30)
    assert child.exitcode == 0
    assert memory.cache_info().cached == 4 * MIB


@both
def test_empty_refuses_an_invalid_shape(backend):
    rule = "must be a sequence of ints, but is of type int."
    check(backend.empty, (3, torch.uint8), TypeError, f"empty: shape {rule}")
    rule = "must be a torch.dtype, but is of type str."
    check(backend.empty, ((3,), "uint8"), TypeError, f"empty: dtype {rule}")
    text = "Trying to create tensor with negative dimension -1: [-1]"
    check(backend.empty, ((-1,), torch.uint8), RuntimeError, text)


@recycles
def test_too_large_a_batch_is_an_error_with_its_size():
    text = (
        f"there must be {2**60} bytes of memory for a batch, but the system has none "
        "left."
    )
    check(backend_module.empty, ((2**60,), torch.uint8), RuntimeError, text)


@pytest.mark.parametrize(
    ("args", "error", "text"),
    [
        (
            ("1", 1.0),
            TypeError,
            "an integer and idle_seconds a number, but are str and",
        ),
        ((1.5, 1.0), TypeError, "an integer and idle_seconds a number, but are float"),
        ((1, "x"), TypeError, "a number, but are int and str."),
        ((-1, 1.0), ValueError, "nbytes must be 0 or more, but is -1."),
        ((2**63, 1.0), ValueError, f"nbytes must be 0 or more, but is {2**63}."),
        ((1, 0.0), ValueError, "between 0.001 and a year, but is 0.0."),
        ((1, math.nan), ValueError, "between 0.001 and a year, but is nan."),
        ((1, math.inf), ValueError, "between 0.001 and a year, but is inf."),
        ((1, 10**400), ValueError, "between 0.001 and a year, but is inf."),
    ],
)
def test_impossible_bounds_are_refused(args, error, text):
    before = memory.cache_info()
    with pytest.raises(error) as caught:
        memory.set_cache_limit(*args)
    assert str(caught.value).startswith("set_cache_limit: ")
    assert text in str(caught.value)
    assert memory.cache_info() == before


def test_pure_python_keeps_nothing():
    assert pyparallel.backend._python.cache_info() == (0, 0, 0, 0, 0)
    assert pyparallel.backend._python.clear_cache() == 0
