"""collate against the oracle, on generated batches."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import oracle
import pytest
import samples
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pyparallel import DataContainer, collate

pytestmark = pytest.mark.asan

bounded = settings(
    max_examples=300,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
few = settings(bounded, max_examples=150)


def contained(column: samples.Column) -> list[DataContainer]:
    return [
        DataContainer(sample, True, value, pad_dims=column.pad_dims)
        for sample, value in zip(column.samples, column.values, strict=True)
    ]


def expected_chunk(column: samples.Column, part: slice) -> torch.Tensor:
    return oracle.stacked(column.samples[part], column.pad_dims, column.values[part])


def check_column(column: samples.Column, chunk: int) -> None:
    """Compare every chunk with the oracle and with torch's own pad and stack."""
    starts = range(0, len(column.samples), chunk)
    parts = [slice(start, start + chunk) for start in starts]
    try:
        expected = [expected_chunk(column, part) for part in parts]
    except RuntimeError:  # a dtype cannot hold its padding value
        with pytest.raises(ValueError, match="must have a padding_value that torch"):
            collate(contained(column), chunk)
        return
    got = collate(contained(column), chunk).data
    assert len(got) == len(expected)
    for actual, right, part in zip(got, expected, parts, strict=True):
        oracle.assert_same_tensor(actual, right)
        assert actual.is_contiguous()
        if actual[0].numel() != 1:  # torch fills one element by other rules than two
            args = column.samples[part], column.pad_dims, column.values[part]
            oracle.assert_same_tensor(actual, oracle.by_torch(*args).contiguous())


@bounded
@given(column=samples.columns(), chunk=st.integers(1, 6))
def test_a_stacked_column_equals_the_oracle_bit_by_bit(
    column: samples.Column, chunk: int
) -> None:
    check_column(column, chunk)


@few
@given(column=samples.columns(mixed=True), chunk=st.integers(1, 6))
def test_mixed_dtypes_promote_as_torch_stack_promotes_them(
    column: samples.Column, chunk: int
) -> None:
    check_column(column, chunk)


@few
@given(column=samples.columns(), chunk=st.integers(1, 6))
def test_samples_are_neither_changed_nor_aliased(
    column: samples.Column, chunk: int
) -> None:
    before = [oracle.elements(sample) for sample in column.samples]
    places = {sample.untyped_storage().data_ptr() for sample in column.samples}
    try:
        batch = collate(contained(column), chunk)
    except ValueError:
        batch = DataContainer([])
    assert [oracle.elements(sample) for sample in column.samples] == before
    for tensor in batch.data:
        assert tensor.numel() == 0 or tensor.untyped_storage().data_ptr() not in places


@few
@given(
    column=samples.columns().filter(
        lambda c: c.samples[0].dtype in (torch.float32, torch.float64, torch.complex64)
    ),
    seed=st.integers(0, 99),
)
def test_gradients_are_those_of_pad_and_stack(
    column: samples.Column, seed: int
) -> None:
    leaves = [sample.clone().requires_grad_() for sample in column.samples]
    twins = [sample.clone().requires_grad_() for sample in column.samples]
    try:
        right = oracle.by_torch(twins, column.pad_dims, column.values)
    except RuntimeError:
        return
    column.samples = leaves
    got = collate(contained(column), len(leaves)).data[0]
    upstream = samples.random_tensor(got.shape, got.dtype, seed, tame=True)
    got.backward(upstream)
    right.backward(upstream)
    for leaf, twin in zip(leaves, twins, strict=True):
        oracle.assert_same_tensor(leaf.grad, twin.grad)


def is_holdable(batch: Sequence[Any], chunk: int) -> Any:
    try:
        return oracle.collate(batch, chunk)
    except (RuntimeError, OverflowError):
        return None


@bounded
@given(batch=samples.batches(DataContainer), chunk=st.integers(1, 6))
def test_a_nest_of_containers_equals_the_oracle(batch: list[Any], chunk: int) -> None:
    expected = is_holdable(batch, chunk)
    if expected is None:
        with pytest.raises(ValueError, match="padding_value"):
            collate(batch, chunk)
        return
    shown = repr(copy.deepcopy(batch))
    oracle.assert_same(collate(batch, chunk), expected)
    assert repr(batch) == shown


@bounded
@given(column=samples.columns(), data=st.data())
def test_a_shape_outside_the_padded_dims_is_refused_with_its_sample(
    column: samples.Column, data: st.DataObject
) -> None:
    shape = tuple(column.samples[0].shape)
    fixed = len(shape) - (column.pad_dims or 0)
    if not fixed:
        return
    wrong = list(shape)
    wrong[data.draw(st.integers(0, fixed - 1))] += 1
    at = data.draw(st.integers(1, len(column.samples)))
    column.samples.insert(at, torch.empty(wrong, dtype=column.samples[0].dtype))
    column.values.insert(at, 0)
    with pytest.raises(ValueError, match=rf"^batch\[{at}\] must match batch\[0\]"):
        collate(contained(column), len(column.samples))
