"""Plans of slabs: both backends return the same immutable value."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.processes.backends import both

pytestmark = [pytest.mark.cuda_torch, pytest.mark.one_backend, pytest.mark.asan]

DTYPES = (torch.uint8, torch.bool, torch.float16, torch.float32, torch.complex128)
leaves = st.lists(
    st.builds(
        lambda shape, dtype: torch.empty(shape, dtype=dtype),
        st.lists(st.integers(0, 5), max_size=3),
        st.sampled_from(DTYPES),
    ),
    max_size=6,
)


@both
@given(tensors=leaves)
def test_slots_are_ascending_aligned_and_disjoint(
    backend: Any, tensors: list[torch.Tensor]
) -> None:
    plan = backend.plan_slab(tensors)
    end = 0
    for offset, leaf in zip(plan.offsets, tensors, strict=True):
        assert offset % 64 == 0
        assert offset >= end
        end = offset + leaf.nbytes
    assert end <= plan.nbytes < end + 64
    assert plan.nbytes % 64 == 0
    assert plan.shapes == tuple(tuple(leaf.shape) for leaf in tensors)
    assert plan.dtypes == tuple(leaf.dtype for leaf in tensors)
