"""collate, padding and Ragged on a GPU: the bytes of the host, without waiting."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import default_collate

from pyparallel import (
    DataContainer,
    Padded,
    Padding,
    Ragged,
    backend,
    collate,
    pad_stack,
    scatter,
)
from pyparallel.batch import torch_stack
from tests.support.batch import samples
from tests.support.devices.sync_debug import forbid_synchronization

pytestmark = pytest.mark.cuda

DTYPES = [torch.uint8, torch.bool, torch.bfloat16, torch.float32, torch.complex128]
OPTIONS: list[dict[str, Any]] = [
    {"size_divisor": 32, "sizes": True, "mask": True},
    {"size_divisor": (1, 7), "side": ("left", "center"), "mask": True},
    {"shape": (40, 41), "side": "center", "sizes": True},
    {"buckets": [(30, 35), (64, 64)], "side": "left", "mask": True},
    {"mask": True},
]


@pytest.fixture
def _in_one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("torch's operators must not be needed")

    monkeypatch.setattr(torch_stack, "pad_and_stack", refuse)
    monkeypatch.setattr(torch_stack, "fill_mask", refuse)


def ragged(num: int = 5, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [
        samples.random_tensor((3, 20 + i, 31 - 2 * i), dtype, i) for i in range(num)
    ]


def contained(tensors: list[torch.Tensor], **options: Any) -> list[dict[str, Any]]:
    return [{"img": DataContainer(x, stack=True, **options)} for x in tensors]


def on_device(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return [samples.as_it_lies(each, torch.device("cuda", 0)) for each in tensors]


def assert_same(found: Any, expected: Any) -> None:
    assert type(found) is type(expected)
    fields = [
        each.fields() if isinstance(each, Padded | Ragged) else [each]
        for each in (found, expected)
    ]
    for one, other in zip(*fields, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            assert one.is_cuda and one.is_contiguous()
            assert (one.dtype, one.shape) == (other.dtype, other.shape)
            assert torch.equal(one.cpu().view(torch.uint8), other.view(torch.uint8))


def assert_chunks(found: Any, expected: Any) -> None:
    for one, other in zip(found.data, expected.data, strict=True):
        assert_same(one, other)


@pytest.mark.usefixtures("_in_one_pass")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("samples_per_gpu", [2, 5])
def test_chunks_have_the_bits_of_the_host(
    dtype: torch.dtype, samples_per_gpu: int
) -> None:
    made = []
    for column in (on_device(ragged(dtype=dtype)), ragged(dtype=dtype)):
        batch = [
            DataContainer(x, stack=True, padding_value=i % 2)
            for i, x in enumerate(column)
        ]
        made.append(collate(batch, samples_per_gpu))
    assert_chunks(*made)


@pytest.mark.kernel
@pytest.mark.usefixtures("_in_one_pass")
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("layout", ["dense", "transposed", "strided", "offset"])
def test_padding_on_the_device_equals_padding_on_the_host(
    options: dict[str, Any], layout: str
) -> None:
    values = {torch.uint8: 1, torch.bfloat16: 1, torch.complex128: 1}
    values |= {torch.int64: 2**53 + 1, torch.uint64: 2**64 - 1}
    for dtype, value in values.items():
        tensors = [samples.lay_out(each, layout) for each in ragged(dtype=dtype)]
        arguments = {"pad_dims": 2, "padding_value": value} | options
        expected = pad_stack(tensors, **arguments)
        assert_same(pad_stack(on_device(tensors), **arguments), expected)


def test_equal_samples_are_stacked_whatever_their_strides() -> None:
    tensors = [torch.rand(4, 5).cuda().t() for _ in range(3)]
    batch = [{"img": DataContainer(x, stack=True, pad_dims=1), "x": x} for x in tensors]
    made = collate(batch, 3)
    assert torch.equal(made["img"].data[0], torch.stack(tensors))
    assert torch.equal(made["x"], default_collate(tensors))
    assert made["x"].is_contiguous() and made["img"].data[0].is_contiguous()


def test_ragged_chunks_are_joined_there() -> None:
    tensors = [torch.rand(n, 4) for n in (3, 0, 2)]
    found, expected = (
        collate([DataContainer(x, ragged=True) for x in column], 2)
        for column in (on_device(tensors), tensors)
    )
    assert type(found.data[0]) is Ragged
    assert_chunks(found, expected)


def test_chunks_with_masks_and_ragged_chunks_arrive_whole() -> None:
    batch = {
        "img": pad_stack(ragged(4), size_divisor=8, side="left", sizes=True, mask=True),
        "points": Ragged.from_tensors([torch.rand(i, 3) for i in range(4)]),
    }
    (part,) = scatter(batch, [0])
    for key, expected in batch.items():
        assert_same(part[key], expected)
    padding = Padding(side="center", mask=True)
    points = part["points"]
    assert_same(points.to_padded(7, padding), batch["points"].to_padded(7, padding))
    nested = points.to_nested()
    assert Ragged.from_nested(nested).values.data_ptr() == points.values.data_ptr()
    assert torch.equal((nested * 2).values(), points.values * 2)


def test_pinned_batches_keep_their_type() -> None:
    container = collate(contained(ragged(), padding=Padding(mask=True)), 5)["img"]
    (pinned,) = container.pin_memory().data
    assert type(pinned) is Padded
    assert pinned.data.is_pinned() and pinned.mask.is_pinned() and pinned.sizes is None


@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("shape", [(1, 2, 3), (1, 2, 2)])
def test_samples_on_two_devices_are_named(swapped: bool, shape: Any) -> None:
    pair = [torch.ones(1, 2, 2).cuda(), torch.ones(shape)]
    if swapped:
        pair.reverse()
    with pytest.raises(ValueError) as caught:
        collate(contained(pair), 2)
    assert str(caught.value) == (
        f"batch[1]['img'] must be on {pair[0].device} like batch[0]['img'], but is on "
        f"{pair[1].device}."
    )


@pytest.mark.skipif(backend.name != "native", reason="pure Python's masks wait")
def test_collate_on_a_device_does_not_wait() -> None:
    padding = Padding(size_divisor=8, side="center", sizes=True, mask=True)
    columns = on_device(ragged()), on_device([torch.rand(n, 4) for n in range(5)])

    def batch() -> list[dict[str, Any]]:
        return [
            {
                "img": DataContainer(image, stack=True, padding=padding),
                "plain": DataContainer(image, stack=True),
                "points": DataContainer(points, ragged=True),
                "equal": torch.ones_like(image[:, :2, :2]),
            }
            for image, points in zip(*columns, strict=True)
        ]

    collate(batch(), 2)  # whatever is loaded and allocated once
    with forbid_synchronization():
        made = collate(batch(), 2)
    assert_chunks(made["img"], collate(contained(ragged(), padding=padding), 2)["img"])


def test_the_kernel_runs_after_the_work_that_made_the_samples() -> None:
    tensors = ragged()
    there = on_device(tensors)
    stream = torch.cuda.Stream()
    late = [torch.zeros_like(each) for each in there]
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        for one, other in zip(late, there, strict=True):
            one.copy_(other)
        made = collate(contained(late), 5)["img"]
    stream.synchronize()
    assert_chunks(made, collate(contained(tensors), 5)["img"])


def test_gradients_flow_back() -> None:
    leaves = [each.cuda().requires_grad_() for each in ragged(2)]
    collate(contained(leaves), 2)["img"].data[0].sum().backward()
    assert all(torch.equal(x.grad, torch.ones_like(x)) for x in leaves)


def test_one_block_on_the_device_serves_every_batch() -> None:
    block = torch.empty(2, 4, device="cuda")
    for side, rows in (("right", [[1, 1, 0, 0]] * 2), ("left", [[0, 0, 1, 1]] * 2)):
        ones = [torch.ones(2, device="cuda")] * 2
        assert pad_stack(ones, shape=(4,), side=side, out=block) is block
        assert block.tolist() == rows
