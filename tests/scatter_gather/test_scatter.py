"""scatter on the host: values, containers, identity, options."""

from __future__ import annotations

import collections

import numpy as np
import pytest
import torch

from pyparallel import DataContainer as DC
from pyparallel import collate, scatter, scatter_kwargs, to_host
from tests.support.batch.samples import Frozen, Pair
from tests.support.processes.backends import both, using

pytestmark = [pytest.mark.cuda_torch, pytest.mark.asan]

CPU2 = ["cpu", "cpu"]


class Config(dict):
    """A dict with attribute access, as configuration libraries have it."""

    __getattr__ = dict.__getitem__


def chunks(*sizes: int) -> list[torch.Tensor]:
    """Return chunks of these sizes that count samples on."""
    return list(torch.arange(sum(sizes)).split(list(sizes)))


# Targets


def test_one_host_target_gives_one_part_without_a_copy():
    tensor, cpu = torch.arange(6).view(2, 3), torch.device("cpu")
    for targets in (-1, "cpu", cpu, "cpu:0", [-1], ["cpu"], (cpu,), range(-1, 0),
                    iter([-1]), [np.int64(-1)], [torch.tensor(-1)],
                    np.int64(-1), torch.tensor(-1)):  # fmt: skip
        (part,) = scatter({"x": tensor}, targets)
        assert part["x"] is tensor


# The partition


@pytest.mark.parametrize(
    ("size", "spg", "num", "expected"),
    [(3, 4, 2, [3]), (6, 4, 2, [4, 2]), (9, 4, 3, [4, 4, 1]), (3, 2, 2, [2, 1])],
)
def test_tensors_next_to_a_container_follow_its_chunks(size, spg, num, expected):
    batch = [
        {"img": DC(torch.full((1, 2, 2), i), stack=True), "label": torch.tensor(i)}
        for i in range(size)
    ]
    parts = scatter(collate(batch, spg), ["cpu"] * num)
    assert [len(part["label"]) for part in parts] == expected
    for part in parts:
        assert part["img"][:, 0, 0, 0].tolist() == part["label"].tolist()


# Options


class Named(np.ndarray):
    """An array with another name."""


def test_arrays_of_every_class_are_split(tmp_path):
    mapped = np.memmap(tmp_path / "map", np.int64, "w+", shape=(5,))
    mapped[:] = range(5)
    for array in (np.arange(5), np.arange(5).view(Named), mapped):
        parts = scatter({"x": torch.arange(5), "y": array}, CPU2, max_size=2)
        assert [part["y"].tolist() for part in parts] == [[0, 1], [3, 4]]


def test_max_size_cuts_the_excess_of_every_part():
    batch = {
        "x": torch.arange(7),
        "img": DC(chunks(4, 3), stack=True),
        "boxes": DC([[torch.ones(1)] * 4, [torch.ones(1)] * 3]),
        "meta": DC([list("abcd"), list("efg")], cpu_only=True),
        "array": np.arange(7),
        "name": "kept",
    }
    first, second = scatter(batch, CPU2, max_size=2)
    assert (first["x"].tolist(), second["x"].tolist()) == ([0, 1], [4, 5])
    assert (first["img"].tolist(), second["img"].tolist()) == ([0, 1], [4, 5])
    assert [len(p["boxes"]) for p in (first, second)] == [2, 2]
    assert (first["meta"], second["meta"]) == (["a", "b"], ["e", "f"])
    assert (first["array"].tolist(), first["name"]) == ([0, 1], "kept")
    assert scatter(torch.arange(9), [-1], max_size=4)[0].tolist() == [0, 1, 2, 3]
    assert scatter(torch.ones(3, 5), [-1], dim=1, max_size=4)[0].shape == (3, 4)
    assert scatter(DC([list("abc")], cpu_only=True), [-1], max_size=2) == (["a", "b"],)


def test_dtype_casts_floating_point_tensors_only():
    batch = {
        "f": torch.ones(2),
        "deep": (DC([[torch.ones(2, dtype=torch.float64)]]), [torch.ones(2)]),
        "i": torch.ones(2, dtype=torch.int32),
        "meta": DC([[torch.ones(2)]], cpu_only=True),
    }
    (part,) = scatter(batch, [-1], dtype=torch.float16)
    assert part["f"].dtype == part["deep"][0][0].dtype == torch.float16
    assert part["deep"][1][0].dtype == torch.float16
    assert part["i"].dtype == torch.int32
    assert part["meta"][0].dtype == torch.float32


