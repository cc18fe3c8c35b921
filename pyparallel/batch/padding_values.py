"""Convert padding values to the bits that are written into the padding.

A padding value is any real number. Each integer dtype gets exactly this number. All
other dtypes get it by way of a double, as from ``torch.nn.functional.pad``, which also
rounds integers to doubles. So the number itself is kept until the dtype is known.
"""

from __future__ import annotations

import functools
import numbers
import operator
import struct
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from typing import Any

import torch

from ..core.errors import BatchTypeError, BatchValueError, type_name, with_advice
from ..core.torch_private import is_recorded, is_wrapped
from .plan import Name, StackPlan

#: A real number without a rounding error.
Number = int | float | Fraction

_INTEGERS = "uint8 int8 int16 int32 int64 uint16 uint32 uint64"

#: The smallest and the largest number of each integer dtype.
INTEGER_LIMITS: dict[torch.dtype, tuple[int, int]] = {
    dtype: (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    if dtype.is_signed
    else (0, 2**bits - 1)
    for dtype, bits in (
        (each, 8 * each.itemsize)
        for each in map(torch.__dict__.__getitem__, _INTEGERS.split())
    )
}


def padding_patterns(
    plan: StackPlan, dtype: torch.dtype, values: Sequence[Any], name: Name
) -> bytes:
    """Return the bit patterns that the backend writes into the padding.

    The result is one pattern for all samples, or one for each if their values differ.
    The value of a sample without padding is not checked.

    Args:
        plan: the plan of the stack.
        dtype: the dtype of all samples.
        values: padding value of every sample.
        name: returns the name of sample ``i`` for an error.

    Raises:
        TypeError: a padding value is not a real number.
        ValueError: the dtype cannot hold a padding value.
    """
    zero = bytes(dtype.itemsize)
    if not any(plan.padded):
        return zero
    if len(set(map(id, values))) == 1:  # nearly always; convert it once
        return padding_pattern(values[0], dtype, name, plan.padded.index(True))
    patterns = [
        padding_pattern(value, dtype, name, i) if padded else None
        for i, (padded, value) in enumerate(zip(plan.padded, values, strict=True))
    ]
    used = {pattern for pattern in patterns if pattern is not None}
    if len(used) == 1:
        return used.pop()
    return b"".join(pattern or zero for pattern in patterns)


def padding_pattern(value: Any, dtype: torch.dtype, name: Name, i: int) -> bytes:
    """Return the bit pattern of a padding value.

    Raises:
        TypeError: the value is not a real number.
        ValueError: the dtype cannot hold the value.
    """
    if dtype in INTEGER_LIMITS:
        number = _as_integer(value, dtype, name, i)
        return number.to_bytes(dtype.itemsize, sys.byteorder, signed=number < 0)
    double = padding_value_as_double(value, name, i)
    try:
        return _convert_double(struct.pack("d", double), dtype)
    except RuntimeError as error:
        raise _cannot_hold(value, dtype, name, i) from error


def padding_number(value: Any, dtype: torch.dtype, name: Name, i: int) -> int | float:
    """Return a padding value as an integer if the dtype has integers, else as a double.

    Raises:
        TypeError: the value is not a real number.
        ValueError: the dtype cannot hold the value.
    """
    if dtype in INTEGER_LIMITS:
        return _as_integer(value, dtype, name, i)
    padding_pattern(value, dtype, name, i)
    return padding_value_as_double(value, name, i)


def padding_value_as_double(value: Any, name: Name, i: int) -> float:
    """Return a padding value as the double that ``torch.nn.functional.pad`` takes."""
    try:
        return float(exact_number(value, name, i))
    except OverflowError as error:
        raise BatchValueError(
            f"{name(i)} must have a padding_value that a double can hold, but has "
            "a larger integer."
        ) from error


def exact_number(value: Any, name: Name, i: int) -> Number:
    """Return a padding value without rounding it.

    Raises:
        TypeError: the value is not a real number.
    """
    number = as_number(value)
    if number is None:
        raise BatchTypeError(
            f"{name(i)} must have a number as padding_value, but has {value!r} "
            f"({type_name(value)})."
        )
    return number


def as_number(value: Any) -> Number | None:
    """Return a real number of any class without rounding it; None for other values.

    The value None means 0, as in F.pad.
    """
    number: Number
    if type(value) is int or type(value) is float:
        number = value
        return number
    if value is None:
        return 0
    try:
        if isinstance(value, torch.Tensor) or type(value).__module__ == "numpy":
            value = value.item()
            if type(value) is int or type(value) is float:
                number = value
                return number
        return _convert_number(value)
    except (TypeError, ValueError, RuntimeError):
        return None


def _convert_number(value: Any) -> Number | None:
    # float() would parse text and discard imaginary parts.
    if isinstance(value, str | bytes) or _is_complex(value):
        return None
    try:
        return operator.index(value)
    except TypeError:
        ratio = None
    if hasattr(value, "as_integer_ratio"):  # also of decimals and of long doubles
        try:
            ratio = Fraction(*value.as_integer_ratio())
        except (ValueError, OverflowError):  # NaN and infinity
            pass
    if ratio is not None and ratio.denominator == 1 and ratio:
        return ratio.numerator
    try:
        double = float(value)
    except OverflowError:
        return ratio
    return double if ratio is None or ratio == double else ratio


def _is_complex(value: Any) -> bool:
    return isinstance(value, numbers.Complex) and not isinstance(value, numbers.Real)


def _as_integer(value: Any, dtype: torch.dtype, name: Name, i: int) -> int:
    """Return the value without its fraction, as ``fill_`` converts it to an integer."""
    number = value if type(value) is int else exact_number(value, name, i)
    low, high = INTEGER_LIMITS[dtype]
    if not low <= number <= high:  # also NaN
        raise _cannot_hold(value, dtype, name, i)
    return int(number)


def _cannot_hold(value: Any, dtype: torch.dtype, name: Name, i: int) -> Exception:
    try:
        found = repr(value)
    except ValueError:  # Python does not write integers of more than 4,300 digits
        found = "a larger integer"
    return with_advice(
        BatchValueError,
        f"{name(i)} must have a padding_value that {dtype} can hold, but has {found}.",
    )


@functools.lru_cache(maxsize=1024)
def _convert_double(double: bytes, dtype: torch.dtype) -> bytes:
    """Convert a double as ``fill_`` does; its bits are the key, for -0.0 and NaN."""
    (value,) = struct.unpack("d", double)
    if is_recorded() or is_wrapped(torch.empty(0, device="cpu")):
        # Here tensors may have no values. Another thread does not have these modes.
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(_fill, value, dtype).result()
    return _fill(value, dtype)


def _fill(value: float, dtype: torch.dtype) -> bytes:
    # Two cells, because for one cell torch checks the range of a half differently. The
    # device is explicit, because users can change the default device.
    cells = torch.empty(2, dtype=dtype, device="cpu").fill_(value)
    return bytes(cells.view(torch.uint8).tolist()[: dtype.itemsize])
