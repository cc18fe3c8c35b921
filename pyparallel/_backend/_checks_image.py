"""What both backends demand of the arguments of image_batch."""

from __future__ import annotations

from collections.abc import Iterable
from ctypes import c_float
from typing import Any, SupportsFloat

import torch
from torch import Tensor

from ._checks import check_memory, check_plain, error, items, name, overlap

#: More channels than an image with transparency has are no image.
MOST_CHANNELS = 4

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_IMAGE_DTYPES = (torch.uint8, torch.float32)
_HWC = (1, 2, 0)


def numbers(values: Iterable[Any], where: str) -> list[float]:
    """Return numbers, each rounded to float32."""
    found = items(values, where, "a sequence of numbers")
    for index, each in enumerate(found):
        if not isinstance(each, SupportsFloat):
            found_kind = f"is of type {type(each).__name__}"
            raise TypeError(f"{where}[{index}] must be a number, but {found_kind}.")
    return [c_float(float(each)).value for each in found]


def check_target(dst: Tensor, num_images: int) -> None:
    where = "image_batch: dst"
    check_plain(dst, where)
    shape = tuple(dst.shape)
    if dst.dtype not in _DTYPES:
        rule = "must have dtype torch.float32, torch.float16 or torch.bfloat16"
        raise TypeError(f"{where} {rule}, but has {dst.dtype}.")
    if len(shape) != 4:
        raise error(where, "have 4 dimensions", f"has shape {shape}")
    if not 1 <= shape[1] <= MOST_CHANNELS:
        rule = f"have 1 to {MOST_CHANNELS} channels"
        raise error(where, rule, f"has shape {shape}")
    if not (
        dst.is_contiguous() or dst.is_contiguous(memory_format=torch.channels_last)
    ):
        found = f"has strides {dst.stride()} for shape {shape}"
        raise error(where, "be contiguous or channels_last", found)
    if num_images != shape[0]:
        rule = f"have {shape[0]} entries, one for each row of dst"
        raise error("image_batch: images", rule, f"has {num_images}")
    check_memory(dst, where)


def check_channels(values: list[float], what: str, num_channels: int) -> None:
    if len(values) != num_channels:
        rule = f"have {num_channels} entries, one for each channel of dst"
        raise error(f"image_batch: {what}", rule, f"has {len(values)}")
    if what == "std" and 0.0 in values:
        where = ("image_batch: std", values.index(0.0))
        raise error(where, "not be 0", "is 0 in float32")


def check_images(images: list[Tensor], dst: Tensor) -> None:
    for index, image in enumerate(images):
        where = ("image_batch: images", index)
        check_plain(image, where)
        if image.dtype not in _IMAGE_DTYPES:
            rule = "must have dtype torch.uint8 or torch.float32"
            raise TypeError(f"{name(where)} {rule}, but has {image.dtype}.")
        if image.dtype != images[0].dtype:
            rule = f"must have the dtype of images[0], {images[0].dtype}"
            raise TypeError(f"{name(where)} {rule}, but has {image.dtype}.")
        if image.device != dst.device:
            rule = f"be on the device of dst, {dst.device}"
            raise error(where, rule, f"is on {image.device}", " Move it first.")
        _check_shape(image, where, dst)
        if not is_packed(image):
            rule = "be contiguous, as (C, h, w) or as (h, w, C)"
            found = f"has strides {image.stride()} for shape {tuple(image.shape)}"
            advice = " Call contiguous() on it first."
            raise error(where, rule, found, advice)
        check_memory(image, where)
        if overlap(image, dst):
            rule = "not share memory with dst"
            raise error(where, rule, "overlaps it", " Clone it first.")


def is_packed(image: Tensor) -> bool:
    """Tell whether an image is contiguous, as it is or with its channels last."""
    return image.is_contiguous() or image.permute(_HWC).is_contiguous()


def check_places(mask: Tensor, dst: Tensor, images: list[Tensor]) -> None:
    where = "image_batch: mask"
    check_plain(mask, where)
    shape, expected = tuple(mask.shape), (dst.shape[0], *dst.shape[2:])
    if mask.dtype is not torch.bool:
        rule = f"must have dtype torch.bool, but has {mask.dtype}."
        raise TypeError(f"{where} {rule}")
    if mask.device != dst.device:
        rule = f"be on the device of dst, {dst.device}"
        raise error(where, rule, f"is on {mask.device}")
    if shape != expected:
        raise error(where, f"have shape {expected}, as dst", f"has shape {shape}")
    if not mask.is_contiguous():
        found = f"has strides {mask.stride()} for shape {shape}"
        raise error(where, "be contiguous", found)
    check_memory(mask, where)
    others = [("dst", dst), *((f"images[{i}]", t) for i, t in enumerate(images))]
    for other, tensor in others:
        if overlap(tensor, mask):
            rule = f"not share memory with {other}"
            raise error(where, rule, "overlaps it", " Give it memory of its own.")


def _check_shape(image: Tensor, where: tuple[str, int], dst: Tensor) -> None:
    shape, found = tuple(image.shape), f"has shape {tuple(image.shape)}"
    channels, height, width = dst.shape[1:]
    if len(shape) != 3:
        raise error(where, "have 3 dimensions", found)
    if shape[0] != channels:
        raise error(where, f"have {channels} channels, as dst", found)
    if shape[1] > height or shape[2] > width:
        rule = f"have at most size ({height}, {width}), that of dst"
        raise error(where, rule, found)
