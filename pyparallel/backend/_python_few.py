"""Few and small samples, padded by torch's operators: pure Python's own short cut.

There a look at the samples costs more than a second pass over their bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from . import _checks

_MOST_SAMPLES = 16
_MOST_ITEMS = 16 * 1024
# Every dtype can hold them, but for quantized ones, and one that has no zero: what
# stands for it depends on how it is written.
_VALUES = frozenset({0, 1})
_NUMBERS = frozenset({bool, int, float})
_PICKY = _checks.QUANTIZED | {getattr(torch, "float8_e8m0fnu", None)}
_EXACT = {Tensor}

_pad = torch.constant_pad_nd
_stack = torch.stack
_STRIDED = torch.strided


def pad_few(
    samples: Sequence[Tensor], pad_dims: int | None, values: Sequence[Any]
) -> Tensor | None:
    """See ``_C.pyi``."""
    if (
        len(samples) > _MOST_SAMPLES
        or set(map(type, samples)) != _EXACT
        or not _NUMBERS.issuperset(map(type, values))
        or not _VALUES.issuperset(values)
    ):
        return None
    dtype, watched = samples[0].dtype, torch.is_grad_enabled()
    shapes = []
    for each in samples:
        if (
            each.dtype is not dtype
            or each.layout is not _STRIDED
            or each.is_nested
            or not each.is_cpu
            or _checks.wraps(each)
            or not each.is_contiguous()
            or each.is_neg()
            or each.is_conj()
            or (watched and each.requires_grad)
            or each.untyped_storage().nbytes()
            < each.nbytes + each.storage_offset() * each.itemsize
        ):
            return None
        shapes.append(each.shape)
    first = shapes[0]
    num_equal = len(first) - (pad_dims or 0)
    if num_equal < 1 or dtype in _PICKY:
        return None
    if any(len(x) != len(first) or x[:num_equal] != first[:num_equal] for x in shapes):
        return None
    target = tuple(map(max, zip(*shapes, strict=True)))
    if not 0 < len(samples) * prod(target) <= _MOST_ITEMS:
        return None
    return _stack(
        [
            each if shape == target else _pad(each, _margins(shape, target), value)
            for each, shape, value in zip(samples, shapes, values, strict=True)
        ]
    )


def _margins(shape: Sequence[int], target: Sequence[int]) -> list[int]:
    margins: list[int] = []
    for have, size in zip(reversed(shape), reversed(target), strict=True):
        margins += (0, size - have)
    return margins
