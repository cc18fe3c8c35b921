"""Every error of `pack` and `views` in both backends, word for word."""

from __future__ import annotations

import pytest
import torch
from backends import both, check, last


def released():
    """A tensor whose storage is gone."""
    tensor = torch.empty(4)
    tensor.untyped_storage().resize_(0)
    return tensor


MEMORY = torch.zeros(64)
SLAB = torch.zeros(64, dtype=torch.uint8)
OVERSIZED = [2**40, 2**40]

PACK = [
    (None, [], [], TypeError, "dst must be a torch.Tensor, but is of type NoneType."),
    (
        SLAB,
        3,
        [],
        TypeError,
        "leaves must be a sequence of tensors, but is of type int.",
    ),
    (
        SLAB,
        ["a"],
        [0],
        TypeError,
        "leaves[0] must be a torch.Tensor, but is of type str.",
    ),
    (
        SLAB,
        [],
        1.5,
        TypeError,
        "offsets must be a sequence of ints, but is of type float.",
    ),
    (
        SLAB,
        [MEMORY],
        ["a"],
        TypeError,
        "offsets[0] must be an int, but is of type str.",
    ),
    (
        SLAB,
        [MEMORY],
        [2**70],
        ValueError,
        f"offsets[0] must fit in 64 bits, but is {2**70}.",
    ),
    (
        SLAB.view(8, 8),
        [],
        [],
        ValueError,
        "dst must be a contiguous torch.uint8 tensor of one dimension on the CPU, but "
        "has dtype torch.uint8, shape (8, 8), strides (8, 1) and device cpu.",
    ),
    (
        MEMORY,
        [],
        [],
        ValueError,
        "dst must be a contiguous torch.uint8 tensor of one dimension on the CPU, but "
        "has dtype torch.float32, shape (64,), strides (1,) and device cpu.",
    ),
    (
        SLAB[::2],
        [],
        [],
        ValueError,
        "dst must be a contiguous torch.uint8 tensor of one dimension on the CPU, but "
        "has dtype torch.uint8, shape (32,), strides (2,) and device cpu.",
    ),
    (
        SLAB,
        [MEMORY],
        [],
        ValueError,
        "offsets must have 1 entries, one for each leaf, but has 0.",
    ),
    (
        SLAB,
        [MEMORY[:1]],
        [-1],
        ValueError,
        "offsets[0] must be at least 0, the start of dst, but is -1.",
    ),
    (
        SLAB,
        [MEMORY[:4], MEMORY[:1]],
        [0, 8],
        ValueError,
        "offsets[1] must be at least 16, the end of leaves[0], but is 8.",
    ),
    (
        SLAB,
        [MEMORY],
        [0],
        ValueError,
        "offsets[0] must leave room for 256 bytes in dst, which has 64, but is 0.",
    ),
    (
        SLAB,
        [MEMORY[:2]],
        [2**63 - 1],
        ValueError,
        "offsets[0] must leave room for 8 bytes in dst, which has 64, but is "
        f"{2**63 - 1}.",
    ),
    (
        SLAB,
        [released()],
        [0],
        ValueError,
        "leaves[0] must lie within its storage, but needs 16 bytes where 0 are left. "
        "Copy it before its storage is released.",
    ),
    (
        SLAB,
        [SLAB[:1]],
        [0],
        ValueError,
        "leaves[0] must not share memory with dst, but overlaps it. Clone it first.",
    ),
]
F4 = torch.float32
VIEWS = [
    ([], [], [], [], TypeError, "slab must be a torch.Tensor, but is of type list."),
    (
        SLAB,
        0,
        [F4],
        [[1]],
        TypeError,
        "offsets must be a sequence of ints, but is of type int.",
    ),
    (
        SLAB,
        [0],
        F4,
        [[1]],
        TypeError,
        "dtypes must be a sequence of dtypes, but is of type dtype.",
    ),
    (
        SLAB,
        [0],
        [F4],
        1,
        TypeError,
        "shapes must be a sequence of shapes, but is of type int.",
    ),
    (
        SLAB,
        [0, 4],
        [F4],
        [[1]] * 2,
        ValueError,
        "offsets, dtypes and shapes must have the same length, but have 2, 1 and 2.",
    ),
    (
        SLAB,
        [0],
        ["float"],
        [[1]],
        TypeError,
        "dtypes[0] must be a torch.dtype, but is of type str.",
    ),
    (
        SLAB,
        [0],
        [F4],
        [1],
        TypeError,
        "shapes[0] must be a sequence of ints, but is of type int.",
    ),
    (
        SLAB,
        [0],
        [F4],
        [[1, 2.0]],
        TypeError,
        "shapes[0][1] must be an int, but is of type float.",
    ),
    (
        SLAB,
        [0],
        [F4],
        [[2**64]],
        ValueError,
        f"shapes[0][0] must fit in 64 bits, but is {2**64}.",
    ),
    (
        MEMORY,
        [0],
        [F4],
        [[1]],
        ValueError,
        "slab must be a contiguous torch.uint8 tensor of one dimension, but has dtype "
        "torch.float32, shape (64,), strides (1,) and device cpu.",
    ),
    (
        SLAB,
        [0],
        [torch.quint8],
        [[1]],
        TypeError,
        "dtypes[0] must be a dtype of plain tensors, but is torch.quint8.",
    ),
    (
        SLAB,
        [0],
        [F4],
        [(2, -1)],
        ValueError,
        "shapes[0] must have no negative size, but is (2, -1).",
    ),
    (
        SLAB,
        [0],
        [F4],
        [OVERSIZED],
        ValueError,
        f"shapes[0] must have fewer than 2**63 bytes, but is {tuple(OVERSIZED)}.",
    ),
    (SLAB, [-4], [F4], [[1]], ValueError, "offsets[0] must be at least 0, but is -4."),
    (
        SLAB,
        [0, 6],
        [F4, F4],
        [[1], [1]],
        ValueError,
        "offsets[1] must be a multiple of 4, the item size of torch.float32, but is 6.",
    ),
    (
        SLAB[3:],
        [0],
        [F4],
        [[1]],
        ValueError,
        "slab must start at a multiple of 4 bytes, the item size of torch.float32, but "
        "starts at byte 3 of its storage.",
    ),
    (
        SLAB,
        [32],
        [F4],
        [(3, 3)],
        ValueError,
        "offsets[0] must leave room for 36 bytes in slab, which has 64, but is 32.",
    ),
    (
        SLAB,
        [68],
        [F4],
        [[0]],
        ValueError,
        "offsets[0] must leave room for 0 bytes in slab, which has 64, but is 68.",
    ),
]


@both
@pytest.mark.parametrize("case", PACK, ids=last)
def test_pack_refuses(backend, case):
    *args, error, message = case
    check(backend.pack, args, error, f"pack: {message}")


@both
@pytest.mark.parametrize("case", VIEWS, ids=last)
def test_views_refuses(backend, case):
    *args, error, message = case
    check(backend.views, args, error, f"views: {message}")
