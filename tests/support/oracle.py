"""The expected results of collate, in simple and slow code without pyparallel.

A tensor is split into the bytes of its elements, and a batch is built from these bytes.
So the results do not depend on strides, on dtypes, or on torch's padding and stacking.
Only the conversion of a padding value uses torch, because `F.pad` defines it.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections import OrderedDict, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F


@dataclasses.dataclass
class Box:
    """The expected content of a DataContainer; collated ones always have pad_dims 2."""

    data: Any
    stack: bool
    padding_value: Any
    cpu_only: bool


def is_box(value: Any) -> bool:
    return isinstance(value, Box) or hasattr(value, "_padding_value")


def elements(tensor: torch.Tensor) -> dict[tuple[int, ...], bytes]:
    """Return the bytes of every element by its index."""
    dense = tensor.detach().resolve_conj().resolve_neg().contiguous()
    line = torch.empty(tensor.numel(), dtype=tensor.dtype).copy_(dense.reshape(-1))
    flat = bytes(line.view(torch.uint8).tolist())
    size = tensor.element_size()
    indices = itertools.product(*map(range, tensor.shape))
    return {index: flat[i * size :][:size] for i, index in enumerate(indices)}


def assemble(
    shape: tuple[int, ...], dtype: torch.dtype, parts: list[bytes]
) -> torch.Tensor:
    if not parts:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(b"".join(parts)), dtype=dtype).view(shape)


def padding(dtype: torch.dtype, value: Any) -> bytes:
    """Return the bytes of a padding value; RuntimeError if the dtype cannot hold it."""
    # Two cells: the range of a half is checked by other rules if there is only one.
    cells = F.pad(torch.empty(0, dtype=dtype), (0, 2), value=value)
    return elements(cells)[(0,)]


def target_shape(
    shapes: Sequence[tuple[int, ...]], pad_dims: int | None
) -> tuple[int, ...]:
    target = list(shapes[0])
    for dim in range(len(target) - (pad_dims or 0), len(target)):
        target[dim] = max(shape[dim] for shape in shapes)
    return tuple(target)


def stacked(
    samples: Sequence[torch.Tensor], pad_dims: int | None, values: Sequence[Any]
) -> torch.Tensor:
    """Return one chunk. Padding is converted to each sample's dtype, then promoted."""
    dtype = functools.reduce(torch.promote_types, [s.dtype for s in samples])
    target = target_shape([tuple(s.shape) for s in samples], pad_dims)
    parts = []
    for sample, value in zip(samples, values, strict=True):
        have, fill = elements(sample), b""
        if sample.shape != target:
            fill = padding(sample.dtype, value)
        indices = itertools.product(*map(range, target))
        cells = [have.get(index, fill) for index in indices]
        # torch converts a NaN to other bits in tensors of one element.
        parts += elements(assemble(target, sample.dtype, cells).to(dtype)).values()
    return assemble((len(samples), *target), dtype, parts)


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


