"""What both backends demand of the arguments of pad_copy."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ._checks import (
    check_mask_kind,
    check_mask_memory,
    check_memory,
    check_plain,
    error,
    ints,
    items,
    name,
    wraps,
)
from .plain import PLAIN


def check_dst(dst: Tensor, num_samples: int, num_fill: int) -> torch.Size:
    where = "pad_copy: dst"
    check_plain(dst, where)
    shape, size = tuple(dst.shape), dst.itemsize
    if not shape:
        raise error(where, "have at least 1 dimension", "has 0")
    if not dst.is_contiguous():
        found = f"has strides {dst.stride()} for shape {shape}"
        raise error(where, "be contiguous", found)
    if num_samples != shape[0]:
        rule = f"have {shape[0]} entries, one for each row of dst"
        raise error("pad_copy: samples", rule, f"has {num_samples}")
    if num_fill not in (size, size * shape[0]):
        rule = f"have {size} bytes, or {size * shape[0]} for one fill per sample"
        raise error("pad_copy: fills", rule, f"has {num_fill}")
    check_memory(dst, where)
    return dst.shape[1:]


def check_samples(dst: Tensor, target: torch.Size, samples: list[Tensor]) -> None:
    """Look at every sample in one expression, since most are good."""
    dtype, device, size = dst.dtype, dst.device, dst.itemsize
    begin, end = dst.data_ptr(), dst.data_ptr() + dst.nbytes
    is_complex, ndim = dtype.is_complex, len(target)
    for index, t in enumerate(samples):
        if (
            type(t) not in PLAIN
            or t.dtype is not dtype
            or t.layout is not torch.strided
            or t.is_nested
            or wraps(t)
            or t.is_neg()
            or (is_complex and t.is_conj())
            or t.device != device
            or not (address := t.data_ptr())  # zero, empty, or its memory is gone
            or len(shape := t.shape) != ndim
            or (shape != target and any(map(operator.gt, shape, target)))
            or not t.is_contiguous()
            or (t.storage_offset() + t.numel()) * size > t.untyped_storage().nbytes()
            or begin - t.nbytes < address < end
        ):
            check_sample(dst, target, t, index)


def check_sample(dst: Tensor, target: torch.Size, sample: Tensor, index: int) -> None:
    """Say what is wrong with a sample; nothing is with some that are not contiguous."""
    where, dtype, device = ("pad_copy: samples", index), dst.dtype, dst.device
    check_plain(sample, where)
    shape = sample.shape
    if sample.dtype != dtype:
        found = f"{dtype}, but has {sample.dtype}. Convert it first."
        raise TypeError(f"{name(where)} must have the dtype of dst, {found}")
    if sample.device != device:
        rule, advice = f"be on the device of dst, {device}", " Move it first."
        raise error(where, rule, f"is on {sample.device}", advice)
    if len(shape) != len(target):
        rule = f"have {len(target)} dimensions, as the rows of dst"
        raise error(where, rule, f"has shape {tuple(shape)}")
    if shape != target and any(map(operator.gt, shape, target)):
        rule = f"have at most shape {tuple(target)}"
        raise error(where, rule, f"has shape {tuple(shape)}")
    check_memory(sample, where, dst)


def starts_of(values: Iterable[Any], where: str) -> list[tuple[int, ...]]:
    rows = items(values, where, "a sequence of sequences of ints")
    return [tuple(ints(row, f"{where}[{at}]")) for at, row in enumerate(rows)]


def check_starts(
    starts: list[tuple[int, ...]], samples: list[Tensor], target: torch.Size
) -> None:
    if len(starts) != len(samples):
        rule = f"have {len(samples)} entries, one for each sample"
        raise error("pad_copy: starts", rule, f"has {len(starts)}")
    for index, (start, sample) in enumerate(zip(starts, samples, strict=True)):
        where, shape = ("pad_copy: starts", index), sample.shape
        if len(start) != len(target):
            rule = f"have {len(target)} entries, one for each dimension of a row of dst"
            raise error(where, rule, f"has {len(start)}")
        if any(each < 0 for each in start):
            raise error(where, "have no negative entry", f"is {start}")
        if any(map(operator.gt, map(operator.add, start, shape), target)):
            rule = f"leave room for shape {tuple(shape)} in shape {tuple(target)}"
            raise error(where, rule, f"is {start}")


def check_mask(mask: Tensor, dst: Tensor, samples: list[Tensor]) -> None:
    where = "pad_copy: mask"
    check_mask_kind(mask, where, dst)
    shape, whole = tuple(mask.shape), tuple(dst.shape)
    last = whole[len(whole) - len(shape) + 1 :]
    if not 2 <= len(shape) <= len(whole) or shape != (whole[0], *last):
        rule = f"have the first and one or more of the last dimensions of dst, {whole}"
        raise error(where, rule, f"has shape {shape}")
    others = [("dst", dst)]
    others += [(f"samples[{i}]", t) for i, t in enumerate(samples) if t.is_contiguous()]
    check_mask_memory(mask, where, others)
