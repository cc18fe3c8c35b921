"""The pure Python backend: the contract of ``_C.pyi`` in torch operators."""

from __future__ import annotations

import ctypes
import os
import sys
import weakref
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from ctypes import c_float
from dataclasses import dataclass
from functools import cache, wraps
from math import prod
from operator import attrgetter, mul
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from ..core.torch_private import (
    foreach_copy,
    is_wrapped,
    outside_autocast,
    set_grad_enabled,
    without_torch_function,
)
from . import _checks, image_checks
from ._checks import ALIGNMENT
from ._python_message import decode, encode
from ._python_ring import ring_claim, ring_format, ring_holders, ring_pass, ring_reclaim
from .plain import PLAIN, can_pack, is_plain, missing_bytes

#: The operators of every backend; ``_C.pyi`` specifies them.
__all__ = [
    "BatchCopy",
    "RecordedEvent",
    "ReturnJob",
    "Runtime",
    "SlabPlan",
    "are_compact",
    "are_on_one_device",
    "bound_cache",
    "bound_pinned",
    "cache_info",
    "clear_cache",
    "columns",
    "copy_compact",
    "decode",
    "empty",
    "encode",
    "find_unpackable",
    "flatten",
    "forbid_use",
    "image_batch",
    "memory_of",
    "pack",
    "pad_copy",
    "pad_small_batch",
    "pinned_info",
    "plan_copy",
    "plan_slab",
    "prepare_return",
    "replace_tensors",
    "ring_claim",
    "ring_format",
    "ring_holders",
    "ring_pass",
    "ring_reclaim",
    "select_tensors",
    "send",
    "stack_equal",
    "views",
]

_Starts = Sequence[Sequence[int]]

_ITEM_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# Dtypes that torch copies bit by bit with any strides. Others are copied as integers.
_COPIED = frozenset(
    map(torch.__dict__.get, "uint8 int8 int16 int32 int64 float16 bfloat16".split())
) | {torch.float32, torch.float64, torch.complex64, torch.complex128}
_NCHW = 4  # the number of dimensions of a batch of images

# The limits of `pad_small_batch`.
_MOST_SAMPLES = 16
_MOST_ITEMS = 16 * 1024
# Padding values that every dtype represents, except those of _EXCLUDED: quantized ones,
# a dtype without a zero, whose substitute depends on the type of the value, and a dtype
# that torch cannot fill.
_VALUES = frozenset({0, 1})
_NUMBERS = frozenset({bool, int, float})
_EXCLUDED = _checks.QUANTIZED | {
    getattr(torch, name, None) for name in ("float8_e8m0fnu", "float4_e2m1fn_x2")
}
_EXACT = {Tensor}

_STRIDED = torch.strided
#: A buffer at any address. One type for all sizes, because ctypes never frees types.
_Owner: Any = ctypes.c_uint8 * sys.maxsize
#: The owners of slabs with live views, by the address of the slab.
_owners: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_is_contiguous = Tensor.is_contiguous
_is_meta = attrgetter("is_meta")
_pad = torch.constant_pad_nd
_stack = torch.stack

_P = ParamSpec("_P")
_R = TypeVar("_R")


