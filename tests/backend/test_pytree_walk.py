"""The compiled walk: the result of optree's walk, or None."""

from __future__ import annotations

import gc
import sys
from collections import OrderedDict, defaultdict, deque
from typing import Any

import optree
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from pyparallel.batch import pytree
from tests.support.batch import samples
from tests.support.processes.backends import (
    check,
    native,
    needs_native,
    reference,
    using,
)

pytestmark = [pytest.mark.asan, pytest.mark.one_backend, needs_native]

LEAVES: set[type] = {type(None), str, bytes, int, float, bool, torch.Tensor}
scalars = st.one_of(st.none(), st.booleans(), st.integers(), st.text(max_size=3))
keys = st.one_of(
    st.lists(st.text(max_size=3), max_size=5, unique=True),
    st.lists(st.integers(-9, 2**70), max_size=5, unique=True),
)


def dicts(children: st.SearchStrategy[Any], cls: Any = dict) -> Any:
    return keys.flatmap(
        lambda names: st.tuples(*[children] * len(names)).map(
            lambda values: cls(zip(names, values, strict=True))
        )
    )


def plain(children: st.SearchStrategy[Any]) -> Any:
    items = st.lists(children, max_size=4)
    return st.one_of(items, items.map(tuple), dicts(children))


def walk_by_optree(tree: Any) -> tuple[list[Any], Any]:
    return optree.tree_flatten(tree, none_is_leaf=True, namespace="pyparallel")


def shape_of(tree: Any) -> Any:
    """Return the expected result: types, values, and the order of keys."""
    if isinstance(tree, dict):
        return type(tree), [(key, shape_of(value)) for key, value in tree.items()]
    if isinstance(tree, list | tuple | deque):
        return type(tree), [shape_of(item) for item in tree]
    return type(tree), tree


def ids(values: list[Any]) -> list[int]:
    return list(map(id, values))


@given(st.recursive(scalars, plain, max_leaves=30))
def test_plain_nests_are_walked_as_optree_walks_them(tree: Any) -> None:
    leaves, structure, classes = native.flatten(tree, LEAVES)
    expected, _ = walk_by_optree(tree)
    assert ids(leaves) == ids(expected)
    assert list(classes) == list(dict.fromkeys(map(type, expected)))
    assert structure.num_leaves == len(leaves)
    again = structure.unflatten(leaves)
    assert shape_of(again) == shape_of(tree)
    _, same, _ = native.flatten(again, LEAVES)
    assert (same, hash(same)) == (structure, hash(structure))
    assert pytree.accessors(structure) == optree.tree_accessors(tree, none_is_leaf=True)


@given(st.recursive(scalars, plain, max_leaves=30), st.integers(0, 2))
def test_a_copy_of_the_containers_is_that_of_both_steps(tree: Any, roots: int) -> None:
    leaves, structure, classes = native.flatten(tree, LEAVES, roots)
    copy, found = native.copy_compact(tree, LEAVES, roots, False)
    assert shape_of(copy) == shape_of(structure.unflatten(leaves))
    assert set(found) == set(classes)
    again, same, _ = native.flatten(copy, LEAVES, roots)
    assert (ids(again), same) == (ids(leaves), structure)
    nodes = pytree.flatten(tree)[1], pytree.flatten(copy)[1]
    assert nodes[0] == nodes[1]
    if isinstance(tree, list | dict) and tree:
        before = shape_of(tree)
        copy.clear()
        assert shape_of(tree) == before


@pytest.mark.parametrize(
    ("tensor", "on_cpu", "is_kept"),
    [
        (torch.ones(2, 3), True, True),
        (torch.ones(2, 3).T, False, False),
        (torch.ones(2, 3).to_sparse(), False, False),
        (torch.ones(2, 3, device="meta"), False, False),
        (torch.ones(2, dtype=torch.complex64).conj(), True, False),
    ],
)
def test_containers_are_copied_around_compact_tensors(tensor, on_cpu, is_kept) -> None:
    tree = {"a": [torch.ones(1), (tensor, "name")]}
    copied = native.copy_compact(tree, LEAVES, 0, on_cpu)
    assert (copied is not None) is is_kept
    if is_kept:
        assert copied[0]["a"][1][0] is tensor and copied[0]["a"] is not tree["a"]


def test_a_collection_during_a_copy_of_containers_may_change_the_batch() -> None:
    class Finalizer:
        def __init__(self, batch: list[Any]) -> None:
            self.cycle, self.batch = self, batch

        def __del__(self) -> None:
            self.batch.clear()

    before = gc.get_threshold()
    for _ in range(20):
        batch: list[Any] = [{"key": [i, {"deep": (i, [i])}]} for i in range(40)]
        expected = shape_of(batch)
        Finalizer(batch[7]["key"])
        Finalizer(batch)
        gc.set_threshold(1)
        try:
            found = native.copy_compact(batch, LEAVES, 0, False)
        finally:
            gc.set_threshold(*before)
        assert batch == [], "the collection did not run"
        if found is not None and found[0] and found[0][7]["key"]:
            assert shape_of(found[0]) == expected


