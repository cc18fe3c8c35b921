"""Padding values: the bits that each dtype gets, at each entry point."""

from __future__ import annotations

import copy
import enum
import itertools
import pickle
from collections.abc import Callable, Iterator
from decimal import Decimal
from fractions import Fraction
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode

from pyparallel import (
    Collate,
    DataContainer,
    DataLoader,
    Pad,
    Padded,
    Padding,
    Ragged,
    collate,
    pad_stack,
)
from pyparallel.batch.padding_values import padding_patterns
from pyparallel.batch.plan import plan_stack
from pyparallel.mmengine import stack_batch
from tests.support.batch import oracle
from tests.support.processes.backends import both, using

pytestmark = [pytest.mark.cuda_torch, pytest.mark.asan]

INT64, UINT64, FLOAT64 = torch.int64, torch.uint64, torch.float64
#: The limits of all integer dtypes, and the first integers that are no double.
LIMITS = [0, *(2**bits for bits in (7, 8, 15, 16, 31, 32, 53, 63, 64)), 10**19]
INTEGERS = sorted({s * (x + d) for x in LIMITS for d in (-1, 0, 1) for s in (-1, 1)})
#: Integers that only an exact path keeps.
WIDE = [(INT64, 2**53 + 1), (INT64, 2**63 - 1), (INT64, -(2**63) + 1)]
WIDE += [(UINT64, 2**53 + 1), (UINT64, 2**63 - 1), (UINT64, 2**64 - 1)]


def name(i: int) -> str:
    return f"batch[{i}]"


def test_the_sign_of_zero_is_kept() -> None:
    plan = plan_stack([(1, 1), (1, 2), (1, 3)], 1, name)
    zero, minus = bytes(4), b"\x00\x00\x00\x80"
    both = zero + minus + zero
    float32, int32 = torch.float32, torch.int32
    assert padding_patterns(plan, float32, [0.0, -0.0, 5], name) == both
    assert padding_patterns(plan, float32, [-0.0, -0.0, 5], name) == minus
    assert padding_patterns(plan, int32, [-0.0, -0.0, 5], name) == zero
    others = [np.float64(-0.0), Decimal("-0"), torch.tensor(-0.0), np.longdouble(-0.0)]
    for value in others:
        assert padding_patterns(plan, float32, [value, value, 5], name) == minus


def test_an_imaginary_part_is_refused() -> None:
    plan = plan_stack([(1, 1), (1, 2)], 1, name)
    kinds: list[Any] = [complex, np.complex64, np.clongdouble, np.array, torch.tensor]
    for value in [kind(1j) for kind in kinds]:
        for dtype in (torch.float32, torch.complex64, INT64):
            with pytest.raises(TypeError) as caught:
                padding_patterns(plan, dtype, [value, value], name)
            assert f"must have a number as padding_value, but has {value!r}" in str(
                caught.value
            )


# --- One table: dtypes x values x entry points x backends.


def ragged(dtype: torch.dtype) -> list[torch.Tensor]:
    return [torch.tensor([[5, 6]], dtype=dtype), torch.tensor([[7, 8, 9]], dtype=dtype)]


def held(samples: Any, value: Any, **flags: Any) -> list[DataContainer]:
    return [DataContainer(x, True, value, pad_dims=1, **flags) for x in samples]


def chunk_of(batch: Any) -> Any:
    return collate(batch, len(batch)).data[0]


def padded_rows(samples: Any, value: Any) -> Any:
    rows = [sample.flatten() for sample in samples]
    return Ragged.from_tensors(rows).to_padded(value)[:, None]


def into_out(samples: Any, value: Any) -> Any:
    out = torch.empty(2, 1, 3, dtype=samples[0].dtype)
    return pad_stack(samples, padding_value=value, out=out)


def masked(samples: Any, value: Any) -> Any:
    padded: Any = pad_stack(samples, padding_value=value, mask=True)
    assert padded.mask.sum() == 5
    return padded.data


class Subclass(torch.Tensor):
    """A subclass that only has another name."""


