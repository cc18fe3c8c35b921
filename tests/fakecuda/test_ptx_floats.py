"""Floating-point instructions of the PTX interpreter, against exact fractions."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import pytest
from ptx_snippets import evaluate, integers, needs_compiler

pytestmark = needs_compiler
Number = Fraction | float  # a float if it is infinite or NaN


@dataclass(frozen=True)
class Format:
    """A binary format: its precision, its smallest exponent, its bits of NaN."""

    digits: int
    least: int
    width: int
    nan: int

    @property
    def infinity(self) -> int:
        return (1 << (self.width - 1)) - (1 << (self.digits - 1))

    def sign(self, bits: int) -> int:
        return bits >> (self.width - 1)

    def value(self, bits: int) -> Number:
        """Return the number that the bits mean, exactly if it is finite."""
        sign = -1 if self.sign(bits) else 1
        magnitude = bits & ((1 << (self.width - 1)) - 1)
        if magnitude >= self.infinity:
            return sign * math.inf if magnitude == self.infinity else math.nan
        exponent, digits = divmod(magnitude, 1 << (self.digits - 1))
        if exponent:
            digits += 1 << (self.digits - 1)
            exponent -= 1
        return sign * digits * Fraction(2) ** (exponent + self.least)

    def nearest(self, value: Number, zero_sign: int = 0) -> int:
        """Return the bits of the nearest number; of NaN, those of PTX."""
        if value != value:
            return self.nan
        negative = value < 0 or (value == 0 and zero_sign)
        sign = 1 << (self.width - 1) if negative else 0
        if isinstance(value, float) and math.isinf(value):
            return sign | self.infinity
        if value == 0:
            return sign
        magnitude = abs(Fraction(value))
        size = magnitude.numerator.bit_length() - magnitude.denominator.bit_length()
        exponent = max(size - self.digits, self.least)
        if magnitude / Fraction(2) ** exponent >= 1 << self.digits:
            exponent += 1
        digits = round(magnitude / Fraction(2) ** exponent)
        bits = (exponent - self.least << self.digits - 1) + digits
        return sign | min(bits, self.infinity)


F32 = Format(24, -149, 32, 0x7FFFFFFF)
NARROW = {"f16": Format(11, -24, 16, 0x7FFF), "bf16": Format(8, -133, 16, 0x7FFF)}


def numbers(seed: int) -> np.ndarray:
    """Return bits of f32: of random numbers, simple ones, the extreme ones."""
    random = np.random.default_rng(seed)
    bits = integers(np.uint32, 280, seed=seed)
    bits[:80] = [F32.nearest(Fraction(k, 8)) for k in range(-40, 40)]
    edges = [0, 1, F32.infinity - 1, F32.infinity, F32.infinity | 1, F32.nan]
    edges += [each | 1 << 31 for each in edges]
    random.shuffle(bits)
    bits[::7] = random.choice(np.array(edges, np.uint32), len(bits[::7]))
    return bits


def signum(a: Number) -> float:
    return a if isinstance(a, float) else float((a > 0) - (a < 0))


def added(a: Number, b: Number) -> Number:
    if isinstance(a, Fraction) and isinstance(b, Fraction):
        return a + b
    return (a if isinstance(a, float) else 0.0) + (b if isinstance(b, float) else 0.0)


def multiplied(a: Number, b: Number) -> Number:
    if isinstance(a, Fraction) and isinstance(b, Fraction):
        return a * b
    return signum(a) * signum(b)


def subtract(a: int, b: int) -> int:
    x, y = F32.value(a), F32.value(b)
    both = F32.sign(a) and not F32.sign(b)
    return F32.nearest(added(x, -y), x == y == 0 and both)


def divide(a: int, b: int) -> int:
    x, y = F32.value(a), F32.value(b)
    sign = F32.sign(a) ^ F32.sign(b)
    if x != x or y != y or (x == 0 and y == 0) or (math.isinf(x) and math.isinf(y)):
        return F32.nan
    if isinstance(y, float):
        return F32.nearest(0.0, sign)
    if y == 0 or isinstance(x, float):
        return F32.nearest(-math.inf if sign else math.inf)
    return F32.nearest(x / y, sign)


def multiply_add(a: int, b: int, c: int) -> int:
    product, z = multiplied(F32.value(a), F32.value(b)), F32.value(c)
    both = F32.sign(a) ^ F32.sign(b) and F32.sign(c)
    return F32.nearest(added(product, z), product == z == 0 and both)


@pytest.mark.parametrize(
    ("opcode", "oracle", "count"),
    [("sub", subtract, 2), ("div", divide, 2), ("fma", multiply_add, 3)],
)
def test_results_are_the_nearest(opcode: str, oracle: object, count: int) -> None:
    inputs = [numbers(seed) for seed in (1, 2, 3)][:count]
    names = ", ".join(["%d0", "%a0", "%b0", "%c0"][: count + 1])
    found = evaluate(f"{opcode}.rn.f32 {names};", *inputs, out=np.uint32)
    rows = zip(*(each.tolist() for each in inputs), strict=True)
    assert found.tolist() == [oracle(*row) for row in rows]


@pytest.mark.parametrize("dtype", [np.uint16, np.uint32])
def test_integers_become_floats(dtype: type) -> None:
    a = integers(dtype, 300)
    found = evaluate(f"cvt.rn.f32.u{8 * a.itemsize} %d0, %a0;", a, out=np.uint32)
    assert found.tolist() == [F32.nearest(Fraction(each)) for each in a.tolist()]


@pytest.mark.parametrize("to", NARROW)
def test_floats_are_narrowed(to: str) -> None:
    form = NARROW[to]
    middle = [
        F32.nearest((form.value(bits) + form.value(bits + 1)) / 2)
        for bits in [*range(40), *range(1000, 1040), form.infinity - 2]
    ]
    around = [each + step for each in middle for step in (-1, 0, 1)]
    overflow = [F32.nearest(Fraction(each)) for each in (65519, 65520, 2**127)]
    extra = np.array([*around[1:], *overflow], np.uint32)
    a = np.concatenate([numbers(1), numbers(2), extra])
    b = a[::-1]

    def nearest(bits: int) -> int:
        return form.nearest(F32.value(bits), F32.sign(bits))

    expected = [nearest(each) for each in a.tolist()]
    found = evaluate(f"cvt.rn.{to}.f32 %d0, %a0;", a, out=np.uint16)
    assert found.tolist() == expected
    found = evaluate(f"cvt.rn.{to}x2.f32 %d0, %a0, %b0;", a, b, out=np.uint32)
    assert (found >> 16).tolist() == expected  # the first source is high
    assert (found & 0xFFFF).tolist() == expected[::-1]
