"""The walk of nested containers."""

from __future__ import annotations

import gc
import threading
import types
import weakref
from collections import OrderedDict, UserDict, defaultdict, deque
from dataclasses import make_dataclass
from typing import Any

import numpy as np
import pytest
import samples
import torch

from pyparallel import DataContainer
from pyparallel.batch import pytree
from pyparallel.core.errors import Field, format_path

pytestmark = pytest.mark.asan


class Boxes(list[Any]):
    """A list with a name."""


class Row(dict[str, Any]):
    """A dict with a name."""


class Stubborn(list[Any]):
    """A list that cannot be made from one."""

    def __init__(self, *, items: list[Any]) -> None:
        super().__init__(items)


TREES: list[Any] = [
    5,
    [],
    {},
    (),
    [1, (2, [3])],
    {"b": 1, "a": {"d": 2, "c": 3}},
    OrderedDict(z=1, a=2),
    defaultdict(list, z=1, a=2),
    Row(z=1, a=2),
    Boxes([1, Boxes([2])]),
    samples.Pair(1, samples.Pair(2, 3)),
    samples.Frozen(1, [2]),
    samples.Slotted(1, {"x": 2}),
    deque([1, 2], maxlen=3),
    {1: "a", "b": 2, None: 3},
]


@pytest.mark.parametrize("tree", TREES, ids=repr)
def test_flattened_values_are_restored(tree: Any) -> None:
    leaves, structure = pytree.flatten(tree)
    again = pytree.unflatten(structure, leaves)
    assert again == tree
    assert type(again) is type(tree)
    if isinstance(tree, dict):
        assert list(again) == list(tree)
        assert again is not tree
    if isinstance(tree, defaultdict | deque):
        assert vars_of(again) == vars_of(tree)


def vars_of(value: Any) -> Any:
    return value.default_factory if isinstance(value, defaultdict) else value.maxlen


@pytest.mark.parametrize("cls", [UserDict, types.MappingProxyType])
def test_other_mappings_are_containers(cls: Any) -> None:
    got = pytree.map_leaves(str, cls({"z": 1, "a": 2}))
    assert (type(got), dict(got), list(got)) == (cls, {"z": "1", "a": "2"}, ["z", "a"])


def test_everything_else_is_a_leaf() -> None:
    optimizer = torch.optim.SGD([torch.ones(1, requires_grad=True)])
    things: list[Any] = [None, "ab", b"ab", range(3), {1, 2}, 1.5, object, optimizer]
    things += [torch.ones(2), np.ones(2), DataContainer([1]), samples.Frozen]
    leaves, _ = pytree.flatten(things)
    assert [id(leaf) for leaf in leaves] == [id(thing) for thing in things]


def test_a_list_that_cannot_be_rebuilt_becomes_a_plain_one() -> None:
    got = pytree.map_leaves(str, Stubborn(items=[1, 2]))
    assert (type(got), got) == (list, ["1", "2"])


def test_paths_name_places_as_the_user_would() -> None:
    tree = {"a": [1, samples.Frozen(2, 3)], "p": Row(x=4)}
    _, structure = pytree.flatten(tree)
    places = [format_path("inputs", path) for path in structure.paths()]
    assert places == [
        "inputs['a'][0]",
        "inputs['a'][1].left",
        "inputs['a'][1].right",
        "inputs['p']['x']",
    ]
    assert (
        format_path("batch[1]", ["img", 0, Field("boxes")])
        == "batch[1]['img'][0].boxes"
    )


def test_cycles_and_bottomless_nests_are_refused() -> None:
    loop: list[Any] = []
    loop.append(loop)
    ring = Row()
    ring["self"] = ring
    deep: Any = 1
    for _ in range(100_000):
        deep = [deep]
    for tree in (loop, ring, deep):
        with pytest.raises(ValueError) as caught:
            pytree.flatten(tree)
        assert str(caught.value) == (
            "the batch must nest its containers at most 64 deep, but it nests deeper. "
            "Look for a container that contains itself."
        )
    while isinstance(deep, list):  # freed one by one, or the C stack may overflow
        deep = deep.pop()


def test_threads_that_meet_a_class_first_all_walk_into_it() -> None:
    results: list[bool] = []
    for round_ in range(30):
        cls = make_dataclass(f"Point{round_}", ["x", "y"])
        start = threading.Barrier(4)

        def walk(cls: Any = cls, start: threading.Barrier = start) -> None:
            start.wait()
            results.append(pytree.flatten([cls(1, 2), cls(3, 4)])[0] == [1, 2, 3, 4])

        threads = [threading.Thread(target=walk) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert results == [True] * 120


def test_a_value_of_any_class_is_freed_without_a_collection() -> None:
    value = Boxes()
    held = weakref.ref(value)
    gc.disable()
    try:
        assert pytree.split_registered(value) is None
        del value
        assert held() is None
    finally:
        gc.enable()
