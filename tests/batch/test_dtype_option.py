"""The option ``dtype``: the results of a cast by torch before collating."""

from __future__ import annotations

import pickle
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pyparallel import (
    Collate,
    DataContainer,
    Pad,
    Padded,
    Padding,
    Ragged,
    Stack,
    backend,
    collate,
    pad_stack,
)
from pyparallel.backend.plain import CASTS
from pyparallel.shm.ring import FREE, PARENT, Ring
from tests.support.batch.oracle import by_torch
from tests.support.batch.samples import DTYPES, LAYOUTS, lay_out, random_tensor
from tests.support.loader.ring_workers import Worker
from tests.support.processes.backends import both, using

pytestmark = pytest.mark.asan

TARGETS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
FLOATS = [each for each in DTYPES if each.is_floating_point]
#: Numbers at every rounding of a float16 and a bfloat16, and beyond their ends.
_HALVES = torch.arange(-(2**15), 2**15).to(torch.int16)
_VALUES = torch.cat(
    [
        each.double() * scale
        for dtype in (torch.float16, torch.bfloat16)
        for each in [_HALVES.view(dtype)]
        for scale in (1, 1 + 2**-9, 1 + 2**-12, 1 - 2**-12, 1 + 2**-40, 2**-30)
    ]
)


def cast(samples: list[torch.Tensor], dtype: torch.dtype) -> list[torch.Tensor]:
    return [x.to(dtype) if x.is_floating_point() else x for x in samples]


