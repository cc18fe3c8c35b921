"""The contract of ``_C.pyi`` in torch operators: the backend where none is compiled."""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from math import prod
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

_P = ParamSpec("_P")
_R = TypeVar("_R")

_LIMIT = 2**63
_ITEM_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# Dtypes that torch copies bit by bit whatever the strides; others go as integers.
_COPIED = frozenset(
    (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
    + (torch.float16, torch.bfloat16, torch.float32, torch.float64)
    + (torch.complex64, torch.complex128)
)
_QUANTIZED = frozenset(
    (torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4)
)
_EXACT = frozenset((Tensor, torch.nn.Parameter))
# Below this many bytes per row, filling all of it costs less than finding the margins.
_WHOLE_FILL_NBYTES = 16 * 1024
_SHARED = "must not share memory with dst, but overlaps it. Clone it first."

_is_functorch: Callable[[Tensor], bool] = torch._C._functorch.is_functorch_wrapped_tensor


def _plainly(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Run without autograd, and on tensor subclasses as on tensors."""

    @wraps(function)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            return function(*args, **kwargs)

    return run


@_plainly
def pad_copy(dst: Tensor, samples: Sequence[Tensor], fills: bytes) -> None:
    """See ``_C.pyi``."""
    _tensor(dst, "pad_copy: dst")
    tensors = _tensors(samples, "pad_copy: samples")
    if not isinstance(fills, bytes):
        raise _wrong_type("pad_copy: fills", "bytes", fills)
    target = _check_dst(dst, len(tensors), len(fills))
    for index, sample in enumerate(tensors):
        _check_sample(dst, target, sample, index)
    if dst.numel() == 0:
        return
    source = dst
    if dst.dtype not in _COPIED:
        bits = _ITEM_BITS[dst.itemsize]
        source, tensors = dst.view(bits), [each.view(bits) for each in tensors]
    if all(each.shape == target for each in tensors):
        torch.stack(tensors, out=source)
    else:
        _copy_and_fill(source, tensors, target, fills)


@_plainly
def pack(dst: Tensor, leaves: Sequence[Tensor], offsets: Sequence[int]) -> None:
    """See ``_C.pyi``."""
    _tensor(dst, "pack: dst")
    tensors = _tensors(leaves, "pack: leaves")
    starts = _ints(offsets, "pack: offsets")
    _check_slab(dst, "pack: dst", " on the CPU")
    if len(starts) != len(tensors):
        raise ValueError(
            f"pack: offsets must have {len(tensors)} entries, one for each leaf, but "
            f"has {len(starts)}."
        )
    zeros = dst.new_zeros(())
    pieces = []
    end = 0
    for index, (leaf, start) in enumerate(zip(tensors, starts)):
        _check_leaf(dst, leaf, index)
        nbytes = leaf.numel() * leaf.itemsize
        _check_slot(index, start, nbytes, end, dst.numel())
        pieces += [zeros.expand(start - end), _bytes_of(leaf)]
        end = start + nbytes
    if dst.numel() > 0:
        torch.cat([*pieces, zeros.expand(dst.numel() - end)], out=dst)


@_plainly
def views(
    slab: Tensor,
    offsets: Sequence[int],
    dtypes: Sequence[torch.dtype],
    shapes: Sequence[Sequence[int]],
) -> list[Tensor]:
    """See ``_C.pyi``."""
    _tensor(slab, "views: slab")
    starts = _ints(offsets, "views: offsets")
    types = _items(dtypes, "views: dtypes", "a sequence of dtypes")
    sizes = _items(shapes, "views: shapes", "a sequence of shapes")
    if not len(starts) == len(types) == len(sizes):
        raise ValueError(
            "views: offsets, dtypes and shapes must have the same length, but have "
            f"{len(starts)}, {len(types)} and {len(sizes)}."
        )
    for index, dtype in enumerate(types):
        if not isinstance(dtype, torch.dtype):
            raise _wrong_type(f"views: dtypes[{index}]", "a torch.dtype", dtype)
        sizes[index] = _ints(sizes[index], f"views: shapes[{index}]")
    _check_slab(slab, "views: slab", "")
    storage, first = slab.untyped_storage(), slab.storage_offset()
    made = []
    for index, (start, dtype, shape) in enumerate(zip(starts, types, sizes)):
        _check_view(index, start, dtype, tuple(shape), first, slab.numel())
        view = torch.empty(0, dtype=dtype, device=slab.device)
        made.append(view.set_(storage, (first + start) // dtype.itemsize, shape))
    return made


def _copy_and_fill(
    dst: Tensor, samples: list[Tensor], target: torch.Size, fills: bytes
) -> None:
    itemsize = dst.itemsize
    strides, first = dst.stride()[1:], dst.storage_offset()
    row_numel = prod(target)
    one_fill = len(fills) == itemsize
    whole = row_numel * itemsize <= _WHOLE_FILL_NBYTES
    bits = _item_bits(dst)
    if whole and one_fill:
        _fill(bits, fills)
    for index, sample in enumerate(samples):
        fill = fills if one_fill else fills[index * itemsize : (index + 1) * itemsize]
        if whole and not one_fill:
            _fill(bits[index], fill)
        if not whole:
            _fill_margins(bits[index], sample.shape, target, fill)
        corner = dst.as_strided(sample.shape, strides, first + index * row_numel)
        corner.copy_(sample)


def _fill_margins(
    row: Tensor, shape: torch.Size, target: torch.Size, fill: bytes
) -> None:
    for dim, (size, limit) in enumerate(zip(shape, target)):
        if size < limit:
            _fill(row.narrow(dim, size, limit - size), fill)
            row = row.narrow(dim, 0, size)


def _item_bits(dst: Tensor) -> Tensor:
    """Return ``dst`` as integers; items of 16 bytes have a last dimension of 2."""
    if dst.itemsize == 16:
        return torch.view_as_real(dst).view(torch.int64)
    return dst.view(_ITEM_BITS[dst.itemsize])


def _fill(bits: Tensor, fill: bytes) -> None:
    words = [
        int.from_bytes(fill[at : at + 8], sys.byteorder, signed=True)
        for at in range(0, len(fill), 8)
    ]
    if len(words) == 1 or words[0] == words[1]:
        bits.fill_(words[0])
    else:
        bits.copy_(torch.tensor(words, device=bits.device))


def _bytes_of(leaf: Tensor) -> Tensor:
    if leaf.dtype not in _COPIED:
        leaf = leaf.view(_ITEM_BITS[leaf.itemsize])
    return leaf.reshape(-1).view(torch.uint8)


def _wrong_type(where: str, rule: str, found: object) -> TypeError:
    return TypeError(f"{where} must be {rule}, but is of type {type(found).__name__}.")


def _items(values: Iterable[Any], where: str, rule: str) -> list[Any]:
    try:
        iterator = iter(values)
    except TypeError:
        raise _wrong_type(where, rule, values) from None
    return list(iterator)


def _ints(values: Iterable[Any], where: str) -> list[int]:
    ints = _items(values, where, "a sequence of ints")
    for at, value in enumerate(ints):
        try:
            ints[at] = number = operator.index(value)
        except TypeError:
            raise _wrong_type(f"{where}[{at}]", "an int", value) from None
        if not -_LIMIT <= number < _LIMIT:
            raise ValueError(f"{where}[{at}] must fit in 64 bits, but is {number}.")
    return ints


def _tensor(value: object, where: str) -> None:
    if not isinstance(value, Tensor):
        raise _wrong_type(where, "a torch.Tensor", value)


def _tensors(values: Iterable[Tensor], where: str) -> list[Tensor]:
    tensors = _items(values, where, "a sequence of tensors")
    for index, each in enumerate(tensors):
        if not isinstance(each, Tensor):
            raise _wrong_type(f"{where}[{index}]", "a torch.Tensor", each)
    return tensors


def _defect(tensor: Tensor) -> str:
    """Say why the bytes of a tensor are not simply its elements; empty if they are."""
    if tensor.is_nested:
        return "nested. Call unbind() on it first."
    if tensor.layout is not torch.strided and tensor.layout is not torch._mkldnn:
        return "sparse. Call to_dense() on it first."
    if tensor.is_quantized:
        return "quantized. Call dequantize() on it first."
    if _is_functorch(tensor) or (type(tensor) not in _EXACT and _is_python(tensor)):
        return "a wrapper. Unwrap it first."
    if tensor.is_meta:
        return "on the meta device. Give it data first."
    if tensor.is_conj():
        return "conjugated. Call resolve_conj() on it first."
    if tensor.is_neg():
        return "negated. Call resolve_neg() on it first."
    if tensor._is_zerotensor():
        return "a zero tensor. Call clone() on it first."
    if tensor.layout is not torch.strided:
        return "without storage. Call to_dense() on it first."
    return ""


def _check_plain(tensor: Tensor, where: str) -> None:
    if defect := _defect(tensor):
        raise TypeError(f"{where} must be a plain strided tensor, but is {defect}")


def _check_storage(tensor: Tensor, where: str) -> None:
    if tensor.numel() == 0:
        return
    reach = zip(tensor.shape, tensor.stride())
    last = tensor.storage_offset() + sum((size - 1) * step for size, step in reach)
    needed, held = (last + 1) * tensor.itemsize, tensor.untyped_storage().nbytes()
    if needed > held:
        raise ValueError(
            f"{where} must lie within its storage, but needs {needed} bytes where "
            f"{held} are left. Copy it before its storage is released."
        )


def _overlaps(source: Tensor, dst: Tensor) -> bool:
    if source.numel() == 0 or dst.numel() == 0 or not source.is_contiguous():
        return False
    distance = source.data_ptr() - dst.data_ptr()
    return -source.numel() * source.itemsize < distance < dst.numel() * dst.itemsize


def _check_dst(dst: Tensor, num_samples: int, num_fill: int) -> torch.Size:
    _check_plain(dst, "pad_copy: dst")
    shape, size = tuple(dst.shape), dst.itemsize
    if not shape:
        raise ValueError("pad_copy: dst must have at least 1 dimension, but has 0.")
    if not dst.is_contiguous():
        raise ValueError(
            f"pad_copy: dst must be contiguous, but has strides {dst.stride()} for "
            f"shape {shape}."
        )
    if num_samples != shape[0]:
        raise ValueError(
            f"pad_copy: samples must have {shape[0]} entries, one for each row of dst, "
            f"but has {num_samples}."
        )
    if num_fill not in (size, size * shape[0]):
        raise ValueError(
            f"pad_copy: fills must have {size} bytes, or {size * shape[0]} for one fill "
            f"per sample, but has {num_fill}."
        )
    _check_storage(dst, "pad_copy: dst")
    return dst.shape[1:]


def _check_sample(dst: Tensor, target: torch.Size, sample: Tensor, index: int) -> None:
    where = f"pad_copy: samples[{index}]"
    _check_plain(sample, where)
    if sample.dtype != dst.dtype:
        raise TypeError(
            f"{where} must have the dtype of dst, {dst.dtype}, but has {sample.dtype}. "
            "Convert it first."
        )
    if sample.device != dst.device:
        raise ValueError(
            f"{where} must be on the device of dst, {dst.device}, but is on "
            f"{sample.device}. Move it first."
        )
    shape = sample.shape
    if len(shape) != len(target):
        raise ValueError(
            f"{where} must have {len(target)} dimensions, as the rows of dst, but has "
            f"shape {tuple(shape)}."
        )
    if shape != target and any(map(operator.gt, shape, target)):
        raise ValueError(
            f"{where} must have at most shape {tuple(target)}, but has shape "
            f"{tuple(shape)}."
        )
    _check_storage(sample, where)
    if _overlaps(sample, dst):
        raise ValueError(f"{where} {_SHARED}")


def _check_slab(slab: Tensor, where: str, on_cpu: str) -> None:
    _check_plain(slab, where)
    good = slab.dtype == torch.uint8 and slab.dim() == 1 and slab.is_contiguous()
    if not good or (on_cpu and slab.device.type != "cpu"):
        raise ValueError(
            f"{where} must be a contiguous torch.uint8 tensor of one dimension{on_cpu}, "
            f"but has dtype {slab.dtype}, shape {tuple(slab.shape)}, strides "
            f"{slab.stride()} and device {slab.device}."
        )
    _check_storage(slab, where)


def _check_leaf(dst: Tensor, leaf: Tensor, index: int) -> None:
    where = f"pack: leaves[{index}]"
    _check_plain(leaf, where)
    if leaf.device.type != "cpu":
        raise ValueError(
            f"{where} must be on the CPU, but is on {leaf.device}. Move it first."
        )
    _check_storage(leaf, where)
    if _overlaps(leaf, dst):
        raise ValueError(f"{where} {_SHARED}")


def _check_slot(index: int, start: int, nbytes: int, end: int, room: int) -> None:
    where = f"pack: offsets[{index}]"
    if start < end:
        limit = "start of dst" if index == 0 else f"end of leaves[{index - 1}]"
        raise ValueError(
            f"{where} must be at least {end}, the {limit}, but is {start}."
        )
    if start + nbytes > room:
        raise ValueError(
            f"{where} must leave room for {nbytes} bytes in dst, which has {room}, but "
            f"is {start}."
        )


def _check_view(
    index: int,
    start: int,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    first: int,
    room: int,
) -> None:
    where, size = f"views: offsets[{index}]", dtype.itemsize
    if dtype in _QUANTIZED:
        raise TypeError(
            f"views: dtypes[{index}] must be a dtype of plain tensors, but is {dtype}."
        )
    if any(length < 0 for length in shape):
        raise ValueError(
            f"views: shapes[{index}] must have no negative size, but is {shape}."
        )
    nbytes = prod(shape) * size
    if nbytes >= _LIMIT:
        raise ValueError(
            f"views: shapes[{index}] must have fewer than 2**63 bytes, but is {shape}."
        )
    if start < 0:
        raise ValueError(f"{where} must be at least 0, but is {start}.")
    if start % size:
        raise ValueError(
            f"{where} must be a multiple of {size}, the item size of {dtype}, but is "
            f"{start}."
        )
    if first % size:
        raise ValueError(
            f"views: slab must start at a multiple of {size} bytes, the item size of "
            f"{dtype}, but starts at byte {first} of its storage."
        )
    if start + nbytes > room:
        raise ValueError(
            f"{where} must leave room for {nbytes} bytes in slab, which has {room}, but "
            f"is {start}."
        )


def _is_python(tensor: Tensor) -> bool:
    keys: Any = torch._C._dispatch_keys(tensor)
    return bool(keys.has(torch._C.DispatchKey.Python))
