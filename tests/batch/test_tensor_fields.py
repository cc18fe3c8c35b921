"""`Padded` and `Ragged` as objects: samples, pytree nodes, pickles and checks."""

from __future__ import annotations

import copy
import pickle
import re
from collections.abc import Callable, Iterator
from typing import Any

import optree
import pytest
import torch
from torch.utils import _pytree

from pyparallel import DataContainer, Padded, Ragged
from pyparallel.batch import pytree

SAMPLES = [torch.tensor([1.0, 2.0]), torch.zeros(0), torch.tensor([3.0])]


def ragged() -> Ragged:
    return Ragged(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([0, 2, 2, 3]))


def padded() -> Padded:
    data = torch.tensor([[1.0, 2.0], [0.0, 0.0], [3.0, 0.0]])
    return Padded(data, torch.tensor([[2], [0], [1]]), None)


both = pytest.mark.parametrize("make", [ragged, padded])


@both
def test_len_iteration_and_indices_count_samples(make: Callable[[], Any]) -> None:
    value = make()
    expected = SAMPLES if make is ragged else list(padded().data)
    assert len(value) == value.num_samples == 3
    for found in (list(value), [value[i] for i in range(3)], [*value[:1], *value[1:]]):
        assert all(map(torch.equal, found, expected)) and len(found) == 3
    assert torch.equal(value[-1], expected[-1])
    assert len(value[2:1]) == 0 and type(value[1:]) is type(value)
    with pytest.raises(IndexError):
        value[3]
    name = type(value).__name__
    with pytest.raises(ValueError, match=re.escape(f"{name}: a slice must have the")):
        value[::2]


@both
@pytest.mark.parametrize(
    "ends", [(0, 9), (1, 1), (2, 1), (3, 3), (5, 5), (-2, 3), (-2, -1), (-1, -2)]
)
def test_a_part_has_the_samples_of_a_slice(
    make: Callable[[], Any], ends: tuple[int, int]
) -> None:
    part, expected = make().part(*ends), list(make())[slice(*ends)]
    assert len(part) == len(expected)
    assert all(map(torch.equal, part, expected))


def test_shape_dtype_and_device_are_those_of_the_data() -> None:
    assert ragged().shape == (3, None) and padded().shape == (3, 2)
    assert Ragged.from_tensors([torch.ones(2, 4, 5)]).shape == (1, None, 4, 5)
    for value in (ragged(), padded()):
        assert (value.dtype, value.device) == (torch.float32, torch.device("cpu"))


@both
def test_to_casts_the_data_and_moves_every_tensor(make: Callable[[], Any]) -> None:
    value = make()
    assert value.to("cpu") is value.to(torch.float32) is value.to() is value
    for half in (value.to(torch.half), value.to("cpu", torch.half)):
        assert type(half) is type(value) and half.dtype == torch.half
        assert half.fields()[1] is value.fields()[1]
    there = value.to("meta", non_blocking=True)
    assert there.device.type == "meta"
    assert [x is None for x in there.fields()] == [x is None for x in value.fields()]
    assert all(x.is_meta for x in there.fields() if x is not None)
    assert value.to(copy=True) == value and value.to(copy=True) is not value
    dtype: Any = value.dtype
    assert value.to(dtype, True) is value is not value.to(dtype, False, True)
    assert value.to(dtype, False, copy=True) is not value


@both
def test_equality_is_by_value(make: Callable[[], Any]) -> None:
    value, other = make(), make()
    assert value == other and not value != other
    other.fields()[0][-1] = 7
    assert value != other and value != value.to(torch.double) and value != 3
    assert padded() != ragged() and padded() != Padded(padded().data)
    with pytest.raises(TypeError, match="unhashable"):
        hash(value)


