"""Plans: values computed from shapes and dtypes only."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pyparallel.batch.plan import plan_stack
from pyparallel.scatter_gather.split import partition

pytestmark = pytest.mark.one_backend


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
