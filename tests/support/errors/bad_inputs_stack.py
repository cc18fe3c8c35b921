"""Samples to stack: invalid ones, and unusual ones with one correct result."""

from __future__ import annotations

import pickle
import resource
import warnings
from pathlib import Path
from typing import Any

import torch

from pyparallel import DataContainer, collate, pad_stack
from pyparallel.batch import plan
from tests.support.errors import collate_errors as known
from tests.support.errors.bad_inputs import Case, refused
from tests.support.errors.collate_errors import freed

DC = DataContainer
ONES = torch.ones
QUANTIZED = "Call dequantize() before collating."


class Named(torch.Tensor):
    """A subclass of Tensor without overrides."""


def quiet(function: Any, *args: Any, **kwargs: Any) -> Any:
    """Make a tensor for which torch warns: prototypes and deprecated layouts."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return function(*args, **kwargs)


def quantized(shape: Any, scale: float = 0.5, dtype: Any = torch.quint8) -> Any:
    return quiet(torch.quantize_per_tensor, ONES(shape), scale, 0, dtype)


def by_channel() -> Any:
    scales, points = torch.tensor([0.5, 1.0]), torch.tensor([0, 0])
    args = (ONES(2, 3), scales, points, 0, torch.quint8)
    return quiet(torch.quantize_per_channel, *args)


def ragged_nest(layout: Any = torch.strided) -> Any:
    return quiet(torch.nested.nested_tensor, [ONES(2), ONES(3)], layout=layout)


def held(*tensors: Any, **flags: Any) -> list[DataContainer]:
    return [DC(tensor, stack=True, **flags) for tensor in tensors]


def within_a_tebibyte(batch: Any) -> Any:
    """Collate under a limit of memory."""
    old = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + 2**40
    resource.setrlimit(resource.RLIMIT_AS, (limit, old[1]))
    try:
        return one(batch)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, old)


def one(batch: Any) -> Any:
    """Collate to one chunk; return the content of the container."""
    (chunk,) = collate(batch, len(batch)).data
    return chunk


def ragged_pair(dtype: Any = torch.float32, **flags: Any) -> Any:
    """Return two samples with 1 and 2 ones."""
    return lambda: held(ONES(1, 1).to(dtype), ONES(1, 2).to(dtype), pad_dims=1, **flags)


def row_of(dtype: Any, value: Any) -> Any:
    """Return the expected result of `ragged_pair`."""

    def make() -> torch.Tensor:
        result = ONES(2, 1, 2).to(dtype)
        result.view(-1)[1] = value
        return result

    return make


def bad_dims(value: Any, shown: str, cls: type) -> Case:
    message = f"DataContainer: pad_dims must be None, 1, 2 or 3, but is {shown}."
    expected = refused(message, cls, AssertionError)
    return Case(lambda: ONES(3, 4, 4), lambda x: DC(x, True, pad_dims=value), expected)


def unpickled(pad_dims: Any, shown: str, cls: type) -> Case:
    """Pickle a container with invalid attributes, and load it."""

    def load(data: torch.Tensor) -> Any:
        odd = DC(data)
        odd._pad_dims = pad_dims
        return pickle.loads(pickle.dumps(odd))  # our own bytes

    message = f"DataContainer: pad_dims must be None, 1, 2 or 3, but is {shown}."
    return Case(lambda: ONES(2), load, refused(message, cls))


def cut(left: int) -> torch.Tensor:
    """Return four floats from the fifth on, whose storage has ``left`` bytes."""
    storage = ONES(8)
    tensor = storage.as_strided((4,), (1,), 4)
    storage.untyped_storage().resize_(left)
    return tensor


def lacks(i: int, need: int, left: int) -> Any:
    message = (
        f"batch[{i}] must lie within its storage, but needs {need} bytes where {left} "
        "are left. Collate it before its storage is resized."
    )
    return refused(message, ValueError, RuntimeError)


def thin(length: int) -> list[torch.Tensor]:
    """Return two samples of a few bytes whose union has ``length`` squared items."""
    single = torch.empty(1)
    return [single.expand(1, length, 1), single.expand(1, 1, length)]


def takes(shape: tuple[int, ...], dtype: Any, nbytes: int) -> Any:
    message = (
        "batch[0] and the samples stacked with it must fit into memory, but the padded "
        f"shape {shape} of {dtype} takes {nbytes} bytes. Use a smaller batch, or "
        "smaller samples."
    )
    return refused(message, MemoryError, RuntimeError)


def wide() -> list[torch.Tensor]:
    return [torch.empty(1, dtype=torch.complex128).expand(2**31, 2**15, 2**13)] * 2


def pairs(*dtypes: Any) -> Any:
    return lambda: held(*[ONES(1, 2, 2).to(dtype) for dtype in dtypes])


def scales(first: Any, other: Any) -> Any:
    message = f"batch[1] must have the {first} of batch[0], but has {other}. "
    return refused(message + QUANTIZED, TypeError, RuntimeError)


#: Shapes and flags.
SHAPES = {
    "pad-0": bad_dims(0, "0", ValueError),
    "pad-4": bad_dims(4, "4", ValueError),
    "pad-float": bad_dims(2.0, "2.0 (float)", TypeError),
    "pad-str": bad_dims("2", "'2' (str)", TypeError),
    "pad-2**32+2": bad_dims(2**32 + 2, str(2**32 + 2), ValueError),
    "pad-true": Case(
        lambda: held(ONES(3, 1), ONES(3, 1), pad_dims=True), one, lambda: ONES(2, 3, 1)
    ),
    "pad-2**32+2-at-once": Case(
        lambda: [ONES(3, 4), ONES(3, 5)],
        lambda x: pad_stack(x, pad_dims=2**32 + 2),
        refused(
            f"samples[0] must have at least pad_dims={2**32 + 2} dimensions, but has "
            "shape (3, 4). Set pad_dims=2.",
            ValueError,
        ),
    ),
    "pickle-2**32+2": unpickled(2**32 + 2, str(2**32 + 2), ValueError),
    "pickle-str": unpickled("2", "'2' (str)", TypeError),
    "pad-differs": Case(
        lambda: held(ONES(1, 1, 2), pad_dims=2) + held(ONES(1, 2, 1), pad_dims=1),
        one,
        lambda: torch.tensor([[[[1.0, 1], [0, 0]]], [[[1, 0], [1, 0]]]]),
    ),
    "stack-differs": Case(
        lambda: [*held(ONES(1, 2, 2)), DC(ONES(1, 2, 2))], one, lambda: ONES(2, 1, 2, 2)
    ),
    "cpu-only-second": Case(
        lambda: [*held(ONES(1, 2, 2)), DC([1], cpu_only=True)],
        one,
        refused(
            f"batch[1] {known.HOLD_TENSOR} list. {known.HELD}",
            TypeError,
            AssertionError,
        ),
    ),
    "cpu-only-first": Case(
        lambda: [DC([1], cpu_only=True), DC(7, stack=True)], one, lambda: [[1], 7]
    ),
    "values-differ": Case(
        lambda: (
            held(ONES(1, 1), padding_value=3, pad_dims=1)
            + held(ONES(1, 2), pad_dims=1, padding_value=7)
        ),
        one,
        row_of(torch.float32, 3),
    ),
    "scalars": Case(
        lambda: held(ONES(()), ONES(()), pad_dims=None), one, lambda: ONES(2)
    ),
    "no-rows": Case(
        lambda: held(ONES(1, 0, 2), ONES(1, 1, 1)),
        one,
        lambda: torch.tensor([[[[0.0, 0]]], [[[1, 0]]]]),
    ),
    "more-than-2**31": Case(
        lambda: [(3, 30000, 30000)] * 2,
        lambda x: plan.plan_stack(x, 2, "batch[{}]".format).shape,
        lambda: (2, 3, 30000, 30000),
    ),
    "four-tebibytes": Case(
        lambda: held(*thin(2**20)),
        within_a_tebibyte,
        takes((2, 1, 2**20, 2**20), torch.float32, 2**43),
    ),
    "more-than-2**63-bytes": Case(
        wide, collate, takes((2, 2**31, 2**15, 2**13), torch.complex128, 2**64)
    ),
}

#: Kinds of tensors.
TENSORS = {
    "float-double": Case(
        pairs(torch.float32, torch.float64), one, lambda: ONES(2, 1, 2, 2).double()
    ),
    "transposed": Case(
        lambda: held(torch.arange(6.0).view(1, 2, 3).mT, torch.zeros(1, 3, 2)),
        one,
        lambda: torch.tensor([[[[0.0, 3], [1, 4], [2, 5]]], [[[0, 0]] * 3]]),
    ),
    "overlapping": Case(
        lambda: [torch.arange(4.0).as_strided((2, 2), (1, 1))] * 2,
        collate,
        lambda: torch.tensor([[[0.0, 1], [1, 2]]] * 2),
    ),
    "channels-last": Case(
        lambda: held(ONES(1, 3, 2, 2).to(memory_format=torch.channels_last)),
        lambda x: one(x).stride(),
        lambda: (12, 12, 4, 2, 1),
    ),
    "grad": Case(
        lambda: held(ONES(1, 1, 1, requires_grad=True), ONES(1, 1, 2)),
        lambda x: one(x).requires_grad,
        lambda: True,
    ),
    "parameter": Case(
        lambda: held(torch.nn.Parameter(ONES(1, 1, 1))),
        lambda x: (type(one(x)), one(x).requires_grad),
        lambda: (torch.Tensor, True),
    ),
    "subclass": Case(
        lambda: held(*[ONES(1, 1, n).as_subclass(Named) for n in (1, 2)]),
        lambda x: (type(one(x)), tuple(one(x).shape)),
        lambda: (torch.Tensor, (2, 1, 1, 2)),
    ),
    "nested": Case(
        lambda: [{"a": ragged_nest()}],
        collate,
        refused(
            "batch[0]['a'] must be a dense tensor, but its layout is nested. Convert "
            "it with to_padded_tensor() before collating.",
            TypeError,
            RuntimeError,
        ),
    ),
    "quantized": Case(
        lambda: held(quantized((1, 2, 2)), quantized((1, 2, 2))),
        one,
        lambda: quantized((2, 1, 2, 2)),
    ),
    "quantized-scales": Case(
        lambda: [quantized(2), quantized(2, 0.25)],
        collate,
        scales(
            "torch.quint8, scale 0.5 and zero point 0",
            "torch.quint8, scale 0.25 and zero point 0",
        ),
    ),
    "quantized-dtypes": Case(
        lambda: held(quantized((1, 1, 2)), quantized((1, 2, 1), dtype=torch.qint8)),
        one,
        scales(
            "torch.quint8, scale 0.5 and zero point 0",
            "torch.qint8, scale 0.5 and zero point 0",
        ),
    ),
    "quantized-and-not": Case(
        lambda: [quantized(2), ONES(2)],
        collate,
        refused(
            f"batch[1] must be quantized like batch[0], but is not. {QUANTIZED}",
            TypeError,
            RuntimeError,
        ),
    ),
    "plain-and-quantized": Case(
        lambda: [ONES(2), quantized(2)],
        collate,
        refused(
            "batch[1] must not be quantized, like batch[0], but has torch.quint8. "
            f"{QUANTIZED}",
            TypeError,
            RuntimeError,
        ),
    ),
    "quantized-by-channel": Case(
        lambda: [by_channel(), by_channel()],
        collate,
        refused(
            "batch[0] must be quantized per tensor, but is torch.per_channel_affine. "
            f"{QUANTIZED}",
            TypeError,
            RuntimeError,
        ),
    ),
    "meta": Case(
        lambda: held(*[ONES(1, 1, n, device="meta") for n in (1, 2)]),
        one,
        lambda: ONES(2, 1, 1, 2, device="meta"),
    ),
    "conjugated": Case(
        lambda: [torch.tensor([1 + 2j]).conj()],
        collate,
        lambda: torch.tensor([[1 - 2j]]),
    ),
    "float8": Case(
        ragged_pair(torch.float8_e4m3fn, padding_value=2),
        one,
        lambda: row_of(torch.float32, 2)().to(torch.float8_e4m3fn),
    ),
    "half-into-int": Case(
        ragged_pair(torch.int64, padding_value=0.5), one, row_of(torch.int64, 0)
    ),
    "2**53+1-into-int": Case(
        ragged_pair(torch.int64, padding_value=2**53 + 1),
        one,
        row_of(torch.int64, 2**53 + 1),
    ),
    "none-as-padding": Case(
        ragged_pair(padding_value=None), one, row_of(torch.float32, 0)
    ),
    "cut-storage": Case(lambda: [ONES(4), cut(20)], collate, lacks(1, 32, 20)),
    "whole-storage": Case(lambda: [cut(32)] * 2, collate, lambda: ONES(2, 4)),
    "twenty-freed": Case(
        lambda: [freed(ONES(3)) for _ in range(20)], collate, lacks(0, 12, 0)
    ),
    "freed-in-a-list": Case(
        lambda: [DC(freed(ONES(3)))], lambda x: one(x)[0] is x[0].data, lambda: True
    ),
}
