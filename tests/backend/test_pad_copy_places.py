"""`pad_copy` with and without starts and a mask: its results and its errors."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from backends import both, check, last
from collate_errors import freed
from raw_bytes import (
    bytes_of,
    marked,
    padded,
    poisoned,
    random_items,
    to_tensor,
)

pytestmark = [
    pytest.mark.cuda_torch,
    pytest.mark.asan,
    pytest.mark.filterwarnings("ignore:ComplexHalf support"),
]


@both
@pytest.mark.parametrize("num_dims", [1, 2, 3])
@pytest.mark.parametrize("shape", [(3, 500, 333), (700, 3, 501), (3, 2001, 2003)])
def test_large_batches_are_placed_by_several_threads(backend, shape, num_dims):
    rng = np.random.default_rng(4)
    shapes = [shape, tuple(size - 2 for size in shape), (1, 1, 100)]
    starts = [(0, 0, 0), (1, 2, 0), (shape[0] - 1, shape[1] - 1, 11)]
    items = [random_items(rng, each, torch.uint8) for each in shapes]
    samples = [to_tensor(each, torch.uint8) for each in items]
    dst = poisoned((3, *shape), torch.uint8)
    mask = torch.ones(3, *shape[-num_dims:], dtype=torch.bool)
    backend.pad_copy(dst, samples, b"\x07", starts, mask)
    assert bytes_of(dst) == padded(shape, items, b"\x07", 1, starts)
    assert bytes_of(mask) == marked(mask.shape, items, starts)


@both
def test_starts_may_be_whatever_counts(backend):
    dst = torch.full((1, 4), 7.0)
    backend.pad_copy(dst, [torch.ones(2)], bytes(4), iter([np.array([1])]))
    assert dst.tolist() == [[0, 1, 1, 0]]


BYTES = torch.zeros(64, dtype=torch.bool)
GOOD = (torch.ones(2, 3, 4), [torch.ones(2, 3), torch.ones(3, 4)], bytes(4))
STARTS = [
    (3, TypeError, "must be a sequence of sequences of ints, but is of type int."),
    ([3, 4], TypeError, "[0] must be a sequence of ints, but is of type int."),
    ([[0, 0], [0.5, 0]], TypeError, "[1][0] must be an int, but is of type float."),
    ([[0, 2**63], [0, 0]], ValueError,
     "[0][1] must fit in 64 bits, but is 9223372036854775808."),
    ([[0, 0]], ValueError, " must have 2 entries, one for each sample, but has 1."),
    ([[0, 0], [0, 0, 0]], ValueError,
     "[1] must have 2 entries, one for each dimension of a row of dst, but has 3."),
    ([[0, -1], [0, 0]], ValueError, "[0] must have no negative entry, but is (0, -1)."),
    ([[1, 1], [0, 1]], ValueError,
     "[1] must leave room for shape (3, 4) in shape (3, 4), but is (0, 1)."),
    ([[1, 2**63 - 1], [0, 0]], ValueError,
     "[0] must leave room for shape (2, 3) in shape (3, 4), but is (1, "
     "9223372036854775807)."),
]  # fmt: skip
FIRST_AND_LAST = "must have the first and one or more of the last dimensions of dst,"
MASKS = [
    ([True], TypeError, "must be a torch.Tensor, but is of type list."),
    (torch.ones(2, 4).to_sparse(), TypeError,
     "must be a plain strided tensor, but is sparse or opaque. Call to_dense() on it "
     "first."),
    (torch.ones(2, 4, dtype=torch.uint8), TypeError,
     "must have dtype torch.bool, but has torch.uint8."),
    (torch.ones(2, 3, dtype=torch.bool), ValueError,
     f"{FIRST_AND_LAST} (2, 3, 4), but has shape (2, 3)."),
    (torch.ones(2, dtype=torch.bool), ValueError,
     f"{FIRST_AND_LAST} (2, 3, 4), but has shape (2,)."),
    (torch.ones(3, 3, 4, dtype=torch.bool), ValueError,
     f"{FIRST_AND_LAST} (2, 3, 4), but has shape (3, 3, 4)."),
    (torch.ones(1, 2, 3, 4, dtype=torch.bool), ValueError,
     f"{FIRST_AND_LAST} (2, 3, 4), but has shape (1, 2, 3, 4)."),
    (torch.ones(4, 2, dtype=torch.bool).T, ValueError,
     "must be contiguous, but has strides (1, 2) for shape (2, 4)."),
    (freed(torch.ones(2, 4, dtype=torch.bool), 3), ValueError,
     "must lie within its storage, but needs 8 bytes where 3 are left. Copy it before "
     "its storage is released."),
]  # fmt: skip


def unwritten(call, args, error, message):
    dst = args[0].fill_(7)
    check(call, args, error, message)
    assert dst.eq(7).all()


@both
@pytest.mark.parametrize("case", STARTS, ids=last)
def test_wrong_starts_are_refused(backend, case):
    starts, error, message = case
    text = message if message.startswith(("[", " ")) else f" {message}"
    unwritten(backend.pad_copy, (*GOOD, starts), error, f"pad_copy: starts{text}")


@both
@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("case", MASKS, ids=last)
def test_wrong_masks_are_refused(backend, case):
    mask, error, message = case
    unwritten(backend.pad_copy, (*GOOD, None, mask), error, f"pad_copy: mask {message}")


@both
def test_a_mask_has_its_own_memory(backend):
    rule = "pad_copy: mask must not share memory with"
    advice = "but overlaps it. Give it memory of its own."
    dst, samples = torch.ones(2, 4, dtype=torch.bool), [BYTES[:4], BYTES[8:12]]
    args = (dst, samples, b"\0", None, dst)
    check(backend.pad_copy, args, ValueError, f"{rule} dst, {advice}")
    args = (dst, samples, b"\0", None, BYTES[11:19].view(2, 4))
    check(backend.pad_copy, args, ValueError, f"{rule} samples[1], {advice}")
    backend.pad_copy(dst, samples, b"\0", None, BYTES[12:20].view(2, 4))
    assert not dst.any() and BYTES.sum() == 8
