"""collate of samples on a GPU: batched there, without waiting."""

from __future__ import annotations

from typing import Any

import pytest
import samples
import torch
from sync_debug import forbid_synchronization
from torch.utils.data import default_collate

from pyparallel import DataContainer, Padded, Padding, Ragged, backend, collate
from pyparallel.batch import torch_stack

pytestmark = pytest.mark.cuda

DTYPES = [torch.uint8, torch.bool, torch.bfloat16, torch.float32, torch.int64]


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
    return [each.cuda() for each in tensors]


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.cpu().contiguous().view(torch.uint8)


def assert_chunks(found: Any, expected: Any, num_chunks: int) -> None:
    assert len(found.data) == len(expected.data) == num_chunks
    for one, other in zip(found.data, expected.data, strict=True):
        assert type(one) is type(other)
        fields = [
            each.fields() if isinstance(each, Padded | Ragged) else [each]
            for each in (one, other)
        ]
        for mine, right in zip(*fields, strict=True):
            assert (mine is None) == (right is None)
            if mine is not None:
                assert mine.is_cuda and mine.is_contiguous()
                assert (mine.dtype, mine.shape) == (right.dtype, right.shape)
                assert torch.equal(bits(mine), bits(right))


@pytest.mark.usefixtures("_in_one_pass")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("samples_per_gpu", [1, 2, 5])
def test_chunks_have_the_bits_of_the_host(
    dtype: torch.dtype, samples_per_gpu: int
) -> None:
    tensors = ragged(dtype=dtype)
    values = [i % 2 for i in range(len(tensors))]
    made = []
    for column in (on_device(tensors), tensors):
        batch = contained(column)
        for item, value in zip(batch, values, strict=True):
            item["img"] = DataContainer(
                item["img"].data, stack=True, padding_value=value
            )
        made.append(collate(batch, samples_per_gpu)["img"])
    assert_chunks(*made, -(-5 // samples_per_gpu))


@pytest.mark.usefixtures("_in_one_pass")
@pytest.mark.parametrize(
    "padding",
    [
        Padding(size_divisor=32, sizes=True, mask=True),
        Padding(shape=(40, 41), side="center", mask=True),
        Padding(buckets=[(25, 32), (64, 64)], side=("left", "right"), sizes=True),
    ],
    ids=str,
)
def test_masks_and_sizes_are_made_there(padding: Padding) -> None:
    tensors = ragged()
    found = collate(contained(on_device(tensors), padding=padding), 2)["img"]
    expected = collate(contained(tensors, padding=padding), 2)["img"]
    assert type(found.data[0]) is Padded
    assert_chunks(found, expected, 3)


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
    assert_chunks(found, expected, 2)


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
    expected = collate(contained([x.cpu() for x in columns[0]], padding=padding), 2)
    assert_chunks(made["img"], expected["img"], 3)


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
    assert_chunks(made, collate(contained(tensors), 5)["img"], 1)


def test_gradients_flow_back() -> None:
    leaves = [each.cuda().requires_grad_() for each in ragged(2)]
    collate(contained(leaves), 2)["img"].data[0].sum().backward()
    assert all(torch.equal(x.grad, torch.ones_like(x)) for x in leaves)
