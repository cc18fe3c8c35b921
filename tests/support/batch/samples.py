"""Difficult inputs: tensors, columns and batches that break careless code."""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections import namedtuple
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

_NAMES = (
    "bool uint8 int8 int16 int32 int64 uint16 uint32 uint64 float16 bfloat16 float32 "
    "float64 complex32 complex64 complex128 float8_e4m3fn float8_e5m2 "
    "float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu"
)
#: All dtypes of dense tensors in this version of torch.
DTYPES = [getattr(torch, name) for name in _NAMES.split() if hasattr(torch, name)]

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    torch.zeros(1, dtype=torch.complex32)  # torch warns about it once in a process

#: Dtypes that torch.stack can promote among each other.
PROMOTED = [
    torch.bool,
    torch.uint8,
    torch.int16,
    torch.int64,
    torch.float16,
    torch.float32,
    torch.float64,
    torch.complex64,
]

LAYOUTS = ("dense", "transposed", "strided", "expanded", "flipped", "offset", "last")

#: Values that not every dtype, and some that no double can hold.
PADDING = [0, 1, -1, 7, 255, 256, 0.5, -0.0, 1e30, 2**31, -(2**63), True]
PADDING += [math.nan, math.inf, -math.inf, 2**53 + 1, -(2**63) + 1, 2**63 - 1]
PADDING += [2**63 + 1, 2**64 - 1]

Pair = namedtuple("Pair", "left right")


@dataclasses.dataclass(frozen=True)
class Frozen:
    left: Any
    right: Any


@dataclasses.dataclass
class Slotted:
    __slots__ = ("left", "right")
    left: Any
    right: Any

    def __post_init__(self) -> None:
        assert not isinstance(self.left, list), "not to be run on a batch"


def rebuild(nest: Any, function: Any) -> Any:
    """Return the container with all items replaced, not by a walk of the library."""
    if isinstance(nest, Frozen):
        return Frozen(function(nest.left), function(nest.right))
    if isinstance(nest, Pair):
        return Pair(*map(function, nest))
    if isinstance(nest, dict):
        return type(nest)((key, function(each)) for key, each in nest.items())
    return type(nest)(map(function, nest))


def same(one: Any, other: Any) -> bool:
    """Compare values and types, all the way down."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, Frozen):
        return same(one.left, other.left) and same(one.right, other.right)
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[k], other[k]) for k in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return same(one.data, other.data) if hasattr(one, "data") else bool(one == other)


def random_tensor(
    shape: tuple[int, ...],
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    tame: bool = False,
) -> torch.Tensor:
    """Return random bits (NaNs among them), or small numbers if ``tame``."""
    generator = torch.Generator().manual_seed(seed)
    if tame or dtype is torch.bool:
        return torch.randint(0, 2, shape, generator=generator).to(dtype)
    nbytes = math.prod(shape) * dtype.itemsize
    bits = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator)
    return bits.view(dtype).view(shape) if nbytes else torch.empty(shape, dtype=dtype)


def lay_out(tensor: torch.Tensor, layout: str) -> torch.Tensor:
    """Return a tensor of the same shape and dtype with another memory layout."""
    dims = tensor.dim()
    if layout == "transposed":
        order = list(range(dims))[::-1]
        return tensor.permute(order).contiguous().permute(order)
    if layout == "strided":
        double = torch.empty((*tensor.shape, 2), dtype=tensor.dtype)
        return double.select(-1, 1).copy_(tensor)
    if layout == "expanded" and dims:
        return tensor[:1].expand(tensor.shape) if tensor.shape[0] else tensor
    if layout == "flipped" and dims:
        return as_bits(tensor).flip(0).view(tensor.dtype)
    if layout == "offset":
        longer = torch.empty(tensor.numel() + 3, dtype=tensor.dtype)
        return longer[3:].view(tensor.shape).copy_(tensor)
    if layout == "last" and dims == 4:
        return tensor.contiguous(memory_format=torch.channels_last)
    return tensor


def as_it_lies(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a copy on a device with the same storage offset and strides.

    ``tensor.to(device)`` may change the layout, and its address is always aligned.
    """
    whole = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())
    there = whole.to(device, copy=True)
    return there.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def as_bits(tensor: torch.Tensor) -> torch.Tensor:
    """View a tensor as integers of its item size; complex128 stays as it is."""
    plain = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.view(plain.get(tensor.element_size(), tensor.dtype))


