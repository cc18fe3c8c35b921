"""Expected results of collate and padding, in simple code without pyparallel."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F


def elements(tensor: torch.Tensor) -> dict[tuple[int, ...], bytes]:
    """Return the bytes of every element by its index."""
    dense = tensor.detach().resolve_conj().resolve_neg().contiguous()
    line = torch.empty(tensor.numel(), dtype=tensor.dtype).copy_(dense.reshape(-1))
    flat = bytes(line.view(torch.uint8).tolist())
    size = tensor.element_size()
    indices = itertools.product(*map(range, tensor.shape))
    return {index: flat[i * size :][:size] for i, index in enumerate(indices)}


#: The dtypes of integers, and those of numpy.
INTEGERS = {
    getattr(torch, name): np.dtype(name)
    for name in "uint8 int8 int16 int32 int64 uint16 uint32 uint64".split()
}


def padding(dtype: torch.dtype, value: Any) -> bytes:
    """Return the bytes of a padding value; RuntimeError if the dtype cannot hold it."""
    if dtype in INTEGERS and isinstance(value, int):
        try:
            return np.array(int(value), INTEGERS[dtype]).tobytes()
        except OverflowError as error:
            raise RuntimeError from error
    # F.pad rounds an integer to a double. Two cells, because the range of a half is
    # checked by other rules if there is only one.
    cells = F.pad(torch.empty(0, dtype=dtype), (0, 2), value=value)
    return elements(cells)[(0,)]


def target_shape(
    shapes: Sequence[tuple[int, ...]], pad_dims: int | None
) -> tuple[int, ...]:
    target = list(shapes[0])
    for dim in range(len(target) - (pad_dims or 0), len(target)):
        target[dim] = max(shape[dim] for shape in shapes)
    return tuple(target)


def target_sizes(
    sizes: Sequence[tuple[int, ...]], options: Mapping[str, Any]
) -> tuple[int, ...]:
    """Return the sizes of the padded dimensions after padding with these options."""
    largest = [max(column) for column in zip(*sizes, strict=True)]
    if options.get("shape"):
        return tuple(options["shape"])
    best = None
    for bucket in options.get("buckets", ()):
        holds = all(room >= size for room, size in zip(bucket, largest, strict=True))
        if holds and (best is None or math.prod(bucket) < math.prod(best)):
            best = tuple(bucket)
    if best is not None:
        return best
    divisor = options.get("size_divisor", 1)
    for dim in range(len(largest)):
        while largest[dim] % (divisor if isinstance(divisor, int) else divisor[dim]):
            largest[dim] += 1
    return tuple(largest)


def first_index(size: int, target: int, side: str) -> int:
    """Return the start of the data: padding is added alternately, first at the end."""
    before = after = 0
    while before + size + after < target:
        if side == "right" or (side == "center" and after <= before):
            after += 1
        else:
            before += 1
    return before


def by_torch(
    samples: Sequence[torch.Tensor], pad_dims: int | None, values: Sequence[Any]
) -> torch.Tensor:
    """Return one chunk as mmcv 1.x makes it: each sample padded, then torch.stack."""
    if pad_dims is None:
        return torch.stack(list(samples))
    target = target_shape([tuple(s.shape) for s in samples], pad_dims)
    padded = []
    for sample, value in zip(samples, values, strict=True):
        kept = sample.dim() - pad_dims
        shape = (*sample.shape[:kept], *target[kept:])
        if 0 in shape:  # F.pad of torch 2.8 refuses some of these
            padded.append(sample.reshape(shape))
            continue
        if sample.shape == shape:
            padded.append(sample)
            continue
        cell = torch.tensor(list(padding(sample.dtype, value)), dtype=torch.uint8)
        row = cell.view(sample.dtype).expand(shape).clone()
        row[tuple(map(slice, sample.shape))] = sample
        padded.append(row)
    return torch.stack(padded)


def assert_same_tensor(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Assert equal dtype, shape and bits; NaN payloads and -0.0 count."""
    assert type(actual) is torch.Tensor
    assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape)
    assert elements(actual) == elements(expected)
