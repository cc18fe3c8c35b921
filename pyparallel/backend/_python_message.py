"""Small batches as bytes, in pure Python: lists of plain tensors only."""

from __future__ import annotations

import ctypes
import struct
from math import prod
from typing import Any

import torch
from torch import Tensor

from ..core.torch_private import is_wrapped
from . import _checks
from .plain import is_plain, missing_bytes

#: The dtypes of plain tensors by the number that torch gives them in C++.
_NAMES = (
    "uint8 int8 int16 int32 int64 float16 float32 float64 complex32 complex64 "
    "complex128 bool - - - bfloat16 - - bits1x8 bits2x4 bits4x2 bits8 bits16 "
    "float8_e5m2 float8_e4m3fn float8_e5m2fnuz float8_e4m3fnuz uint16 uint32 uint64 "
    "uint1 uint2 uint3 uint4 uint5 uint6 uint7 int1 int2 int3 int4 int5 int6 int7 "
    "float8_e8m0fnu float4_e2m1fn_x2"
).split()
_DTYPES: dict[int, torch.dtype] = {
    code: getattr(torch, name)
    for code, name in enumerate(_NAMES)
    if hasattr(torch, name)
}
_CODES = {dtype: code for code, dtype in _DTYPES.items()}
_LIST = struct.Struct("=cI")
_HEADER = struct.Struct("=cBB")


def encode(tree: Any, limit: int) -> tuple[bytes, int] | None:
    """See ``_C.pyi``."""
    limit = left = _checks.as_int(limit, "encode: limit")
    if type(tree) is not list or len({*map(id, tree)}) < len(tree):
        return None
    parts = [_LIST.pack(b"l", len(tree))]
    for leaf in tree:
        if type(leaf) is not Tensor or not _is_sent(leaf) or leaf.nbytes > left:
            return None
        left -= leaf.nbytes
        shape = leaf.shape
        parts += [
            _HEADER.pack(b"x", _CODES[leaf.dtype], len(shape)),
            struct.pack(f"={len(shape)}q", *shape),
            ctypes.string_at(leaf.data_ptr(), leaf.nbytes),
        ]
    return b"".join(parts), limit - left


def _is_sent(leaf: Tensor) -> bool:
    return (
        is_plain(leaf)
        and not is_wrapped(leaf)
        and leaf.is_cpu
        and not leaf.requires_grad
        and leaf.is_contiguous()
        and not missing_bytes(leaf)
        and leaf.dtype in _CODES
    )


def decode(message: Any) -> Any:
    """See ``_C.pyi``."""
    try:
        data = memoryview(message).cast("B")
    except TypeError:
        rule = "a bytes-like object"
        _checks.check_type("decode: message", memoryview, rule, message)
        raise
    made: list[Tensor] = []
    try:
        tag, size = _LIST.unpack_from(data)
        at = _LIST.size
        while tag == b"l" and len(made) < size:
            tensor, at = _take(data, at)
            made.append(tensor)
        if tag == b"l" and at == len(data):
            return made
    except (struct.error, KeyError, ValueError):
        pass
    raise _checks.error("decode: message", "be bytes of encode", "is damaged")


def _take(data: memoryview, at: int) -> tuple[Tensor, int]:
    tag, code, ndim = _HEADER.unpack_from(data, at)
    at += _HEADER.size
    shape = struct.unpack_from(f"={ndim}q", data, at)
    at += 8 * ndim
    dtype = _DTYPES[code]
    end = at + prod(shape) * dtype.itemsize
    if tag != b"x" or min(shape, default=0) < 0 or end > len(data):
        raise ValueError
    tensor = torch.empty(shape, dtype=dtype, device="cpu")
    ctypes.memmove(tensor.data_ptr(), bytes(data[at:end]), end - at)
    return tensor, end
