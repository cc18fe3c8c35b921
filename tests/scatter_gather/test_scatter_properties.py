"""scatter compared with plain Python and torch.split, on random nested batches."""

from __future__ import annotations

import collections
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from samples import Pair, rebuild, same

from pyparallel import DataContainer as DC
from pyparallel import scatter

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


def ceiling(total: int, num: int) -> list[int]:
    size = max(1, -(-total // num))
    return [min(size, total - start) for start in range(0, total, size)]


def plant(tree: Any, sizes: list[int]) -> Any:
    """Return the tree with real leaves; samples count from 0 to their sum."""
    total = sum(sizes)
    whole = torch.arange(total)
    if isinstance(tree, str):
        return {
            "tensor": lambda: whole.clone(),
            "column": lambda: whole.view(total, 1).expand(total, 3),
            "stacked": lambda: DC(list(whole.split(sizes)), stack=True),
            "listed": lambda: DC([list(part.split(1)) for part in whole.split(sizes)]),
            "meta": lambda: DC(
                [[{"id": int(i)} for i in part] for part in whole.split(sizes)],
                cpu_only=True,
            ),
            "number": lambda: 5,
            "text": lambda: "text",
            "none": lambda: None,
        }[tree]()
    return rebuild(tree, lambda item: plant(item, sizes))


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


@st.composite
def cases(draw: Any) -> tuple[Any, list[int], int]:
    """Draw a tree, the sizes of its chunks, and a sufficient number of targets."""
    per_target, num_chunks = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    last = draw(st.integers(1, per_target))
    sizes = [per_target] * (num_chunks - 1) + [last]
    tree = draw(trees.filter(lambda tree: not isinstance(tree, str)))
    return tree, sizes, num_chunks + draw(st.integers(0, 2))


def ids_of(sizes: list[int]) -> list[list[int]]:
    numbers = iter(range(sum(sizes)))
    return [[next(numbers) for _ in range(size)] for size in sizes]


def has(tree: Any, kinds: tuple[str, ...]) -> bool:
    if isinstance(tree, str):
        return tree in kinds
    items = tree.values() if isinstance(tree, dict) else tree
    return any(has(item, kinds) for item in items)


@settings(deadline=None, max_examples=150)
@given(cases())
def test_every_target_gets_its_samples_in_the_same_containers(case):
    tree, sizes, num_targets = case
    parts = scatter(plant(tree, sizes), ["cpu"] * num_targets)
    if not has(tree, ("stacked", "listed", "meta")):
        sizes = ceiling(sum(sizes), num_targets)
    groups = ids_of(sizes) if has(tree, LEAVES[:5]) else [[]] * num_targets
    assert len(parts) == len(groups)
    for part, ids in zip(parts, groups, strict=True):
        assert same(plain(part), expect(tree, ids))


@settings(deadline=None, max_examples=100)
@given(cases(), st.lists(st.integers(1, 4), min_size=1, max_size=4), st.integers(1, 4))
def test_chunk_sizes_and_max_size_cut_all_alike(case, new_sizes, max_size):
    tree, _, _ = case
    # One chunk, so that stacked tensors can be divided at any sizes.
    batch = plant(tree, [sum(new_sizes)])
    targets = ["cpu"] * len(new_sizes)
    parts = scatter(batch, targets, chunk_sizes=new_sizes, max_size=max_size)
    for part, ids in zip(parts, ids_of(new_sizes), strict=True):
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