def _default_pinned_limit() -> int:
    if sys.platform == "win32":
        return 1 << 30
    nbytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGESIZE")
    return min(1 << 30, nbytes // 8)


# A list, so that bound_pinned can change the value. torch's allocator ignores it.
_pinned_limit = [_default_pinned_limit()]


def without_autograd(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Run a function without autograd, autocast, and code of subclasses and modes."""

    @wraps(function)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        before = torch.is_grad_enabled()
        set_grad_enabled(False)  # no_grad() takes a microsecond more
        try:
            with without_torch_function(), outside_autocast():
                return function(*args, **kwargs)
        finally:
            set_grad_enabled(before)

    return run


@without_autograd
def pad_copy(
    dst: Tensor,
    samples: Sequence[Tensor],
    fills: bytes,
    starts: Sequence[Sequence[int]] | None = None,
    mask: Tensor | None = None,
) -> None:
    """See ``_C.pyi``."""
    _checks.check_type("pad_copy: dst", Tensor, "a torch.Tensor", dst)
    tensors = _checks.as_tensors(samples, "pad_copy: samples")
    _checks.check_type("pad_copy: fills", bytes, "bytes", fills)
    places = None
    if starts is not None:
        places = _checks.as_starts(starts, "pad_copy: starts")
    if mask is not None:
        _checks.check_type("pad_copy: mask", Tensor, "a torch.Tensor", mask)
    target = _checks.check_dst(dst, len(tensors), len(fills))
    _checks.check_samples(dst, target, tensors)
    if places is not None:
        _checks.check_starts(places, tensors, target)
    if mask is not None:
        _checks.check_mask(mask, dst, tensors)
        _fill_mask(mask, tensors, places)
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


def _copy_and_fill(
    dst: Tensor, samples: list[Tensor], fills: bytes, starts: _Starts | None
) -> None:
    """Fill all of ``dst``, then copy: separate fills of the margins are slower."""
    itemsize, row_numel = dst.itemsize, prod(dst.shape[1:])
    strides, first = dst.stride()[1:], dst.storage_offset()
    origin = (0,) * len(strides)
    # An item of 16 bytes is viewed as two integers.
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


def _fill(bits: Tensor, fill: bytes) -> None:
    halves = (fill[:8], fill[8:] or fill[:8])
    words = [int.from_bytes(half, sys.byteorder, signed=True) for half in halves]
    if words[0] == words[1]:
        bits.fill_(words[0])
    else:
        bits.copy_(torch.tensor(words, device=bits.device))


def _fill_mask(mask: Tensor, samples: list[Tensor], starts: _Starts | None) -> None:
    """Set the mask where samples are: in each dimension, one range per sample."""
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


def pad_small_batch(
    samples: Sequence[Tensor], pad_dims: int | None, values: Sequence[Any]
) -> Tensor | None:
    """See ``_C.pyi``.

    In Python the checks of `pad_copy` take longer than a second pass over a few bytes.
    """
    if (
        len(samples) > _MOST_SAMPLES
        or set(map(type, samples)) != _EXACT
        or not _NUMBERS.issuperset(map(type, values))
        or not _VALUES.issuperset(values)
    ):
        return None
    dtype, grad_enabled = samples[0].dtype, torch.is_grad_enabled()
    shapes = []
    for each in samples:
        if (
            each.dtype is not dtype
            or each.layout is not _STRIDED
            or each.is_nested
            or not each.is_cpu
            or is_wrapped(each)
            or not each.is_contiguous()
            or each.is_neg()
            or each.is_conj()
            or (grad_enabled and each.requires_grad)
            or each.untyped_storage().nbytes()
            < each.nbytes + each.storage_offset() * each.itemsize
        ):
            return None
        shapes.append(each.shape)
    first = shapes[0]
    num_equal = len(first) - (pad_dims or 0)
    if num_equal < 1 or dtype in _EXCLUDED:
        return None
    if any(len(x) != len(first) or x[:num_equal] != first[:num_equal] for x in shapes):
        return None
    target = tuple(map(max, zip(*shapes, strict=True)))
    if not 0 < len(samples) * prod(target) <= _MOST_ITEMS:
        return None
    with without_torch_function(), outside_autocast():
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


def stack_equal(samples: Sequence[Tensor]) -> Tensor | None:
    """See ``_C.pyi``."""
    try:
        first = samples[0]
        if first.layout is not _STRIDED or first.is_quantized:
            return None
        if set(map(type, samples)) != _EXACT:
            return None
        # torch.stack reads freed memory, and imports the compiler for meta tensors.
        if any(map(_is_meta, samples)) or any(map(missing_bytes, samples)):
            return None
        with without_torch_function(), outside_autocast():
            stacked = _stack(samples)  # type: ignore[arg-type]  # checked by torch
        if stacked.requires_grad:  # as the extension
            return None
        # torch.stack preserves the channels_last format of images.
        return stacked if stacked.dim() < _NCHW else stacked.contiguous()
    except (AttributeError, IndexError, TypeError, RuntimeError):
        return None


@without_autograd
def image_batch(
    dst: Tensor,
    images: Sequence[Tensor],
    mask: Tensor | None,
    mean: Sequence[float],
    std: Sequence[float],
    fill: Sequence[float],
    swap_channels: bool,
    exact: bool,
) -> None:
    """See ``_C.pyi``."""
    _checks.check_type("image_batch: dst", Tensor, "a torch.Tensor", dst)
    tensors = _checks.as_tensors(images, "image_batch: images")
    if mask is not None:
        _checks.check_type("image_batch: mask", Tensor, "a torch.Tensor", mask)
    channels = {"mean": mean, "std": std, "fill": fill}
    rows = {
        what: image_checks.as_floats(row, f"image_batch: {what}")
        for what, row in channels.items()
    }
    image_checks.check_bool(swap_channels, "image_batch: swap_channels")
    image_checks.check_bool(exact, "image_batch: exact")
    image_checks.check_dst(dst, len(tensors))
    for what, row in rows.items():
        image_checks.check_channels(row, what, dst.shape[1])
    image_checks.check_images(tensors, dst)
    if mask is not None:
        image_checks.check_mask(mask, dst, tensors)
        _fill_image_mask(mask, tensors)
    columns = {what: _column(row, dst) for what, row in rows.items()}
    if not exact:
        columns |= _scale_and_bias(rows, dst)
    _write_images(dst, tensors, columns, swap_channels)


def _write_images(
    dst: Tensor, images: list[Tensor], columns: dict[str, Tensor], swap_channels: bool
) -> None:
    fill, scale = columns["fill"], columns.get("scale")
    sides = dst.shape[2:]
    for row, image in zip(dst, images, strict=True):
        height, width = image.shape[1:]
        if image.shape[1:] != sides:
            row[:, height:] = fill
            row[:, :height, width:] = fill
        pixels = image.flip(0) if swap_channels else image
        corner = row[:, :height, :width]
        if scale is None:
            torch.div(pixels - columns["mean"], columns["std"], out=corner)
        else:
            torch.add(pixels * scale, columns["bias"], out=corner)


def _scale_and_bias(rows: dict[str, list[float]], dst: Tensor) -> dict[str, Tensor]:
    """Return the factors of one multiplication and one addition for each channel."""
    mean, std = (
        torch.tensor(rows[what], dtype=torch.float64, device="cpu")
        for what in ("mean", "std")
    )
    parts = {"scale": 1 / std, "bias": -mean / std}
    return {what: _column(part.tolist(), dst) for what, part in parts.items()}


def _column(values: list[float], dst: Tensor) -> Tensor:
    """Return values as float32 ``(C, 1, 1)``, without a wait of the host for a GPU."""
    cells = [c_float(each).value for each in values]
    cell = torch.empty((1, 1), dtype=torch.float32, device=dst.device)
    return torch.stack([torch.full_like(cell, each) for each in cells])


def _fill_image_mask(mask: Tensor, images: list[Tensor]) -> None:
    mask.zero_()
    for row, image in zip(mask, images, strict=True):
        row[: image.shape[1], : image.shape[2]].fill_(True)


@dataclass(frozen=True, slots=True)
class SlabPlan:
    """See ``_C.pyi``."""

    offsets: tuple[int, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    nbytes: int

    def __post_init__(self) -> None:
        """Check the plan once, so that the operators need not."""
        starts = _checks.as_ints(self.offsets, "SlabPlan: offsets")
        sizes = _checks.as_list(self.shapes, "SlabPlan: shapes", "a sequence of shapes")
        types = _checks.as_list(self.dtypes, "SlabPlan: dtypes", "a sequence of dtypes")
        if not len(starts) == len(sizes) == len(types):
            found = f"have {len(starts)}, {len(sizes)} and {len(types)}"
            where = "SlabPlan: offsets, shapes and dtypes"
            raise _checks.error(where, "have the same length", found)
        for i, (dtype, shape) in enumerate(zip(types, sizes, strict=True)):
            _checks.check_type(
                f"SlabPlan: dtypes[{i}]", torch.dtype, "a torch.dtype", dtype
            )
            sizes[i] = tuple(_checks.as_ints(shape, f"SlabPlan: shapes[{i}]"))
        nbytes = _checks.as_int(self.nbytes, "SlabPlan: nbytes")
        _checks.check_plan(starts, sizes, types, nbytes)
        _set_fields(self, tuple(starts), tuple(sizes), tuple(types), nbytes)


def plan_slab(leaves: Sequence[Tensor]) -> SlabPlan:
    """See ``_C.pyi``."""
    tensors = _checks.as_tensors(leaves, "plan_slab: leaves")
    offsets = []
    end = 0
    for i, leaf in enumerate(tensors):
        _checks.check_plain(leaf, ("plan_slab: leaves", i))
        offsets.append(end)
        end += -(-prod(leaf.shape) * leaf.itemsize // ALIGNMENT) * ALIGNMENT
        if end >= _checks.LIMIT:
            rule = "have fewer than 2**63 bytes together"
            raise _checks.error("plan_slab: leaves", rule, f"leaves[{i}] goes beyond")
    shapes = tuple([tuple(leaf.shape) for leaf in tensors])
    plan = object.__new__(SlabPlan)  # valid by construction: skip the checks
    _set_fields(
        plan, tuple(offsets), shapes, tuple([leaf.dtype for leaf in tensors]), end
    )
    return plan


def _set_fields(plan: SlabPlan, *values: object) -> None:
    for name, value in zip(SlabPlan.__slots__, values, strict=True):
        object.__setattr__(plan, name, value)


@without_autograd
def pack(dst: Tensor, leaves: Sequence[Tensor], plan: SlabPlan) -> None:
    """See ``_C.pyi``."""
    _checks.check_type("pack: dst", Tensor, "a torch.Tensor", dst)
    tensors = _checks.as_tensors(leaves, "pack: leaves")
    _checks.check_type("pack: plan", SlabPlan, "a SlabPlan", plan)
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


@without_autograd
def views(slab: Tensor, plan: SlabPlan) -> list[Tensor]:
    """See ``_C.pyi``."""
    _checks.check_type("views: slab", Tensor, "a torch.Tensor", slab)
    _checks.check_type("views: plan", SlabPlan, "a SlabPlan", plan)
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
        else:  # torch.frombuffer rejects empty buffers
            view = torch.empty(shape, dtype=dtype, device="cpu")
        made.append(view)
    return made


def forbid_use(tensors: Sequence[Tensor], message: str) -> None:
    """See ``_C.pyi``."""
    for tensor in _checks.as_tensors(tensors, "forbid_use: tensors"):
        tensor.__class__ = _forbidden(message)


@cache
def _forbidden(message: str) -> type[Tensor]:
    """Return a class of tensors that raise in every function of torch."""

    def refuse(*args: Any) -> Any:
        raise RuntimeError(message)

    return type(
        "ForbiddenTensor", (Tensor,), {"__torch_function__": staticmethod(refuse)}
    )


def _is_pinned_by_torch(slab: Tensor) -> bool:
    """Return True for a block of torch's pinned memory allocator.

    That allocator finds the block of a copy by the block's own storage, so its views
    must share that storage.
    """
    return slab.untyped_storage().resizable() and slab.is_pinned()


@without_autograd
def memory_of(tensor: Tensor) -> Tensor:
    """See ``_C.pyi``."""
    _checks.check_type("memory_of: tensor", Tensor, "a torch.Tensor", tensor)
    _checks.check_plain(tensor, "memory_of: tensor")
    storage = tensor.untyped_storage()
    if tensor.is_cpu and tensor.numel():
        for reference in _owners.valuerefs():  # atomic, unlike `values`
            owner = reference()
            if owner is None:
                continue
            if 0 <= tensor.data_ptr() - owner.slab.data_ptr() < owner.slab.nbytes:
                storage = owner.slab.untyped_storage()
    memory = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return memory.set_(storage, 0, (storage.nbytes(),), (1,))


def send(*args: Any, **kwargs: Any) -> None:
    """See ``_C.pyi``; native only."""
    raise NotImplementedError(
        "send must be native, but pure Python runs. Copy by torch's operators."
    )


def plan_copy(*args: Any, **kwargs: Any) -> None:
    """See ``_C.pyi``; native only."""
    raise NotImplementedError(
        "plan_copy must be native, but pure Python runs. Use `DeviceCopy`."
    )


def prepare_return(*args: Any, **kwargs: Any) -> None:
    """See ``_C.pyi``; always None, so `PackedHostCopy` packs the leaves."""


class RecordedEvent:
    """See ``_C.pyi``; native only."""


class BatchCopy:
    """See ``_C.pyi``; native only."""


class ReturnJob:
    """See ``_C.pyi``; native only."""


class Runtime:
    """See ``_C.pyi``; native only."""

    def __init__(self, device_type: str) -> None:
        raise NotImplementedError(
            "Runtime must be native, but pure Python runs. Use torch's events."
        )


def pinned_info() -> tuple[int, int, int, int]:
    """See ``_C.pyi``."""
    return (0, 0, _pinned_limit[0], 0)


def bound_pinned(limit: int) -> None:
    """See ``_C.pyi``."""
    _pinned_limit[0] = limit


def empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """See ``_C.pyi``."""
    _checks.check_type("empty: dtype", torch.dtype, "a torch.dtype", dtype)
    return torch.empty(
        _checks.as_ints(shape, "empty: shape"), dtype=dtype, device="cpu"
    )


def cache_info() -> tuple[int, int, int, int, int]:
    """See ``_C.pyi``."""
    return (0, 0, 0, 0, 0)


def bound_cache(limit: int, idle_seconds: float) -> None:
    """See ``_C.pyi``."""


def clear_cache() -> int:
    """See ``_C.pyi``."""
    return 0


def columns(dicts: list[Any], stack: bool) -> None:
    """See ``_C.pyi``; always None, so `collate` gathers the columns."""


def flatten(tree: Any, leaf_types: AbstractSet[type], roots: int = 0) -> None:
    """See ``_C.pyi``; always None, so the caller flattens with optree."""


def copy_compact(
    tree: Any, leaf_types: AbstractSet[type], roots: int, on_cpu: bool
) -> None:
    """See ``_C.pyi``; always None, so the caller flattens and unflattens."""


def select_tensors(leaves: Sequence[Any]) -> list[Tensor]:
    """See ``_C.pyi``."""
    return [leaf for leaf in leaves if type(leaf) in PLAIN]


def replace_tensors(leaves: Sequence[Any], tensors: Sequence[Any]) -> list[Any]:
    """See ``_C.pyi``."""
    indices = [i for i, leaf in enumerate(leaves) if type(leaf) in PLAIN]
    if len(indices) != len(tensors):
        rule = f"have {len(indices)} entries, as leaves has tensors"
        raise _checks.error("replace_tensors: tensors", rule, f"has {len(tensors)}")
    replaced = list(leaves)
    for i, tensor in zip(indices, tensors, strict=True):
        replaced[i] = tensor
    return replaced


def find_unpackable(tensors: Sequence[Tensor]) -> list[int]:
    """See ``_C.pyi``."""
    found = _checks.as_tensors(tensors, "find_unpackable: tensors")
    with without_torch_function():
        return [i for i, tensor in enumerate(found) if not can_pack(tensor)]


def are_on_one_device(tensors: Sequence[Tensor]) -> bool:
    """See ``_C.pyi``."""
    found = _checks.as_tensors(tensors, "are_on_one_device: tensors")
    with without_torch_function():
        return any(not each.is_meta for each in found[:1]) and all(
            is_plain(each) and not is_wrapped(each) and each.device == found[0].device
            for each in found
        )


def are_compact(leaves: Sequence[Any], on_cpu: bool) -> bool:
    """See ``_C.pyi``."""
    tensors = select_tensors(leaves)
    with without_torch_function():
        try:
            if not all(map(_is_contiguous, tensors)):
                return False
        except RuntimeError:  # sparse tensors do not support it
            return False
        return not on_cpu or all(map(_is_compact_on_cpu, tensors))


def _is_compact_on_cpu(tensor: Tensor) -> bool:
    is_on_cpu = is_plain(tensor) and tensor.is_cpu and not is_wrapped(tensor)
    return is_on_cpu and not missing_bytes(tensor)
