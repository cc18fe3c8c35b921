"""Plans of slabs: both backends return the same immutable value."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from backends import both
from hypothesis import given
from hypothesis import strategies as st

pytestmark = [pytest.mark.cuda_torch, pytest.mark.asan]

DTYPES = (torch.uint8, torch.bool, torch.float16, torch.float32, torch.complex128)
LEAVES = [torch.zeros(2, 3), torch.zeros(()), torch.zeros(65, dtype=torch.uint8)]
TEXT = (
    "SlabPlan(offsets=(0, 64, 128), shapes=((2, 3), (), (65,)), "
    "dtypes=(torch.float32, torch.float32, torch.uint8), nbytes=256)"
)

leaves = st.lists(
    st.builds(
        lambda shape, dtype: torch.empty(shape, dtype=dtype),
        st.lists(st.integers(0, 5), max_size=3),
        st.sampled_from(DTYPES),
    ),
    max_size=6,
)


def fields(plan: Any) -> tuple[Any, ...]:
    return plan.offsets, plan.shapes, plan.dtypes, plan.nbytes


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


@both
def test_equal_leaves_make_equal_plans(backend: Any) -> None:
    plan = backend.plan_slab(LEAVES)
    again = backend.plan_slab([torch.ones_like(leaf) for leaf in LEAVES])
    assert plan == again == backend.SlabPlan(*fields(plan))
    assert hash(plan) == hash(again)
    assert len({plan, again}) == 1
    assert plan != backend.plan_slab(LEAVES[:2])
    assert plan != backend.plan_slab([leaf.to(torch.int16) for leaf in LEAVES])
    assert plan != backend.plan_slab([leaf.reshape(1, -1) for leaf in LEAVES])
    assert plan != fields(plan)


@both
def test_a_plan_prints_its_numbers(backend: Any) -> None:
    assert repr(backend.plan_slab(LEAVES)) == TEXT
    assert fields(backend.plan_slab([])) == ((), (), (), 0)
    assert type(backend.plan_slab(LEAVES).shapes[0]) is tuple


@both
def test_a_plan_is_frozen_and_travels(backend: Any) -> None:
    plan = backend.plan_slab(LEAVES)
    for name in ("offsets", "shapes", "dtypes", "nbytes", "other"):
        with pytest.raises((AttributeError, TypeError)):
            setattr(plan, name, 1)
    assert plan == copy.copy(plan) == copy.deepcopy(plan)
    assert plan == pickle.loads(pickle.dumps(plan))
    assert hash(plan) == hash(pickle.loads(pickle.dumps(plan)))
