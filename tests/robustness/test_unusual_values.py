"""Masked arrays, meta tensors and other layouts get errors with names."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from pyparallel import (
    Collate,
    Concat,
    DataContainer,
    List,
    Pad,
    PreDataLoader,
    Ragged,
    Stack,
    collate,
    gather,
    scatter,
    to_host,
)
from pyparallel.core.errors import Error
from tests.support.processes.backends import both, using
from tests.support.processes.entry_points import ENTRY_POINTS, tensors_of

pytestmark = [
    pytest.mark.cuda_torch,
    pytest.mark.filterwarnings("ignore::UserWarning"),  # torch's, of rare kinds
]


@dataclass
class Record:
    x: Any


SHAPE = (1, 2, 3)
#: These entry points need tensors.
OF_ARRAYS = {"stack_batch", "gather", "gather sums", "gather Ragged"}
OF_ARRAYS |= {"scatter", "to_padded"}


def masked(value: float = 1, shape: tuple[int, ...] = SHAPE) -> Any:
    return np.ma.array(np.full(shape, value), mask=np.zeros(shape, bool))


@both
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("entry", [e for e in ENTRY_POINTS if e not in OF_ARRAYS])
def test_a_masked_array_is_refused_by_its_name(
    entry: str, first: bool, backend: ModuleType
) -> None:
    samples: list[Any] = [masked(), np.ones(SHAPE)]
    samples = samples if first else samples[::-1]
    with using(backend), pytest.raises(TypeError) as caught:
        ENTRY_POINTS[entry](samples)
    text = str(caught.value)
    assert f"[{samples.index(samples[0]) if first else 1}]" in text
    assert (
        "must be an array without a mask, because a tensor cannot hold the mask, but "
        "is numpy.ma.MaskedArray. "
    ) in text
    # Each of the two advices works.
    assert text.endswith(
        ("Return filled() of the array and its mask as two values.",
         "Use List() to keep the values in a list.")
    )  # fmt: skip
    fields = [{"a": each.filled(), "mask": each.mask} for each in [masked(2)] * 2]
    assert collate(fields)["mask"].dtype == torch.bool
    assert Collate(default=List())(samples) == samples


def test_masks_within_numbers_and_lists_are_refused_too() -> None:
    for column in ([1.5, np.ma.masked], [np.ma.masked, 1.5], [np.float32(1), masked()]):
        for rule in (collate, Collate()):
            with pytest.raises(TypeError, match="must be an array without a mask"):
                rule([{"x": each} for each in column])
    for make in (ENTRY_POINTS["Pad"], ENTRY_POINTS["Stack"]):
        with pytest.raises(TypeError, match=r"batch\[0\]\['x'\] must be .* is list"):
            make([[masked()]] * 2)


def meta(*shape: int) -> torch.Tensor:
    return torch.ones(shape or SHAPE, device="meta")


def nested(layout: torch.layout = torch.strided) -> Any:
    return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=layout)


def scale(number: float) -> torch.Tensor:
    return torch.quantize_per_tensor(torch.ones(2), number, 0, torch.quint8)


RAGGED = Ragged(meta(3, 2), torch.tensor([0, 1, 3], device="meta"))
NO_DATA = "have data to be copied"
DENSE = (
    "gather: outputs[0]['a'] must be a dense tensor to be joined, but its layout is "
)
CASES: dict[str, tuple[Callable[[], Any], str]] = {
    "scatter": (
        lambda: scatter({"a": [1, meta()]}, "cpu"),
        f"inputs['a'][1] must {NO_DATA} to cpu, but is on the meta device. Give it "
        "data first, or keep it in DataContainer([tensor], cpu_only=True).",
    ),
    "parts": (
        lambda: scatter({"a": meta(2)}, ["cpu", "cpu"]),
        f"inputs['a'] must {NO_DATA} to cpu, ",
    ),
    "chunks": (
        lambda: scatter({"a": DataContainer([[meta()]])}, "cpu", dtype=torch.float16),
        f"inputs['a'] must {NO_DATA} to cpu, ",
    ),
    "prefetch": (
        lambda: list(PreDataLoader([{"a": (1, meta())}], device="cpu")),
        f"PreDataLoader: batch['a'][1] must {NO_DATA}, but is on the meta device. Give "
        "it data first, or leave it out of the batch.",
    ),
    "prefetch chunks": (
        lambda: list(PreDataLoader([{"a": DataContainer([meta()])}], device="cpu")),
        f"PreDataLoader: batch['a'].data[0] must {NO_DATA}, ",
    ),
    "to_host": (
        lambda: to_host({"b": 1, "a": [meta()]}),
        f"to_host: batch['a'][0] must {NO_DATA}, but is on the meta device (Cannot "
        "copy out of meta tensor; no data!). Give it data first, or leave it out of "
        "the batch.",
    ),
    "gather": (
        lambda: gather([{"a": torch.ones(1)}, {"a": meta(1)}], "cpu"),
        f"gather: outputs[1]['a'] must {NO_DATA} to cpu, but is on meta. Give all "
        "tensors data, or only gather meta tensors, with target_device=None.",
    ),
    "gather with the first": (
        lambda: gather([{"a": meta(1)}, {"a": torch.ones(1)}], None),
        "gather: outputs[1]['a'] must be on the meta device like the first tensor, but "
        "is on cpu. ",
    ),
    "gather containers": (
        lambda: gather([DataContainer([meta(1)])] * 2, "cpu"),
        f"gather: outputs[0].data must {NO_DATA} to cpu, ",
    ),
    "gather nested": (
        lambda: gather([{"a": nested()}] * 2, "cpu"),
        f"{DENSE}nested. Return a Ragged, as Ragged.from_nested makes it, or put it "
        "into a list in a DataContainer.",
    ),
    "gather jagged": (
        lambda: gather([{"a": nested(torch.jagged)}] * 2, "cpu"),
        f"{DENSE}nested. ",
    ),
    "gather rows": (
        lambda: gather([{"a": torch.ones(2, 2).to_sparse_csr()}] * 2, "cpu"),
        f"{DENSE}torch.sparse_csr. Convert it with to_dense(), or put it into a list "
        "in a DataContainer.",
    ),
    "gather mixed": (
        lambda: gather([{"a": torch.ones(2).to_sparse()}, {"a": torch.ones(2)}], "cpu"),
        f"{DENSE}torch.sparse_coo. Convert it with to_dense(), or put it into a list "
        "in a DataContainer.",
    ),
    "gather scales": (
        lambda: gather([{"a": scale(0.5)}, {"a": scale(0.25)}], "cpu"),
        "outputs[1]['a'] must have the torch.quint8, scale 0.5 and zero point 0 of "
        "outputs[0]['a'], ",
    ),
    "images": (
        lambda: ENTRY_POINTS["images"]([nested()]),
        "images[0] must be a dense tensor, but its layout is nested. ",
    ),
    "stack_batch": (
        lambda: ENTRY_POINTS["stack_batch"]([nested()]),
        "tensor_list[0] must be a dense tensor, but its layout is nested. ",
    ),
    "padding of a class that cannot": (
        lambda: ENTRY_POINTS["Pad"]([masked_tensor()] * 2),
        "Collate, Pad(size_divisor=4, mask=True): batch[0]['x'] must be a tensor that "
        "torch can pad and join, but is torch.masked.maskedtensor.core.MaskedTensor: ",
    ),
    **{
        f"Ragged {name}": (
            read,
            "Ragged: offsets must have data to find the samples, but is on the meta "
            "device. Use the shape of values, which is all that it has.",
        )
        for name, read in {
            "unbind": RAGGED.unbind,
            "max_seqlen": lambda: RAGGED.max_seqlen,
            "part": lambda: RAGGED[:1],
            "sample": lambda: RAGGED[0],
            "to_padded": RAGGED.to_padded,
        }.items()
    },
}


def masked_tensor() -> Any:
    return torch.masked.masked_tensor(torch.ones(SHAPE), torch.ones(SHAPE).bool())


@both
@pytest.mark.parametrize("case", CASES)
def test_other_tensors_are_named(case: str, backend: ModuleType) -> None:
    call, message = CASES[case]
    with using(backend), pytest.raises(Error) as caught:
        call()
    text = str(caught.value)
    if NO_DATA in message:  # torch raises this class
        assert isinstance(caught.value, NotImplementedError)
    assert text == message or (message.endswith((" ", "no")) and message in text)


@both
@pytest.mark.parametrize("entry", [e for e in ENTRY_POINTS if e != "to_padded"])
def test_meta_tensors_make_the_shapes_of_a_batch(
    entry: str, backend: ModuleType
) -> None:
    if entry == "scatter":  # it copies
        return
    with using(backend):
        found = tensors_of(ENTRY_POINTS[entry]([meta(), meta()]))
        expected = tensors_of(ENTRY_POINTS[entry]([torch.ones(SHAPE)] * 2))
    assert all(each.is_meta for each in found)
    assert [(x.shape, x.dtype) for x in found] == [(x.shape, x.dtype) for x in expected]


def test_the_name_of_a_field_may_be_empty() -> None:
    rules = Collate({"": Stack(), "x": Stack()})
    batch = rules([{"": 1, "x": 2}] * 2)
    assert (batch[""].tolist(), batch["x"].tolist()) == ([1, 1], [2, 2])
    with pytest.raises(ValueError, match=r"Collate: '' must have one rule, but has a"):
        Collate({"": Stack(), ".x": Stack()})


def test_items_of_lists_and_fields_of_records_are_refused_with_names() -> None:
    for rule in (Concat(), Pad(), Stack()):
        with pytest.raises(TypeError, match=r"batch\[0\]\['x'\] must be .* is list"):
            Collate(x=rule)([{"x": [np.ones(2), UserDict(a=1)]}])
    with pytest.raises(TypeError, match=r"batch\[1\] must be a .*Record like"):
        Collate.auto([Record(1), {}])
    fields: list[Any] = [{"x": Record(1)}, {"x": {}}]
    assert Collate.auto(fields)(fields) == {"x": [Record(1), {}]}


def test_the_advice_for_other_layouts_works() -> None:
    pairs = [[{"a": Ragged.from_nested(nested(layout))}] * 2
             for layout in (torch.strided, torch.jagged)]  # fmt: skip
    for pair in pairs:
        assert gather(pair, "cpu")["a"].lengths().tolist() == [2, 3, 2, 3]
    rows = torch.ones(2, 2).to_sparse_csr()
    for each in (nested(), nested(torch.jagged), rows):
        assert gather([DataContainer([each])] * 2, "cpu").data == [each, each]
        assert gather([each], "cpu") is each
    assert gather([rows.to_dense()] * 2, "cpu").shape == (4, 2)
    parts = scatter({"a": DataContainer([meta()], cpu_only=True)}, "cpu")
    assert parts[0]["a"].is_meta
    assert scatter([meta()], -1)[0][0].is_meta
