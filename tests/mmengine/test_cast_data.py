"""BaseDataPreprocessor.cast_data: moved values, their copies, and unchanged values."""

from __future__ import annotations

import array
from collections import OrderedDict, UserList, namedtuple
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from pyparallel import DataContainer, collate
from pyparallel.mmengine import BaseDataPreprocessor, _cast_data

pytestmark = pytest.mark.one_backend

META = torch.device("meta")


class Element:
    """An object that knows its way."""

    def __init__(self, device: Any = None, **options: Any) -> None:
        self.device, self.options = device, options

    def to(self, device: Any, **options: Any) -> Element:
        return Element(device, **options)


def to_meta(data: Any, non_blocking: bool = False) -> Any:
    preprocessor = BaseDataPreprocessor(non_blocking)
    preprocessor.to("meta")
    return preprocessor.cast_data(data)


def on_host(data: Any) -> Any:
    return BaseDataPreprocessor().cast_data(data)


def test_on_the_host_containers_are_new_and_tensors_the_very_ones() -> None:
    t = torch.zeros(4, 4).t()
    data = {"a": [t], "b": t}
    result = on_host(data)
    assert result is not data and result["a"] is not data["a"]
    assert result["a"][0] is t and result["b"] is t
    assert on_host(t) is t


def test_values_without_to_are_passed_through() -> None:
    buffers = [b"bytes", bytearray(b"12"), memoryview(b"12"), array.array("i", [1, 2])]
    arrays = [np.arange(3), np.float32(2)]
    others = [range(3), "text", None, 2.5, {1, 2}, slice(1), Element, torch.float32]
    others.append(torch.Size([2, 3]))
    for value in (*buffers, *arrays, *others):
        assert to_meta(value) is value
        assert to_meta({"a": [value, torch.zeros(1)]})["a"][0] is value


def test_sequences_of_other_kinds_are_walked() -> None:
    class Frozen(UserList):
        def __init__(self, *items: Any) -> None:
            super().__init__(items)

    t = torch.zeros(1)
    result = to_meta({"a": UserList([t, 1]), "b": Frozen(t, 1), "c": UserList([1])})
    assert type(result["a"]) is UserList
    assert result["a"][0].device == META and result["a"][1] == 1
    kept = UserList([1, "a"])
    assert to_meta([kept])[0] is kept


def test_an_override_is_called_for_each_value() -> None:
    class Numpy(BaseDataPreprocessor):
        def cast_data(self, data: Any) -> Any:
            if isinstance(data, np.ndarray):
                return torch.from_numpy(data)
            return super().cast_data(data)

    pair = namedtuple("pair", "a b")
    data = OrderedDict(a=[np.ones(2), "text"], b=pair(np.ones(3), (torch.ones(1),)))
    result = Numpy()(data)
    assert type(result) is OrderedDict and type(result["b"]) is pair
    assert torch.equal(result["a"][0], torch.ones(2).double())
    assert torch.equal(result["b"].a, torch.ones(3).double())
    assert result["a"][1] == "text" and result["b"].b == data["b"].b


@pytest.mark.parametrize("enforce_sorted", [False, True])
def test_the_sizes_of_a_packed_sequence_stay_on_the_host(enforce_sorted: bool) -> None:
    steps = [torch.ones(3, 2), torch.ones(2, 2)]
    packed = pack_sequence(steps, enforce_sorted=enforce_sorted)
    expected = packed.to(META)
    for moved in (to_meta([packed])[0], DataContainer(packed).to(META).data):
        assert type(moved) is PackedSequence
        assert moved.batch_sizes is packed.batch_sizes
        for one, other in zip(moved, expected, strict=True):
            assert (one is None) is (other is None)
            assert one is None or (one.device, one.shape) == (other.device, other.shape)


def test_objects_with_a_to_method_use_it() -> None:
    result = to_meta([Element(), {"a": Element()}])
    assert result[0].device == META and result[0].options == {}
    assert result[1]["a"].device == META
    assert to_meta(Element(), non_blocking=True).options == {"non_blocking": True}


def test_datacontainers_are_replaced_and_metadata_is_unchanged() -> None:
    samples = [
        {
            "img": DataContainer(torch.full((1, n), float(n)), stack=True, pad_dims=1),
            "boxes": DataContainer(torch.zeros(n, 4)),
            "metas": DataContainer({"n": n, "t": torch.zeros(1)}, cpu_only=True),
        }
        for n in (1, 2)
    ]
    data = collate(samples, samples_per_gpu=2)
    assert on_host(data)["img"].tolist() == [[[1, 0]], [[2, 2]]]
    result = to_meta(data)
    assert result["img"].device == META and result["boxes"][1].device == META
    assert [meta["n"] for meta in result["metas"]] == [1, 2]
    assert result["metas"][0]["t"].device == torch.device("cpu")


def test_a_container_of_many_chunks_is_named() -> None:
    data = {"img": DataContainer([torch.zeros(1), torch.zeros(1)], stack=True)}
    with pytest.raises(ValueError) as caught:
        on_host([data])
    assert str(caught.value) == (
        "data[0]['img'] must have at most one chunk for each target (1), but has 2. "
        "Collate with a larger samples_per_gpu, or name more targets."
    )


def test_a_cycle_is_an_error() -> None:
    data: list[Any] = [torch.zeros(1)]
    data.append(data)
    with pytest.raises(ValueError, match="nest its containers at most"):
        on_host(data)


def test_a_device_that_is_not_there_is_named() -> None:
    if torch.cuda.is_available():
        pytest.skip("is about a machine without")
    preprocessor = BaseDataPreprocessor()
    preprocessor._device = torch.device("cuda", 0)
    with pytest.raises(RuntimeError) as caught:
        preprocessor.cast_data({"a": torch.zeros(1)})
    assert str(caught.value).startswith(
        "cast_data: device cuda:0 must be a device of this machine, but torch "
    )


def test_all_tensors_are_copied_together(monkeypatch: pytest.MonkeyPatch) -> None:
    copies = []

    def move(leaves: Any, parts: Any, target: Any, dtype: Any) -> Any:
        copies.append((list(leaves), target, dtype))
        return [
            part.to("meta") if isinstance(part, torch.Tensor) else part
            for part in parts
        ]

    cuda = torch.device("cuda", 0)
    monkeypatch.setattr(_cast_data, "move", move)
    monkeypatch.setattr(_cast_data, "resolve_target", lambda device, *_: cuda)
    preprocessor = BaseDataPreprocessor()
    preprocessor._device = torch.device("cuda")
    t = torch.zeros(1)
    data = {"inputs": [t, t], "more": {"a": (t, "b")}, "element": Element()}
    result = preprocessor.cast_data(data)
    (queued,) = copies
    tensors = [leaf for leaf in queued[0] if isinstance(leaf, torch.Tensor)]
    assert len(tensors) == 3 and queued[1:] == (cuda, None)
    assert result["more"]["a"][0].device == META
    assert result["element"].device == torch.device("cuda")
    preprocessor.cast_data([t, None, 1, "a"])
    assert len(copies) == 2
