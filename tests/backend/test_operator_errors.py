"""Complete messages of all errors of the operators, in both backends."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.support.devices.host_device import COPIES, SIDE, HostStream
from tests.support.errors.collate_errors import freed
from tests.support.processes.backends import both, check, last, native, needs_native

pytestmark = [
    pytest.mark.cuda_torch,
    pytest.mark.one_backend,
    pytest.mark.asan,
    # Warnings of torch about the tensors that are refused here.
    pytest.mark.filterwarnings("ignore:Sparse"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors"),
    pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor"),
    pytest.mark.filterwarnings("ignore:.*deprecated"),
]

MEMORY = torch.zeros(64)
SLAB = torch.zeros(64, dtype=torch.uint8)


def refuses(backend, name, args, error, message):
    """Expect exactly this error, and that no argument is written."""
    held = [x for x in args if isinstance(x, torch.Tensor) and x.device.type == "cpu"]
    held = [x for x in held if x.layout == torch.strided]
    held = [x for x in held if x.untyped_storage().nbytes() >= x.nbytes]
    before = [x.clone() for x in held]
    check(getattr(backend, name), args, error, f"{name}: {message}")
    assert all(map(torch.equal, held, before))


# -------------------------------------------------------------- arguments of operators
PAD_COPY = [
    ([1], [], b"", TypeError, "dst must be a torch.Tensor, but is of type list."),
    (torch.ones(2, 2), 3, b"", TypeError,
     "samples must be a sequence of tensors, but is of type int."),
    (torch.ones(2, 2), [torch.ones(2), np.ones(2)], b"", TypeError,
     "samples[1] must be a torch.Tensor, but is of type ndarray."),
    (torch.ones(2, 2), [torch.ones(2)] * 2, "0000", TypeError,
     "fills must be bytes, but is of type str."),
    (torch.ones(()), [], b"0000", ValueError,
     "dst must have at least 1 dimension, but has 0."),
    (torch.ones(2, 3).T, [torch.ones(2)] * 3, b"0000", ValueError,
     "dst must be contiguous, but has strides (1, 3) for shape (3, 2)."),
    (torch.ones(3, 2), [torch.ones(2)] * 2, b"0000", ValueError,
     "samples must have 3 entries, one for each row of dst, but has 2."),
    (torch.ones(3, 2), [torch.ones(2)] * 3, b"00000", ValueError,
     "fills must have 4 bytes, or 12 for one fill per sample, but has 5."),
    (freed(torch.empty(4)), [torch.ones(())] * 4, b"0000", ValueError,
     "dst must lie within its storage, but needs 16 bytes where 0 are left. Copy it "
     "before its storage is released."),
    (torch.ones(2, 2), [torch.ones(2), torch.ones(2).double()], b"0000", TypeError,
     "samples[1] must have the dtype of dst, torch.float32, but has torch.float64. "
     "Convert it first."),
    (torch.ones(1, 2), [torch.ones(1, 2)], b"0000", ValueError,
     "samples[0] must have 1 dimensions, as the rows of dst, but has shape (1, 2)."),
    (torch.ones(3, 3, 4, 5), [torch.ones(3, 4, 5)] * 2 + [torch.ones(3, 6, 5)], b"0000",
     ValueError,
     "samples[2] must have at most shape (3, 4, 5), but has shape (3, 6, 5)."),
    (torch.ones(1, 4), [freed(torch.empty(100)[10:90:20], 100)], b"0000", ValueError,
     "samples[0] must lie within its storage, but needs 284 bytes where 100 are left. "
     "Copy it before its storage is released."),
    (MEMORY[:8].view(2, 4), [torch.ones(4), MEMORY[7:9]], b"0000", ValueError,
     "samples[1] must not share memory with dst, but overlaps it. Clone it first."),
]  # fmt: skip


GOOD = (torch.ones(2, 3, 4), [torch.ones(2, 3), torch.ones(3, 4)], bytes(4))
STARTS = [
    (3, TypeError,
     "starts must be a sequence of sequences of ints, but is of type int."),
    ([3, 4], TypeError, "starts[0] must be a sequence of ints, but is of type int."),
    ([[0, 0], [0.5, 0]], TypeError,
     "starts[1][0] must be an int, but is of type float."),
    ([[0, 2**63], [0, 0]], ValueError,
     "starts[0][1] must fit in 64 bits, but is 9223372036854775808."),
    ([[0, 0]], ValueError,
     "starts must have 2 entries, one for each sample, but has 1."),
    ([[0, 0], [0, 0, 0]], ValueError,
     "starts[1] must have 2 entries, one for each dimension of a row of dst, but has "
     "3."),
    ([[0, -1], [0, 0]], ValueError,
     "starts[0] must have no negative entry, but is (0, -1)."),
    ([[1, 1], [0, 1]], ValueError,
     "starts[1] must leave room for shape (3, 4) in shape (3, 4), but is (0, 1)."),
    ([[1, 2**63 - 1], [0, 0]], ValueError,
     "starts[0] must leave room for shape (2, 3) in shape (3, 4), but is (1, "
     "9223372036854775807)."),
]  # fmt: skip
FIRST_AND_LAST = "must have the first and one or more of the last dimensions of dst,"
MASKS = [
    ([True], TypeError, "mask must be a torch.Tensor, but is of type list."),
    (torch.ones(2, 4).to_sparse(), TypeError,
     "mask must be a plain strided tensor, but is sparse or opaque. Call to_dense() on "
     "it first."),
    (torch.ones(2, 4, dtype=torch.uint8), TypeError,
     "mask must have dtype torch.bool, but has torch.uint8."),
    (torch.ones(2, 3, dtype=torch.bool), ValueError,
     f"mask {FIRST_AND_LAST} (2, 3, 4), but has shape (2, 3)."),
    (torch.ones(2, dtype=torch.bool), ValueError,
     f"mask {FIRST_AND_LAST} (2, 3, 4), but has shape (2,)."),
    (torch.ones(3, 3, 4, dtype=torch.bool), ValueError,
     f"mask {FIRST_AND_LAST} (2, 3, 4), but has shape (3, 3, 4)."),
    (torch.ones(4, 2, dtype=torch.bool).T, ValueError,
     "mask must be contiguous, but has strides (1, 2) for shape (2, 4)."),
    (freed(torch.ones(2, 4, dtype=torch.bool), 3), ValueError,
     "mask must lie within its storage, but needs 8 bytes where 3 are left. Copy it "
     "before its storage is released."),
]  # fmt: skip


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


OPERATORS = [
    *(("pad_copy", *case) for case in PAD_COPY),
    *(("pad_copy", *GOOD, *case) for case in STARTS),
    *(("pad_copy", *GOOD, None, *case) for case in MASKS),
    *(("SlabPlan", *case) for case in PLANS),
    *(("plan_slab", *case) for case in PLANNED),
    *(("pack", *case) for case in PACK),
    *(("views", *case) for case in VIEWS),
]


@both
@pytest.mark.parametrize("case", OPERATORS, ids=last)
def test_wrong_arguments_are_refused_and_nothing_is_written(backend, case):
    name, *args, error, message = case
    if name in ("pack", "views"):
        args[-1] = backend.plan_slab(args[-1])
    refuses(backend, name, args, error, message)


@both
def test_an_invalid_plan_is_refused(backend):
    message = "plan must be a SlabPlan, but is of type list."
    refuses(backend, "pack", [SLAB, [], []], TypeError, message)
    refuses(backend, "views", [SLAB, []], TypeError, message)


@both
def test_a_mask_has_its_own_memory(backend):
    rule, advice = "mask must not share memory with", "Give it memory of its own."
    flags = torch.zeros(64, dtype=torch.bool)
    dst, samples = torch.ones(2, 4, dtype=torch.bool), [flags[:4], flags[8:12]]
    for mask, name in ((dst, "dst"), (flags[11:19].view(2, 4), "samples[1]")):
        message = f"{rule} {name}, but overlaps it. {advice}"
        args = (dst, samples, b"\0", None, mask)
        refuses(backend, "pad_copy", args, ValueError, message)
    backend.pad_copy(dst, samples, b"\0", None, flags[12:20].view(2, 4))
    assert not dst.any() and flags.sum() == 8


@both
def test_starts_may_be_whatever_counts(backend):
    dst = torch.full((1, 4), 7.0)
    backend.pad_copy(dst, [torch.ones(2)], bytes(4), iter([np.array([1])]))
    assert dst.tolist() == [[0, 1, 1, 0]]


# -------------------------------------------------------------------- kinds of tensors
class Wrapper(torch.Tensor):
    """A subclass whose bytes only its own code can reach."""

    @staticmethod
    def __new__(cls):
        return torch.Tensor._make_wrapper_subclass(cls, (2,), dtype=torch.float32)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise AssertionError("nothing may be asked of it")


def nested():
    return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])


def quantized():
    return torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.quint8)


COMPLEX = torch.ones(2, dtype=torch.complex64)
PLAIN = "must be a plain strided tensor, but is"
DEFECTS = {
    "nested": (nested, "nested. Call unbind() on it first."),
    "sparse": (lambda: torch.ones(2).to_sparse(),
        "sparse or opaque. Call to_dense() on it first."),
    "csr": (lambda: torch.ones(2, 2).to_sparse_csr(),
        "sparse or opaque. Call to_dense() on it first."),
    "mkldnn": (lambda: torch.ones(2).to_mkldnn(),
        "sparse or opaque. Call to_dense() on it first."),
    "quantized": (quantized, "quantized. Call dequantize() on it first."),
    "wrapper": (Wrapper, "a wrapper. Unwrap it first."),
    "meta": (lambda: torch.empty(2, device="meta"),
        "on the meta device. Give it data first."),
    "conjugated": (COMPLEX.conj, "conjugated. Call resolve_conj() on it first."),
    "negated": (lambda: COMPLEX.conj().imag,
        "negated. Call resolve_neg() on it first."),
    "zero": (lambda: torch._efficientzerotensor(2),
        "a zero tensor. Call clone() on it first."),
}  # fmt: skip


@both
@pytest.mark.parametrize("name", DEFECTS)
def test_every_tensor_must_be_plain(backend, name):
    make, words = DEFECTS[name]
    bad, good = make(), torch.ones(1, 2)
    message = f"{PLAIN} {words}"
    check(backend.pad_copy, (bad, [], b""), TypeError, f"pad_copy: dst {message}")
    args = (good, [bad], bytes(4))
    check(backend.pad_copy, args, TypeError, f"pad_copy: samples[0] {message}")
    plan = backend.plan_slab([good])
    check(backend.plan_slab, [[bad]], TypeError, f"plan_slab: leaves[0] {message}")
    check(backend.pack, (bad, [good], plan), TypeError, f"pack: dst {message}")
    check(backend.pack, (SLAB, [bad], plan), TypeError, f"pack: leaves[0] {message}")
    check(backend.views, (bad, plan), TypeError, f"views: slab {message}")


@both
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("missing", [0, 1, 4])
def test_a_tensor_reaches_to_the_last_byte_of_its_storage(backend, turned, missing):
    sample = torch.arange(20.0).view(4, 5)
    expected = (sample.t() if turned else sample).clone()
    if turned:
        sample.t_()
    plan = backend.plan_slab([sample])
    sample.untyped_storage().resize_(80 - missing)
    dst, slab = torch.zeros(1, *sample.shape), torch.zeros(plan.nbytes).byte()
    if not missing:
        backend.pad_copy(dst, [sample], bytes(4))
        assert dst[0].equal(expected)
        backend.pack(slab, [sample], plan)
        assert backend.views(slab, plan)[0].equal(expected)
        return
    message = (
        f"must lie within its storage, but needs 80 bytes where {80 - missing} are "
        "left. Copy it before its storage is released."
    )
    args = (dst, [sample], bytes(4))
    check(backend.pad_copy, args, ValueError, f"pad_copy: samples[0] {message}")
    args = (slab, [sample], plan)
    check(backend.pack, args, ValueError, f"pack: leaves[0] {message}")
    assert dst.eq(0).all() and slab.eq(0).all()


# ------------------------------------------------------------------------------ rings
LINE = 64
OPERATORS = ("claim", "pass", "reclaim", "holders")


def blank(num_slots):
    return torch.full((LINE * (1 + num_slots),), 0xEE, dtype=torch.uint8)


def formatted(backend, num_slots):
    header = blank(num_slots)
    backend.ring_format(header, num_slots)
    return header


FLAT = "must be a contiguous torch.uint8 tensor of one dimension on the CPU, but has "
HEADERS = [
    ([1], TypeError, "must be a torch.Tensor, but is of type list."),
    (torch.zeros(128), ValueError,
     f"{FLAT}dtype torch.float32, shape (128,), strides (1,) and device cpu."),
    (blank(3)[::2], ValueError,
     f"{FLAT}dtype torch.uint8, shape (128,), strides (2,) and device cpu."),
    (blank(1).view(2, 64), ValueError,
     f"{FLAT}dtype torch.uint8, shape (2, 64), strides (64, 1) and device cpu."),
    (torch.zeros(128, dtype=torch.uint8, device="meta"), TypeError,
     "must be a plain strided tensor, but is on the meta device. Give it data first."),
    (blank(2)[8:136], ValueError,
     "must start at a multiple of 64 bytes, but starts 8 bytes behind one."),
]  # fmt: skip


def arguments(op, header):
    more = {"format": [1], "claim": [5, 0], "pass": [0, 5, 0], "reclaim": [5]}
    return [header, *more.get(op, [])]


@both
@pytest.mark.parametrize("op", ("format", *OPERATORS))
@pytest.mark.parametrize("case", HEADERS, ids=last)
def test_another_header_is_refused(backend, op, case):
    header, error, message = case
    name = f"ring_{op}"
    whole = f"{name}: header {message}"
    check(getattr(backend, name), arguments(op, header), error, whole)


def spoiled(byte, value):
    def make(backend):
        header = formatted(backend, 3)
        header[byte] = value
        return header

    return make


CORRUPTED = {
    "never formatted": lambda backend: blank(3),
    "no bytes": lambda backend: blank(0)[:0],
    "less than a line": lambda backend: blank(0)[:63],
    "line zero alone": lambda backend: formatted(backend, 1)[:LINE],
    "cut": lambda backend: formatted(backend, 3)[: LINE * 3],
    "cut within a line": lambda backend: formatted(backend, 3)[: LINE * 3 + 8],
    "magic": spoiled(0, 0),
    "fewer slots": spoiled(8, 2),
    "more slots": spoiled(8, 4),
    "many slots": spoiled(15, 0x7F),
    "negative slots": spoiled(15, 0x80),
    "no maker": spoiled(16, 0),
    "unknown maker": spoiled(16, 3),
}


@both
@pytest.mark.parametrize("op", OPERATORS)
@pytest.mark.parametrize("case", CORRUPTED)
def test_a_corrupted_header_is_refused(backend, op, case):
    header = CORRUPTED[case](backend)
    before = header.clone()
    rule = f"be what ring_format makes of {header.numel()} bytes"
    message = f"ring_{op}: header must {rule}, but is not. Format it first."
    args = arguments(op, header)
    check(getattr(backend, f"ring_{op}"), args, ValueError, message)
    assert header.equal(before)


BIG = 2**63
NUMBERS = [
    ("format", ["a"], TypeError, "num_slots must be an int, but is of type str."),
    ("format", [BIG], ValueError, f"num_slots must fit in 64 bits, but is {BIG}."),
    ("format", [0], ValueError, "num_slots must be between 1 and 65536, but is 0."),
    ("format", [65537], ValueError,
     "num_slots must be between 1 and 65536, but is 65537."),
    ("format", [2], ValueError,
     "header must have 192 bytes, 64 and 64 for each of 2 slots, but has 256."),
    ("claim", [None, 0], TypeError, "holder must be an int, but is of type NoneType."),
    ("claim", [5, "a"], TypeError, "fd must be an int, but is of type str."),
    ("claim", [0, 0], ValueError, "holder must be 1 or more, but is 0."),
    ("claim", [BIG, 0], ValueError, f"holder must fit in 64 bits, but is {BIG}."),
    ("pass", ["a", 5, 0], TypeError, "slot must be an int, but is of type str."),
    ("pass", [0, 5, 0.5], TypeError, "to must be an int, but is of type float."),
    ("pass", [3, 5, 0], ValueError, "slot must be between 0 and 2, but is 3."),
    ("pass", [-1, 5, 0], ValueError, "slot must be between 0 and 2, but is -1."),
    ("pass", [0, 0, 5], ValueError, "holder must be 1 or more, but is 0."),
    ("pass", [0, 5, -1], ValueError, "to must be 0 or more, but is -1."),
    ("reclaim", [0], ValueError, "holder must be 1 or more, but is 0."),
    ("reclaim", [-BIG - 1], ValueError,
     f"holder must fit in 64 bits, but is {-BIG - 1}."),
]  # fmt: skip


@both
@pytest.mark.parametrize("case", NUMBERS, ids=last)
def test_a_bad_number_is_refused_and_nothing_written(backend, case):
    op, args, error, message = case
    header = formatted(backend, 3)
    before = header.clone()
    check(
        getattr(backend, f"ring_{op}"), [header, *args], error, f"ring_{op}: {message}"
    )
    assert header.equal(before)


# ---------------------------------------------------------------------------- sending
LEAF = torch.ones(4)

BYTES = torch.zeros(16, dtype=torch.uint8)
FAR = HostStream(0, 0, device_type=1)
SENDS = [
    ({"stream": 3}, TypeError,
     "send: stream must be a torch.Stream, but is of type int."),
    ({"stream": HostStream(0, device_type=14)}, NotImplementedError,
     "send: stream must be of a device type in transfers(), but is of 'meta'."),
    ({"chunk_nbytes": 0}, ValueError,
     "send: chunk_nbytes must be between 1 and 4194304, but is 0."),
    ({"leaves": [3]}, TypeError,
     "send: leaves[0] must be a torch.Tensor, but is of type int."),
    ({"leaves": []}, ValueError,
     "send: leaves must have 1 entries, as planned, but has 0."),
    ({"plan": 3}, TypeError, "send: plan must be a SlabPlan, but is of type int."),
    ({"slab": SLAB[:32]}, ValueError,
     "send: slab must have 64 bytes, as planned, but has 32."),
    ({"slab": SLAB, "leaves": [SLAB[:16].view(torch.float32)]}, ValueError,
     "send: leaves[0] must not share memory with dst, but overlaps it. Clone it "
     "first."),
    ({"targets": [BYTES]}, ValueError,
     "send: targets must have 0 entries, as sources, but has 1."),
    ({"targets": [BYTES], "sources": [LEAF[::2]]}, ValueError,
     "send: sources[0] must be contiguous, but has shape (2,) and strides (2,)."),
    ({"targets": [BYTES], "sources": [LEAF[:2]]}, ValueError,
     "send: targets[0] must have 8 bytes, as its source, but has 16."),
    ({"targets": [BYTES], "sources": [BYTES]}, ValueError,
     "send: sources[0] must not share memory with dst, but overlaps it. Clone it "
     "first."),
    ({"targets": [BYTES], "sources": [BYTES.to("meta")]}, TypeError,
     "send: sources[0] must be a plain strided tensor, but is on the meta device. Give "
     "it data first."),
]  # fmt: skip


@needs_native
@pytest.mark.parametrize(("changes", "error", "message"), SENDS, ids=map(last, SENDS))
def test_bad_arguments_are_named_and_nothing_is_written(changes, error, message):
    good = {
        "slab": SLAB.clone(),
        "leaves": [LEAF],
        "plan": native.plan_slab([LEAF]),
        "targets": [],
        "sources": [],
        "stream": COPIES,
    }
    native.send(**good)
    good["slab"].zero_()
    check(lambda: native.send(**{**good, **changes}), (), error, message)
    assert not good["slab"].any() and not BYTES.any()


@needs_native
def test_a_sent_batch_refuses_a_stream_of_another_device_type():
    plan = native.plan_slab([LEAF])
    sent = native.send(SLAB.clone(), [LEAF], plan, [], [], COPIES)
    assert sent.is_done() and sent.check() is None and sent.wait(SIDE) is None
    check(
        sent.wait,
        (FAR,),
        ValueError,
        "RecordedEvent.wait: stream must be of 'cpu', but is of 'cuda'.",
    )
