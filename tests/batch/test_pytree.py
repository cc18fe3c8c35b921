"""The walk of nested containers."""

from __future__ import annotations

import gc
import operator
import threading
import weakref
from collections import UserDict
from dataclasses import InitVar, dataclass, field, make_dataclass
from functools import cached_property
from typing import Any

import pytest
import torch

from pyparallel import DataContainer, PreDataLoader, collate, gather, scatter
from pyparallel.batch import pytree

pytestmark = pytest.mark.asan


class Boxes(list[Any]):
    """A list with a name."""


class Stubborn(list[Any]):
    """A list that cannot be made from one."""

    def __init__(self, *, items: list[Any]) -> None:
        super().__init__(items)


@dataclass
class Counted:
    """A dataclass with attributes that are no fields."""

    boxes: list[int]
    offset: InitVar[int] = 0
    late: Any = field(init=False)

    def __post_init__(self, offset: int) -> None:
        self.count = len(self.boxes) + offset

    @cached_property
    def parity(self) -> int:
        return self.count % 2


class Named:
    """A class whose attributes are in slots."""

    __slots__ = ("__private", "__weakref__", "name", "unset")

    def __init__(self, name: str) -> None:
        self.name, self.__private = name, name.upper()

    @property
    def upper(self) -> str:
        return self.__private


@dataclass(slots=True)
class Slotted(Named):
    """The same, as a dataclass without a dict."""

    boxes: list[int]
    late: Any = field(init=False)

    def __post_init__(self) -> None:
        Named.__init__(self, "ann")


def test_a_dataclass_keeps_attributes_that_are_no_fields() -> None:
    value = Counted([1, 2], offset=3)
    assert value.parity == 1
    value.note = note = object()  # type: ignore[attr-defined]
    assert pytree.flatten(value)[0] == [1, 2]
    moved = pytree.map_leaves(str, value)
    assert type(moved) is Counted and moved is not value
    kept = {"count": 5, "parity": 1, "note": note}
    assert vars(moved) == {"boxes": ["1", "2"], **kept}
    value.late = 7
    assert pytree.map_leaves(str, value).late == "7"
    assert value.boxes == [1, 2]


def test_a_dataclass_keeps_slots_that_are_no_fields() -> None:
    moved = pytree.map_leaves(str, Slotted([1, 2]))
    assert type(moved) is Slotted
    assert (moved.boxes, moved.name, moved.upper) == (["1", "2"], "ann", "ANN")
    assert not hasattr(moved, "unset") and not hasattr(moved, "late")
    assert weakref.ref(moved)() is moved


class Record(dict[str, Any]):
    """A dict whose constructor takes the value of one key."""

    def __init__(self, name: Any) -> None:
        super().__init__(name=name)


class Attributes(dict[str, Any]):
    """A dict whose items are its attributes."""

    def __init__(self, items: dict[str, Any]) -> None:
        super().__init__(items)
        self.__dict__ = self


class Owned(list[Any]):
    """A list whose constructor takes its owner."""

    def __init__(self, owner: Any = None) -> None:
        super().__init__()


class Filed(dict[str, Any]):
    """A dict whose constructor takes its file."""

    def __init__(self, path: Any = None) -> None:
        super().__init__()


class Encoded(UserDict[str, Any]):
    """A batch with attributes, as of tokenizers."""

    def __init__(self, data: Any, encodings: Any = None) -> None:
        super().__init__(data)
        self.encodings = encodings


class Loaded(Filed):
    """A dict with attributes that its constructor does not take."""

    def __init__(self, data: Any, encodings: Any) -> None:
        super().__init__()
        self.update(data)
        self.encodings = encodings


class Held(Owned):
    """A list with attributes."""

    def __init__(self, data: Any, encodings: Any) -> None:
        super().__init__()
        self += data.values()
        self.encodings = encodings


class Mirrored(dict[str, Any]):
    """A dict with an attribute for each item."""

    def __init__(self, data: Any, encodings: Any = None) -> None:
        super().__init__(data)
        vars(self).update(self, encodings=encodings)


@pytest.mark.parametrize("cls", [Encoded, Loaded, Held])
def test_attributes_of_dicts_and_lists_move_with_them(cls: Any) -> None:
    encodings = ["a", "b"]
    batch = cls({"a": torch.ones(2), "data": torch.zeros(2)}, encodings)
    before, x = list(getattr(batch, "values", batch.copy)()), torch.float64
    moved = [*scatter(batch, -1, dtype=x), *scatter([batch], "cpu", dtype=x)[0]]
    moved += [*scatter(batch, ["cpu", "cpu"]), *PreDataLoader([batch], "cpu")]
    moved += [DataContainer(batch).to("cpu").data]
    for each in moved:
        assert type(each) is cls and each.encodings is encodings
    assert torch.equal((moved[0] if cls is Held else [*moved[0].values()])[0],
                       torch.ones(2, dtype=x))  # fmt: skip
    after = list(getattr(batch, "values", batch.copy)())
    assert all(map(operator.is_, before, after))
    (mirrored,) = scatter(Mirrored({"a": torch.ones(2)}), -1, dtype=x)
    assert mirrored["a"] is mirrored.a and mirrored.a.dtype == x


@pytest.mark.parametrize("empty", [Stubborn(items=[]), Owned()], ids=["refuse", "drop"])
def test_a_list_that_cannot_be_rebuilt_becomes_a_plain_one(empty: list[Any]) -> None:
    empty += [1, 2]
    got = pytree.map_leaves(str, empty)
    assert (type(got), got) == (list, ["1", "2"])


@pytest.mark.parametrize("value", [5, {"name": 5}])
def test_a_dict_that_cannot_be_rebuilt_becomes_a_plain_one(value: Any) -> None:
    got = pytree.map_leaves(lambda leaf: leaf + 1, Record(value))
    expected = {"name": 6} if value == 5 else {"name": {"name": 6}}
    assert (type(got), got) == (dict, expected)


def test_a_dict_that_drops_its_items_becomes_a_plain_one() -> None:
    filed = Filed("a.png")
    filed["img"] = torch.ones(2)
    for got in (
        pytree.map_leaves(lambda leaf: leaf + 1, filed),
        collate([filed, filed]),
        gather([filed, filed], "cpu"),
        *scatter(filed, ["cpu"]),
    ):
        assert type(got) is dict and set(got) == {"img"}


def test_the_attributes_of_a_dict_follow_its_items() -> None:
    got: Any = pytree.map_leaves(str, Attributes({"a": 1}))
    assert (type(got), got, got.a) == (Attributes, {"a": "1"}, "1")


def test_cycles_and_bottomless_nests_are_refused() -> None:
    loop: list[Any] = []
    loop.append(loop)
    ring: dict[str, Any] = {}
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


class Lonely:
    """A key that cannot be compared with another one."""

    def __lt__(self, other: object) -> bool:
        raise ValueError("no order")


def test_keys_that_cannot_be_sorted_are_walked_as_inserted() -> None:
    for keys in ([Lonely(), Lonely()], [torch.zeros(2), torch.zeros(2)]):
        tree = [{keys[1]: 1, keys[0]: {"b": 2, "a": 3}}]
        leaves, structure = pytree.flatten(tree)
        assert leaves == [1, 2, 3]
        (found,) = pytree.unflatten(structure, leaves)
        assert list(map(id, found)) == [id(keys[1]), id(keys[0])]
        assert [found[key] for key in found] == [1, {"b": 2, "a": 3}]
    assert pytree.flatten({1.5: 0, 0.5: 1})[0] == [1, 0], "sorted again"


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
