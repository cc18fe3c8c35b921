"""Containers of other libraries, registered with torch's pytree and default_collate."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.utils import _pytree
from torch.utils.data import default_collate
from torch.utils.data._utils.collate import default_collate_fn_map

from pyparallel import (
    BatchWarning,
    Collate,
    DataLoader,
    List,
    Pad,
    Stack,
    collate,
    gather,
    scatter,
    to_host,
)
from pyparallel.core import errors

pytestmark = pytest.mark.also_peers


class Cloud:
    """Points and their unit; no container that the library knows by itself."""

    def __init__(self, points: torch.Tensor, unit: str) -> None:
        self.points, self.unit = points, unit


class Named(Cloud):
    """The same, registered with the names of its children."""


@pytest.fixture(autouse=True, scope="module")
def registered() -> Iterator[None]:
    def join(batch: list[Cloud], **_: Any) -> Cloud:
        return type(batch[0])(torch.stack([c.points for c in batch]), batch[0].unit)

    for cls, steps in (
        (Cloud, None),
        (Named, lambda c: ([(_pytree.GetAttrKey("points"), c.points)], c.unit)),
    ):
        _pytree.register_pytree_node(
            cls,
            lambda c: ([c.points], c.unit),
            lambda points, unit, cls=cls: cls(*points, unit),
            flatten_with_keys_fn=steps,
        )
    default_collate_fn_map[Cloud] = join
    yield
    del default_collate_fn_map[Cloud]


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize("cls", [Cloud, Named])
def test_registered_classes_are_batched_split_and_rebuilt_as_registered(
    cls: Any,
) -> None:
    clouds = [{"c": cls(torch.tensor([2 * i, 2 * i + 1]), "m")} for i in range(3)]
    for num_workers in (0, 1):
        (batch,) = DataLoader(clouds, batch_size=3, num_workers=num_workers)
        parts = [each["c"] for each in scatter(batch, ["cpu", "cpu"])]
        joined = gather([{"c": part} for part in parts], "cpu")["c"]
        (back,) = to_host([batch["c"]])
        for each in (*parts, joined, back):
            assert type(each) is cls and each.unit == "m"
        assert [part.points.tolist() for part in parts] == [[[0, 1], [2, 3]], [[4, 5]]]
        for each in (batch["c"], joined, back):
            assert each.points.tolist() == [[0, 1], [2, 3], [4, 5]]


class Points(torch.Tensor):
    """A tensor that another library collates."""


class Label(str):
    """A text that another library collates."""


class Marker(type):
    """The class of a class that is no base class, as tensordict's of a tensorclass."""

    def __instancecheck__(cls, value: Any) -> bool:
        return type(value) is Unbased


class Marked(metaclass=Marker):
    """Its own check decides which objects are instances."""


class Unbased:
    """An object that another library collates."""


@pytest.mark.parametrize(
    ("value", "cls"),
    [
        (torch.ones(2).as_subclass(Points), Points),
        (Label("a"), Label),
        (Unbased(), Marked),
    ],
    ids=["tensor", "text", "marked"],
)
def test_registered_tensors_texts_and_objects_are_batched_as_registered(
    value: Any, cls: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(
        default_collate_fn_map, cls, lambda batch, **_: ("joined", batch)
    )
    name, found = collate([{"x": value}] * 2)["x"]
    assert name == "joined" and all(each is value for each in found)


@dataclass
class Scan:
    """A sample that a program also collates for torch's loader."""

    points: torch.Tensor


def joined(batch: list[Any], **_: Any) -> str:
    return f"joined {len(batch)}"


def test_a_registered_function_leaves_rules_to_their_fields(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(default_collate_fn_map, Scan, joined)
    scans = [Scan(torch.ones(n)) for n in (1, 2)]
    padded = [[1, 0], [1, 1]]
    assert Collate(points=Pad())(scans).points.tolist() == padded
    inside = Collate({"scan.points": Pad()})([{"scan": each} for each in scans])
    assert inside["scan"].points.tolist() == padded
    assert Collate(id=List())([{"scan": each, "id": 0} for each in scans]) == {
        "scan": "joined 2",
        "id": [0, 0],
    }


def test_automatic_rules_leave_registered_classes_to_their_function(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for cls in (Scan, Points):
        monkeypatch.setitem(default_collate_fn_map, cls, joined)
    for value in (Scan(torch.ones(2)), torch.ones(2).as_subclass(Points)):
        samples = [{"x": value, "id": i} for i in range(2)]
        assert repr(Collate.auto(samples)) == "Collate(id=Stack())"
        assert Collate.auto(samples)(samples)["x"] == "joined 2"
        assert Collate.auto([value] * 2)([value] * 2) == "joined 2"
    points = [torch.ones(n).as_subclass(Points) for n in (1, 2)]
    monkeypatch.setattr(errors, "_warned", set())
    with pytest.warns(BatchWarning, match="PP105"):
        assert repr(Collate.auto(points)) == "Collate(default=List())"


def test_registered_classes_that_do_not_fit_are_named() -> None:
    batch = [{"c": Cloud(torch.ones(n), "m")} for n in (2, 2, 3)]
    with pytest.raises(RuntimeError) as torchs:
        default_collate([batch[0]["c"], batch[2]["c"]])
    with pytest.raises(ValueError) as caught:
        collate(batch)
    assert str(caught.value) == (
        "batch[2]['c'] must fit batch[0]['c'], but default_collate cannot join two "
        f"{__name__}.Cloud objects: {torchs.value}"
    )
    with pytest.raises(TypeError) as caught:
        collate([{"c": Cloud(torch.ones(2), "m")}, {"c": 5}])
    assert str(caught.value) == (
        f"batch[1]['c'] must be a {__name__}.Cloud like batch[0]['c'], but is int."
    )
    with pytest.raises(TypeError) as caught:
        Collate({"c.points": Pad()})(batch)
    assert str(caught.value) == (
        "Collate: rules must be for fields of dicts and objects, but a sample has a "
        f"{__name__}.Cloud, which its library batches as a whole. Return to_dict() of "
        "it from the data set, or remove the rules for its fields."
    )


def test_a_tensordict_takes_part_as_a_tensordict() -> None:
    TensorDict = pytest.importorskip("tensordict").TensorDict
    samples = [
        TensorDict({"a": torch.full((3,), i), "n": {"b": torch.ones(2)}}, [])
        for i in range(4)
    ]
    batch = collate([{"td": sample} for sample in samples], 4)["td"]
    whole = torch.stack(samples)
    assert type(batch) is TensorDict and batch.batch_size == (4,)
    assert (batch == whole).all()
    parts = [each["td"] for each in scatter({"td": batch}, ["cpu", "cpu"])]
    assert [part.batch_size for part in parts] == [(2,), (2,)]
    assert [part["n"].batch_size for part in parts] == [(2,), (2,)]
    assert (torch.cat(parts) == whole).all()
    joined = gather(parts, "cpu")
    assert joined.batch_size == (4,) and (joined == whole).all()
    assert (to_host(batch) == whole).all()
    for num_workers in (0, 1):
        loader = DataLoader(samples, batch_size=2, num_workers=num_workers)
        assert (torch.cat(list(loader)) == whole).all()
    rules = Collate({"n.b": Stack()})
    with pytest.raises(TypeError, match=re.escape("Return to_dict() of it")):
        rules(samples)
    assert rules([each.to_dict() for each in samples])["n"]["b"].shape == (4, 2)
    assert repr(Collate.auto(samples)) == "Collate()"
