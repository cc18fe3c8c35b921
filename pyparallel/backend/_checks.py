"""What both backends demand of arguments, worded as the extension words it."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from math import prod
from typing import Any, SupportsIndex

import torch
from torch import Tensor

from ..core import torch_private
from ..core.torch_private import is_zero_tensor, runs_in_python
from .plain import PLAIN, missing_bytes

_Where = str | tuple[str, int]  # an argument, or an item of one; named only in errors

#: Slots of a slab start at multiples of this many bytes (one cache line).
ALIGNMENT = 64

_LIMIT = 2**63
QUANTIZED = frozenset(
    (torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4)
)

wraps = torch_private.is_wrapped


def _is_not_strided(tensor: Tensor) -> bool:
    return tensor.layout is not torch.strided


# What keeps the bytes of a tensor from being simply its elements.
_DEFECTS: tuple[tuple[Callable[[Tensor], bool], str, str], ...] = (
    (lambda t: t.is_nested, "nested", " Call unbind() on it first."),
    (_is_not_strided, "sparse or opaque", " Call to_dense() on it first."),
    (lambda t: t.is_quantized, "quantized", " Call dequantize() on it first."),
    (lambda t: wraps(t) or runs_in_python(t), "a wrapper", " Unwrap it first."),
    (lambda t: t.is_meta, "on the meta device", " Give it data first."),
    (lambda t: t.is_conj(), "conjugated", " Call resolve_conj() on it first."),
    (lambda t: t.is_neg(), "negated", " Call resolve_neg() on it first."),
    (is_zero_tensor, "a zero tensor", " Call clone() on it first."),
)


def name(where: _Where) -> str:
    return where if isinstance(where, str) else f"{where[0]}[{where[1]}]"


def error(where: _Where, rule: str, found: str, advice: str = "") -> ValueError:
    return ValueError(f"{name(where)} must {rule}, but {found}.{advice}")


def require(where: str, kind: Any, rule: str, found: object) -> None:
    if not isinstance(found, kind):
        name = type(found).__name__
        raise TypeError(f"{where} must be {rule}, but is of type {name}.")


def items(values: Iterable[Any], where: str, rule: str) -> list[Any]:
    require(where, Iterable, rule, values)
    return list(values)


def tensors(values: Iterable[Tensor], where: str) -> list[Tensor]:
    found = items(values, where, "a sequence of tensors")
    for index, each in enumerate(found):
        if not isinstance(each, Tensor):
            require(f"{where}[{index}]", Tensor, "a torch.Tensor", each)
    return found


def ints(values: Iterable[Any], where: str) -> list[int]:
    found = items(values, where, "a sequence of ints")
    return [integer(value, (where, at)) for at, value in enumerate(found)]


def integer(value: Any, where: _Where) -> int:
    if type(value) is not int:
        require(name(where), SupportsIndex, "an int", value)
        value = operator.index(value)
    if not -_LIMIT <= value < _LIMIT:
        raise error(where, "fit in 64 bits", f"is {value}")
    return int(value)


def is_plain(t: Tensor) -> bool:
    odd = t.is_neg() or t.is_conj() or is_zero_tensor(t) or wraps(t)
    odd = odd or t.is_nested or t.is_quantized or t.is_meta
    return type(t) in PLAIN and t.layout is torch.strided and not odd


def check_plain(tensor: Tensor, where: _Where) -> None:
    if not is_plain(tensor):
        for applies, found, advice in _DEFECTS:
            if applies(tensor):
                rule = f"must be a plain strided tensor, but is {found}"
                raise TypeError(f"{name(where)} {rule}.{advice}")


def check_memory(tensor: Tensor, where: _Where, dst: Tensor | None = None) -> None:
    """Check that a tensor lies within its storage, and outside ``dst``."""
    found = missing_bytes(tensor)
    if found:
        advice = " Copy it before its storage is released."
        raise error(where, "lie within its storage", found, advice)
    if dst is not None and tensor.is_contiguous() and overlap(tensor, dst):
        rule = "not share memory with dst"
        raise error(where, rule, "overlaps it", " Clone it first.")


def overlap(one: Tensor, other: Tensor) -> bool:
    """Tell whether two contiguous tensors share bytes."""
    distance = one.data_ptr() - other.data_ptr()
    return bool(one.nbytes and other.nbytes) and -one.nbytes < distance < other.nbytes


def check_mask_kind(mask: Tensor, where: str, dst: Tensor) -> None:
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
    if nbytes >= _LIMIT:
        rule = "have fewer than 2**63 bytes"
        raise error(f"SlabPlan: shapes[{index}]", rule, f"is {shape}")
    if start < begin or start % ALIGNMENT:
        rule = f"be a multiple of {ALIGNMENT} and at least {begin}"
        rule += ", the end of the leaf before it"
        raise error(where, rule, f"is {start}")
    if start + nbytes >= _LIMIT:
        rule = f"leave room for {nbytes} bytes below 2**63"
        raise error(where, rule, f"is {start}")
    return start + nbytes
