"""Plans: values computed from shapes and dtypes only."""

from __future__ import annotations

import copy
import math
import pickle
import sys
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pyparallel import Padding
from pyparallel.batch.plan import StackPlan, padding_patterns, plan_stack
from pyparallel.scatter_gather.split import partition


def name(i: int) -> str:
    return f"batch[{i}]"


#: Shapes, pad_dims, padding, and the plan.
PLANS = [
    ([(3, 4, 5), (3, 5, 4)], 2, None, StackPlan((2, 3, 5, 5), (True, True))),
    ([(2, 3), (2, 3), (2, 0)], 1, None, StackPlan((3, 2, 3), (False, False, True))),
    ([(), ()], None, None, StackPlan((2,), (False, False))),
    ([(1, 2, 4), (1, 3, 3)], 2, Padding(size_divisor=(1, 4), side=("left", "center")),
     StackPlan((2, 1, 3, 4), (True, True), ((0, 1, 0), (0, 0, 0)))),
    ([(1, 2, 4), (1, 3, 3)], 2, Padding(shape=(3, 5)),
     StackPlan((2, 1, 3, 5), (True, True))),
    # Samples that fill the target start in the low corner.
    ([(1, 2), (1, 2)], 1, Padding(side="left", size_divisor=2),
     StackPlan((2, 1, 2), (False, False))),
    # With a padding all dimensions may be padded.
    ([(2,), (3,)], 1, Padding(), StackPlan((2, 3), (True, False))),
    ([()], 0, Padding(), StackPlan((1,), (False,))),
]  # fmt: skip


@pytest.mark.parametrize(("shapes", "pad_dims", "padding", "expected"), PLANS)
def test_a_plan_is_a_value_of_plain_integers(
    shapes: Any, pad_dims: int | None, padding: Padding | None, expected: StackPlan
) -> None:
    plan = plan_stack(list(map(torch.Size, shapes)), pad_dims, name, padding)
    assert plan == expected == plan_stack(shapes, pad_dims, name, padding)
    for twin in (copy.copy(plan), pickle.loads(pickle.dumps(plan))):
        assert plan == twin and hash(plan) == hash(twin)
    assert repr(plan) == repr(expected)
    assert {type(start) for row in plan.starts or () for start in row} <= {int}
    with pytest.raises(AttributeError):
        plan.shape = (1,)  # type: ignore[misc]


def test_with_a_padding_there_must_be_the_padded_dimensions() -> None:
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
