"""Plans: values computed from shapes and dtypes only."""

from __future__ import annotations

import math
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pyparallel.batch.plan import padding_patterns, plan_stack
from pyparallel.scatter_gather.split import partition


def name(i: int) -> str:
    return f"batch[{i}]"


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