# Containers and identity


def test_containers_keep_their_types():
    tensor = torch.arange(4)
    batch = {
        "named": Pair(tensor, 1),
        "ordered": collections.OrderedDict(z=tensor, a=2),
        "default": collections.defaultdict(list, k=tensor),
        "config": Config(x=tensor),
        "mapped": collections.UserDict(x=tensor),
        "frozen": Frozen(3, DC(chunks(2, 2), stack=True)),
        "deque": collections.deque([tensor]),
        "tuple": (tensor,),
        "list": [tensor],
        "size": tensor.shape,
    }
    for i, part in enumerate(scatter(batch, CPU2)):
        values = [2 * i, 2 * i + 1]
        assert list(part) == list(batch)
        assert {k: type(v) for k, v in part.items()} == {
            k: type(v) for k, v in batch.items()
        }
        assert part["named"].left.tolist() == values
        assert list(part["ordered"]) == ["z", "a"]
        assert part["default"].default_factory is list
        assert part["config"].x.tolist() == part["mapped"]["x"].tolist() == values
        assert part["frozen"].left == 3
        assert part["frozen"].right.tolist() == values


def test_cpu_only_content_is_the_very_object():
    meta = {"file": "a.png"}
    assert scatter(DC([[meta]], cpu_only=True), [-1])[0][0] is meta
    assert scatter({"m": DC([[meta]], cpu_only=True)}, [-1])[0]["m"][0] is meta
    five = [[i] for i in range(5)]
    assert scatter(DC(five, cpu_only=True), [-1]) is five


@pytest.mark.parametrize("targets", [[-1], CPU2])
@pytest.mark.parametrize(
    "make", [list, dict, collections.OrderedDict, collections.deque]
)
def test_empty_containers_are_the_very_objects(targets, make):
    empty, tensor = make(), torch.arange(4)
    given = (tensor, empty, {"deep": {"x": tensor, "out": empty}})
    for part in scatter([tensor, empty], targets):
        assert part[1] is empty
    for part in scatter([{"x": tensor}, empty], targets):
        assert part[1] is empty
    for part in scatter(given, targets):
        assert part is not given and len(part[0]) == 4 // len(targets)
        assert part[1] is empty and part[2]["deep"]["out"] is empty
    inputs, kwargs = scatter_kwargs((tensor, empty), {"cache": empty}, targets)
    assert len(inputs) == len(kwargs) == len(targets)
    for args, named in zip(inputs, kwargs, strict=True):
        assert args[1] is named["cache"] is empty
    for part in scatter(empty, targets):
        assert part is empty
    inputs, kwargs = scatter_kwargs((empty,), {}, targets)
    assert all(args[0] is empty for args in inputs)
    assert kwargs == ({},) * len(targets)


# In compiled code


@both
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # of torch
def test_a_compiled_step_may_scatter(backend):
    weight = torch.ones(2, requires_grad=True)

    def step(x):
        y = x * weight
        (part,) = scatter({"y": y, "turned": x.t()}, "cpu", dtype=torch.float64)
        chunks = DC([x[:2], x[2:]], stack=True)
        parts = scatter({"y": y, "img": chunks}, ["cpu", "cpu"])
        (args,), (kwargs,) = scatter_kwargs((y,), {"x": x}, -1)
        others = [part["turned"].t(), parts[0]["y"], parts[1]["img"], kwargs["x"]]
        return [part["y"], args[0], *others]

    x = torch.arange(6.0).view(3, 2)
    with using(backend):
        torch.compiler.reset()
        found = torch.compile(step, backend="eager")(x)
        expected = step(x)
    assert all(map(torch.equal, found, expected))
    found[0].sum().backward()
    assert weight.grad.tolist() == [6, 9]


class Unknown:
    """A class that no walk has met before."""


@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace")
def test_a_compiled_step_may_move_objects_of_any_class():
    def step(x):
        return to_host([x + 1, Unknown()])[0] + DC([x, Unknown()]).to("cpu").data[0]

    torch.compiler.reset()
    x = torch.ones(2)
    assert (
        torch.compile(step, backend="eager")(x).tolist() == step(x).tolist() == [3, 3]
    )