@st.composite
def tensors(
    draw: Any, shape: tuple[int, ...], dtype: torch.dtype, tame: bool = False
) -> torch.Tensor:
    made = random_tensor(shape, dtype, draw(st.integers(0, 999)), tame)
    return lay_out(made, draw(st.sampled_from(LAYOUTS)))


@dataclasses.dataclass
class Column:
    """One field of a batch: its tensors and the options for stacking them."""

    samples: list[torch.Tensor]
    pad_dims: int | None
    values: list[Any]


@st.composite
def columns(draw: Any, mixed: bool = False, count: int | None = None) -> Column:
    """Draw tensors that can be stacked, of one dtype or of several."""
    pad_dims = draw(st.sampled_from([None, 1, 2, 3]))
    num_dims = draw(st.integers(0 if pad_dims is None else pad_dims + 1, 5))
    sizes = st.integers(0, 4 if num_dims < 4 else 3)
    fixed = [draw(sizes) for _ in range(num_dims - (pad_dims or 0))]
    count = count or draw(st.integers(1, 5))
    dtype = draw(st.sampled_from(PROMOTED if mixed else DTYPES))
    value = draw(st.sampled_from(PADDING))
    own = draw(st.booleans())
    samples, values = [], []
    for _ in range(count):
        shape = (*fixed, *(draw(sizes) for _ in range(pad_dims or 0)))
        dtype = draw(st.sampled_from(PROMOTED)) if mixed else dtype
        samples.append(draw(tensors(shape, dtype, tame=mixed)))
        values.append(draw(st.sampled_from(PADDING)) if own else value)
    return Column(samples, pad_dims, values)


@st.composite
def batches(draw: Any, container: Any) -> list[Any]:
    """Draw samples of one structure that mmcv 1.x batches without loss.

    Args:
        draw: the function of hypothesis.
        container: the class of the DataContainers.
    """
    return draw(_nodes(container, draw(st.integers(1, 5)), 3))


@st.composite
def _nodes(draw: Any, container: Any, count: int, depth: int) -> Any:
    kinds = ["int", "float", "bool", "tensor", "array", "stack", "list", "meta"]
    kind = draw(st.sampled_from([*kinds, "dict", list, tuple] if depth else kinds))
    child = _nodes(container, count, depth - 1)
    if kind in (list, tuple):
        inside = [draw(child) for _ in range(draw(st.integers(0, 3)))]
        return [kind(column[i] for column in inside) for i in range(count)]
    if kind == "dict":
        keys = draw(st.lists(st.sampled_from(["b", "a", 1, None]), unique=True))
        made = {key: draw(child) for key in keys}
        return [{key: made[key][i] for key in keys} for i in range(count)]
    return draw(_leaves(container, kind, count))


@st.composite
def _leaves(draw: Any, container: Any, kind: str, count: int) -> Any:
    numbers = {"int": st.integers(-(2**63), 2**63 - 1), "bool": st.booleans()}
    numbers |= {"float": st.floats()}
    if kind in numbers:
        return [draw(numbers[kind]) for _ in range(count)]
    if kind == "array":
        shape = tuple(draw(st.lists(st.integers(0, 3), max_size=3)))
        dtype = draw(st.sampled_from(["u1", "i4", "f4", "f8", "?"]))
        return [np.full((*shape, 2), i, dtype) for i in range(count)]
    column = draw(columns(count=count))
    if kind == "tensor":
        return [column.samples[0].clone() for _ in range(count)]
    if kind == "stack":
        # Values that every dtype can hold; this dtype has no zero.
        values = [1] if "e8m0" in str(column.samples[0].dtype) else [0, 1, 7]
        value, dims = st.sampled_from(values), column.pad_dims
        return [container(t, True, draw(value), False, dims) for t in column.samples]
    return [container(sample, cpu_only=kind == "meta") for sample in column.samples]
