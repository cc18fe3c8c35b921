"""The contract of ``_C.pyi`` in torch operators: the backend where none is compiled."""

from __future__ import annotations

import ctypes
import os
import sys
import weakref
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from math import prod
from operator import attrgetter, mul
from typing import Any

import torch
from torch import Tensor

from ..core.torch_private import foreach_copy
from . import _checks, _checks_pad
from ._plainly import plainly
from ._python_few import pad_few
from ._python_image import image_batch
from ._python_ring import ring_claim, ring_format, ring_holders, ring_pass, ring_reclaim
from ._python_slab_plan import SlabPlan, plan_slab
from .plain import missing_bytes

__all__ = [
    "SlabPlan",
    "columns",
    "flatten",
    "image_batch",
    "memory_of",
    "pack",
    "pad_copy",
    "pad_few",
    "plan_slab",
    "ring_claim",
    "ring_format",
    "ring_holders",
    "ring_pass",
    "ring_reclaim",
    "stack_equal",
    "views",
]

_Starts = Sequence[Sequence[int]]

_ITEM_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# Dtypes that torch copies bit by bit whatever the strides; others go as integers.
_COPIED = frozenset(
    map(torch.__dict__.get, "uint8 int8 int16 int32 int64 float16 bfloat16".split())
) | {torch.float32, torch.float64, torch.complex64, torch.complex128}
_IMAGES = 4  # dimensions of a batch of them
_STRIDED = torch.strided
#: A buffer at any address. One type for all sizes, because ctypes keeps its types.
_Owner: Any = ctypes.c_uint8 * sys.maxsize
#: The slabs of living views, each held by an owner, by their addresses.
_owners: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_is_meta = attrgetter("is_meta")
_stack = torch.stack


@plainly
def pad_copy(
    dst: Tensor,
    samples: Sequence[Tensor],
    fills: bytes,
    starts: Sequence[Sequence[int]] | None = None,
    mask: Tensor | None = None,
) -> None:
    """See ``_C.pyi``."""
    _checks.require("pad_copy: dst", Tensor, "a torch.Tensor", dst)
    tensors = _checks.tensors(samples, "pad_copy: samples")
    _checks.require("pad_copy: fills", bytes, "bytes", fills)
    places = None
    if starts is not None:
        places = _checks_pad.starts_of(starts, "pad_copy: starts")
    if mask is not None:
        _checks.require("pad_copy: mask", Tensor, "a torch.Tensor", mask)
    target = _checks_pad.check_dst(dst, len(tensors), len(fills))
    _checks_pad.check_samples(dst, target, tensors)
    if places is not None:
        _checks_pad.check_starts(places, tensors, target)
    if mask is not None:
        _checks_pad.check_mask(mask, dst, tensors)
        _mark(mask, tensors, places)
    if dst.numel() == 0:
        return
    source = dst
    if dst.dtype not in _COPIED:
        bits = _ITEM_BITS[dst.itemsize]
        source, tensors = dst.view(bits), [each.view(bits) for each in tensors]
    if all(each.shape == target for each in tensors):
        torch.stack(tensors, out=source)
    else:
        _copy_and_fill(source, tensors, fills, places)


def stack_equal(samples: Sequence[Tensor]) -> Tensor | None:
    """See ``_C.pyi``."""
    try:
        first = samples[0]
        if first.layout is not _STRIDED or first.is_quantized:
            return None
        # torch reads freed memory, and imports its compiler for meta tensors.
        if any(map(_is_meta, samples)) or any(map(missing_bytes, samples)):
            return None
        stacked = _stack(samples)  # type: ignore[arg-type]  # raises if not
        # torch keeps the channels_last format of images.
        return stacked if stacked.dim() < _IMAGES else stacked.contiguous()
    except (AttributeError, IndexError, TypeError, RuntimeError):
        return None


