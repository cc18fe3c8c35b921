"""`image_batch` and `pad_copy` on a GPU: the results of the host, for every launch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from pyparallel import backend
from tests.support.batch import image_oracle as oracle
from tests.support.devices import fake_cuda

pytestmark = pytest.mark.cuda

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
# Of images, a launch carries 246 in few parameters, and 1000 in many.
NUMBERS = oracle.Numbers(
    (123.675, 116.28, 103.53, 7.5), (58.395, 57.12, 57.375, -0.1), (1, -2, 1e-7, 1e9)
)


def photos(
    sides: Sequence[Sequence[int]], channels: int = 3, dtype: torch.dtype = torch.uint8
) -> list[torch.Tensor]:
    """Return images at every distance from a multiple of sixteen, of both layouts."""
    generator = torch.Generator().manual_seed(len(sides))
    made = []
    for i, (height, width) in enumerate(sides):
        numel = channels * height * width
        flat = torch.randint(0, 256, (numel + 16,), generator=generator).to(dtype)
        image = flat[i % 16 : i % 16 + numel].view(channels, height, width)
        if i % 3 == 1:
            rows = flat[i % 16 : i % 16 + numel].view(height, width, channels)
            image = rows.permute(2, 0, 1)
        made.append(image)
    return made


def on_device(image: torch.Tensor) -> torch.Tensor:
    """Move an image with all that lies around it, so that it stays where it starts."""
    storage = torch.empty(0, dtype=image.dtype).set_(image.untyped_storage()).cuda()
    return storage.as_strided(image.shape, image.stride(), image.storage_offset())


def poisoned(
    shape: tuple[int, ...], dtype: torch.dtype, place: str, last: bool, shift: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return memory, and a destination that starts `shift` items into it."""
    numel = torch.Size(shape).numel()
    block = torch.full((numel + 64,), -77 if dtype.is_floating_point else 1).to(dtype)
    block = block.to(place)
    inner = block[shift : shift + numel]
    if last:
        num, channels, height, width = shape
        return block, inner.view(num, height, width, channels).permute(0, 3, 1, 2)
    return block, inner.view(shape)


