"""The expected batch of images, in simple numpy code."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

Array = NDArray[np.generic]

#: Half a unit in the last place, relative to the value.
HALF_ULP = {torch.float32: 0.0, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
#: The same for the smallest values, which have fewer digits.
TINY = {torch.float32: 2.0**-149, torch.float16: 2.0**-25, torch.bfloat16: 2.0**-126}


class Numbers(NamedTuple):
    mean: Sequence[float]
    std: Sequence[float]
    fill: Sequence[float]


def in_steps(
    images: Sequence[Array], target: tuple[int, int], numbers: Numbers, swap: bool
) -> Array:
    """Return the batch (n, C, H, W) in float32, rounded to float32 after every step."""
    mean, std, fill = (np.array(row, np.float32)[:, None, None] for row in numbers)
    out = np.empty((len(images), len(numbers.mean), *target), np.float32)
    with np.errstate(all="ignore"):
        for row, image in zip(out, images, strict=True):
            row[:] = fill
            pixels = image[::-1] if swap else image
            pixels = (pixels.astype(np.float32) - mean) / std
            row[:, : image.shape[1], : image.shape[2]] = pixels
    return out


def in_truth(image: Array, numbers: Numbers, swap: bool) -> tuple[Array, Array]:
    """Return one image in float64, and the tolerance of fast implementations."""
    mean, std = (
        np.array(row, np.float32).astype(np.float64)[:, None, None]
        for row in (numbers.mean, numbers.std)
    )
    pixels = (image[::-1] if swap else image).astype(np.float64)
    reach = (abs(pixels) + abs(mean)) / abs(std)
    return (pixels - mean) / std, 2.0**-22 * reach


def rounded_bits(values: Array, dtype: torch.dtype) -> Array:
    """Return the bits of float32 values in another dtype, to the nearest even."""
    if dtype is torch.float32:
        return values.view(np.uint32)
    if dtype is torch.float16:
        with np.errstate(over="ignore"):
            return values.astype(np.float16).view(np.uint16)
    bits = values.view(np.uint32).astype(np.uint64)
    up = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(values), 0x7FC0, up).astype(np.uint16)


def assert_bits(actual: torch.Tensor, expected: Array) -> None:
    """Compare with float32 values bit by bit; all NaNs are equal."""
    integers = torch.int32 if actual.itemsize == 4 else torch.int16
    found = actual.contiguous().view(integers).numpy().view(f"u{actual.itemsize}")
    right = rounded_bits(expected, actual.dtype)
    same = (found == right) | (actual.isnan().contiguous().numpy() & np.isnan(expected))
    assert same.all(), (actual, expected)


def assert_near(
    actual: torch.Tensor, image: Array, numbers: Numbers, swap: bool
) -> None:
    """Compare with float64 within the documented tolerance."""
    truth, tolerance = in_truth(image, numbers, swap)
    unit, tiny = HALF_ULP[actual.dtype], TINY[actual.dtype]
    allowed = tolerance + (abs(truth) + tolerance) * unit + tiny
    assert (abs(actual.double().numpy() - truth) <= allowed).all()


def mask_of(images: Sequence[Array], target: tuple[int, int]) -> Array:
    """Return a mask of the images in their batch, (n, H, W)."""
    mask = np.zeros((len(images), *target), np.bool_)
    for row, image in zip(mask, images, strict=True):
        row[: image.shape[1], : image.shape[2]] = True
    return mask
