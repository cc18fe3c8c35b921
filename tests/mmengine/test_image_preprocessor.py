"""ImagePreprocessor compared with mmengine's ImgDataPreprocessor, bit for bit.

Runs where mmengine is installed.
"""

from __future__ import annotations

import os
import warnings
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pyparallel import ImagePreprocessor

pytestmark = [
    pytest.mark.peers,
    pytest.mark.filterwarnings(r"ignore:\[PP103\]"),  # any mean, also for bytes
]

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # deprecations of its own dependencies
    try:
        from mmengine.model import ImgDataPreprocessor, stack_batch
    except ImportError as error:
        if os.environ.get("PYPARALLEL_REQUIRE_MMCV", "0") not in ("", "0"):
            raise
        pytest.skip(f"needs mmengine: {error}", allow_module_level=True)

bounded = settings(max_examples=150, deadline=None)
NUMBERS = st.floats(-200, 200, width=32)
DIVISORS = st.integers(1, 33)


@st.composite
def options(draw: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return options of both, with one meaning."""
    mean = std = None
    if draw(st.booleans()):
        num = draw(st.sampled_from([1, 3]))
        mean = draw(st.lists(NUMBERS, min_size=num, max_size=num))
        std = draw(st.lists(NUMBERS.filter(bool), min_size=num, max_size=num))
    divisor, value = draw(DIVISORS), draw(NUMBERS)
    swap = draw(st.sampled_from([None, "bgr_to_rgb", "rgb_to_bgr"]))
    ours = {
        "mean": mean,
        "std": std,
        "size_divisor": divisor,
        "pad_value": value,
        "swap_channels": swap is not None,
    }
    theirs = {"pad_size_divisor": divisor, "pad_value": value, "mean": mean, "std": std}
    return ours, theirs | ({swap: True} if swap else {})


def images(data: Any, num: int) -> list[torch.Tensor]:
    dtype = data.draw(st.sampled_from([torch.uint8, torch.float32, torch.float64]))
    sides = st.tuples(st.integers(1, 40), st.integers(1, 40))
    shapes = [(3, *data.draw(sides)) for _ in range(num)]
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    return [
        (torch.rand(shape, generator=generator, dtype=torch.float64) * 255).to(dtype)
        for shape in shapes
    ]


def assert_same(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    assert ours.shape == theirs.shape and ours.dtype is theirs.dtype
    assert torch.equal(ours.view(torch.int32), theirs.contiguous().view(torch.int32))


@bounded
@given(both=options(), data=st.data(), num=st.integers(1, 4))
def test_lists_of_images_have_equal_bits(both: Any, data: Any, num: int) -> None:
    ours, theirs = both
    given_images = images(data, num)
    found = ImagePreprocessor(**ours)(given_images)
    expected = ImgDataPreprocessor(**theirs)({"inputs": given_images})["inputs"]
    assert_same(found, expected)


@bounded
@given(both=options(), data=st.data(), num=st.integers(1, 3))
def test_one_tensor_has_equal_bits(both: Any, data: Any, num: int) -> None:
    ours, theirs = both
    stacked = torch.stack(images(data, 1) * num)
    found = ImagePreprocessor(**ours)(stacked)
    expected = ImgDataPreprocessor(**theirs)({"inputs": stacked})["inputs"]
    assert_same(found, expected)


@bounded
@given(data=st.data(), num=st.integers(1, 4), divisor=DIVISORS, value=NUMBERS)
def test_without_numbers_it_is_stack_batch(
    data: Any, num: int, divisor: int, value: float
) -> None:
    given_images = [each.float() for each in images(data, num)]
    found = ImagePreprocessor(size_divisor=divisor, pad_value=value)(given_images)
    assert_same(found, stack_batch(given_images, divisor, value))


def test_half_precision_equals_mmengine_rounded_once() -> None:
    both = {"mean": [123.675, 116.28, 103.53], "std": [58.395, 57.12, 57.375]}
    sides = ((9, 30), (31, 5))
    given_images = [torch.randint(0, 256, (3, *s), dtype=torch.uint8) for s in sides]
    expected = ImgDataPreprocessor(**both)({"inputs": given_images})["inputs"]
    for dtype in (torch.float16, torch.bfloat16):
        found = ImagePreprocessor(**both, dtype=dtype)(given_images)
        assert torch.equal(found, expected.to(dtype))
