"""Complete messages of all ring errors in both backends."""

from __future__ import annotations

import pytest
import torch
from backends import both, check, last

pytestmark = [pytest.mark.cuda_torch, pytest.mark.asan]

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
