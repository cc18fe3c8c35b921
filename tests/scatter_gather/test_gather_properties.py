"""gather joins the parts of any nested value, split at any place."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import hypothesis.strategies as st
import torch
from hypothesis import given, settings

from pyparallel import DataContainer, gather
from tests.support.batch.samples import Frozen, Pair, rebuild, same


@dataclass(frozen=True)
class Samples:
    """A leaf before it is cut: rows of numbers, as this kind of value."""

    kind: str
    width: int


kinds = st.sampled_from(["tensor", "integers", "names", "boxes", "constant", "loss"])
leaves = st.builds(Samples, kinds, st.integers(0, 3))
nests = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=3).map(tuple),
        st.lists(inner, min_size=1, max_size=3).map(lambda x: [leaf_of("tensor"), *x]),
        st.dictionaries(st.text("abc", max_size=2), inner, max_size=3),
        st.dictionaries(st.integers(0, 3), inner, max_size=2).map(OrderedDict),
        st.tuples(inner, inner).map(lambda x: Pair(*x)),
        st.tuples(inner, inner).map(lambda x: Frozen(*x)),
    ),
    max_leaves=6,
)
cuts = st.lists(st.integers(0, 4), min_size=1, max_size=4)


def leaf_of(name: str) -> Samples:
    return Samples(name, 1)


def value(leaf: Samples, start: int, stop: int) -> Any:
    """Return a model's output leaf for these samples."""
    rows = torch.arange(start, stop).reshape(-1, 1).repeat(1, leaf.width)
    seen = range(start, stop)
    made: dict[str, Any] = {
        "tensor": rows.double(),
        "integers": rows,
        "names": [f"{i}" for i in seen],
        "boxes": DataContainer([torch.ones(i % 3, 4) for i in seen]),
        "constant": leaf.width,
        "loss": torch.tensor(float(start)),
    }
    return made[leaf.kind]


def build(nest: Any, make: Any) -> Any:
    """Return the nest with every leaf replaced."""
    if isinstance(nest, Samples):
        return make(nest)
    return rebuild(nest, lambda each: build(each, make))


@settings(deadline=None, max_examples=150)
@given(nests, cuts)
def test_gather_restores_the_whole_value(nest: Any, sizes: list[int]) -> None:
    ends = [sum(sizes[:i]) for i in range(len(sizes) + 1)]
    outputs = [
        build(nest, lambda leaf, a=a, b=b: value(leaf, a, b)) for a, b in pairwise(ends)
    ]

    def whole(leaf: Samples) -> Any:
        if leaf.kind == "loss":
            return torch.tensor([float(start) for start in ends[:-1]])
        return value(leaf, 0, ends[-1])

    assert same(gather(outputs, "cpu"), build(nest, whole))
