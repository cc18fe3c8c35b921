"""Complete messages of all errors of slabs and their plans in both backends."""

from __future__ import annotations

import pytest
import torch
from backends import both, check, last
from collate_errors import freed

pytestmark = [pytest.mark.cuda_torch, pytest.mark.asan]


MEMORY = torch.zeros(64)
SLAB = torch.zeros(64, dtype=torch.uint8)
OVERSIZED = [2**40, 2**40]
F4 = torch.float32
LONG = 2**63 - 64  # the largest offset

PLANS = [
    (0, [[1]], [F4], 64, TypeError,
     "offsets must be a sequence of ints, but is of type int."),
    (["a"], [[1]], [F4], 64, TypeError,
     "offsets[0] must be an int, but is of type str."),
    ([2**70], [[1]], [F4], 64, ValueError,
     f"offsets[0] must fit in 64 bits, but is {2**70}."),
    ([0], 1, [F4], 64, TypeError,
     "shapes must be a sequence of shapes, but is of type int."),
    ([0], [1], [F4], 64, TypeError,
     "shapes[0] must be a sequence of ints, but is of type int."),
    ([0], [[1, 2.0]], [F4], 64, TypeError,
     "shapes[0][1] must be an int, but is of type float."),
    ([0], [[2**64]], [F4], 64, ValueError,
     f"shapes[0][0] must fit in 64 bits, but is {2**64}."),
    ([0], [[1]], F4, 64, TypeError,
     "dtypes must be a sequence of dtypes, but is of type dtype."),
    ([0], [[1]], ["float"], 64, TypeError,
     "dtypes[0] must be a torch.dtype, but is of type str."),
    ([0, 64], [[1]], [F4] * 2, 128, ValueError,
     "offsets, shapes and dtypes must have the same length, but have 2, 1 and 2."),
    ([0], [[1]], [F4], "a", TypeError, "nbytes must be an int, but is of type str."),
    ([0], [[1]], [F4], 2**64, ValueError,
     f"nbytes must fit in 64 bits, but is {2**64}."),
    ([0], [[1]], [torch.quint8], 64, TypeError,
     "dtypes[0] must be a dtype of plain tensors, but is torch.quint8."),
    ([0], [(2, -1)], [F4], 64, ValueError,
     "shapes[0] must have no negative size, but is (2, -1)."),
    ([0], [OVERSIZED], [F4], 64, ValueError,
     f"shapes[0] must have fewer than 2**63 bytes, but is {tuple(OVERSIZED)}."),
    ([-64], [[1]], [F4], 64, ValueError,
     "offsets[0] must be a multiple of 64 and at least 0, the end of the leaf before "
     "it, but is -64."),
    ([0, 72], [[1], [1]], [F4] * 2, 128, ValueError,
     "offsets[1] must be a multiple of 64 and at least 4, the end of the leaf before "
     "it, but is 72."),
    ([0, 64], [[17], [1]], [F4] * 2, 128, ValueError,
     "offsets[1] must be a multiple of 64 and at least 68, the end of the leaf before "
     "it, but is 64."),
    ([LONG], [[16]], [F4], LONG, ValueError,
     f"offsets[0] must leave room for 64 bytes below 2**63, but is {LONG}."),
    ([0], [[17]], [F4], 64, ValueError,
     "nbytes must be a multiple of 64 and at least 68, the end of the last leaf, but "
     "is 64."),
    ([0], [[1]], [F4], 65, ValueError,
     "nbytes must be a multiple of 64 and at least 4, the end of the last leaf, but is "
     "65."),
]  # fmt: skip

PLANNED = [
    (3, TypeError, "leaves must be a sequence of tensors, but is of type int."),
    (["a"], TypeError, "leaves[0] must be a torch.Tensor, but is of type str."),
    ([MEMORY, MEMORY.to(torch.complex64).conj()], TypeError,
     "leaves[1] must be a plain strided tensor, but is conjugated. Call resolve_conj() "
     "on it first."),
    ([MEMORY, MEMORY[0].expand(2**40, 2**20), MEMORY[0].expand(2**40, 2**20)],
     ValueError,
     "leaves must have fewer than 2**63 bytes together, but leaves[2] goes beyond."),
]  # fmt: skip