def placed(
    samples: Sequence[torch.Tensor],
    pad_dims: int,
    values: Sequence[Any],
    options: Mapping[str, Any],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return one chunk with its sizes and its mask."""
    dtype = functools.reduce(torch.promote_types, [s.dtype for s in samples])
    fixed = samples[0].dim() - pad_dims
    sizes = [tuple(sample.shape[fixed:]) for sample in samples]
    end = target_sizes(sizes, options)
    target = (*samples[0].shape[:fixed], *end)
    side = options.get("side", "right")
    sides = (side,) * pad_dims if isinstance(side, str) else side
    parts, bits = [], []
    for sample, size, value in zip(samples, sizes, values, strict=True):
        starts = (0,) * fixed + tuple(map(first_index, size, end, sides))
        have = {
            tuple(i + start for i, start in zip(index, starts, strict=True)): item
            for index, item in elements(sample.to(dtype)).items()
        }
        fill = b""
        if tuple(sample.shape) != target:
            raw = assemble((1,), sample.dtype, [padding(sample.dtype, value)])
            fill = elements(raw.to(dtype))[(0,)]
        indices = itertools.product(*map(range, target))
        parts += [have.get(index, fill) for index in indices]
        for index in itertools.product(*map(range, end)):
            steps = zip(index, starts[fixed:], size, strict=True)
            bits.append(all(at <= i < at + length for i, at, length in steps))
    return (
        assemble((len(samples), *target), dtype, parts),
        torch.tensor(sizes, dtype=torch.int64).view(len(samples), pad_dims),
        torch.tensor(bits, dtype=torch.bool).view(len(samples), *end),
    )


def by_torch(
    samples: Sequence[torch.Tensor], pad_dims: int | None, values: Sequence[Any]
) -> torch.Tensor:
    """Return one chunk as mmcv 1.x makes it: F.pad on each sample, torch.stack."""
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
        margins = []
        for dim in range(1, pad_dims + 1):
            margins += [0, target[-dim] - sample.shape[-dim]]
        padded.append(F.pad(sample, margins, value=value))
    return torch.stack(padded)


def collate(batch: Sequence[Any], samples_per_gpu: int) -> Any:
    first = batch[0]
    if is_box(first):
        return _boxes(batch, samples_per_gpu)
    if isinstance(first, torch.Tensor):
        return stacked(batch, None, [0] * len(batch))
    if isinstance(first, str | bytes):
        return list(batch)
    if isinstance(first, Mapping):
        items = {k: collate([s[k] for s in batch], samples_per_gpu) for k in first}
        if isinstance(first, defaultdict):
            return defaultdict(first.default_factory, items)
        return type(first)(items)
    if dataclasses.is_dataclass(first):
        return _dataclass(batch, samples_per_gpu)
    if isinstance(first, Sequence):
        columns = [
            collate([sample[i] for sample in batch], samples_per_gpu)
            for i in range(len(first))
        ]
        return type(first)(*columns) if hasattr(first, "_fields") else columns
    if type(first).__module__ == "numpy":
        native = [array.astype(array.dtype.newbyteorder("=")) for array in batch]
        return stacked([torch.from_numpy(array) for array in native], None, batch)
    kinds = {bool: torch.bool, int: torch.int64, float: torch.float64}
    return torch.tensor(batch, dtype=kinds[type(first)])


def _boxes(batch: Sequence[Any], samples_per_gpu: int) -> Box:
    first = batch[0]
    data: list[Any] = []
    for start in range(0, len(batch), samples_per_gpu):
        chunk = batch[start : start + samples_per_gpu]
        values = [sample.data for sample in chunk]
        if first.stack and not first.cpu_only:
            paddings = [sample.padding_value for sample in chunk]
            data.append(stacked(values, chunk[0].pad_dims, paddings))
        else:
            data.append(values)
    return Box(data, first.stack, first.padding_value, first.cpu_only)


def _dataclass(batch: Sequence[Any], samples_per_gpu: int) -> Any:
    return {
        field.name: collate([getattr(s, field.name) for s in batch], samples_per_gpu)
        for field in dataclasses.fields(batch[0])
    }


def assert_same_tensor(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Assert equal dtype, shape and bits; NaN payloads and -0.0 count."""
    assert type(actual) is torch.Tensor
    assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape)
    assert elements(actual) == elements(expected)


def assert_same_mapping(actual: Any, expected: Mapping[Any, Any]) -> None:
    """Assert equal classes, keys in their order, values and attributes."""
    assert type(actual) is type(expected)
    assert list(actual) == list(expected)
    for key in expected:
        assert_same(actual[key], expected[key])
    if isinstance(expected, OrderedDict):
        assert actual.__dict__ == expected.__dict__


def assert_same(actual: Any, expected: Any) -> None:
    """Assert equal structure, types and bits; lists of values keep the very objects."""
    if isinstance(expected, Box):
        flags = (actual.stack, actual.padding_value, actual.cpu_only, actual.pad_dims)
        assert flags[0::2] == (expected.stack, expected.cpu_only)
        assert repr(flags[1]) == repr(expected.padding_value)
        assert flags[3] == 2
        assert_same(actual.data, expected.data)
    elif isinstance(expected, torch.Tensor):
        if actual is not expected:
            assert_same_tensor(actual, expected)
    elif dataclasses.is_dataclass(actual):
        for name, value in expected.items():
            assert_same(getattr(actual, name), value)
    elif isinstance(expected, Mapping):
        assert_same_mapping(actual, expected)
    elif isinstance(expected, list | tuple):
        assert type(actual) is type(expected)
        assert len(actual) == len(expected)
        for one, other in zip(actual, expected, strict=True):
            assert_same(one, other)
    else:
        assert actual is expected or actual == expected
