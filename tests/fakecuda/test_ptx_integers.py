"""Integer instructions of the PTX interpreter, against Python's integers."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest
from ptx_snippets import PtxError, evaluate, integers, needs_compiler

pytestmark = needs_compiler
UNSIGNED = {"u16": np.uint16, "u32": np.uint32, "u64": np.uint64}
SIGNED = {"s16": np.int16, "s32": np.int32, "s64": np.int64}
TYPES = UNSIGNED | SIGNED
BITS = {"b16": np.uint16, "b32": np.uint32, "b64": np.uint64}
BYTES = {"u8": np.uint8, "s8": np.int8}
WIDE = {"u32": np.uint64, "s32": np.int64}


def wrapped(value: int, dtype: type) -> int:
    """Return the integer that the low bits of ``value`` mean."""
    bits = 8 * np.dtype(dtype).itemsize
    value &= (1 << bits) - 1
    return value - (1 << bits) if np.iinfo(dtype).min and value >> (bits - 1) else value


def check(
    body: str, oracle: Callable[..., int], *inputs: np.ndarray, out: type
) -> None:
    """Compare each result of an instruction with the oracle's, wrapped."""
    found = evaluate(body, *inputs, out=out).tolist()
    rows = zip(*(each.tolist() for each in inputs), strict=True)
    expected = [wrapped(int(oracle(*row)), out) for row in rows]
    assert found == expected, body


def operands(dtype: type, count: int) -> list[np.ndarray]:
    return [integers(dtype, 300, seed=seed) for seed in range(count)]


@pytest.mark.parametrize(
    ("opcode", "types", "oracle"),
    [
        ("add", TYPES, lambda a, b: a + b),
        ("sub", TYPES, lambda a, b: a - b),
        ("mul.lo", TYPES, lambda a, b: a * b),
        ("min", TYPES, min),
        ("max", TYPES, max),
        ("and", BITS, lambda a, b: a & b),
        ("or", BITS, lambda a, b: a | b),
    ],
)
def test_results_of_two_sources_wrap(
    opcode: str, types: dict, oracle: Callable
) -> None:
    for name, dtype in types.items():
        body = f"{opcode}.{name} %d0, %a0, %b0;"
        check(body, oracle, *operands(dtype, 2), out=dtype)


@pytest.mark.parametrize(
    ("opcode", "types", "oracle"),
    [("neg", SIGNED, lambda a: -a), ("not", BITS, lambda a: ~a)],
)
def test_results_of_one_source_wrap(opcode: str, types: dict, oracle: Callable) -> None:
    for name, dtype in types.items():
        check(f"{opcode}.{name} %d0, %a0;", oracle, *operands(dtype, 1), out=dtype)


def test_wide_products() -> None:
    for name, dtype in WIDE.items():
        body = f"mul.wide.{name} %d0, %a0, %b0;"
        check(body, lambda a, b: a * b, *operands(TYPES[name], 2), out=dtype)


def quotient(a: int, b: int) -> int:
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


def test_quotients_round_toward_zero() -> None:
    for name, dtype in TYPES.items():
        a, b = operands(dtype, 2)
        b[b == 0] = 3
        # The quotient of the smallest integer by -1 wraps.
        a[0], b[0] = np.iinfo(dtype).min, wrapped(-1, dtype)
        check(f"div.{name} %d0, %a0, %b0;", quotient, a, b, out=dtype)


def test_division_by_zero_ends_the_kernel() -> None:
    a = np.ones(70, np.int32)
    b = np.arange(69, -1, -1, np.int32)
    with pytest.raises(PtxError) as error:
        evaluate("div.s32 %d0, %a0, %b0;", a, b, out=np.int32)
    assert str(error.value) == (
        "snippet, block (1, 0, 0), thread (5, 0, 0): division by zero: "
        "div.s32 %d0, %a0, %b0;"
    )


def shifted(value: int, count: int) -> int:
    return value << count if count < 64 else 0


