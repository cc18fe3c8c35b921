"""Plans: values computed from shapes and dtypes only."""

from __future__ import annotations

import copy
import math
import pickle
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pyparallel import Padding
from pyparallel.batch.plan import StackPlan, padding_patterns, plan_stack
from pyparallel.scatter_gather.split import partition


def name(i: int) -> str:
    return f"batch[{i}]"


def test_equal_batches_make_equal_plans() -> None:
    shapes = [(3, 4, 5), (3, 5, 4)]
    plan = plan_stack(shapes, 2, name)
    assert plan == StackPlan((2, 3, 5, 5), (True, True))
    assert plan == plan_stack([torch.Size(shape) for shape in shapes], 2, name)
    assert plan == copy.copy(plan) == pickle.loads(pickle.dumps(plan))
    assert hash(plan) == hash(pickle.loads(pickle.dumps(plan)))
    with pytest.raises(AttributeError):
        plan.shape = (1,)  # type: ignore[misc]


def test_a_plan_holds_plain_integers() -> None:
    plan = plan_stack([torch.Size([1, 2]), torch.Size([1, 3])], 1, name)
    assert type(plan.shape) is tuple
    shown = "StackPlan(shape=(2, 1, 3), padded=(True, False), starts=None)"
    assert repr(plan) == shown


def test_only_smaller_samples_are_padded() -> None:
    plan = plan_stack([(2, 3), (2, 3), (2, 0)], 1, name)
    assert plan == StackPlan((3, 2, 3), (False, False, True))
    assert plan_stack([(), ()], None, name) == StackPlan((2,), (False, False))


def test_a_padding_gives_the_target_and_where_samples_start() -> None:
    shapes = [torch.Size([1, 2, 4]), torch.Size([1, 3, 3])]
    padding = Padding(size_divisor=(1, 4), side=("left", "center"))
    plan = plan_stack(shapes, 2, name, padding)
    assert plan == StackPlan((2, 1, 3, 4), (True, True), ((0, 1, 0), (0, 0, 0)))
    assert plan == copy.copy(plan) == pickle.loads(pickle.dumps(plan))
    assert {type(start) for row in plan.starts for start in row} == {int}
    assert len({plan, plan_stack(shapes, 2, name)}) == 2
    fixed = plan_stack(shapes, 2, name, Padding(shape=(3, 5)))
    assert fixed == StackPlan((2, 1, 3, 5), (True, True))


def test_samples_that_fill_the_target_start_in_the_low_corner() -> None:
    plan = plan_stack([(1, 2), (1, 2)], 1, name, Padding(side="left", size_divisor=2))
    assert plan == StackPlan((2, 1, 2), (False, False))
    assert plan == plan_stack([(1, 2), (1, 2)], 1, name)


def test_with_a_padding_all_dimensions_may_be_padded() -> None:
    assert plan_stack([(2,), (3,)], 1, name, Padding()).shape == (2, 3)
    assert plan_stack([()], 0, name, Padding()).shape == (1,)
    with pytest.raises(ValueError) as caught:
        plan_stack([(2,), (3,)], 2, name, Padding())
    assert str(caught.value) == (
        "batch[0] must have at least pad_dims=2 dimensions, but has shape (2,). Set "
        "pad_dims=1."
    )


def test_zero_sizes_do_not_hide_an_overflow() -> None:
    assert plan_stack([(0, 2**62)], None, name).shape == (1, 0, 2**62)
    with pytest.raises(ValueError, match=r"less than 2\*\*63 elements"):
        plan_stack([(0, 2**62, 2)], None, name)


@given(st.integers(0, 200), st.integers(1, 40))
def test_a_partition_is_that_of_torch_chunk(num_items: int, num_parts: int) -> None:
    chunks = torch.arange(num_items).chunk(num_parts)
    # Of nothing torch makes as many empty chunks as asked for; a partition has one.
    expected = [len(chunk) for chunk in chunks] if num_items else [0]
    assert partition(num_items, num_parts) == expected


def test_one_pattern_serves_equal_values() -> None:
    plan = plan_stack([(1, 1), (1, 2), (1, 3)], 1, name)
    one = b"\x00\x00\xe0\x40"
    assert padding_patterns(plan, torch.float32, [7, 7, 7], name) == one
    assert padding_patterns(plan, torch.float32, [7, 7.0, -1], name) == one
    assert padding_patterns(plan, torch.float32, [7, 0, 9], name) == one + bytes(8)


def test_the_sign_of_zero_is_kept() -> None:
    plan = plan_stack([(1, 1), (1, 2), (1, 3)], 1, name)
    zero, minus = bytes(4), b"\x00\x00\x00\x80"
    both = zero + minus + zero
    assert padding_patterns(plan, torch.float32, [0.0, -0.0, 5], name) == both
    assert padding_patterns(plan, torch.float32, [-0.0, -0.0, 5], name) == minus
    assert padding_patterns(plan, torch.int32, [-0.0, -0.0, 5], name) == zero


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint64], ids=str)
def test_a_value_that_is_just_too_large_is_refused(dtype: torch.dtype) -> None:
    plan = plan_stack([(1, 1), (1, 2)], 1, name)
    first = 2**64 if dtype == torch.uint64 else 2**63  # whose double is exact
    below = int(math.nextafter(first, 0))
    pattern = padding_patterns(plan, dtype, [below, 0], name)
    assert pattern == below.to_bytes(8, sys.byteorder)
    with pytest.raises(ValueError) as caught:
        padding_patterns(plan, dtype, [first, 0], name)
    assert str(caught.value) == (
        f"batch[0] must have a padding_value that {dtype} can hold, but has {first}."
    )


def test_the_value_of_the_largest_sample_is_not_looked_at() -> None:
    plan = plan_stack([(1, 2), (1, 1)], 1, name)
    assert padding_patterns(plan, torch.uint8, ["bad", 3], name) == b"\x03"
    same = plan_stack([(1, 2), (1, 2)], 1, name)
    assert padding_patterns(same, torch.uint8, ["bad", -1], name) == b"\x00"
