"""All options of padding against the oracle, on both backends, on generated columns."""

from __future__ import annotations

import math
from types import ModuleType
from typing import Any

import oracle
import pytest
import samples
import torch
import torch.nn.functional as F
from backends import both, using
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pyparallel import DataContainer, Padded, Padding, collate, pad_stack
from pyparallel.batch import torch_stack

pytestmark = pytest.mark.asan

bounded = settings(
    max_examples=150,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


@st.composite
def options(draw: Any, column: samples.Column, pad_dims: int) -> dict[str, Any]:
    """Draw options that the samples of a column fit."""
    fixed = column.samples[0].dim() - pad_dims
    sizes = [tuple(sample.shape[fixed:]) for sample in column.samples]
    largest = [max(1, *column) for column in zip(*sizes, strict=True)]
    more = st.integers(0, 2)

    def larger() -> tuple[int, ...]:
        return tuple(size + draw(more) for size in largest)

    drawn: dict[str, Any] = {}
    kind = draw(st.sampled_from(["", "size_divisor", "shape", "buckets"]))
    if kind == "size_divisor":
        divisors = st.integers(1, 3)
        each = st.tuples(*[divisors] * pad_dims)
        drawn[kind] = draw(divisors | each if pad_dims else divisors)
    elif kind and pad_dims:
        small = tuple(draw(st.integers(1, 4)) for _ in largest)
        buckets = draw(st.permutations([larger(), small, larger()]))
        drawn[kind] = larger() if kind == "shape" else buckets
    side = st.sampled_from(["right", "left", "center"])
    sides = st.tuples(*[side] * pad_dims) if pad_dims else side
    drawn |= draw(st.fixed_dictionaries({}, optional={"side": side | sides}))
    flags = {"sizes": st.booleans(), "mask": st.booleans()}
    return drawn | draw(st.fixed_dictionaries({}, optional=flags))


@st.composite
def cases(draw: Any, mixed: bool = False) -> tuple[samples.Column, dict[str, Any]]:
    column = draw(samples.columns(mixed=mixed, count=draw(st.integers(1, 4))))
    column.pad_dims = column.pad_dims or 0
    return column, draw(options(column, column.pad_dims))


def check(actual: Any, expected: Any, chosen: dict[str, Any]) -> None:
    """Compare a result with the oracle's data, sizes and mask."""
    data, sizes, mask = expected
    if not (chosen.get("sizes") or chosen.get("mask")):
        oracle.assert_same_tensor(actual, data)
        assert actual.is_contiguous()
        return
    assert type(actual) is Padded
    oracle.assert_same_tensor(actual.data, data)
    for flag, found, right in zip(
        ("sizes", "mask"), actual.fields()[1:], (sizes, mask), strict=True
    ):
        if chosen.get(flag):
            oracle.assert_same_tensor(found, right)
        else:
            assert found is None


def expected_of(column: samples.Column, chosen: dict[str, Any]) -> Any:
    pad_dims = column.pad_dims or 0
    try:
        return oracle.placed(column.samples, pad_dims, column.values, chosen)
    except RuntimeError:  # a dtype cannot hold its padding value
        return None


@both
@bounded
@given(case=cases())
def test_containers_with_options_equal_the_oracle_bit_by_bit(
    backend: ModuleType, case: Any
) -> None:
    column, chosen = case
    if not column.pad_dims:
        return
    batch = [
        DataContainer(x, True, value, False, column.pad_dims, padding=Padding(**chosen))
        for x, value in zip(column.samples, column.values, strict=True)
    ]
    expected = expected_of(column, chosen)
    with using(backend):
        if expected is None:
            with pytest.raises(ValueError, match="must have a padding_value"):
                collate(batch, len(batch))
        else:
            check(collate(batch, len(batch)).data[0], expected, chosen)


@both
@bounded
@given(case=cases(), data=st.data())
def test_pad_stack_equals_the_oracle_bit_by_bit(
    backend: ModuleType, case: Any, data: Any
) -> None:
    column, chosen = case
    value = column.values[0]
    column.values = [value] * len(column.samples)
    arguments = {"pad_dims": column.pad_dims, "padding_value": value}
    expected = expected_of(column, chosen)
    with using(backend):
        if expected is None:
            with pytest.raises(ValueError, match="must have a padding_value"):
                pad_stack(column.samples, **arguments, **chosen)
            return
        padding = Padding(**chosen)
        got = pad_stack(column.samples, **arguments, padding=padding)
        check(got, expected, chosen)
        out = torch.empty_like(expected[0])
        again = pad_stack(column.samples, **arguments, **chosen, out=out)
        assert (again.data if isinstance(again, Padded) else again) is out
        check(again, expected, chosen)


@both
@settings(bounded, max_examples=75)
@given(case=cases(mixed=True))
def test_mixed_dtypes_are_promoted_with_options_too(
    backend: ModuleType, case: Any
) -> None:
    column, chosen = case
    column.values = [1] * len(column.samples)
    with using(backend):
        got = pad_stack(
            column.samples, pad_dims=column.pad_dims, padding_value=1, **chosen
        )
    check(got, expected_of(column, chosen), chosen)


@both
@settings(bounded, max_examples=75)
@given(case=cases(), seed=st.integers(0, 99))
def test_gradients_are_those_of_pad_and_stack(
    backend: ModuleType, case: Any, seed: int
) -> None:
    column, chosen = case
    pad_dims = column.pad_dims or 0
    column.samples = [
        samples.random_tensor(tuple(each.shape), torch.float64, seed + i, tame=True)
        for i, each in enumerate(column.samples)
    ]
    leaves = [each.clone().requires_grad_() for each in column.samples]
    with using(backend):
        got = pad_stack(leaves, pad_dims=pad_dims, padding_value=2, **chosen)
    column.values = [2] * len(leaves)
    check(tuple_or_tensor(got), expected_of(column, chosen), chosen)
    data = got.data if isinstance(got, Padded) else got
    upstream = samples.random_tensor(tuple(data.shape), torch.float64, seed, tame=True)
    data.backward(upstream)
    ones = [torch.ones_like(each) for each in column.samples]
    inside = oracle.placed(ones, pad_dims, [0] * len(ones), chosen)[0].bool()
    for leaf, row, here in zip(leaves, upstream, inside, strict=True):
        assert leaf.grad is not None
        assert torch.equal(leaf.grad.flatten(), row[here])


def tuple_or_tensor(result: Any) -> Any:
    """Detach the data of a result."""
    if isinstance(result, Padded):
        return Padded(result.data.detach(), result.sizes, result.mask)
    return result.detach()


@both
def test_plain_samples_with_options_are_written_in_one_pass(
    backend: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("torch's operators must not be needed")

    monkeypatch.setattr(torch_stack, "pad_and_stack", refuse)
    monkeypatch.setattr(torch_stack, "fill_mask", refuse)
    ragged = [torch.rand(3, 100 + i, 90 - i) for i in range(4)]
    with using(backend):
        for side in ("right", "left", "center"):
            got = pad_stack(ragged, pad_dims=2, size_divisor=32, side=side, mask=True)
            sides = {"right": (0, 0), "left": (28, 6), "center": (14, 3)}
            top, left = sides[side]
            assert torch.equal(got.data[0, :, top:, left:][:, :100, :90], ragged[0])
            assert got.mask[0, top : top + 100, left : left + 90].all()
            assert got.mask.sum() == sum(x[0].numel() for x in ragged)
            assert got.data.sum() == pytest.approx(sum(x.sum() for x in ragged))


@both
@pytest.mark.parametrize("small", [True, False])
def test_equal_samples_of_the_target_size_are_stacked_unchanged(
    backend: ModuleType, small: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    equal = [torch.rand(2, 4, 8) for _ in range(3 if small else 40)]
    calls: list[Any] = []
    with using(backend):
        from pyparallel import backend as backend_module

        before = backend_module.stack_equal
        monkeypatch.setattr(
            backend_module, "stack_equal", lambda s: calls.append(len(s)) or before(s)
        )
        got = pad_stack(equal, pad_dims=2, size_divisor=4, mask=True, sizes=True)
    assert calls == [len(equal)]
    assert torch.equal(got.data, torch.stack(equal))
    assert got.mask.all() and got.mask.shape == (len(equal), 4, 8)
    assert got.sizes.tolist() == [[4, 8]] * len(equal)


@both
def test_unequal_leading_dims_pad_by_default(backend: ModuleType) -> None:
    ragged = [torch.ones(2, 3), torch.ones(3, 1)]
    with using(backend):
        got = pad_stack(ragged, padding_value=7)
    right = [F.pad(x, (0, 3 - x.shape[1], 0, 3 - x.shape[0]), value=7) for x in ragged]
    assert torch.equal(got, torch.stack(right))
    assert math.isclose(got.sum(), 9 + 9 * 7)
