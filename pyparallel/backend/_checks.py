"""Checks of the arguments of both backends, with the messages of the extension.

`image_checks` has those of image_batch, because `images` uses two of its names.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from math import prod
from typing import Any, SupportsIndex

import torch
from torch import Tensor

from ..core.torch_private import is_wrapped, is_zero_tensor, runs_in_python
from .plain import CASTS, PLAIN, is_plain, missing_bytes

_Where = str | tuple[str, int]  # an argument, or an item of one

#: Slots of a slab start at multiples of this many bytes (one cache line).
ALIGNMENT = 64

LIMIT = 2**63
QUANTIZED = frozenset(
    (torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4)
)


def _is_not_strided(tensor: Tensor) -> bool:
    return tensor.layout is not torch.strided


# Properties of tensors whose bytes are not simply their elements.
_DEFECTS: tuple[tuple[Callable[[Tensor], bool], str, str], ...] = (
    (lambda t: t.is_nested, "nested", " Call unbind() on it first."),
    (_is_not_strided, "sparse or opaque", " Call to_dense() on it first."),
    (lambda t: t.is_quantized, "quantized", " Call dequantize() on it first."),
    (lambda t: is_wrapped(t) or runs_in_python(t), "a wrapper", " Unwrap it first."),
    (lambda t: t.is_meta, "on the meta device", " Give it data first."),
    (lambda t: t.is_conj(), "conjugated", " Call resolve_conj() on it first."),
    (lambda t: t.is_neg(), "negated", " Call resolve_neg() on it first."),
    (is_zero_tensor, "a zero tensor", " Call clone() on it first."),
)


def format_where(where: _Where) -> str:
    return where if isinstance(where, str) else f"{where[0]}[{where[1]}]"


def error(where: _Where, rule: str, found: str, advice: str = "") -> ValueError:
    return ValueError(f"{format_where(where)} must {rule}, but {found}.{advice}")


def check_type(where: str, cls: Any, rule: str, found: object) -> None:
    if not isinstance(found, cls):
        raise TypeError(
            f"{where} must be {rule}, but is of type {type(found).__name__}."
        )


def as_list(values: Iterable[Any], where: str, rule: str) -> list[Any]:
    check_type(where, Iterable, rule, values)
    return list(values)


def as_tensors(values: Iterable[Tensor], where: str) -> list[Tensor]:
    found = as_list(values, where, "a sequence of tensors")
    for index, each in enumerate(found):
        if not isinstance(each, Tensor):
            check_type(f"{where}[{index}]", Tensor, "a torch.Tensor", each)
    return found


def as_ints(values: Iterable[Any], where: str) -> list[int]:
    found = as_list(values, where, "a sequence of ints")
    return [as_int(value, (where, at)) for at, value in enumerate(found)]


def as_int(value: Any, where: _Where) -> int:
    if type(value) is not int:
        check_type(format_where(where), SupportsIndex, "an int", value)
        value = operator.index(value)
    if not -LIMIT <= value < LIMIT:
        raise error(where, "fit in 64 bits", f"is {value}")
    return int(value)


def check_plain(tensor: Tensor, where: _Where) -> None:
    if not is_plain(tensor) or tensor.is_meta or is_wrapped(tensor):
        for applies, found, advice in _DEFECTS:
            if applies(tensor):
                rule = f"must be a plain strided tensor, but is {found}"
                raise TypeError(f"{format_where(where)} {rule}.{advice}")


def check_memory(tensor: Tensor, where: _Where, dst: Tensor | None = None) -> None:
    """Check that a tensor is inside its storage and does not overlap ``dst``."""
    found = missing_bytes(tensor)
    if found:
        advice = " Copy it before its storage is released."
        raise error(where, "lie within its storage", found, advice)
    if dst is not None and tensor.is_contiguous() and overlap(tensor, dst):
        rule = "not share memory with dst"
        raise error(where, rule, "overlaps it", " Clone it first.")


def overlap(one: Tensor, other: Tensor) -> bool:
    """Return True if two contiguous tensors share bytes."""
    distance = one.data_ptr() - other.data_ptr()
    return bool(one.nbytes and other.nbytes) and -one.nbytes < distance < other.nbytes


def check_mask_type(mask: Tensor, where: str, dst: Tensor) -> None:
    check_plain(mask, where)
    if mask.dtype is not torch.bool:
        rule = f"must have dtype torch.bool, but has {mask.dtype}."
        raise TypeError(f"{where} {rule}")
    if mask.device != dst.device:
        rule = f"be on the device of dst, {dst.device}"
        raise error(where, rule, f"is on {mask.device}")


def check_mask_memory(
    mask: Tensor, where: str, others: Iterable[tuple[str, Tensor]]
) -> None:
    if not mask.is_contiguous():
        found = f"has strides {mask.stride()} for shape {tuple(mask.shape)}"
        raise error(where, "be contiguous", found)
    check_memory(mask, where)
    for other, tensor in others:
        if overlap(tensor, mask):
            rule = f"not share memory with {other}"
            raise error(where, rule, "overlaps it", " Give it memory of its own.")


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
    """Check every sample with one expression first, because most samples are valid."""
    dtype, device = source_dtype(dst, samples), dst.device
    size = dtype.itemsize
    begin, end = dst.data_ptr(), dst.data_ptr() + dst.nbytes
    is_complex, ndim = dtype.is_complex, len(target)
    for index, t in enumerate(samples):
        if (
            type(t) not in PLAIN
            or t.dtype is not dtype
            or t.layout is not torch.strided
            or t.is_nested
            or is_wrapped(t)
            or t.is_neg()
            or (is_complex and t.is_conj())
            or t.device != device
            or not (address := t.data_ptr())  # a zero tensor, empty, or freed
            or len(shape := t.shape) != ndim
            or (shape != target and any(map(operator.gt, shape, target)))
            or not t.is_contiguous()
            or (t.storage_offset() + t.numel()) * size > t.untyped_storage().nbytes()
            or begin - t.nbytes < address < end
        ):
            check_sample(dst, target, t, index, dtype)


def source_dtype(dst: Tensor, samples: list[Tensor]) -> torch.dtype:
    """Return the dtype that all samples must have: that of ``dst``, or one to cast."""
    first = samples[0].dtype if samples else dst.dtype
    return first if dst.is_cpu and (first, dst.dtype) in CASTS else dst.dtype


def check_sample(
    dst: Tensor, target: torch.Size, sample: Tensor, index: int, dtype: torch.dtype
) -> None:
    """Raise the error for a sample; samples that are not contiguous may be valid."""
    where, device = ("pad_copy: samples", index), dst.device
    check_plain(sample, where)
    shape = sample.shape
    if sample.dtype != dtype:
        like = "dst" if dtype == dst.dtype else "samples[0]"
        found = f"{dtype}, but has {sample.dtype}. Convert it first."
        raise TypeError(f"{format_where(where)} must have the dtype of {like}, {found}")
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


def as_starts(values: Iterable[Any], where: str) -> list[tuple[int, ...]]:
    rows = as_list(values, where, "a sequence of sequences of ints")
    return [tuple(as_ints(row, f"{where}[{at}]")) for at, row in enumerate(rows)]


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
    check_mask_type(mask, where, dst)
    shape, whole = tuple(mask.shape), tuple(dst.shape)
    last = whole[len(whole) - len(shape) + 1 :]
    if not 2 <= len(shape) <= len(whole) or shape != (whole[0], *last):
        rule = f"have the first and one or more of the last dimensions of dst, {whole}"
        raise error(where, rule, f"has shape {shape}")
    others = [("dst", dst)]
    others += [(f"samples[{i}]", t) for i, t in enumerate(samples) if t.is_contiguous()]
    check_mask_memory(mask, where, others)


def check_slab(slab: Tensor, where: str, on_cpu: str) -> None:
    check_plain(slab, where)
    good = slab.dtype == torch.uint8 and slab.dim() == 1 and slab.is_contiguous()
    if not good or (on_cpu and slab.device.type != "cpu"):
        rule = f"be a contiguous torch.uint8 tensor of one dimension{on_cpu}"
        form = f"shape {tuple(slab.shape)}, strides {slab.stride()}"
        found = f"has dtype {slab.dtype}, {form} and device {slab.device}"
        raise error(where, rule, found)
    check_memory(slab, where)


def check_size(slab: Tensor, nbytes: int, where: str) -> None:
    if slab.numel() != nbytes:
        raise error(where, f"have {nbytes} bytes, as planned", f"has {slab.numel()}")


def check_leaf(
    leaf: Tensor, index: int, dtype: torch.dtype, shape: tuple[int, ...], dst: Tensor
) -> None:
    where = ("pack: leaves", index)
    check_plain(leaf, where)
    if leaf.device != dst.device:
        rule = f"be on the device of dst, {dst.device}"
        raise error(where, rule, f"is on {leaf.device}", " Move it first.")
    if leaf.dtype != dtype or leaf.shape != shape:
        found = f"has {leaf.dtype} and {tuple(leaf.shape)}"
        rule = f"have dtype {dtype} and shape {shape}, as planned"
        raise error(where, rule, found)
    check_memory(leaf, where, dst)


def check_plan(
    starts: list[int],
    sizes: list[tuple[int, ...]],
    types: list[torch.dtype],
    nbytes: int,
) -> None:
    end = 0
    for index, (start, shape, dtype) in enumerate(
        zip(starts, sizes, types, strict=True)
    ):
        end = _check_slot(index, start, shape, dtype, end)
    if nbytes < end or nbytes % ALIGNMENT:
        rule = f"be a multiple of {ALIGNMENT} and at least {end}"
        rule += ", the end of the last leaf"
        raise error("SlabPlan: nbytes", rule, f"is {nbytes}")


def _check_slot(
    index: int, start: int, shape: tuple[int, ...], dtype: torch.dtype, begin: int
) -> int:
    where, nbytes = ("SlabPlan: offsets", index), prod(shape) * dtype.itemsize
    if dtype in QUANTIZED:
        rule = f"must be a dtype of plain tensors, but is {dtype}."
        raise TypeError(f"SlabPlan: dtypes[{index}] {rule}")
    if any(length < 0 for length in shape):
        rule = "have no negative size"
        raise error(f"SlabPlan: shapes[{index}]", rule, f"is {shape}")
    if nbytes >= LIMIT:
        rule = "have fewer than 2**63 bytes"
        raise error(f"SlabPlan: shapes[{index}]", rule, f"is {shape}")
    if start < begin or start % ALIGNMENT:
        rule = f"be a multiple of {ALIGNMENT} and at least {begin}"
        rule += ", the end of the leaf before it"
        raise error(where, rule, f"is {start}")
    if start + nbytes >= LIMIT:
        rule = f"leave room for {nbytes} bytes below 2**63"
        raise error(where, rule, f"is {start}")
    return start + nbytes
