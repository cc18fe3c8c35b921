"""Cases for collate, scatter, to_host and to_device: both backends against numpy.

Each case draws a batch together with the expected bytes of its fields.
"""

from __future__ import annotations

import functools
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

from pyparallel import (
    DataContainer,
    Padded,
    Padding,
    collate,
    pad_stack,
    scatter,
    to_host,
)
from pyparallel.transfer import to_device
from tests.support.batch import oracle, raw_bytes, samples
from tests.support.devices.host_device import HostDevice
from tests.support.fuzzing.fuzz_operators import (
    BACKENDS,
    generator,
    headers,
    outcome,
    pad_copies,
    plans,
    sizes,
    slabs,
    tensor,
)
from tests.support.fuzzing.fuzz_samples import nested_samples
from tests.support.fuzzing.fuzzed import Numbers
from tests.support.processes.backends import reference, using

Pair = namedtuple("Pair", "left right")
CPU = torch.device("cpu")


class Want(NamedTuple):
    """An expected tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    data: bytes


class Field(NamedTuple):
    """One field of a batch, and its expected results.

    Attributes:
        values: the values of all samples.
        collated: the expected result of `collate`: a `Want`, a list, or chunks.
        parts: the expected part of each target.
        fails: `collate` must reject the values.
    """

    values: list[Any]
    collated: Any
    parts: list[Any]
    fails: bool = False


class Chunks(NamedTuple):
    """A DataContainer with one item for each chunk."""

    data: list[Any]


@functools.lru_cache(maxsize=4096)
def fill_of(dtype: torch.dtype, at: int) -> bytes | None:
    """Return the bytes of a padding value; None if the dtype cannot hold it."""
    try:
        return oracle.padding(dtype, samples.PADDING[at])
    except RuntimeError:
        return None


def parts_of(values: list[Any], chunk: int) -> list[Any]:
    return [values[start : start + chunk] for start in range(0, len(values), chunk)]


def rows(want: Want, chunk: int) -> list[Want]:
    """Return the parts of a tensor that is split along its first dimension."""
    each = len(want.data) // want.shape[0]
    made = []
    for start in range(0, want.shape[0], chunk):
        num = min(chunk, want.shape[0] - start)
        data = want.data[start * each : (start + num) * each]
        made.append(Want(want.dtype, (num, *want.shape[1:]), data))
    return made


def draw_options(numbers: Numbers, pad_dims: int) -> dict[str, Any]:
    """Draw options of padding that fit every sample of up to 5 cells."""
    if not pad_dims or numbers.maybe():
        return {}
    kind = numbers.choose(["", "size_divisor", "shape", "buckets"])
    options: dict[str, Any] = {}
    if kind == "size_divisor":
        options[kind] = numbers.between(1, 4)
    elif kind == "shape":
        options[kind] = tuple(numbers.between(5, 7) for _ in range(pad_dims))
    elif kind == "buckets":
        small = tuple(numbers.between(1, 6) for _ in range(pad_dims))
        options[kind] = (small, tuple(numbers.between(5, 7) for _ in range(pad_dims)))
    sides = ("right", "left", "center")
    options["side"] = tuple(numbers.choose(sides) for _ in range(pad_dims))
    return options | {"sizes": numbers.maybe(), "mask": numbers.maybe()}


class Column(NamedTuple):
    """Tensors to stack, and the options."""

    tensors: list[torch.Tensor]
    items: list[np.ndarray]
    pad_dims: int
    fills: list[int]  # places in samples.PADDING
    options: dict[str, Any]


def draw_column(
    numbers: Numbers, rng: np.random.Generator, count: int, one_value: bool = False
) -> Column:
    dtype, pad_dims = numbers.choose(raw_bytes.DTYPES), numbers.between(0, 3)
    fixed = sizes(numbers, numbers.between(1 if pad_dims else 0, 5 - pad_dims), 3)
    value, own = numbers.between(0, len(samples.PADDING) - 1), numbers.maybe(3)
    tensors, items, fills = [], [], []
    for _ in range(count):
        made = tensor(numbers, rng, (*fixed, *sizes(numbers, pad_dims)), dtype)
        tensors.append(made[0])
        items.append(made[1])
        mine = numbers.between(0, len(samples.PADDING) - 1) if own else value
        fills.append(value if one_value else mine)
    return Column(tensors, items, pad_dims, fills, draw_options(numbers, pad_dims))


def stacked(column: Column, part: slice) -> Any:
    """Return the expected chunk; None if a value does not fit the dtype."""
    tensors, items = column.tensors[part], column.items[part]
    dtype, pad_dims, options = tensors[0].dtype, column.pad_dims, column.options
    fixed = tensors[0].dim() - pad_dims
    ends = [tuple(each.shape[fixed:]) for each in tensors]
    end = oracle.target_sizes(ends, options) if pad_dims else ()
    target = (*tensors[0].shape[:fixed], *end)
    sides = options.get("side", ("right",) * pad_dims)
    starts = [
        (0,) * fixed + tuple(map(oracle.first_index, size, end, sides)) for size in ends
    ]
    fills = b""
    for each, at in zip(tensors, column.fills[part], strict=True):
        fill = fill_of(dtype, at) if tuple(each.shape) != target else bytes(1)
        if fill is None:
            return None
        fills += fill.ljust(dtype.itemsize, b"\0")
    data = raw_bytes.padded(target, items, fills, dtype.itemsize, starts)
    whole = Want(dtype, (len(tensors), *target), data)
    if not (options.get("sizes") or options.get("mask")):
        return whole
    lengths = np.array(ends, dtype=np.int64).tobytes()
    mask = raw_bytes.marked((len(tensors), *end), items, starts)
    return Padded(
        whole,
        Want(torch.int64, (len(ends), pad_dims), lengths) if options["sizes"] else None,
        Want(torch.bool, (len(ends), *end), mask) if options["mask"] else None,
    )


def stacks(numbers: Numbers, rng: Any, count: int, chunk: int) -> Field:
    column = draw_column(numbers, rng, count)
    padding = Padding(**column.options) if column.options else None
    values = [
        DataContainer(
            each,
            stack=True,
            padding_value=samples.PADDING[at],
            pad_dims=column.pad_dims or None,
            **({"padding": padding} if padding else {}),
        )
        for each, at in zip(column.tensors, column.fills, strict=True)
    ]
    starts = range(0, count, chunk)
    data = [stacked(column, slice(start, start + chunk)) for start in starts]
    return Field(values, Chunks(data), data, any(each is None for each in data))


def plain_tensors(numbers: Numbers, rng: Any, count: int, chunk: int) -> Field:
    dtype = numbers.choose(raw_bytes.DTYPES)
    shape = sizes(numbers, numbers.between(0, 4))
    made = [tensor(numbers, rng, shape, dtype) for _ in range(count)]
    data = b"".join(items.tobytes() for _, items in made)
    want = Want(dtype, (count, *shape), data)
    return Field([each for each, _ in made], want, rows(want, chunk))


def arrays(numbers: Numbers, rng: Any, count: int, chunk: int) -> Field:
    kind = numbers.choose(["u1", "i4", "f4", "f8", ">i2"])
    shape, step = sizes(numbers, numbers.between(0, 2)), numbers.choose([1, -1, 2])
    made = [rng.integers(0, 100, (*shape, 4)).astype(kind) for _ in range(count)]
    values = [each[..., ::step] for each in made]
    native = np.stack(values).astype(np.dtype(kind).newbyteorder("="))
    dtype = torch.from_numpy(native).dtype
    want = Want(dtype, native.shape, native.tobytes())
    return Field(values, want, rows(want, chunk))


def scalars(numbers: Numbers, rng: Any, count: int, chunk: int) -> Field:
    kind = numbers.choose([int, float, bool])
    values = [kind(numbers.between(0, 1000) - 500) for _ in range(count)]
    made = np.array(values, dtype=np.int64 if kind is int else kind)
    want = Want(torch.from_numpy(made).dtype, (count,), made.tobytes())
    return Field(values, want, rows(want, chunk))


def texts(numbers: Numbers, rng: Any, count: int, chunk: int) -> Field:
    values = [str(numbers.between(0, 99)) for _ in range(count)]
    return Field(values, values, [values for _ in parts_of(values, chunk)])


def held(numbers: Numbers, rng: Any, count: int, chunk: int) -> Field:
    """DataContainers that do not stack: lists of their values."""
    cpu_only = numbers.maybe()
    inside: list[Any] = [{"id": i} for i in range(count)]
    if not cpu_only:
        inside = [torch.full((numbers.between(0, 3),), i) for i in range(count)]
    values = [DataContainer(each, cpu_only=cpu_only) for each in inside]
    if not cpu_only:
        inside = [Want(t.dtype, tuple(t.shape), raw_bytes.bytes_of(t)) for t in inside]
    data = parts_of(inside, chunk)
    return Field(values, Chunks(data), data)


LEAVES: list[Callable[..., Field]] = [stacks, stacks, plain_tensors, arrays, scalars]
LEAVES += [texts, held]


def draw_field(numbers: Numbers, rng: Any, count: int, chunk: int, depth: int) -> Field:
    kind = numbers.between(0, 10 if depth else 6)
    if kind < len(LEAVES):
        return LEAVES[kind](numbers, rng, count, chunk)
    num = 2 if kind == 10 else numbers.between(1, 3)
    inside = [draw_field(numbers, rng, count, chunk, depth - 1) for _ in range(num)]

    def build(children: list[Any], collated: bool) -> Any:
        if kind in (7, 8):
            keyed = zip("cab", children, strict=False)
            return dict(keyed) if kind == 7 else OrderedDict(keyed)
        if kind == 10:
            return Pair(*children)
        return children if collated else tuple(children)  # a column is a list

    values = [build([f.values[i] for f in inside], False) for i in range(count)]
    targets = len(inside[0].parts)
    parts = [build([f.parts[i] for f in inside], True) for i in range(targets)]
    collated = build([f.collated for f in inside], True)
    return Field(values, collated, parts, any(f.fails for f in inside))


def check(found: Any, right: Any) -> None:
    """Compare structure, types and bytes."""
    if isinstance(right, Want):
        assert type(found) is torch.Tensor
        assert (found.dtype, tuple(found.shape)) == (right.dtype, right.shape)
        assert raw_bytes.bytes_of(found) == right.data
        assert found.is_contiguous()
    elif isinstance(right, Chunks):
        assert type(found) is DataContainer
        check(found.data, right.data)
    elif isinstance(right, Padded):
        assert type(found) is Padded
        check(found.fields(), right.fields())
    elif isinstance(right, dict):
        assert type(found) is type(right) and list(found) == list(right)
        for key, value in right.items():
            check(found[key], value)
    elif isinstance(right, list | tuple):
        assert type(found) is type(right) and len(found) == len(right)
        for one, other in zip(found, right, strict=True):
            check(one, other)
    else:
        assert type(found) is type(right) and found == right


def batches(numbers: Numbers) -> None:
    """Nested fields: collated, scattered over targets, and copied to the host."""
    rng, count, chunk = generator(numbers), numbers.between(1, 5), numbers.between(1, 5)
    field = draw_field(numbers, rng, count, chunk, 2)
    ids = held(numbers, rng, count, chunk)  # chunks do not change
    right = {"ids": ids.collated, "field": field.collated}
    batch = [
        {"ids": i, "field": value}
        for i, value in zip(ids.values, field.values, strict=True)
    ]
    refusals = []
    for backend in BACKENDS:
        with using(backend):
            got, text = outcome(collate, batch, chunk)
            refusals.append(text)
            if field.fails:
                continue
            assert not text, text
            check(got, right)
            parts = scatter(got, ["cpu"] * len(field.parts))
            expected = zip(ids.parts, field.parts, strict=True)
            for part, (number, value) in zip(parts, expected, strict=True):
                check(part, {"ids": number, "field": value})
                assert to_host(part) is part
    assert len(set(refusals)) == 1, refusals
    assert ("must have a padding_value" in refusals[0]) is field.fails


def pad_stacks(numbers: Numbers) -> None:
    """One column with options, into memory of the caller or new one."""
    rng = generator(numbers)
    column = draw_column(numbers, rng, numbers.between(1, 5), one_value=True)
    right = stacked(column, slice(None))
    arguments = {"pad_dims": column.pad_dims, **column.options}
    arguments["padding_value"] = samples.PADDING[column.fills[0]]
    whole = right.data if isinstance(right, Padded) else right
    into = numbers.maybe()
    refusals = []
    for backend in BACKENDS:
        out = None
        if into and right is not None:
            out = raw_bytes.poisoned(whole.shape, whole.dtype)
        call = functools.partial(pad_stack, column.tensors, out=out, **arguments)
        with using(backend):
            got, text = outcome(call)
        refusals.append(text)
        if right is not None:
            assert not text, text
            check(got, right)
            data = got.data if isinstance(got, Padded) else got
            assert out is None or data is out
    assert len(set(refusals)) == 1, refusals
    assert ("must have a padding_value" in refusals[0]) is (right is None)


def device_copies(numbers: Numbers) -> None:
    """Leaves that are packed, sent to a device and unpacked, also on the host."""
    rng = generator(numbers)
    leaves, rights = [], []
    for _ in range(numbers.between(1, 5)):
        dtype = numbers.choose(raw_bytes.DTYPES)
        leaf, items = tensor(numbers, rng, sizes(numbers, numbers.between(0, 4)), dtype)
        leaves.append(leaf)
        rights.append(Want(dtype, tuple(leaf.shape), items.tobytes()))
    for backend in BACKENDS:
        if backend is not reference:
            with using(backend):
                check(to_device.send(leaves, CPU, HostDevice()).wait(), rights)


#: A kind that is listed twice is drawn twice as often.
KINDS = [batches, batches, batches, pad_stacks, pad_stacks, pad_copies, pad_copies]
KINDS += [slabs, plans, device_copies, headers, nested_samples, nested_samples]


def any_case(numbers: Numbers) -> str:
    """Run one case; return its kind."""
    kind = numbers.choose(KINDS)
    kind(numbers)
    return kind.__name__