def test_the_repr_shows_the_shapes_and_not_the_values() -> None:
    data = torch.zeros(2, 3, 1000)
    sizes, mask = torch.ones(2, 1, dtype=torch.int64), torch.ones(2, 1000) > 0
    start = "Padded(data=(2, 3, 1000), dtype=torch.float32, device=cpu"
    assert repr(Padded(data)) == f"{start})"
    assert repr(Padded(data, sizes)) == f"{start}, sizes=(2, 1))"
    assert repr(Padded(data, None, mask)) == f"{start}, mask=(2, 1000))"
    ragged = Ragged.from_tensors([torch.ones(n, 2, dtype=torch.half) for n in (3, 4)])
    text = "Ragged(values=(7, 2), dtype=torch.float16, device=cpu, offsets=(3,))"
    assert repr(ragged) == str(ragged) == text
    assert repr(DataContainer([ragged])) == f"DataContainer([{text}])"
    assert repr(Padded(data).to("meta")) == start.replace("cpu", "meta") + ")"
    names = Padded.from_fields(["a", None, "b"])  # a node in a tree of other objects
    assert repr(names) == "Padded(data='a', sizes=None, mask='b')"


@both
def test_copies_and_pickles_are_equal_and_name_the_public_path(
    make: Callable[[], Any],
) -> None:
    value = make()
    assert copy.deepcopy(value) == copy.copy(value) == value
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        written = pickle.dumps(value, protocol)
        assert pickle.loads(written) == value and b"pyparallel.batch" not in written


@both
def test_pytrees_of_torch_and_of_optree_reach_the_tensors(
    make: Callable[[], Any],
) -> None:
    batch = {"x": make(), "y": torch.ones(1)}
    double = {"x": make().fields()[0] * 2}
    for tree_map in (optree.tree_map, _pytree.tree_map):
        found = tree_map(lambda x: x if x is None else x * 2, batch)
        assert type(found["x"]) is type(make())
        assert torch.equal(found["x"].fields()[0], double["x"])
    names = ("values", "offsets", "data", "sizes", "mask")
    found = [str(path[-1]) for path, _ in _pytree.tree_leaves_with_path(make())]
    assert found == [f".{name}" for name in names if hasattr(make(), name)]
    leaves, structure = pytree.flatten(batch)
    assert pytree.unflatten(structure, leaves)["x"] == make()
    assert pytree.accessors(structure)[0].codify("batch").startswith("batch['x'].")


def bad_fields() -> Iterator[tuple[Any, Any, str]]:
    values, offsets = torch.ones(3), torch.tensor([0, 3])
    advice = "Use Ragged.from_tensors for a list of samples."
    yield [values], offsets, f"Ragged: values must be a tensor, but is list. {advice}"
    yield values, [0, 3], f"Ragged: offsets must be a tensor, but is list. {advice}"
    forms = (
        (offsets.int(), "torch.int32 of shape (2,) on cpu"),
        (offsets[None], "torch.int64 of shape (1, 2) on cpu"),
        (offsets[:0], "torch.int64 of shape (0,) on cpu"),
        (offsets.to("meta"), "torch.int64 of shape (2,) on meta"),
    )
    for wrong, form in forms:
        yield (
            values,
            wrong,
            "Ragged: offsets must be torch.int64 of shape (n + 1,) on the device of "
            f"values, cpu, but is {form} for values of shape (3,). {advice}",
        )
    for numbers in ([0, 2], [1, 3], [0, 2, 1, 3], [0, 4], [0]):
        yield (
            values,
            torch.tensor(numbers),
            "Ragged: offsets must ascend from 0 to 3, the length of values, but is "
            f"{numbers}. {advice}",
        )


@pytest.mark.parametrize(("values", "offsets", "text"), list(bad_fields()))
def test_wrong_offsets_are_refused(values: Any, offsets: Any, text: str) -> None:
    kind = TypeError if "must be a tensor" in text else ValueError
    with pytest.raises(kind) as caught:
        Ragged(values, offsets)
    assert str(caught.value) == text


def test_offsets_elsewhere_are_not_read() -> None:
    there = Ragged(torch.ones(3, device="meta"), torch.tensor([5], device="meta"))
    assert len(there) == 0