@plainly
def pack(dst: Tensor, leaves: Sequence[Tensor], plan: SlabPlan) -> None:
    """See ``_C.pyi``."""
    _checks.require("pack: dst", Tensor, "a torch.Tensor", dst)
    tensors = _checks.tensors(leaves, "pack: leaves")
    _checks.require("pack: plan", SlabPlan, "a SlabPlan", plan)
    _checks.check_slab(dst, "pack: dst", "")
    _checks.check_size(dst, plan.nbytes, "pack: dst")
    if len(tensors) != len(plan.offsets):
        rule = f"have {len(plan.offsets)} entries, as planned"
        raise _checks.error("pack: leaves", rule, f"has {len(tensors)}")
    wanted = zip(tensors, plan.dtypes, plan.shapes, strict=True)
    for index, (leaf, dtype, shape) in enumerate(wanted):
        _checks.check_leaf(leaf, index, dtype, shape, dst)
    zeros = dst.new_zeros(())
    pieces, end = [], 0
    for leaf, start in zip(tensors, plan.offsets, strict=True):
        if leaf.dtype not in _COPIED:
            leaf = leaf.view(_ITEM_BITS[leaf.itemsize])
        flat = leaf.contiguous().as_strided((leaf.numel(),), (1,))
        pieces += [zeros.expand(start - end), flat.view(torch.uint8)]
        end = start + leaf.nbytes
    if dst.numel() > 0:
        torch.cat([*pieces, zeros.expand(dst.numel() - end)], out=dst)