def test_shifts_beyond_the_width() -> None:
    for name, dtype in TYPES.items():
        bits = int(name[1:])
        a = integers(dtype, 4 * bits, seed=1)
        counts = np.tile(np.arange(2 * bits, dtype=np.uint32), 2)
        counts[-1] = 2**32 - 1
        body = f"shr.{name} %d0, %a0, %b0;"
        check(body, lambda a, count: a >> count, a, counts, out=dtype)
        check(f"shl.b{bits} %d0, %a0, %b0;", shifted, a, counts, out=dtype)


@pytest.mark.parametrize("bits", [32, 64])
def test_bit_fields_are_inserted(bits: int) -> None:
    dtype = UNSIGNED[f"u{bits}"]
    a, b = (integers(dtype, 2000, seed=seed) for seed in (1, 2))
    random = np.random.default_rng(0)
    begins, counts = random.integers(0, bits + 8, (2, 2000)).astype(np.uint32)
    begins[:2], counts[2:4] = 257, 256  # only eight bits count

    def inserted(field: int, value: int, begin: int, count: int) -> int:
        mask = (1 << (count & 255)) - 1 << (begin & 255)
        return value & ~mask | field << (begin & 255) & mask

    body = f"bfi.b{bits} %d0, %a0, %b0, %c0, %e0;"
    check(body, inserted, a, b, begins, counts, out=dtype)


@pytest.mark.parametrize(
    ("comparison", "oracle"),
    [
        ("eq", lambda a, b: a == b),
        ("ne", lambda a, b: a != b),
        ("lt", lambda a, b: a < b),
        ("le", lambda a, b: a <= b),
        ("gt", lambda a, b: a > b),
        ("ge", lambda a, b: a >= b),
    ],
)
def test_comparisons(comparison: str, oracle: Callable) -> None:
    for name, dtype in TYPES.items():
        a, b = operands(dtype, 2)
        b[::3] = a[::3]
        body = f"setp.{comparison}.{name} %p0, %a0, %b0; selp.b32 %d0, 1, 0, %p0;"
        check(body, oracle, a, b, out=np.uint32)


def test_selections() -> None:
    c = integers(np.int32, 300, seed=3)
    for name, dtype in (BITS | {"f32": np.uint32}).items():
        body = f"setp.gt.s32 %p1, %c0, 0; selp.{name} %d0, %a0, %b0, %p1;"
        a, b = operands(dtype, 2)
        check(body, lambda a, b, c: a if c > 0 else b, a, b, c, out=dtype)


def test_predicates_are_values() -> None:
    body = """setp.lt.s32 %p1, %a0, 0; setp.lt.s32 %p2, %b0, 0; and.pred %p0, %p1, %p2;
    or.pred %p3, %p1, %p2; not.pred %p3, %p3; mov.pred %p1, 1; and.pred %p3, %p3, %p1;
    selp.b32 %x0, 1, 0, %p0; selp.b32 %x1, 2, 0, %p3; add.u32 %d0, %x0, %x1;"""
    check(
        body,
        lambda a, b: (a < 0 and b < 0) + 2 * (not (a < 0 or b < 0)),
        *operands(np.int32, 2),
        out=np.uint32,
    )


def test_conversions_keep_the_low_bits() -> None:
    names = TYPES | BYTES
    for (to, dtype), (source, from_type) in itertools.product(names.items(), repeat=2):
        (a,) = operands(from_type, 1)
        body = f"cvt.{to}.{source} %d0, %a0;"
        check(body, lambda a: a, a, out=dtype)
        if np.dtype(dtype).itemsize <= 4:  # a wider register gets the extended integer
            body = body.replace("%d0", "%x0") + "mov.b32 %d0, %x0;"
            found = evaluate(body, a, out=np.int32)
            assert found.tolist() == a.astype(dtype).astype(np.int32).tolist()


def test_literals() -> None:
    (a,) = operands(np.int32, 1)
    for literal, value in {"17": 17, "-17": -17, "0x1F": 31}.items():
        check(
            f"add.s32 %d0, %a0, {literal};", lambda a, v=value: a + v, a, out=np.int32
        )
