"""Kernels on a GPU: their results equal those of the host.

These are few and small, because compute-sanitizer runs them too.
"""

from __future__ import annotations

import itertools

import pytest
import torch

from pyparallel import backend
from tests.support.batch.samples import as_it_lies

pytestmark = [pytest.mark.cuda, pytest.mark.kernel]

DTYPES = [torch.uint8, torch.bool, torch.int16, torch.bfloat16, torch.float16]
DTYPES += [torch.float32, torch.int32, torch.int64, torch.float64, torch.complex128]
CUDA = torch.device("cuda", 0)


def same(found: torch.Tensor, expected: torch.Tensor) -> bool:
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    assert found.is_cuda
    return torch.equal(found.cpu(), expected)


def fills(dtype: torch.dtype, num: int) -> bytes:
    return b"".join(
        torch.tensor([i % 2 + 1], dtype=dtype).view(torch.uint8).numpy().tobytes()
        for i in range(num)
    )


def layouts(samples: list[torch.Tensor]) -> dict[str, list[torch.Tensor]]:
    dims = range(samples[0].dim() - 1, -1, -1)
    wide = [torch.stack([x, x], -1) for x in samples]
    return {
        "contiguous": samples,
        "transposed": [x.permute(*dims).contiguous().permute(*dims) for x in samples],
        "strided": [x[..., 0] for x in wide],
        "offset": [
            torch.cat([x.flatten()[:1], x.flatten()])[1:].view(x.shape) for x in samples
        ],
    }


def check_pad_copy(samples: list[torch.Tensor], target: tuple[int, ...], pad: bytes):
    shape = (len(samples), *target)
    expected = torch.empty(shape, dtype=samples[0].dtype)
    backend.pad_copy(expected, samples, pad)
    found = torch.full(shape, 1, dtype=samples[0].dtype, device=CUDA)
    backend.pad_copy(found, [as_it_lies(each, CUDA) for each in samples], pad)
    assert same(found, expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", ["contiguous", "transposed", "strided", "offset"])
@pytest.mark.parametrize("one_fill", [True, False])
def test_pad_copy_is_that_of_the_host(dtype, layout, one_fill):
    torch.manual_seed(1)
    sizes = [(3, 5, 7), (3, 8, 6), (3, 1, 1), (3, 8, 7)]
    samples = layouts([torch.randint(0, 2, size).to(dtype) for size in sizes])[layout]
    check_pad_copy(samples, (3, 8, 7), fills(dtype, 1 if one_fill else len(samples)))


@pytest.mark.parametrize("num", [82, 83, 679, 680, 1025, 5000])
def test_pad_copy_takes_thousands_of_samples(num):
    samples = [torch.full((i % 3, i % 5), float(i)) for i in range(num)]
    check_pad_copy(samples, (2, 4), fills(torch.float32, num))


@pytest.mark.parametrize(
    "dims", list(itertools.product([1, 2], [1, 3], [33, 64, 1000]))
)
def test_rows_of_every_length_are_copied(dims):
    samples = [torch.rand(dims), torch.rand(dims[0], dims[1], max(1, dims[2] - 3))]
    for each in ([(256 * x).to(torch.uint8) for x in samples], samples):
        check_pad_copy(each, dims, fills(each[0].dtype, 1))


# A launch holds 54 boxes with starts in few parameters, 452 in many; further launches
# take the rest.
@pytest.mark.parametrize("num", [3, 54, 55, 452, 453, 2000])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.complex128])
def test_pad_copy_places_samples_and_makes_their_mask(dtype, num):
    sizes = [(3, 5 + i % 4, 20 + i % 7) for i in range(num)]
    starts = [(0, i % 2, 4 * (i % 3)) for i in range(num)]
    samples = [torch.randint(0, 2, size).to(dtype) for size in sizes]
    made = []
    for place in (torch.device("cpu"), CUDA):
        dst = torch.full((num, 3, 9, 34), 1, device=place).to(dtype)
        mask = torch.ones(num, 9, 34, dtype=torch.bool, device=place)
        on_place = [sample.to(place) for sample in samples]
        backend.pad_copy(dst, on_place, fills(dtype, num), starts, mask)
        made.append((dst, mask))
    assert all(map(same, made[1], made[0]))


def test_pad_copy_runs_on_the_current_stream():
    samples = [torch.ones(4, device=CUDA), torch.ones(2, device=CUDA)]
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(20_000_000)
        samples = [sample + 1 for sample in samples]
        out = torch.zeros(2, 4, device=CUDA)
        backend.pad_copy(out, samples, fills(torch.float32, 1))
        total = out.sum()
    side.synchronize()
    assert total.item() == 2 * 6 + 1 * 2


@pytest.mark.parametrize("shape", [(0, 4), (9, 4), (300, 4), (1, 1)])
def test_pad_copy_takes_boxes(shape):
    samples = [torch.rand(shape), torch.rand(0, shape[1]), torch.rand(shape)]
    check_pad_copy(samples, shape, fills(torch.float32, 1))
