"""Padding options and ragged batches on a GPU: the same results as on the host."""

from __future__ import annotations

from typing import Any

import pytest
import samples
import torch

from pyparallel import (
    DataContainer,
    Padded,
    Padding,
    Ragged,
    collate,
    pad_stack,
    scatter,
)
from pyparallel.batch import torch_stack

pytestmark = pytest.mark.cuda

OPTIONS: list[dict[str, Any]] = [
    {"size_divisor": 32, "sizes": True, "mask": True},
    {"size_divisor": (1, 7), "side": ("left", "center"), "mask": True},
    {"shape": (40, 41), "side": "center", "sizes": True},
    {"buckets": [(30, 30), (64, 64)], "side": "left", "mask": True},
    {"mask": True},
]


def on_host(result: Any) -> list[torch.Tensor | None]:
    fields = result.fields() if isinstance(result, Padded) else [result]
    assert all(each is None or each.is_cuda for each in fields)
    return [None if each is None else each.cpu() for each in fields]


@pytest.mark.kernel
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.complex128])
@pytest.mark.parametrize("layout", ["dense", "transposed", "strided", "offset"])
def test_padding_on_the_device_equals_padding_on_the_host(
    options: dict[str, Any],
    dtype: torch.dtype,
    layout: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("torch's operators must not be needed")

    ragged = [
        samples.lay_out(samples.random_tensor((3, 30 + i, 40 - i), dtype, i), layout)
        for i in range(6)
    ]
    arguments = {"pad_dims": 2, "padding_value": 1} | options
    expected = pad_stack(ragged, **arguments)
    expected = expected.fields() if isinstance(expected, Padded) else [expected]
    monkeypatch.setattr(torch_stack, "pad_and_stack", refuse)
    there = [samples.as_it_lies(x, torch.device("cuda", 0)) for x in ragged]
    found = on_host(pad_stack(there, **arguments))
    for one, other in zip(found, expected, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            assert one.dtype is other.dtype
            assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def test_one_block_on_the_device_serves_every_batch() -> None:
    block = torch.empty(2, 4, device="cuda")
    for side, rows in (("right", [[1, 1, 0, 0]] * 2), ("left", [[0, 0, 1, 1]] * 2)):
        ones = [torch.ones(2, device="cuda")] * 2
        assert pad_stack(ones, shape=(4,), side=side, out=block) is block
        assert block.tolist() == rows


def test_chunks_with_masks_and_ragged_chunks_arrive_whole() -> None:
    padding = Padding(size_divisor=8, side="left", sizes=True, mask=True)
    batch = collate(
        [
            {
                "img": DataContainer(torch.rand(3, 5 + i, 9), True, padding=padding),
                "points": DataContainer(torch.rand(i, 3), ragged=True),
            }
            for i in range(4)
        ],
        4,
    )
    (part,) = scatter(batch, [0])
    assert (type(part["img"]), type(part["points"])) == (Padded, Ragged)
    for key in ("img", "points"):
        for found, expected in zip(part[key], batch[key].data[0], strict=True):
            assert found.is_cuda and found.dtype is expected.dtype
            assert torch.equal(found.cpu(), expected)
    points = part["points"]
    expected = batch["points"].data[0].to_padded(7, Padding(side="center", mask=True))
    found = points.to_padded(7, Padding(side="center", mask=True))
    assert torch.equal(found.data.cpu(), expected.data)
    assert torch.equal(found.mask.cpu(), expected.mask)
    nested = points.to_nested()
    assert Ragged.from_nested(nested).values.data_ptr() == points.values.data_ptr()
    assert torch.equal((nested * 2).values(), points.values * 2)


def test_samples_on_the_device_are_joined_there() -> None:
    column = [torch.rand(n, 2, device="cuda") for n in (3, 0, 2)]
    ragged = Ragged.from_tensors(column)
    assert ragged.values.is_cuda and ragged.offsets.is_cuda
    assert ragged.offsets.tolist() == [0, 3, 3, 5]
    assert torch.equal(ragged.values, torch.cat(column))
    assert [tuple(x.shape) for x in ragged.part(0, 2).unbind()] == [(3, 2), (0, 2)]


def test_pinned_batches_keep_their_type() -> None:
    padding = Padding(mask=True)
    ragged = [torch.rand(1, n, 2) for n in (2, 3)]
    container = collate([DataContainer(x, True, padding=padding) for x in ragged], 2)
    (pinned,) = container.pin_memory().data
    assert type(pinned) is Padded
    assert pinned.data.is_pinned() and pinned.mask.is_pinned() and pinned.sizes is None