def made_by(
    place: str,
    images: list[torch.Tensor],
    shape: tuple[int, ...],
    dtype: torch.dtype,
    flags: Any,
    shift: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the memory of a batch, and that of its mask."""
    last, swap, exact = flags
    block, dst = poisoned(shape, dtype, place, last, shift)
    marks, mask = poisoned(
        (shape[0], *shape[2:]), torch.bool, place, False, shift % 16 + 3
    )
    numbers = [row[: shape[1]] for row in NUMBERS]
    backend.image_batch(dst, images, mask, *numbers, swap, exact)
    return block.cpu(), marks.cpu()


@pytest.mark.kernel
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("source", [torch.uint8, torch.float32], ids=str)
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize("channels", [1, 2, 3, 4])
def test_exact_batches_have_the_bits_of_the_host(
    dtype: torch.dtype, source: torch.dtype, last: bool, swap: bool, channels: int
) -> None:
    rows = 9 if fake_cuda.active else 40  # the fake runtime interprets each instruction
    sides = [(7, 1), (rows - 7, 700), (1, 1333), (0, 5), (rows, 1024), (rows // 3, 31)]
    sides.append((rows - 1, 1333))
    images = photos(sides, channels, source)
    there = [on_device(image) for image in images]
    for width, shift in ((1344, 0), (1344, 8), (1333, 0), (1333, 3)):
        shape = (len(images), channels, rows, width)
        flags = (last, swap, True)
        expected = made_by("cpu", images, shape, dtype, flags, shift)
        found = made_by("cuda", there, shape, dtype, flags, shift)
        assert all(map(torch.equal, found, expected))


@pytest.mark.kernel
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("last", [False, True])
def test_fast_batches_are_as_near_to_the_truth_as_stated(
    dtype: torch.dtype, last: bool
) -> None:
    numbers = oracle.Numbers(*(row[:3] for row in NUMBERS))
    images = photos([(20, 600), (21, 601), (1, 1)])
    order = torch.channels_last if last else torch.contiguous_format
    dst = torch.empty(3, 3, 21, 608, dtype=dtype, device="cuda", memory_format=order)
    there = [on_device(image) for image in images]
    backend.image_batch(dst, there, None, *numbers, True, False)
    for row, image in zip(dst.cpu(), images, strict=True):
        box = row[:, : image.shape[1], : image.shape[2]]
        oracle.assert_near(box, image.numpy(), numbers, True)


@pytest.mark.kernel
def test_values_that_are_no_numbers_and_subnormal_ones_are_those_of_the_host() -> None:
    odd = [0.0, -0.0, 1e-45, -1e-39, 3e38, float("inf"), float("-inf"), 65504, 6e-8]
    image = torch.tensor(odd * 20, dtype=torch.float32).view(1, 1, -1)
    for dtype in DTYPES:
        rows = []
        for place in ("cpu", "cuda"):
            dst = torch.empty(1, 1, 1, 180, dtype=dtype, device=place)
            args = ([image.to(place)], None, [0.0], [0.9], [0.0], False, True)
            backend.image_batch(dst, *args)
            rows.append(dst.cpu())
        assert torch.equal(*rows)
    none = torch.full((1, 1, 40), float("nan"), device="cuda")
    for dtype in DTYPES:
        dst = torch.zeros(1, 1, 1, 40, dtype=dtype, device="cuda")
        backend.image_batch(dst, [none], None, [0.0], [1.0], [0.0], False, True)
        assert dst.isnan().all()


@pytest.mark.kernel
@pytest.mark.parametrize("num", [0, 1, 246, 247, 1000, 1001, 2300])
def test_any_number_of_images_is_written(num: int) -> None:
    sides = [(i % 7, i % 23 + 1) for i in range(num)]
    images = photos(sides)
    there = [on_device(image) for image in images]
    flags = (num % 2 == 1, False, True)
    expected = made_by("cpu", images, (num, 3, 6, 24), torch.float16, flags)
    found = made_by("cuda", there, (num, 3, 6, 24), torch.float16, flags)
    assert all(map(torch.equal, found, expected))


def captured(run: Any) -> torch.cuda.CUDAGraph:
    """Return a graph of what `run` queues, which has run before outside of one."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph


@pytest.mark.parametrize("num", [3, 300, 1200])
def test_a_graph_keeps_the_table_of_images(num: int) -> None:
    images = photos([(i % 5 + 1, 9 + i % 9) for i in range(num)])
    there = [on_device(image) for image in images]
    dst = torch.empty(num, 3, 5, 18, device="cuda")
    mask = torch.empty(num, 5, 18, dtype=torch.bool, device="cuda")
    numbers = [row[:3] for row in NUMBERS]

    def run() -> None:
        backend.image_batch(dst, list(there), mask, *numbers, True, True)

    graph = captured(run)
    for add in (1, 5):
        for image, on_host in zip(there, images, strict=True):
            image.add_(add)
            on_host.add_(add)
        dst.fill_(-77)
        mask.fill_(True)
        graph.replay()
        expected = torch.empty(dst.shape), torch.empty(mask.shape, dtype=torch.bool)
        backend.image_batch(expected[0], images, expected[1], *numbers, True, True)
        assert torch.equal(dst.cpu(), expected[0])
        assert torch.equal(mask.cpu(), expected[1])


@pytest.mark.parametrize("num", [5, 84, 700])
def test_a_graph_keeps_the_boxes_of_a_pad_copy(num: int) -> None:
    samples = [torch.rand(i % 4 + 1, 5).cuda() for i in range(num)]
    dst = torch.empty(num, 4, 8, device="cuda")

    def run() -> None:
        backend.pad_copy(dst, list(samples), bytes(4))

    graph = captured(run)
    for _ in range(2):
        for sample in samples:
            sample.add_(1)
        dst.fill_(-77)
        graph.replay()
        expected = torch.empty(num, 4, 8)
        backend.pad_copy(expected, [sample.cpu() for sample in samples], bytes(4))
        assert torch.equal(dst.cpu(), expected)


@pytest.mark.parametrize("last", [False, True])
def test_more_than_two_to_the_31_values(last: bool) -> None:
    if torch.cuda.mem_get_info()[0] < 12 << 30:
        pytest.skip("needs 12 GiB of free memory on the GPU")
    height, width = 30011, 24001  # of three channels: more than 2**31
    image = torch.randint(0, 256, (3, height, width), dtype=torch.uint8, device="cuda")
    dst = torch.full(
        (1, 3, height + 1, width + 7), -77, dtype=torch.bfloat16, device="cuda"
    )
    if last:
        dst = dst.contiguous(memory_format=torch.channels_last)
    numbers = [row[:3] for row in NUMBERS]
    backend.image_batch(dst, [image], None, *numbers, False, True)
    mean, std, fill = (torch.tensor(row[:3]).view(3, 1, 1).cuda() for row in NUMBERS)
    for first in range(0, height, 5000):
        rows = image[:, first : first + 5000]
        expected = ((rows - mean) / std).bfloat16()
        found = dst[0, :, first : first + 5000]
        assert torch.equal(found[:, : rows.shape[1], :width], expected)
        assert (found[:, :, width:] == fill.bfloat16()).all()
    assert (dst[0, :, height] == fill[:, 0].bfloat16()).all()
