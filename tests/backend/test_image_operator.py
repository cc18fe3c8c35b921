"""`image_batch` of both backends: its results, its bounds, and its errors."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.batch import image_oracle as oracle
from tests.support.errors.collate_errors import freed
from tests.support.processes.backends import both, check, last

pytestmark = [pytest.mark.cuda_torch, pytest.mark.one_backend, pytest.mark.asan]

bounded = settings(
    max_examples=200, deadline=None, suppress_health_check=list(HealthCheck)
)
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
LAYOUTS = ["dense", "channels last", "at an odd place"]


def lay_out(image: Any, layout: str) -> torch.Tensor:
    """Return the image as a tensor with another place or order in memory."""
    if layout == "channels last":
        rows = np.ascontiguousarray(image.transpose(1, 2, 0))
        return torch.from_numpy(rows).permute(2, 0, 1)
    if layout == "dense":
        return torch.from_numpy(image.copy())
    flat = torch.empty(image.size + 3, dtype=torch.from_numpy(image[:0].copy()).dtype)
    return flat[3:].view(image.shape).copy_(torch.from_numpy(image.copy()))


def drawn(
    draw: Callable[..., Any], shape: tuple[int, ...], kind: str, odd: bool
) -> Any:
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    if kind == "uint8":
        return rng.integers(0, 256, shape, np.uint8)
    image = (rng.standard_normal(shape) * 10.0 ** rng.integers(-3, 6)).astype("f4")
    if odd and image.size:
        image.flat[rng.integers(image.size)] = draw(
            st.sampled_from([np.nan, np.inf, -np.inf, -0.0, 1e-42, 3e38])
        )
    return image


@st.composite
def cases(draw: Callable[..., Any], exact: bool) -> Any:
    channels, kind = draw(st.integers(1, 4)), draw(st.sampled_from(["uint8", "float"]))
    sides = st.tuples(st.integers(0, 40), st.integers(0, 40))
    images = [
        drawn(draw, (channels, *draw(sides)), kind, exact)
        for _ in range(draw(st.integers(0, 4)))
    ]
    least = [max([each.shape[dim] for each in images], default=0) for dim in (1, 2)]
    target = tuple(size + draw(st.integers(0, 9)) for size in least)
    rows = st.lists(
        st.floats(-300, 300, width=32), min_size=channels, max_size=channels
    )
    numbers = oracle.Numbers(
        draw(rows),
        [x if abs(x) > 1e-3 else 1.0 for x in draw(rows)],
        [x * 10.0 ** draw(st.integers(0, 5)) for x in draw(rows)],
    )
    tensors = [lay_out(each, draw(st.sampled_from(LAYOUTS))) for each in images]
    return images, tensors, target, numbers


def guarded(
    shape: tuple[int, int, int, int], dtype: torch.dtype, channels_last: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return memory with a result in the middle of it, all of it another value."""
    num, depth, height, width = shape
    numel = num * depth * height * width
    block = torch.full((numel + 128,), -77.0, dtype=dtype)
    inner = block[64 : 64 + numel]
    if channels_last:
        return block, inner.view(num, height, width, depth).permute(0, 3, 1, 2)
    return block, inner.view(shape)