class Recorder(TorchFunctionMode):
    """A mode, under which operators of torch run."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return func(*args, **(kwargs or {}))


def of_subclass(samples: Any, value: Any) -> Any:
    column = [sample.as_subclass(Subclass) for sample in samples]
    return chunk_of(held(column, value)).as_subclass(torch.Tensor)


def under_a_mode(samples: Any, value: Any) -> Any:
    with Recorder():
        return chunk_of(held(samples, value))


def traced(samples: Any, value: Any) -> Any:
    def run(*given: torch.Tensor) -> Any:
        return pad_stack(given, padding_value=value)

    return make_fx(run)(*samples)(*samples)


def mapped(samples: Any, value: Any) -> Any:
    def run(*given: torch.Tensor) -> Any:
        return pad_stack(given, padding_value=value)

    return torch.vmap(run)(*[sample[None] for sample in samples])[0]


def mixed(samples: Any, value: Any) -> Any:
    """Give the longest sample, which gets no padding, another dtype."""
    dtype = samples[0].dtype
    other = {UINT64: torch.uint8, torch.uint8: torch.uint8}.get(dtype, torch.bool)
    column = [samples[0], samples[1].to(other)]
    try:
        torch.promote_types(dtype, other)
    except RuntimeError:  # a dtype that torch promotes with itself alone
        column = samples
    whole = chunk_of(held(column, value))
    return torch.stack([whole[0], samples[1]])  # bool keeps no other value


def small(samples: Any, value: Any) -> Any:
    """Each sample has its own value."""
    batch = [held(samples[:1], value)[0], held(samples[1:], -1)[0]]
    return chunk_of(batch)


def named_rule(samples: Any, value: Any) -> Any:
    # A rule takes real numbers only; others take tensors too.
    others = (torch.Tensor, np.ndarray, np.bool_)
    number = value.item() if isinstance(value, others) else value
    number = Fraction(number) if isinstance(number, Decimal) else number
    rule = pickle.loads(pickle.dumps(Pad(number, dims=1)))
    try:
        return Collate(x=rule)([{"x": sample} for sample in samples])["x"]
    except ValueError as error:
        text = str(error).split("batch[0]['x']")[1].split(" Use another value")[0]
        raise ValueError(f"batch[0]{text}") from None


ENTRIES: dict[str, Callable[..., Any]] = {
    "container": lambda x, value: chunk_of(held(x, value)),
    "own values": small,
    "options": lambda x, value: chunk_of(held(x, value, padding=Padding())),
    "copied": lambda x, value: chunk_of(copy.deepcopy(held(x, value))),
    "rule": named_rule,
    "pad_stack": lambda x, value: pad_stack(x, padding_value=value),
    "out": into_out,
    "mask": masked,
    "to_padded": padded_rows,
    "stack_batch": lambda x, value: stack_batch(x, 1, value),
    "subclass": of_subclass,
    "mode": under_a_mode,
    "make_fx": traced,
    "vmap": mapped,
    "mixed dtypes": mixed,
}


class Level(enum.IntEnum):
    WIDE = 2**53 + 1


def forms(value: int, dtype: torch.dtype) -> Iterator[Any]:
    """Yield a value as objects of other classes that hold it exactly."""
    yield from (Fraction(value), Decimal(value))
    for kind in (np.int64, np.uint64):
        if np.iinfo(kind).min <= value <= np.iinfo(kind).max:
            yield from (kind(value), np.array(value, kind))
    if value in (0, 1):
        yield from (bool(value), np.bool_(value), torch.tensor(bool(value)))
    if float(value) == value:
        yield from (
            float(value),
            np.float64(value),
            torch.tensor(value, dtype=FLOAT64),
        )
    if -(2**63) <= value < 2**63:
        yield from (torch.tensor(value), torch.tensor([value]), np.longdouble(value))
    if value == Level.WIDE:
        yield Level.WIDE
    if 0 <= value < 2**64:
        yield torch.tensor(value, dtype=UINT64)


def outcome(entry: str, dtype: torch.dtype, value: Any) -> Any:
    """Return the bytes of the padding, or the text of the error."""
    samples = ragged(dtype)
    try:
        got = ENTRIES[entry](samples, value)
    except ValueError as error:
        return (
            str(error).replace("samples[", "batch[").replace("tensor_list[", "batch[")
        )
    assert (type(got), got.dtype, got.shape) == (torch.Tensor, dtype, (2, 1, 3))
    assert got[0, :, :2].equal(samples[0]) and got[1].equal(samples[1])
    return oracle.elements(got[0, 0, 2:])[(0,)]


def right_outcome(dtype: torch.dtype, value: Any, shown: Any) -> Any:
    try:
        return oracle.padding(dtype, value)
    except RuntimeError:
        return (
            f"batch[0] must have a padding_value that {dtype} can hold, but has "
            f"{shown!r}."
        )


@both
@pytest.mark.parametrize(
    "entry",
    [pytest.param(x, marks=pytest.mark.slow) if x == "make_fx" else x for x in ENTRIES],
)
def test_each_integer_gets_exactly_the_padding_value(
    backend: ModuleType, entry: str
) -> None:
    # A trace takes 20 ms.
    values = INTEGERS[:4] + INTEGERS[-9:] if entry == "make_fx" else INTEGERS
    with using(backend):
        for dtype, value in itertools.product(oracle.INTEGERS, values):
            right = right_outcome(dtype, value, value)
            assert outcome(entry, dtype, value) == right, (dtype, value)


@both
@pytest.mark.parametrize("entry", ["container", "rule", "mixed dtypes"])
def test_numbers_of_all_classes_are_exact(backend: ModuleType, entry: str) -> None:
    with using(backend):
        for dtype, value in itertools.product((INT64, UINT64, torch.int8), INTEGERS):
            for each in forms(value, dtype):
                right = right_outcome(dtype, value, each)
                found = outcome(entry, dtype, each)
                if entry == "rule" and isinstance(right, str):  # shows another class
                    assert "can hold, but has" in found
                else:
                    assert found == right, (dtype, each)


def test_fractions_are_cut_off_as_fill_does() -> None:
    for value in (2.7, -2.7, np.float32(2.7), Fraction(27, 10), Decimal("-2.7")):
        right = int(value).to_bytes(8, "little", signed=True)
        assert outcome("container", INT64, value) == right
    exact = Fraction(2**54 + 3, 2)  # its double is 2**53 + 2
    assert outcome("container", INT64, exact) == (2**53 + 1).to_bytes(8, "little")
    for dtype, value in (
        (torch.uint8, 255.5),
        (torch.uint8, -0.5),
        (torch.int8, -128.5),
    ):
        assert "can hold, but has" in outcome("container", dtype, value)


def test_an_error_shows_the_exact_value_and_only_where_it_would_be_written() -> None:
    rule = "batch[0] must have a padding_value that"
    cases = [(INT64, 2**63, 2**63), (UINT64, 2**64 + 1, 2**64 + 1), (INT64, 1e19, 1e19)]
    cases += [(INT64, 10**400, 10**400), (INT64, 10**5000, "a larger integer")]
    for dtype, value, shown in cases:
        text = f"{rule} {dtype} can hold, but has {shown}."
        assert outcome("container", dtype, value) == text
        assert chunk_of(held(ragged(dtype)[:1] * 2, value)).shape == (2, 1, 2)
    double = f"{rule} a double can hold, but has a larger integer."
    assert outcome("container", torch.float32, 10**400) == double


def test_other_dtypes_get_the_double_of_an_integer() -> None:
    tie = 2**60 + 2**36 + 1  # rounded to a double first, and then to a float
    for dtype in (torch.float32, torch.float64, torch.complex64):
        for value in (2**53 + 1, tie, 2**64 - 1, -(2**70) - 1):
            right = torch.tensor(float(value), dtype=dtype)
            assert outcome("container", dtype, value) == oracle.elements(right)[()]


def test_rules_with_different_values_differ() -> None:
    values = [2**53, 2**53 + 1, 2**53 + 2]
    kinds: list[Any] = [int, np.int64, np.uint64, Fraction]
    for one, other in itertools.product(values, values):
        for first, second in itertools.product(kinds, kinds):
            rules = Pad(first(one)), Pad(second(other))
            assert (rules[0] == rules[1]) is (one == other)
            assert one != other or hash(rules[0]) == hash(rules[1])
        assert (Pad(np.float64(one)) == Pad(other)) is (float(one) == other)
    assert repr(Pad(np.int64(2**53 + 1))) == "Pad(value=9007199254740993)"


@pytest.mark.parametrize(("dtype", "value"), WIDE)
def test_sides_and_other_options_get_the_value(dtype: torch.dtype, value: int) -> None:
    samples = ragged(dtype)
    for side in ("left", "center", ("left", "right")):
        whole: Any = pad_stack(
            samples, padding_value=value, shape=(2, 4), side=side, mask=True, sizes=True
        )
        assert isinstance(whole, Padded)
        # Not by an index: torch 2.8 has none for uint64.
        pairs = zip(whole.data.flatten().tolist(), whole.mask.flatten(), strict=True)
        assert {found for found, is_real in pairs if not is_real} == {value}
        recorded = of_subclass([whole.data[0], whole.data[1][:, :3]], value)
        assert recorded[1][:, 3].tolist() == [value] * 2


class Wide(torch.utils.data.Dataset):  # type: ignore[type-arg]
    def __len__(self) -> int:
        return len(WIDE)

    def __getitem__(self, i: int) -> Any:
        dtype, value = WIDE[i // 2 * 2]
        return held([torch.ones(1, 1 + i % 2, dtype=dtype)], value)[0]


def test_a_worker_writes_the_value() -> None:
    loader = DataLoader(Wide(), 2, num_workers=1, collate_fn=collate)
    for i, batch in enumerate(loader):
        assert batch.data[0][0, 0, 1].item() == WIDE[2 * i][1]


def test_tensors_without_values_have_the_shape() -> None:
    for dtype, value in WIDE:
        samples = [sample.to("meta") for sample in ragged(dtype)]
        assert chunk_of(held(samples, value)).shape == (2, 1, 3)