def assert_same(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Assert equal bits, except those of NaN.

    torch gives a NaN of bfloat16 one of two values, by the strides of its source.
    """
    assert type(found) is torch.Tensor and found.is_contiguous()
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    if expected.dtype.is_floating_point:
        nan = expected.isnan() if expected.element_size() > 1 else expected != expected
        assert torch.equal(found != found, nan)
        found, expected = (each.masked_fill(nan, 1) for each in (found, expected))
    bits = [
        each.contiguous().view(torch.uint8) for each in (found, expected) if each.dim()
    ]
    assert not bits or torch.equal(*bits)


@pytest.mark.parametrize("dtype", TARGETS[:3])
@both
def test_every_number_is_rounded_as_torch_rounds_it(
    backend: ModuleType, dtype: torch.dtype
) -> None:
    for source in (torch.float32, torch.float64):
        if source == dtype:
            continue
        values = _VALUES.to(source)
        with using(backend):
            for part in (values, values[3:7]):  # also less than a vector
                (found,) = pad_stack([part], dtype=dtype)
                assert_same(found, part.to(dtype))
                found = pad_stack([part, part[:-1]], dtype=dtype, side="left")[1]
                assert_same(found[1:], part[:-1].to(dtype))


@both
def test_operators_cast_the_listed_pairs_alone(backend: ModuleType) -> None:
    for source in DTYPES:
        for dtype in DTYPES:
            dst = torch.zeros(1, 2, dtype=dtype)
            sample = torch.ones(2).to(source)
            fill = bytes(dtype.itemsize)
            if source == dtype or (source, dtype) in CASTS:
                backend.pad_copy(dst, [sample], fill)
                expected = bytes(sample.to(dtype).view(torch.uint8).tolist())
                assert bytes(dst.view(torch.uint8)[0].tolist()) == expected
                continue
            with pytest.raises(TypeError, match=f"of dst, {dtype}, but has {source}"):
                backend.pad_copy(dst, [sample], fill)
    dst, mixed = torch.zeros(2, 2, dtype=torch.float16), [torch.ones(2), torch.ones(2)]
    mixed[1] = mixed[1].double()
    rule = r"samples\[1\] must have the dtype of samples\[0\], torch.float32, but has"
    with pytest.raises(TypeError, match=rule):
        backend.pad_copy(dst, mixed, bytes(2))


@pytest.mark.parametrize("dtype", TARGETS[:2])
def test_a_worker_casts_into_its_slab(dtype: torch.dtype) -> None:
    collate_fn = Collate(x=Pad(dtype=dtype), y=Stack(dtype=dtype))
    samples = [{"x": torch.rand(3 + i, 300), "y": _VALUES[:700]} for i in range(4)]
    ring = Ring(2, 1 << 20)
    batch = Worker(ring, collate_fn).make(samples).batch
    assert ring.holders() == [PARENT, FREE]
    expected = collate_fn(samples)
    for name in ("x", "y"):
        assert_same(batch[name], expected[name])
        assert batch[name].dtype == dtype
    places = [backend.memory_of(each).data_ptr() for each in batch.values()]
    assert places[0] == places[1], "a tensor is outside of the slab"


OPTIONS: list[dict[str, Any]] = [
    {},
    {"mask": True, "sizes": True, "side": "center"},
    {"size_divisor": 4, "side": "left"},
]


@st.composite
def ragged_columns(draw: Any) -> list[torch.Tensor]:
    """Draw samples that differ in all of their dimensions, of one dtype or several."""
    num_dims, mixed = draw(st.integers(0, 4)), draw(st.integers(0, 3)) == 0
    dtypes = st.sampled_from([*FLOATS, torch.float32, torch.float64, torch.int64])
    dtype, sizes = draw(dtypes), st.integers(0, 5)
    samples = []
    for i in range(draw(st.integers(1, 20))):
        shape = tuple(draw(sizes) for _ in range(num_dims))
        if mixed:
            dtype = draw(st.sampled_from([torch.float16, torch.float32, torch.int64]))
        sample = random_tensor(shape, dtype, i, tame=mixed)
        samples.append(lay_out(sample, draw(st.sampled_from(LAYOUTS))))
    return samples


@given(ragged_columns(), st.sampled_from(TARGETS), st.sampled_from(OPTIONS))
@both
def test_samples_are_cast_and_padded_as_after_a_cast_by_torch(
    backend: ModuleType,
    samples: list[torch.Tensor],
    dtype: torch.dtype,
    options: dict[str, Any],
) -> None:
    before = [each.clone() for each in samples]
    expected: Any = pad_stack(cast(samples, dtype), padding_value=0.1, **options)
    with using(backend):
        found: Any = pad_stack(samples, dtype=dtype, padding_value=0.1, **options)
        out = torch.empty_like(expected.data)
        pad_stack(samples, dtype=dtype, padding_value=0.1, out=out, **options)
    assert_same(out, expected.data)
    if isinstance(expected, Padded):
        assert torch.equal(found.mask, expected.mask)
        assert torch.equal(found.sizes, expected.sizes)
        found, expected = found.data, expected.data
    assert_same(found, expected)
    for each, old in zip(samples, before, strict=True):
        assert each.dtype == old.dtype


ENTRIES: dict[str, Any] = {
    "Pad": lambda samples, dtype: Collate(default=Pad(3, dims=1, dtype=dtype))(
        samples
    ),
    "Stack": lambda samples, dtype: Collate(default=Stack(dtype=dtype))(
        [each[:, :2] for each in samples]
    ),
    "DataContainer": lambda samples, dtype: collate(
        [
            DataContainer(x, True, 3, pad_dims=1, padding=Padding(dtype=dtype))
            for x in samples
        ],
        len(samples),
    ).data[0],
    "to_padded": lambda samples, dtype: Ragged.from_tensors(
        [each.T for each in samples]
    ).to_padded(3, Padding(dtype=dtype)).transpose(1, 2).contiguous(),
}  # fmt: skip


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("num", [2, 40])
@pytest.mark.parametrize(
    ("source", "dtype"),
    [
        *sorted(CASTS, key=str),
        (torch.float16, torch.float32),
        (torch.int32, torch.float16),
    ],
)
@both
def test_every_entry_casts_values_and_padding(
    backend: ModuleType, source: torch.dtype, dtype: torch.dtype, num: int, entry: str
) -> None:
    samples = [(torch.rand(3, 2 + i % 3) * 99).to(source) for i in range(num)]
    shapes = samples if entry != "Stack" else [each[:, :2] for each in samples]
    expected = by_torch(cast(shapes, dtype), 1, [3] * num)
    with using(backend):
        assert_same(ENTRIES[entry](samples, dtype), expected)


@both
def test_large_batches_are_cast_by_threads_past_the_caches(backend: ModuleType) -> None:
    samples = [torch.rand(3, 700 + i, 1300) for i in range(8)]
    for dtype in (torch.bfloat16, torch.float16):
        with using(backend):
            found = pad_stack(samples, dtype=dtype, padding_value=7)
        for sample, made in zip(samples, found, strict=True):
            height = sample.shape[1]
            assert torch.equal(made[:, :height], sample.to(dtype))
            assert (made[:, height:] == 7).all()


@both
def test_numbers_arrays_and_integers(backend: ModuleType) -> None:
    rules = Collate(
        score=Stack(dtype=torch.bfloat16),
        label=Stack(dtype=torch.bfloat16),
        points=Pad(mask=True, dtype=torch.float32),
        default=Stack(dtype=torch.float16),
    )
    samples = [
        {"score": 0.1, "label": i, "points": np.full((1 + i, 2), 0.1), "text": "a",
         "list": [0.5, 1.5], "complex": torch.ones(1, dtype=torch.complex64)}
        for i in range(2)
    ]  # fmt: skip
    with using(backend):
        batch: Any = rules(samples)
    assert torch.equal(batch["score"], torch.tensor([0.1, 0.1], dtype=torch.bfloat16))
    assert batch["label"].dtype is torch.int64 and batch["text"] == ["a", "a"]
    assert batch["points"].data.dtype is torch.float32
    assert batch["points"].mask.dtype is torch.bool
    assert batch["points"].data[0, 0, 0] == np.float32(0.1)
    assert batch["list"].dtype is torch.float16
    assert batch["complex"].dtype is torch.complex64


@both
def test_gradients_flow_through_the_cast(backend: ModuleType) -> None:
    samples = [torch.rand(n, requires_grad=True) for n in (2, 3)]
    twins = [each.detach().clone().requires_grad_() for each in samples]
    with using(backend):
        found = pad_stack(samples, dtype=torch.float16)
    expected = pad_stack(cast(twins, torch.float16))
    for batch in (found, expected):
        (batch.float() ** 2).sum().backward()
    for one, other in zip(samples, twins, strict=True):
        assert one.grad is not None and other.grad is not None
        assert one.grad.dtype is torch.float32 and torch.equal(one.grad, other.grad)


def test_a_dtype_is_part_of_the_options() -> None:
    padding = Padding(dtype=torch.bfloat16)
    assert repr(padding) == "Padding(dtype=torch.bfloat16)"
    assert repr(Stack(dtype=torch.float16)) == "Stack(dtype=torch.float16)"
    assert pickle.loads(pickle.dumps(padding)) == padding != Padding()
    dtypes: list[Any] = [torch.int8, torch.complex64, "float16", float]
    for dtype in dtypes:
        for cls in (Padding, Pad, Stack):
            with pytest.raises(TypeError) as caught:
                cls(dtype=dtype)
            rule = "dtype must be a floating-point torch.dtype, but is"
            assert str(caught.value) == f"{cls.__name__}: {rule} {dtype!r}."


def test_errors_name_the_sample_and_the_dtype_of_the_result() -> None:
    samples = [{"x": torch.ones(2)}, {"x": torch.ones(1)}]
    with pytest.raises(ValueError, match=r"batch\[1\]\['x'\].*torch.float16 can hold"):
        Collate(x=Pad(1e30, dtype=torch.float16))(samples)
    with pytest.raises(ValueError, match="the dtype of the result"):
        pad_stack([torch.ones(2)], dtype=torch.float16, out=torch.ones(1, 2))
    half = torch.float4_e2m1fn_x2 if hasattr(torch, "float4_e2m1fn_x2") else None
    if half is not None:
        with pytest.raises(TypeError, match=r"batch\[0\]\['x'\].*convert to"):
            Collate(x=Pad(dtype=half))(samples)