def run(
    backend: ModuleType, case: Any, dtype: torch.dtype, flags: tuple[bool, ...]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return batch and mask, having looked at the memory around the batch."""
    _, tensors, target, numbers = case
    swap, exact, channels_last = flags
    shape = (len(tensors), len(numbers.mean), *target)
    block, dst = guarded(shape, dtype, channels_last)
    mask = torch.ones((len(tensors), *target), dtype=torch.bool)
    backend.image_batch(dst, tensors, mask, *numbers, swap, exact)
    assert (block[:64] == -77).all() and (block[64 + dst.numel() :] == -77).all()
    return dst, mask


@both
@bounded
@given(
    case=cases(exact=True),
    dtype=st.sampled_from(DTYPES),
    swap=st.booleans(),
    channels_last=st.booleans(),
)
def test_exact_batches_have_the_bits_of_steps_in_numpy(
    backend: ModuleType, case: Any, dtype: torch.dtype, swap: bool, channels_last: bool
) -> None:
    images, _, target, numbers = case
    dst, mask = run(backend, case, dtype, (swap, True, channels_last))
    oracle.assert_bits(dst, oracle.in_steps(images, target, numbers, swap))
    assert np.array_equal(mask.numpy(), oracle.mask_of(images, target))


@pytest.mark.slow
@both
@bounded
@given(
    case=cases(exact=False),
    dtype=st.sampled_from(DTYPES),
    swap=st.booleans(),
    channels_last=st.booleans(),
)
def test_fast_batches_are_as_near_to_the_truth_as_stated(
    backend: ModuleType, case: Any, dtype: torch.dtype, swap: bool, channels_last: bool
) -> None:
    images, _, target, numbers = case
    dst, mask = run(backend, case, dtype, (swap, False, channels_last))
    nothing = [each[:, :0, :0] for each in images]
    fills = torch.from_numpy(oracle.in_steps(nothing, target, numbers, swap)).to(dtype)
    assert np.array_equal(mask.numpy(), oracle.mask_of(images, target))
    for row, fill, image, inside in zip(dst, fills, images, mask, strict=True):
        assert torch.equal(row[:, ~inside], fill[:, ~inside])
        box = row[:, : image.shape[1], : image.shape[2]]
        if np.abs(oracle.in_truth(image, numbers, swap)[0]).max(initial=0) < 6e4:
            oracle.assert_near(box, image, numbers, swap)


@both
def test_numbers_are_rounded_to_float32_and_may_be_anything(
    backend: ModuleType,
) -> None:
    dst = torch.empty(1, 2, 1, 2)
    image = torch.tensor([[[0]], [[1]]], dtype=torch.uint8)
    inf = float("inf")
    backend.image_batch(
        dst, [image], None, [0, 1 / 3], [0, 1], [1e300, -inf], False, True
    )
    oracle.assert_bits(
        dst, np.array([[[[np.nan, np.inf]], [[1 - np.float32(1 / 3), -np.inf]]]], "f4")
    )
    backend.image_batch(
        dst, [image], None, [np.float64(0), 1], [1, True], [0, 0], False, False
    )
    assert dst[..., 0].tolist() == [[[0], [0]]]


#: Means and stds that three operations cannot divide by, and their neighbours that
#: they can.
ODD = [0.0, -0.0, 1e-45, 1e-30, 2.0**-41, 2.0**-40, -3.5, 2.0**40, 2.0**41, 1e38]


@both
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("source", [torch.uint8, torch.float32], ids=str)
def test_every_mean_and_std_divides_as_numpy_does(
    backend: ModuleType, dtype: torch.dtype, channels_last: bool, source: torch.dtype
) -> None:
    pixels = torch.arange(256, dtype=source).expand(3, 2, 256).contiguous()
    layout = torch.channels_last if channels_last else torch.contiguous_format
    dst = torch.empty(1, 3, 2, 256, dtype=dtype).to(memory_format=layout)
    for odd in [*ODD, float("inf"), float("nan")]:
        for mean, std in ((odd, 58.395), (123.675, odd), (odd, odd), (odd, 1e-3)):
            numbers = oracle.Numbers((mean, 7.5, mean), (57.12, std, std), (0, 0, 0))
            backend.image_batch(dst, [pixels], None, *numbers, False, True)
            expected = oracle.in_steps([pixels.numpy()], (2, 256), numbers, False)
            oracle.assert_bits(dst, expected)


def image(*shape: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    return torch.ones(shape or (3, 4, 5), dtype=dtype)


BATCH = (2, 3, 4, 5)
ROW = (1.0, 1.0, 1.0)
MEMORY = torch.zeros(120)


def call(**changed: Any) -> list[Any]:
    """Return good arguments with some of them changed."""
    good = {
        "dst": torch.full(BATCH, 7.0),
        "images": [image(), image(3, 2, 2)],
        "mask": None,
        "mean": ROW,
        "std": ROW,
        "fill": ROW,
        "swap_channels": False,
        "exact": True,
    }
    return list((good | changed).values())


def odd_start() -> torch.Tensor:
    raw = torch.zeros(3 * 4 * 5 * 4 + 1, dtype=torch.uint8).numpy()
    return torch.frombuffer(raw.data, dtype=torch.float32, offset=1).view(3, 4, 5)


BYTES = torch.zeros(60, dtype=torch.uint8)
FLOAT = torch.float32
REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"dst": [1]}, TypeError, "dst must be a torch.Tensor, but is of type list."),
    ({"images": 1}, TypeError,
     "images must be a sequence of tensors, but is of type int."),
    ({"images": [image(), 1]}, TypeError,
     "images[1] must be a torch.Tensor, but is of type int."),
    ({"mask": [1]}, TypeError, "mask must be a torch.Tensor, but is of type list."),
    ({"mean": 1}, TypeError, "mean must be a sequence of floats, but is of type int."),
    ({"std": (1, "1", 1)}, TypeError, "std[1] must be a float, but is of type str."),
    ({"swap_channels": 1}, TypeError,
     "swap_channels must be a bool, but is of type int."),
    ({"exact": None}, TypeError, "exact must be a bool, but is of type NoneType."),
    ({"dst": torch.ones(BATCH, dtype=torch.int32)}, TypeError,
     "dst must have dtype torch.float32, torch.float16 or torch.bfloat16, but has "
     "torch.int32."),
    ({"dst": torch.ones(BATCH, device="meta")}, TypeError,
     "dst must be a plain strided tensor, but is on the meta device. Give it data "
     "first."),
    ({"dst": torch.ones(2, 3)}, ValueError,
     "dst must have 4 dimensions, (N, C, H, W), but has shape (2, 3)."),
    ({"dst": torch.ones(1, 5, 2, 2)}, ValueError,
     "dst must have 1 to 4 channels, but has shape (1, 5, 2, 2)."),
    ({"dst": torch.ones(1, 1, 0, 2**31)}, ValueError,
     "dst must be smaller than 2**31 in height and width, but has shape (1, 1, 0, "
     "2147483648)."),
    ({"dst": torch.ones(2, 3, 5, 4).transpose(2, 3)}, ValueError,
     "dst must be contiguous or channels_last, but has strides (60, 20, 1, 4) for "
     "shape (2, 3, 4, 5)."),
    ({"images": [image()]}, ValueError,
     "images must have 2 entries, one for each image of dst, but has 1."),
    ({"fill": (1, 2)}, ValueError,
     "fill must have 3 entries, one for each channel, but has 2."),
    ({"images": [image(dtype=torch.int64), image()]}, TypeError,
     "images[0] must have dtype torch.uint8 or torch.float32, but has torch.int64. "
     "Convert it first."),
    ({"images": [image(), image(dtype=FLOAT)]}, TypeError,
     "images[1] must have the dtype of images[0], torch.uint8, but has torch.float32. "
     "Convert it first."),
    ({"images": [image(), image(2, 3)]}, ValueError,
     "images[1] must have 3 dimensions, (C, h, w), but has shape (2, 3)."),
    ({"images": [image(), image(1, 4, 4)]}, ValueError,
     "images[1] must have 3 channels, as dst, but has shape (1, 4, 4)."),
    ({"images": [image(), image(3, 5, 5)]}, ValueError,
     "images[1] must have at most height 4 and width 5, but has shape (3, 5, 5)."),
    ({"images": [image(), image(3, 5, 4).transpose(1, 2)]}, ValueError,
     "images[1] must be contiguous, or a permuted view of contiguous (h, w, C), but "
     "has strides (20, 1, 4) for shape (3, 4, 5). Call contiguous() on it first."),
    ({"images": [odd_start(), image(dtype=FLOAT)]}, ValueError,
     "images[0] must start at a multiple of 4 bytes, the item size of torch.float32, "
     "but starts 1 bytes behind one."),
    (
        {
            "dst": MEMORY.view(BATCH),
            "images": [image(dtype=FLOAT), MEMORY[:60].view(3, 4, 5)],
        },
        ValueError,
        "images[1] must not share memory with dst, but overlaps it. Clone it first.",
    ),
    ({"mask": torch.ones(2, 4, 5, dtype=torch.uint8)}, TypeError,
     "mask must have dtype torch.bool, but has torch.uint8."),
    ({"mask": torch.ones(2, 4, dtype=torch.bool)}, ValueError,
     "mask must have shape (2, 4, 5), one entry for each pixel of dst, but has shape "
     "(2, 4)."),
    ({"mask": torch.ones(2, 5, 4, dtype=torch.bool).transpose(1, 2)}, ValueError,
     "mask must be contiguous, but has strides (20, 1, 4) for shape (2, 4, 5)."),
    ({"dst": MEMORY.view(BATCH), "mask": MEMORY.view(torch.bool)[:40].view(2, 4, 5)},
     ValueError,
     "mask must not share memory with dst, but overlaps it. Give it memory of its "
     "own."),
    ({"images": [image(), BYTES.view(3, 4, 5)],
      "mask": BYTES[:40].view(torch.bool).view(2, 4, 5)}, ValueError,
     "mask must not share memory with images[1], but overlaps it. Give it memory of "
     "its own."),
    ({"images": [freed(image(), 7), image()]}, ValueError,
     "images[0] must lie within its storage, but needs 60 bytes where 7 are left. Copy "
     "it before its storage is released."),
]  # fmt: skip


@both
@pytest.mark.parametrize("case", REFUSED, ids=last)
def test_arguments_that_do_not_fit_are_refused_and_nothing_is_written(
    backend: ModuleType, case: Any
) -> None:
    changed, error, message = case
    arguments = call(**changed)
    check(backend.image_batch, arguments, error, f"image_batch: {message}")
    if "dst" not in changed:
        assert (arguments[0] == 7).all()