@given(st.recursive(scalars, plain, max_leaves=8), st.recursive(scalars, plain))
def test_structures_are_equal_as_in_optree(a: Any, b: Any) -> None:
    same = walk_by_optree(a)[1] == walk_by_optree(b)[1]
    ours, theirs = native.flatten(a, LEAVES)[1], native.flatten(b, LEAVES)[1]
    assert (ours == theirs) is same
    assert (ours != theirs) is not same


def test_the_order_of_keys_is_restored_but_does_not_count() -> None:
    one, two = {"b": 1, "a": [2]}, {"a": [2], "b": 1}
    leaves, first, _ = native.flatten(one, LEAVES)
    same, second, _ = native.flatten(two, LEAVES)
    assert leaves == same == [2, 1]
    assert first == second and hash(first) == hash(second)
    assert list(first.unflatten([5, 6]).items()) == [("b", 6), ("a", [5])]
    assert list(second.unflatten([5, 6]).items()) == [("a", [5]), ("b", 6)]
    assert repr(first) == "Structure({'b': Ellipsis, 'a': [Ellipsis]})"


class Meta(type):
    """A class of classes whose hash is Python code."""

    num_runs = 0

    def __hash__(cls) -> int:
        Meta.num_runs += 1
        return 0


@pytest.mark.parametrize(
    "tree",
    [
        samples.Pair(1, 2),
        samples.Frozen(1, 2),
        OrderedDict(a=1),
        defaultdict(list, a=1),
        deque([1]),
        {"a": 1, 2: 3},
        {None: 1},
        {True: 1},
        {(1, 2): 1},
        {type("Name", (str,), {})("a"): 1},
        type("Row", (dict,), {})(a=1),
        type("Boxes", (list,), {})([1]),
        Meta("Odd", (), {})(),
        object(),
        torch.ones(2, 2).max(0),
    ],
    ids=lambda tree: type(tree).__name__,
)
def test_possible_containers_are_left_to_optree(tree: Any) -> None:
    before = Meta.num_runs
    assert native.flatten(tree, LEAVES) is None
    assert native.flatten([1, {"a": (tree,)}], LEAVES) is None
    assert Meta.num_runs == before


def nest(depth: int) -> Any:
    tree: Any = 1
    for i in range(depth):
        tree = ([tree], (tree,), {"a": tree})[i % 3]
    return tree


def test_deep_nests_are_left_to_optree() -> None:
    assert native.flatten(nest(200), LEAVES)[0] == [1]
    assert native.flatten(nest(201), LEAVES) is None
    for depth in (200, 201):
        leaves, structure = pytree.flatten(nest(depth))
        assert pytree.unflatten(structure, leaves) == nest(depth)
    loop: Any = {}
    loop["self"] = [loop]
    assert native.flatten(loop, LEAVES) is None


@pytest.mark.parametrize("leaves", [[], [1], [1, 2, 3, 4]])
def test_the_number_of_leaves_must_be_right(leaves: list[int]) -> None:
    _, structure, _ = native.flatten([1, {"a": (2, 3)}], LEAVES)
    rule = "unflatten: leaves must have 3 entries, as the structure"
    message = f"{rule}, but has {len(leaves)}."
    check(structure.unflatten, [iter(leaves)], ValueError, message)
    with pytest.raises(TypeError):
        structure.unflatten(3)


@example([])  # one object at two paths
@given(st.recursive(scalars | st.sampled_from([(), deque(), OrderedDict()]), plain))
def test_empty_containers_in_arguments_are_leaves_on_both_backends(tree: Any) -> None:
    for arguments, roots in [(tree, 1), ((tree, {"a": tree}), 2), (tree, 0)]:
        found = []
        for module in (native, reference):
            with using(module):
                leaves, structure, classes = pytree.flatten_arguments(arguments, roots)
            found.append((ids(leaves), pytree.accessors(structure), set(classes)))
            rebuilt = pytree.unflatten(structure, leaves)
            assert shape_of(rebuilt) == shape_of(arguments)
        assert found[0] == found[1]


def test_the_arguments_of_flatten_are_checked() -> None:
    message = "flatten: leaf_types must be a set, but is of type list."
    check(native.flatten, ([1], [int]), TypeError, message)
    message = "flatten: roots must be between 0 and 2, but is 3."
    check(native.flatten, ([1], {int}, 3), ValueError, message)


def test_a_thousand_walks_leak_nothing() -> None:
    leaf, keys = torch.ones(1), ["".join(("key", str(i))) for i in range(4)]
    batch = [{key: (leaf, [leaf]) for key in keys}, {keys[3]: leaf, keys[0]: 1}]
    odd = [batch, object()]

    def one_round() -> None:
        leaves, structure, _ = native.flatten(batch, LEAVES, 1)
        structure.unflatten(leaves)
        assert structure == native.flatten(structure.unflatten(leaves), LEAVES)[1]
        assert native.flatten(odd, LEAVES) is None
        with pytest.raises(ValueError):
            structure.unflatten(leaves[1:])

    def counts() -> list[int]:
        gc.collect()
        held = [*keys, leaf, batch, *batch, None, dict, native.Structure]
        return [*map(sys.getrefcount, held), len(gc.get_objects())]

    one_round()
    before = counts()
    for _ in range(1000):
        one_round()
    grown = [b - a for a, b in zip(before, counts(), strict=True)]
    assert max(grown) < 100, grown
