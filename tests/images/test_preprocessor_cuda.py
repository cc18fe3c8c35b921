"""ImagePreprocessor on a GPU: the results of the host, without waiting."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from pyparallel import ImagePreprocessor, Padded
from pyparallel.images import _batch
from tests.support.devices.sync_debug import forbid_synchronization

pytestmark = pytest.mark.cuda

MEAN, STD = (123.675, 116.28, 103.53), (58.395, 57.12, 57.375)
OPTIONS: list[dict[str, Any]] = [
    {"mean": MEAN, "std": STD, "size_divisor": 32, "return_mask": True},
    {"mean": MEAN, "std": STD, "swap_channels": True, "pad_value": (1, 2, 3),
     "pad_before_normalize": True, "memory_format": torch.channels_last},
    {"mean": 7, "std": 3, "pad_value": 114, "dtype": torch.bfloat16},
    {"mean": MEAN, "std": STD, "return_mask": True, "dtype": torch.float16,
     "memory_format": torch.channels_last},
    {"size_divisor": (7, 5)},
]  # fmt: skip


@pytest.fixture(autouse=True)
def _no_operators_of_torch(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    if request.node.name == "test_images_on_another_device_are_named":
        yield  # torch's way is where the fault is found
        return

    def refuse(*_: Any) -> None:
        raise AssertionError("torch's operators must not be needed")

    monkeypatch.setattr(_batch, "_run_torch", refuse)
    yield


def photos(num: int = 6, dtype: torch.dtype = torch.uint8) -> list[torch.Tensor]:
    shapes = [(3, 200 + 7 * i, 301 - 11 * i) for i in range(num)]
    made = [torch.randint(0, 256, shape).to(dtype) for shape in shapes]
    made[1] = made[1].permute(1, 2, 0).contiguous().permute(2, 0, 1)
    return made


def parts(result: Any) -> list[torch.Tensor]:
    each = result.fields() if isinstance(result, Padded) else [result]
    return [tensor for tensor in each if tensor is not None]


#: The kernel for each option and dtype, and the ways of images for one of the options.
SOURCES = (torch.uint8, torch.float32, torch.int16)
BATCHES = [
    *((options, source, "there already") for options in OPTIONS for source in SOURCES),
    *((OPTIONS[0], source, "from the host") for source in SOURCES),
    *((OPTIONS[0], source, "pinned") for source in SOURCES),
]


@pytest.mark.parametrize(("options", "source", "way"), BATCHES)
def test_batches_have_the_bits_of_the_host(
    options: dict[str, Any], source: torch.dtype, way: str
) -> None:
    images = photos(dtype=source)
    expected = parts(ImagePreprocessor(**options)(images))
    there = images
    if way == "pinned":
        there = [image.pin_memory() for image in images]
    if way == "there already":
        there = [image.cuda() for image in images]
    pre = ImagePreprocessor(**options, device=None if there[0].is_cuda else "cuda")
    found = parts(pre(there))
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert one.is_cuda and one.dtype is other.dtype
        assert one.stride() == other.stride()
        assert torch.equal(one.cpu(), other)


def test_the_host_waits_for_nothing() -> None:
    pre = ImagePreprocessor(MEAN, STD, return_mask=True, device="cuda")
    there = [image.cuda() for image in photos()]
    pre(there)  # whatever is loaded and allocated once
    with forbid_synchronization():
        result = pre(there)
    expected = ImagePreprocessor(MEAN, STD)([image.cpu() for image in there])
    assert torch.equal(result.data.cpu(), expected)


def test_the_kernel_runs_on_the_stream_that_is_current() -> None:
    there = [image.cuda() for image in photos()]
    expected = ImagePreprocessor(MEAN, STD)([image.cpu() for image in there])
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    late = [torch.zeros_like(image) for image in there]
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        for one, other in zip(late, there, strict=True):
            one.copy_(other)
        batch = ImagePreprocessor(MEAN, STD)(late)
    stream.synchronize()
    assert torch.equal(batch.cpu(), expected)


def test_images_on_another_device_are_named() -> None:
    with pytest.raises(ValueError, match=r"images\[1\] must be on cuda:0 like images"):
        _batch.image_batch(
            [torch.ones(3, 2, 2, device="cuda"), torch.ones(3, 2, 2)],
            ImagePreprocessor(MEAN, STD)._options,
        )


def test_many_small_images() -> None:
    sides = torch.randint(1, 40, (2500, 2)).tolist()
    images = [torch.randint(0, 256, (3, *each), dtype=torch.uint8) for each in sides]
    expected = ImagePreprocessor(MEAN, STD, return_mask=True)(images)
    found = ImagePreprocessor(MEAN, STD, return_mask=True, device=0)(images)
    assert torch.equal(found.data.cpu(), expected.data)
    assert torch.equal(found.mask.cpu(), expected.mask)


def test_fast_batches_are_near_exact_ones() -> None:
    images = photos()
    exact = ImagePreprocessor(MEAN, STD, device="cuda")(images)
    fast = ImagePreprocessor(MEAN, STD, device="cuda", exact=False)(images)
    torch.testing.assert_close(fast, exact, rtol=0, atol=2.0**-22 * 400 / 57)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")
def test_a_compiled_model_has_it_in_its_graph() -> None:
    pre = ImagePreprocessor(MEAN, STD, device="cuda")
    compiled = torch.compile(pre, fullgraph=True, backend="aot_eager")
    images = photos()
    assert torch.equal(compiled(images), pre(images))
    torch._dynamo.reset()
