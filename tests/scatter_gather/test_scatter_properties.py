"""scatter compared with plain Python and torch.split, on random nested batches."""

from __future__ import annotations

import collections
from itertools import accumulate
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pyparallel import DataContainer as DC
from pyparallel import scatter
from tests.support.batch.samples import Pair, rebuild, same

pytestmark = pytest.mark.asan

LEAVES = ("tensor", "column", "stacked", "listed", "meta", "number", "text", "none")

trees = st.recursive(
    st.sampled_from(LEAVES),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
        st.builds(Pair, inner, inner),
        st.dictionaries(st.integers(0, 3), inner, max_size=2).map(
            collections.OrderedDict
        ),
    ),
    max_leaves=8,
)


def plant(tree: Any, total: int) -> Any:
    """Return the tree with real leaves of one chunk, whose samples count from 0."""
    whole = torch.arange(total)
    if isinstance(tree, str):
        return {
            "tensor": whole.clone(),
            "column": whole.view(total, 1).expand(total, 3),
            "stacked": DC([whole], stack=True),
            "listed": DC([list(whole.split(1))]),
            "meta": DC([[{"id": i} for i in range(total)]], cpu_only=True),
            "number": 5,
            "text": "text",
            "none": None,
        }[tree]
    return rebuild(tree, lambda item: plant(item, total))


def expect(tree: Any, ids: list[int]) -> Any:
    """Return the expected part of the target with these samples, as plain values."""
    if isinstance(tree, str):
        return {
            "tensor": ids,
            "column": [[i] * 3 for i in ids],
            "stacked": ids,
            "listed": [[i] for i in ids],
            "meta": [{"id": i} for i in ids],
            "number": 5,
            "text": "text",
            "none": None,
        }[tree]
    return rebuild(tree, lambda item: expect(item, ids))


def plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        assert value.is_contiguous()
        return value.tolist()
    if isinstance(value, dict | list | tuple):
        return rebuild(value, plain)
    return value


@settings(deadline=None, max_examples=100)
@given(
    trees.filter(lambda tree: not isinstance(tree, str)),
    st.lists(st.integers(1, 4), min_size=1, max_size=4),
    st.integers(1, 4),
)
def test_chunk_sizes_and_max_size_cut_all_alike(tree, sizes, max_size):
    # One chunk, so that stacked tensors can be divided at any sizes.
    batch, targets = plant(tree, sum(sizes)), ["cpu"] * len(sizes)
    parts = scatter(batch, targets, chunk_sizes=sizes, max_size=max_size)
    for part, size, end in zip(parts, sizes, accumulate(sizes), strict=True):
        ids = list(range(end - size, end))
        assert same(plain(part), expect(tree, ids[:max_size]))


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.integers(0, 5), min_size=1, max_size=3),
    st.integers(1, 4),
    st.data(),
)
def test_a_tensor_is_split_along_any_dimension_as_torch_chunk_does(shape, num, data):
    dim = data.draw(st.integers(-len(shape), len(shape) - 1))
    tensor = torch.arange(float(torch.Size(shape).numel())).view(shape)
    expected = tensor.chunk(num, dim) if num > 1 else [tensor]
    found = scatter(tensor, ["cpu"] * num, dim)
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other) and one.is_contiguous()
