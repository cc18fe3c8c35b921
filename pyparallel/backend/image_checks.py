"""Checks of the arguments of image_batch, with the messages of the extension."""

from __future__ import annotations

from collections.abc import Iterable
from ctypes import c_float
from typing import Any, SupportsFloat, SupportsIndex

import torch
from torch import Tensor

from ._checks import (
    as_list,
    check_mask_memory,
    check_mask_type,
    check_memory,
    check_plain,
    error,
    format_where,
    overlap,
)

_Where = str | tuple[str, int]

#: The channels of a color image with transparency.
MOST_CHANNELS = 4

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_IMAGE_DTYPES = (torch.uint8, torch.float32)
_SIDES_BELOW = 2**31
_HWC = (1, 2, 0)


def as_floats(values: Iterable[Any], where: str) -> list[float]:
    """Return the values as floats, each rounded to float32."""
    numbers = as_list(values, where, "a sequence of floats")
    for index, each in enumerate(numbers):
        if not isinstance(each, SupportsFloat | SupportsIndex):
            found = f"is of type {type(each).__name__}"
            raise TypeError(f"{where}[{index}] must be a float, but {found}.")
    return [c_float(float(each)).value for each in numbers]


def check_bool(value: object, where: str) -> None:
    """Check that a value is a bool."""
    if type(value) is not bool:
        found = f"is of type {type(value).__name__}"
        raise TypeError(f"{where} must be a bool, but {found}.")


def check_dst(dst: Tensor, num_images: int) -> None:
    """Check the tensor that receives the batch."""
    where = "image_batch: dst"
    check_plain(dst, where)
    shape = tuple(dst.shape)
    found = f"has shape {shape}"
    if dst.dtype not in _DTYPES:
        rule = "must have dtype torch.float32, torch.float16 or torch.bfloat16"
        raise TypeError(f"{where} {rule}, but has {dst.dtype}.")
    if len(shape) != 4:
        raise error(where, "have 4 dimensions, (N, C, H, W)", found)
    if not 1 <= shape[1] <= MOST_CHANNELS:
        raise error(where, f"have 1 to {MOST_CHANNELS} channels", found)
    if max(shape[2:]) >= _SIDES_BELOW:
        raise error(where, "be smaller than 2**31 in height and width", found)
    if not (
        dst.is_contiguous() or dst.is_contiguous(memory_format=torch.channels_last)
    ):
        found = f"has strides {dst.stride()} for shape {shape}"
        raise error(where, "be contiguous or channels_last", found)
    if num_images != shape[0]:
        rule = f"have {shape[0]} entries, one for each image of dst"
        raise error("image_batch: images", rule, f"has {num_images}")
    check_memory(dst, where)
    _check_aligned(dst, where)


def check_channels(values: list[float], what: str, num_channels: int) -> None:
    """Check that there is one value for each channel."""
    if len(values) != num_channels:
        rule = f"have {num_channels} entries, one for each channel"
        raise error(f"image_batch: {what}", rule, f"has {len(values)}")


def check_images(images: list[Tensor], dst: Tensor) -> None:
    """Check the images against the tensor that receives the batch."""
    for index, image in enumerate(images):
        where = ("image_batch: images", index)
        check_plain(image, where)
        rule = ""
        if image.dtype not in _IMAGE_DTYPES:
            rule = "must have dtype torch.uint8 or torch.float32"
        elif image.dtype != images[0].dtype:
            rule = f"must have the dtype of images[0], {images[0].dtype}"
        if rule:
            advice = f"but has {image.dtype}. Convert it first."
            raise TypeError(f"{format_where(where)} {rule}, {advice}")
        if image.device != dst.device:
            rule = f"be on the device of dst, {dst.device}"
            raise error(where, rule, f"is on {image.device}", " Move it first.")
        _check_shape(image, where, dst)
        if not is_packed(image):
            rule = "be contiguous, or a permuted view of contiguous (h, w, C)"
            found = f"has strides {image.stride()} for shape {tuple(image.shape)}"
            advice = " Call contiguous() on it first."
            raise error(where, rule, found, advice)
        check_memory(image, where)
        _check_aligned(image, where)
        if overlap(image, dst):
            rule = "not share memory with dst"
            raise error(where, rule, "overlaps it", " Clone it first.")


def is_packed(image: Tensor) -> bool:
    """Return True if an image ``(C, h, w)`` is contiguous as is or as ``(h, w, C)``."""
    return image.is_contiguous() or image.permute(_HWC).is_contiguous()


def check_mask(mask: Tensor, dst: Tensor, images: list[Tensor]) -> None:
    """Check the mask against the batch and the images."""
    where = "image_batch: mask"
    check_mask_type(mask, where, dst)
    expected = (dst.shape[0], *dst.shape[2:])
    if mask.shape != expected:
        rule = f"have shape {expected}, one entry for each pixel of dst"
        raise error(where, rule, f"has shape {tuple(mask.shape)}")
    others = [("dst", dst), *((f"images[{i}]", t) for i, t in enumerate(images))]
    check_mask_memory(mask, where, others)


def _check_shape(image: Tensor, where: _Where, dst: Tensor) -> None:
    shape, found = tuple(image.shape), f"has shape {tuple(image.shape)}"
    channels, height, width = dst.shape[1:]
    if len(shape) != 3:
        raise error(where, "have 3 dimensions, (C, h, w)", found)
    if shape[0] != channels:
        raise error(where, f"have {channels} channels, as dst", found)
    if shape[1] > height or shape[2] > width:
        rule = f"have at most height {height} and width {width}"
        raise error(where, rule, found)


def _check_aligned(tensor: Tensor, where: _Where) -> None:
    excess = tensor.data_ptr() % tensor.itemsize
    if excess and tensor.numel():
        size = f"{tensor.itemsize} bytes, the item size of {tensor.dtype}"
        rule, found = f"start at a multiple of {size}", f"starts {excess} bytes"
        raise error(where, rule, f"{found} behind one")
