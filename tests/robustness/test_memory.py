"""Recycled memory as users see it; csrc/memory/test_block_cache.cpp tests the cache."""

from __future__ import annotations

import gc
import math
import pickle

import pytest
import torch
from backends import both, check
from prefetch_loaders import until

from pyparallel import DataContainer, collate, memory
from pyparallel import backend as backend_module
from pyparallel.core.errors import BatchTypeError, BatchValueError

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


def collated(num_rows):
    """Return a batch of two ragged samples, (2, 1, num_rows, 1024) bytes."""
    rows = (num_rows, num_rows - 1)
    samples = [torch.full((1, n, 1024), n % 251, dtype=torch.uint8) for n in rows]
    boxes = [DataContainer(sample, stack=True) for sample in samples]
    return collate(boxes, samples_per_gpu=2).data[0]


def test_only_batches_of_a_mebibyte_and_more_are_recycled():
    before = memory.cache_info()
    small = collated(32)
    assert memory.cache_info() == before
    equal = collate([{"x": torch.ones(MIB, dtype=torch.uint8)} for _ in range(2)])
    native = backend_module.name == "native"
    assert memory.cache_info().in_use == before.in_use + 2 * MIB * native
    del small, equal


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
def test_the_cache_stays_within_its_limit_and_frees_unused_blocks_in_time():
    memory.set_cache_limit(3 * MIB)
    kept = collated(1024)
    del kept
    assert memory.cache_info().cached == 2 * MIB
    dropped = collated(2048)
    del dropped
    assert memory.cache_info().cached == 2 * MIB
    memory.set_cache_limit(64 * MIB, idle_seconds=0.05)  # and then it is empty
    until(lambda: memory.cache_info().cached == 0)
    assert memory.cache_info().limit == 64 * MIB


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


NOT_NUMBERS = "nbytes must be an integer and idle_seconds a number, but are"
NOT_LONG = "idle_seconds must be between 0.001 and a year, but is"


@pytest.mark.parametrize(
    ("args", "error", "text"),
    [
        ((1.5, 1.0), BatchTypeError, f"{NOT_NUMBERS} float and float."),
        ((1, "x"), BatchTypeError, f"{NOT_NUMBERS} int and str."),
        ((-1, 1.0), BatchValueError, "nbytes must be 0 or more, but is -1."),
        ((2**63, 1.0), BatchValueError, f"nbytes must be 0 or more, but is {2**63}."),
        ((1, 0.0), BatchValueError, f"{NOT_LONG} 0.0."),
        ((1, math.nan), BatchValueError, f"{NOT_LONG} nan."),
        ((1, math.inf), BatchValueError, f"{NOT_LONG} inf."),
    ],
)
def test_impossible_bounds_are_refused(args, error, text):
    before = memory.cache_info()
    check(memory.set_cache_limit, args, error, f"set_cache_limit: {text}")
    assert memory.cache_info() == before
