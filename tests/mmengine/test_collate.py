"""pseudo_collate and default_collate: types, values, and errors with a path."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, UserDict, UserList, defaultdict, deque, namedtuple
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mmengine_compare import same
from torch.utils.data import DataLoader

from pyparallel import DataContainer
from pyparallel.mmengine import default_collate, pseudo_collate

pytestmark = pytest.mark.also_peers

Point = namedtuple("Point", ["x", "y"])
both = pytest.mark.parametrize("collate", [pseudo_collate, default_collate])


class Element:
    def to(self, device: Any) -> Element:
        return self


@dataclasses.dataclass
class Sample:
    a: int


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


@both
@pytest.mark.parametrize("batch", [["a", "b"], ("a", "b"), [b"a"], (b"",)])
def test_a_batch_of_text_is_the_result(collate: Any, batch: Any) -> None:
    assert collate(batch) is batch


def test_leaves_are_passed_on_without_a_copy() -> None:
    batch = (1, 2)
    assert pseudo_collate(batch) is batch
    elements = [Element()]
    assert default_collate(elements) is elements
    assert pseudo_collate([None, 1]) == [None, 1]
    assert pseudo_collate([Sample(1)]) == [Sample(1)]
    image = torch.zeros(1)
    assert pseudo_collate([{"img": image}])["img"][0] is image


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


@both
def test_a_mapping_that_refuses_a_dict_becomes_one(collate: Any) -> None:
    class Fixed(UserDict):
        def __init__(self, *, a: Any) -> None:
            super().__init__(a=a)

    assert collate([Fixed(a="1"), Fixed(a="2")]) == {"a": ["1", "2"]}
    # Keys that the first sample lacks are dropped.
    assert collate([{"a": "1"}, {"a": "2", "b": "3"}]) == {"a": ["1", "2"]}


@both
def test_datacontainers_are_batched_by_their_flags(collate: Any) -> None:
    batch = [
        {
            "img": DataContainer(torch.full((1, n), n), stack=True, pad_dims=1),
            "metas": DataContainer({"n": n}, cpu_only=True),
        }
        for n in (1, 2)
    ]
    result = collate(batch)
    assert result["img"].data[0].tolist() == [[[1, 0]], [[2, 2]]]
    assert result["metas"].data == [[{"n": 1}, {"n": 2}]]


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


@pytest.mark.parametrize(
    ("batch", "kind", "start"),
    [
        ([{"a": None}], TypeError, "batch[0]['a'] must be a tensor, a numeric array"),
        ([[1, Sample(1)]], TypeError, "batch[0][1] must be a tensor, a numeric array"),
        ([{"a": torch.zeros(2)}, {"a": torch.zeros(3)}], RuntimeError,
         "batch[1]['a'] must match batch[0]['a'], but has shape (3,) where (2,) was"),
        ([(torch.zeros(2),), (2,)], TypeError,
         "batch[1][0] must be a tensor like batch[0][0], but is int."),
    ],
)  # fmt: skip
def test_values_that_cannot_be_stacked_are_named(
    batch: Any, kind: Any, start: str
) -> None:
    with pytest.raises(kind) as caught:
        default_collate(batch)
    assert str(caught.value).startswith(start)


def test_in_a_worker_stacks_are_in_shared_memory() -> None:
    samples = [{"img": torch.full((3,), i), "name": str(i)} for i in range(4)]
    loader = DataLoader(
        samples,  # type: ignore[arg-type]  # a list is a dataset
        batch_size=2,
        num_workers=1,
        collate_fn=default_collate,
        multiprocessing_context="fork",
    )
    batches = list(loader)
    assert [each["img"].tolist() for each in batches] == [
        [[0] * 3, [1] * 3],
        [[2] * 3, [3] * 3],
    ]
    assert all(each["img"].is_shared() for each in batches)
    assert [each["name"] for each in batches] == [["0", "1"], ["2", "3"]]


SCHEMAS = st.recursive(
    st.sampled_from(["text", "int", "tensor", "element"]),
    lambda children: st.one_of(
        st.tuples(st.just("list"), st.lists(children, max_size=3)),
        st.tuples(st.just("tuple"), st.lists(children, max_size=3)),
        st.tuples(st.just("point"), st.tuples(children, children).map(list)),
        st.tuples(st.just("dict"), st.lists(children, max_size=3)),
    ),
    max_leaves=8,
)
ELEMENT = Element()


def sample_of(schema: Any, i: int) -> Any:
    if isinstance(schema, str):
        return {"text": f"t{i}", "int": i, "tensor": torch.tensor([i, i])}.get(
            schema, ELEMENT
        )
    kind, parts = schema
    values = [sample_of(part, i) for part in parts]
    if kind == "dict":
        return {f"k{j}": value for j, value in enumerate(values)}
    if kind == "point":
        return Point(*values)
    return values if kind == "list" else tuple(values)


def expected_of(schema: Any, num: int, stacks: bool, form: Any) -> Any:
    """Return the result by the rules, knowing the schema; ``form`` of the leaves."""
    if isinstance(schema, str):
        values = form(sample_of(schema, i) for i in range(num))
        if stacks and schema == "int":
            return torch.tensor(values)
        return torch.stack(list(values)) if stacks and schema == "tensor" else values
    kind, parts = schema
    inner = list if kind == "dict" else tuple
    values = [expected_of(part, num, stacks, inner) for part in parts]
    if kind == "dict":
        return {f"k{j}": value for j, value in enumerate(values)}
    return Point(*values) if kind == "point" else values


@settings(deadline=None, max_examples=150)
@given(SCHEMAS, st.integers(1, 4), st.booleans(), st.sampled_from([list, tuple]))
def test_every_form_by_the_rules(
    schema: Any, num: int, stacks: bool, form: Any
) -> None:
    batch = form(sample_of(schema, i) for i in range(num))
    collate = default_collate if stacks else pseudo_collate
    assert same(collate(batch), expected_of(schema, num, stacks, form))