@plainly
def views(slab: Tensor, plan: SlabPlan) -> list[Tensor]:
    """See ``_C.pyi``."""
    _checks.require("views: slab", Tensor, "a torch.Tensor", slab)
    _checks.require("views: plan", SlabPlan, "a SlabPlan", plan)
    _checks.check_slab(slab, "views: slab", "")
    _checks.check_size(slab, plan.nbytes, "views: slab")
    own = slab.is_cpu and not _is_pinned_by_torch(slab)
    if own and slab.numel():
        owner = _Owner.from_address(slab.data_ptr())
        owner.slab = slab
        _owners[slab.data_ptr()] = owner
    storage, first = slab.untyped_storage(), slab.storage_offset()
    made = []
    for start, dtype, shape in zip(plan.offsets, plan.dtypes, plan.shapes, strict=True):
        if first % dtype.itemsize:
            size = dtype.itemsize
            rule = f"start at a multiple of {size} bytes, the item size of {dtype}"
            found = f"starts at byte {first} of its storage"
            raise _checks.error("views: slab", rule, found)
        numel = prod(shape)
        if not own:
            view = torch.empty(0, dtype=dtype, device=slab.device)
            view.set_(storage, (first + start) // dtype.itemsize, shape, ())
        elif numel:
            view = torch.frombuffer(owner, dtype=dtype, count=numel, offset=start)
            view.resize_(shape)
        else:  # torch.frombuffer takes no empty buffers
            view = torch.empty(shape, dtype=dtype)
        made.append(view)
    return made


@plainly
def memory_of(tensor: Tensor) -> Tensor:
    """See ``_C.pyi``."""
    _checks.require("memory_of: tensor", Tensor, "a torch.Tensor", tensor)
    _checks.check_plain(tensor, "memory_of: tensor")
    storage = tensor.untyped_storage()
    if tensor.is_cpu and tensor.numel():
        for owner in list(_owners.values()):
            if 0 <= tensor.data_ptr() - owner.slab.data_ptr() < owner.slab.nbytes:
                storage = owner.slab.untyped_storage()
    memory = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return memory.set_(storage, 0, (storage.nbytes(),), (1,))


def _is_pinned_by_torch(slab: Tensor) -> bool:
    """Return True for a block of torch's allocator of pinned memory.

    That allocator finds the block that a copy reads by the block's own storage.
    """
    return slab.untyped_storage().resizable() and slab.is_pinned()


def send(*args: Any, **kwargs: Any) -> None:
    """See ``_C.pyi``: native only."""
    raise NotImplementedError(
        "send must be native, but pure Python runs. Copy by torch's operators."
    )


class RecordedEvent:
    """See ``_C.pyi``: native only."""


class Runtime:
    """See ``_C.pyi``: native only."""

    def __init__(self, device_type: str) -> None:
        raise NotImplementedError(
            "Runtime must be native, but pure Python runs. Use torch's events."
        )


# In a list, so that it can be changed; what of it is in use is for torch to say.
_pinned_limit = [
    min(1 << 30, os.sysconf("SC_PHYS_PAGES") // 8 * os.sysconf("SC_PAGESIZE"))
]


def pinned_info() -> tuple[int, int, int, int]:
    """See ``_C.pyi``."""
    return (0, 0, _pinned_limit[0], 0)


def bound_pinned(limit: int) -> None:
    """See ``_C.pyi``."""
    _pinned_limit[0] = limit


def columns(dicts: list[Any], stack: bool) -> None:
    """See ``_C.pyi``: none are gathered."""


def flatten(tree: Any, leaf_types: AbstractSet[type]) -> None:
    """See ``_C.pyi``: every nest is left to optree."""


def empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """See ``_C.pyi``."""
    _checks.require("empty: dtype", torch.dtype, "a torch.dtype", dtype)
    return torch.empty(_checks.ints(shape, "empty: shape"), dtype=dtype, device="cpu")


def cache_info() -> tuple[int, int, int, int, int]:
    """See ``_C.pyi``."""
    return (0, 0, 0, 0, 0)


def bound_cache(limit: int, idle_seconds: float) -> None:
    """See ``_C.pyi``."""


def clear_cache() -> int:
    """See ``_C.pyi``."""
    return 0


def _copy_and_fill(
    dst: Tensor, samples: list[Tensor], fills: bytes, starts: _Starts | None
) -> None:
    """Fill everything, then copy: margins alone are many short calls, and slower."""
    itemsize, row_numel = dst.itemsize, prod(dst.shape[1:])
    strides, first = dst.stride()[1:], dst.storage_offset()
    origin = (0,) * len(strides)
    # Items of 16 bytes are two integers in a last dimension.
    bits = torch.view_as_real(dst) if itemsize == 16 else dst
    bits = bits.view(_ITEM_BITS[min(itemsize, 8)])
    if len(fills) == itemsize:
        _fill(bits, fills)
    else:
        for index in range(len(samples)):
            _fill(bits[index], fills[index * itemsize :][:itemsize])
    corners = []
    for index, sample in enumerate(samples):
        start = origin if starts is None else starts[index]
        at = first + index * row_numel + sum(map(mul, start, strides))
        corners.append(dst.as_strided(sample.shape, strides, at))
    foreach_copy(corners, samples)


def _mark(mask: Tensor, samples: list[Tensor], starts: _Starts | None) -> None:
    """Mark the samples' places: the product, over dimensions, of where each one is."""
    if mask.numel() == 0:
        return
    ndim, device = mask.dim() - 1, mask.device
    sizes = torch.tensor([each.shape[-ndim:] for each in samples], device=device)
    first = torch.zeros_like(sizes)
    if starts is not None:
        first = torch.tensor([each[-ndim:] for each in starts], device=device)
    mask.fill_(True)
    for dim in range(ndim):
        at = torch.arange(mask.shape[dim + 1], device=device)
        begin, size = first[:, dim : dim + 1], sizes[:, dim : dim + 1]
        inside = (at >= begin) & (at < begin + size)
        others = (1,) * dim, (1,) * (ndim - dim - 1)
        mask &= inside.view(len(samples), *others[0], -1, *others[1])


def _fill(bits: Tensor, fill: bytes) -> None:
    halves = (fill[:8], fill[8:] or fill[:8])
    words = [int.from_bytes(half, sys.byteorder, signed=True) for half in halves]
    uniform = words[0] == words[1]
    bits.fill_(words[0]) if uniform else bits.copy_(torch.tensor(words).to(bits.device))
