"""pseudo_collate and default_collate: types, values, and errors with a path."""

from __future__ import annotations

from collections import OrderedDict, UserDict, UserList, defaultdict, deque, namedtuple
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch

from pyparallel import DataContainer
from pyparallel.mmengine import default_collate, pseudo_collate
from tests.support.mmengine.compare import same

pytestmark = pytest.mark.also_peers

Point = namedtuple("Point", ["x", "y"])
both = pytest.mark.parametrize("collate", [pseudo_collate, default_collate])


class Element:
    def to(self, device: Any) -> Element:
        return self


def test_default_collate_stacks_tensors_arrays_and_numbers() -> None:
    elements = [Element(), Element()]
    batch = [
        {
            "img": torch.full((2,), i),
            "array": np.arange(2) + i,
            "number": i,
            "float": i / 2,
            "flag": bool(i),
            "text": "ab"[i],
            "element": elements[i],
            "pair": (torch.tensor(i), b"x"),
            "point": Point(i, "p"),
        }
        for i in range(2)
    ]
    expected = {
        "img": torch.tensor([[0, 0], [1, 1]]),
        "array": torch.tensor([[0, 1], [1, 2]]),
        "number": torch.tensor([0, 1]),
        "float": torch.tensor([0, 0.5], dtype=torch.float64),
        "flag": torch.tensor([False, True]),
        "text": ["a", "b"],
        "element": elements,
        "pair": [torch.tensor([0, 1]), (b"x", b"x")],
        "point": Point(torch.tensor([0, 1]), ("p", "p")),
    }
    assert same(default_collate(batch), expected)
    assert pseudo_collate(elements) is default_collate(elements) is elements
    assert pseudo_collate(["a", "b"]) == default_collate(["a", "b"]) == ["a", "b"]


@both
def test_containers_keep_their_types(collate: Any) -> None:
    batch = [
        {
            "ordered": OrderedDict(b="1", a="2"),
            "default": defaultdict(list, a="1"),
            "user": UserDict(a="1"),
            "proxy": MappingProxyType({"a": "1"}),
            "list": ["1"],
            "tuple": ("1",),
            "userlist": UserList(["1"]),
            "range": range(0),
            "deque": deque(["1"]),
            "img": DataContainer(torch.ones(1), stack=True, pad_dims=None),
        }
    ] * 2
    result = collate(batch)
    assert type(result["ordered"]) is OrderedDict
    assert list(result["ordered"]) == ["b", "a"]
    assert type(result["default"]) is defaultdict
    assert result["default"].default_factory is list
    assert type(result["user"]) is UserDict
    assert type(result["proxy"]) is MappingProxyType
    assert result["proxy"]["a"] == ["1", "1"]
    assert result["list"] == [("1", "1")] and result["tuple"] == [("1", "1")]
    assert result["userlist"] == UserList([("1", "1")])
    assert result["range"] == []
    assert type(result["deque"]) is deque
    assert result["img"].data[0].tolist() == [[1], [1]]


@both
@pytest.mark.parametrize(
    ("batch", "kind", "text"),
    [
        ([], IndexError, "must have at least one sample, but is empty."),
        ((), ValueError, "must have at least one sample, but is empty."),
        ("ab", TypeError, "must be a sequence of samples, but is str."),
        ({"a": 1}, TypeError, "must be a sequence of samples, but is dict."),
    ],
)
def test_an_invalid_batch_is_refused(
    collate: Any, batch: Any, kind: Any, text: str
) -> None:
    with pytest.raises(kind) as caught:
        collate(batch)
    assert str(caught.value) == f"{collate.__name__}: data_batch {text}"


RECURSIVE: list[Any] = []
RECURSIVE.append(RECURSIVE)
ITEMS = "Convert it to a tensor or an array, which is one value."
REFUSED: list[tuple[Any, Any, str]] = [
    ([{"a": {"b": "1"}}, {"a": {"c": "1"}}], KeyError,
     "batch[1]['a'] must have the keys of batch[0]['a'], but lacks 'b'. Give every "
     "sample the same keys."),
    ([{"a": [1, 2]}, {"a": [1, 2]}, {"a": [1]}], RuntimeError,
     f"batch[2]['a'] must have 2 items like batch[0]['a'], but has 1. {ITEMS}"),
    ([Point([1], 2), Point([], 2)], RuntimeError,
     f"batch[1].x must have 1 items like batch[0].x, but has 0. {ITEMS}"),
    ([{"a": [1]}, {"a": 1}], TypeError,
     "batch[1]['a'] must be a sequence like batch[0]['a'], but is int."),
    ([[["a", "b"]], ["ab"]], TypeError,
     "batch[1][0] must be a sequence like batch[0][0], but is str."),
    ([{"a": {}}, {"a": None}], TypeError,
     "batch[1]['a'] must be a mapping like batch[0]['a'], but is None."),
    ([RECURSIVE], ValueError,
     "data_batch[0][0][0][0]... must nest its containers at most 64 deep, but it nests "
     "deeper. Look for a container that contains itself."),
]  # fmt: skip


@both
@pytest.mark.parametrize(("batch", "kind", "text"), REFUSED)
def test_errors_name_sample_and_key(
    collate: Any, batch: Any, kind: Any, text: str
) -> None:
    with pytest.raises(kind) as caught:
        collate(batch)
    assert str(caught.value) == text
