"""DataContainer: attributes, pickles, copies and transfer through DataLoader."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data._utils.pin_memory import pin_memory

import pyparallel.mmcv
from pyparallel import DataContainer, Padding
from tests.support.batch import samples

FLAGS = ("data", "stack", "padding_value", "cpu_only", "pad_dims")
STATE = {"_data", "_stack", "_padding_value", "_cpu_only", "_pad_dims"}


def flags(container: DataContainer) -> tuple[Any, ...]:
    return tuple(getattr(container, name) for name in FLAGS)


def test_the_type_is_that_of_the_data() -> None:
    assert DataContainer(torch.ones(1)).datatype == "torch.FloatTensor"
    assert DataContainer(np.ones(1)).datatype is np.ndarray
    assert repr(DataContainer([1])) == "DataContainer([1])"


def test_size_and_dim_are_the_tensors() -> None:
    container = DataContainer(torch.ones(2, 3))
    assert (container.size(), container.dim()) == (torch.Size([2, 3]), 2)
    assert (container.size(-1), container.size(dim=0)) == (3, 2)
    for name in ("size", "dim"):
        with pytest.raises(AttributeError) as caught:
            getattr(DataContainer([1]), name)()
        assert str(caught.value) == (
            f"DataContainer has no attribute {name} for type <class 'list'>"
        )


def test_length_truth_iteration_and_items_are_the_datas() -> None:
    container = DataContainer([4, 5, 6])
    assert (len(container), list(container), container[1:]) == (3, [4, 5, 6], [5, 6])
    assert container and DataContainer(0) and not DataContainer([])
    assert DataContainer({"a": 1})["a"] == 1
    for call in (len, iter, lambda dc: dc[0]):
        with pytest.raises(TypeError):
            call(DataContainer(5))


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_pickle_keeps_everything_and_has_public_paths_only(protocol: int) -> None:
    padding = Padding(side="left", mask=True)
    for options in ({}, {"padding": padding}):
        container = DataContainer([torch.ones(2)], True, 7, False, 1, **options)
        written = pickle.dumps(container, protocol)
        assert b"pyparallel.batch" not in written
        again = pickle.loads(written)
        assert torch.equal(again.data[0], container.data[0])
        assert flags(again)[1:] == (True, 7, False, 1)
        assert again.padding == options.get("padding")


def written_by_mmcv(pad_dims: bytes = b"I2\n") -> bytes:
    """Return a pickle, opcode by opcode, as mmcv's own class makes it."""
    return (
        b"ccopy_reg\n_reconstructor\n"
        b"(cmmcv.parallel.data_container\nDataContainer\nc__builtin__\nobject\nNtR"
        b"(dV_data\n(lI4\naI5\nasV_cpu_only\nI01\nsV_stack\nI00\nsV_padding_value\nI7\ns"
        b"V_pad_dims\n" + pad_dims + b"sb."
    )


def test_a_pickle_of_mmcv_loads_while_installed() -> None:
    with pyparallel.mmcv.installed():
        container = pickle.loads(written_by_mmcv())
    assert type(container) is DataContainer
    assert flags(container) == ([4, 5], False, 7, True, 2)
    assert set(vars(container)) == set(vars(DataContainer(1))) == STATE


def test_a_pickle_with_impossible_pad_dims_is_refused() -> None:
    with pyparallel.mmcv.installed(), pytest.raises(ValueError) as caught:
        pickle.loads(written_by_mmcv(b"I1000000000\n"))
    assert str(caught.value) == (
        "DataContainer: pad_dims must be None, 1, 2 or 3, but is 1000000000."
    )


@pytest.mark.parametrize(
    "state, cls, message",
    [
        ({"_data": 1, "_stack": True, "_cpu_only": True}, ValueError,
         "the pickled state of a DataContainer must have _data, _stack, "
         "_padding_value, _cpu_only, _pad_dims, but lacks _padding_value, _pad_dims."),
        (5, TypeError,
         "the pickled state of a DataContainer must be a dict, but is int."),
        (dict.fromkeys(STATE, "2"), TypeError,
         "DataContainer: pad_dims must be None, 1, 2 or 3, but is '2' (str)."),
    ],
)  # fmt: skip
def test_a_broken_state_is_refused(state: Any, cls: type, message: str) -> None:
    container = object.__new__(DataContainer)
    with pytest.raises(cls) as caught:  # type: ignore[call-overload]
        container.__setstate__(state)
    assert str(caught.value) == message
    assert vars(container) == {}


class Named(DataContainer):
    """A subclass with an attribute of its own."""


def test_to_moves_every_tensor_inside_and_keeps_the_rest() -> None:
    inner = DataContainer(torch.ones(1))
    data = {"pair": samples.Pair(torch.ones(1), "text"), "deep": [(inner,)]}
    container = Named(data, True, 7, False, 1)
    container.note = "kept"  # type: ignore[attr-defined]
    moved = container.to("meta")
    assert (type(moved), moved.note) == (Named, "kept")  # type: ignore[attr-defined]
    assert flags(moved)[1:] == (True, 7, False, 1)
    assert type(moved.data["pair"]) is samples.Pair
    assert (moved.data["pair"].left.is_meta, moved.data["pair"].right) == (True, "text")
    assert moved.data["deep"][0][0].data.is_meta
    assert not data["pair"].left.is_meta and not inner.data.is_meta  # type: ignore[attr-defined]


def test_metadata_is_not_copied() -> None:
    meta = DataContainer([torch.ones(1)], cpu_only=True)
    assert meta.to("meta") is meta
    assert meta.pin_memory() is meta


def test_torchs_own_pin_memory_pins_containers(monkeypatch: pytest.MonkeyPatch) -> None:
    pinned = []

    def fake(tensor: torch.Tensor, *_: Any) -> torch.Tensor:
        pinned.append(tensor.tolist())
        return tensor.clone()

    monkeypatch.setattr(torch.Tensor, "pin_memory", fake)
    batch = {
        "img": DataContainer([torch.ones(1)], stack=True, padding_value=3),
        "boxes": DataContainer([[torch.ones(2), torch.ones(3)]]),
        "meta": DataContainer([[torch.zeros(1)]], cpu_only=True),
        "away": DataContainer(torch.ones(1, device="meta")),
    }
    got = pin_memory(batch)
    assert pinned == [[1], [1, 1], [1, 1, 1]]
    assert got["meta"] is batch["meta"]
    assert flags(got["img"])[1:] == flags(batch["img"])[1:]
    assert got["boxes"].data[0][1] is not batch["boxes"].data[0][1]
    assert torch.equal(got["boxes"].data[0][1], torch.ones(3))