NO_SLAB = "must be a contiguous torch.uint8 tensor of one dimension, but "
PACK = [
    (None, [], [], TypeError, "dst must be a torch.Tensor, but is of type NoneType."),
    (SLAB, 3, [], TypeError,
     "leaves must be a sequence of tensors, but is of type int."),
    (SLAB, ["a"], [], TypeError,
     "leaves[0] must be a torch.Tensor, but is of type str."),
    (SLAB.view(8, 8), [], [], ValueError,
     f"dst {NO_SLAB}has dtype torch.uint8, shape (8, 8), strides (8, 1) and device "
     "cpu."),
    (MEMORY, [], [], ValueError,
     f"dst {NO_SLAB}has dtype torch.float32, shape (64,), strides (1,) and device "
     "cpu."),
    (SLAB[::2], [], [], ValueError,
     f"dst {NO_SLAB}has dtype torch.uint8, shape (32,), strides (2,) and device cpu."),
    (SLAB, [MEMORY], [MEMORY], ValueError,
     "dst must have 256 bytes, as planned, but has 64."),
    (SLAB, [], [MEMORY[:1]], ValueError,
     "leaves must have 1 entries, as planned, but has 0."),
    (SLAB, [MEMORY[:2]], [MEMORY[:1]], ValueError,
     "leaves[0] must have dtype torch.float32 and shape (1,), as planned, but has "
     "torch.float32 and (2,)."),
    (SLAB.new_zeros(128), [MEMORY[:1], MEMORY[:1].int()], [MEMORY[:1]] * 2, ValueError,
     "leaves[1] must have dtype torch.float32 and shape (1,), as planned, but has "
     "torch.int32 and (1,)."),
    (SLAB, [freed(torch.empty(4))], [MEMORY[:4]], ValueError,
     "leaves[0] must lie within its storage, but needs 16 bytes where 0 are left. Copy "
     "it before its storage is released."),
    (SLAB, [freed(torch.empty(4).expand(2, 4).t())], [MEMORY[:8].view(4, 2)],
     ValueError,
     "leaves[0] must lie within its storage, but needs 16 bytes where 0 are left. Copy "
     "it before its storage is released."),
    (SLAB, [SLAB[:1]], [SLAB[:1]], ValueError,
     "leaves[0] must not share memory with dst, but overlaps it. Clone it first."),
]  # fmt: skip
VIEWS = [
    ([], [], TypeError, "slab must be a torch.Tensor, but is of type list."),
    (MEMORY, [MEMORY[:1]], ValueError,
     "slab must be a contiguous torch.uint8 tensor of one dimension, but has dtype "
     "torch.float32, shape (64,), strides (1,) and device cpu."),
    (SLAB[3:], [MEMORY[:1]], ValueError,
     "slab must have 64 bytes, as planned, but has 61."),
    (SLAB.new_zeros(67)[3:], [SLAB[:0], MEMORY[:1]], ValueError,
     "slab must start at a multiple of 4 bytes, the item size of torch.float32, but "
     "starts at byte 3 of its storage."),
]  # fmt: skip


@both
@pytest.mark.parametrize("case", PLANS, ids=last)
def test_a_plan_refuses(backend, case):
    *args, error, message = case
    check(backend.SlabPlan, args, error, f"SlabPlan: {message}")


@both
@pytest.mark.parametrize("case", PLANNED, ids=last)
def test_plan_slab_refuses(backend, case):
    leaves, error, message = case
    check(backend.plan_slab, [leaves], error, f"plan_slab: {message}")


@both
@pytest.mark.parametrize("case", PACK, ids=last)
def test_pack_refuses_and_writes_nothing(backend, case):
    dst, leaves, planned, error, message = case
    before = None if dst is None else dst.clone()
    plan = backend.plan_slab(planned)
    check(backend.pack, [dst, leaves, plan], error, f"pack: {message}")
    assert dst is None or dst.equal(before)


@both
@pytest.mark.parametrize("case", VIEWS, ids=last)
def test_views_refuses(backend, case):
    slab, planned, error, message = case
    plan = backend.plan_slab(planned)
    check(backend.views, [slab, plan], error, f"views: {message}")


@both
def test_an_invalid_plan_is_refused(backend):
    message = "plan must be a SlabPlan, but is of type list."
    check(backend.pack, [SLAB, [], []], TypeError, f"pack: {message}")
    check(backend.views, [SLAB, []], TypeError, f"views: {message}")
