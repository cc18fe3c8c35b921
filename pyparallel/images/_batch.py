"""Normalise and pad images of different sizes into one batch."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import c_float
from dataclasses import dataclass
from functools import lru_cache, partial
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple

import torch

from .. import backend
from ..backend.image_checks import MOST_CHANNELS, is_packed
from ..backend.plain import PLAIN, without_subclasses
from ..batch import allocation, stack, torch_stack
from ..batch.padding import Padding
from ..batch.plan import StackPlan, plan_stack
from ..core.errors import BatchTypeError, BatchValueError, EmptyBatchError, type_name
from ..core.torch_private import outside_autocast

_KERNEL_DTYPES = ({torch.uint8}, {torch.float32})
_CHANNELS = tuple({num} for num in range(1, MOST_CHANNELS + 1))
_STRIDED = {torch.strided}
_channels_of = itemgetter(0)
_dtype_of = attrgetter("dtype")
_is_nested = attrgetter("is_nested")
_layout_of = attrgetter("layout")
_shape_of = attrgetter("shape")

_Numbers = tuple[float, ...]


class ChannelConstants(NamedTuple):
    """One number for every channel of the result, each rounded to float32."""

    mean: _Numbers
    std: _Numbers
    fill: _Numbers


# Compared and hashed by identity, so that a look-up in a cache is cheap.
@dataclass(frozen=True, slots=True, eq=False)
class ImageOptions:
    """The options of `ImagePreprocessor` as a frozen value.

    Attributes:
        mean: one for every channel of the result, or one for all; None: no
            normalisation.
        std: as ``mean``.
        pad_value: one for every channel, or one for all.
        pad_first: True: ``pad_value`` is normalised like a pixel, with channels in the
            order of the images. False: it is written into the result unchanged.
        swap_channels: reverse the order of the channels.
        exact: see `backend.image_batch`.
        padding: the divisor of the sizes, and whether to return a mask.
        dtype: the dtype of the result.
        channels_last: True if the result has this memory format.
    """

    mean: _Numbers | None
    std: _Numbers | None
    pad_value: _Numbers
    pad_first: bool
    swap_channels: bool
    exact: bool
    padding: Padding
    dtype: torch.dtype
    channels_last: bool

    @lru_cache(maxsize=64)  # noqa: B019 - few options exist, and they are small
    def channel_constants(self, num_channels: int) -> ChannelConstants:
        """Return the constants for a number of channels.

        Raises:
            ValueError: an option has another number of entries.
        """
        for option in ("mean", "std", "pad_value"):
            value = getattr(self, option)
            if value is not None and len(value) not in (1, num_channels):
                raise BatchValueError(
                    f"ImagePreprocessor: images[0] must have {len(value)} channels, "
                    f"because {option} has {len(value)} entries, but has "
                    f"{num_channels}. Pass one for each channel, or one for all."
                )
        spread = partial(_spread, num=num_channels)
        mean = spread((0.0,) if self.mean is None else self.mean)
        std = spread((1.0,) if self.std is None else self.std)
        fill = spread(self.pad_value)
        if self.pad_first:
            if self.swap_channels:
                fill = fill[::-1]
            # Computing in double and rounding gives the result of a float32 operation.
            less = [_float32(v - m) for v, m in zip(fill, mean, strict=True)]
            fill = tuple(_float32(v / s) for v, s in zip(less, std, strict=True))
        return ChannelConstants(mean, std, fill)


def _spread(values: _Numbers, num: int) -> _Numbers:
    rounded = tuple(map(_float32, values))
    return rounded if len(rounded) == num else rounded * num


def _float32(value: float) -> float:
    return c_float(value).value


def image_name(i: int) -> str:
    """Return the name of image ``i`` for an error."""
    return f"images[{i}]"


def check_images(images: Sequence[Any]) -> None:
    """Raise unless these are images that fit into one batch.

    Raises:
        TypeError: an image is not a tensor of real numbers.
        ValueError: there are no images, or an image has a wrong number of dimensions or
            channels. The message names the first one.
    """
    if not torch.compiler.is_compiling() and images and _are_usual(images):
        return
    if not images:
        raise EmptyBatchError(
            "ImagePreprocessor: images must have at least one image, but is empty."
        )
    torch_stack.check_layouts(images, image_name)
    for i, image in enumerate(images):
        where = f"ImagePreprocessor: {image_name(i)}"
        if not isinstance(image, torch.Tensor):
            raise BatchTypeError(
                f"{where} must be a tensor or a numeric array (C, h, w), or a PIL "
                f"image, but is {type_name(image)}. Convert it with torch.as_tensor."
            )
        if image.is_complex() or image.is_quantized:
            raise BatchTypeError(
                f"{where} must have a dtype of real numbers, but has {image.dtype}."
            )
        if image.dim() != 3 or not 1 <= image.shape[0] <= MOST_CHANNELS:
            raise BatchValueError(
                f"{where} must have shape (C, h, w) with 1 to {MOST_CHANNELS} "
                f"channels, but has shape {tuple(image.shape)}."
            )
        if image.shape[0] != images[0].shape[0]:
            raise BatchValueError(
                f"{where} must have {images[0].shape[0]} channels like images[0], but "
                f"has shape {tuple(image.shape)}."
            )


def _are_usual(images: Sequence[Any]) -> bool:
    """Return True if images of the most common kind pass all checks of them."""
    if not (
        PLAIN.issuperset(map(type, images))
        and set(map(_dtype_of, images)) in _KERNEL_DTYPES
        and set(map(_layout_of, images)) == _STRIDED
        and not any(map(_is_nested, images))
    ):
        return False
    shapes = list(map(_shape_of, images))
    return set(map(len, shapes)) == {3} and set(map(_channels_of, shapes)) in _CHANNELS


def image_batch(
    images: Sequence[torch.Tensor], options: ImageOptions
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the batch, and the mask if the options request it.

    The backend processes plain images in one pass. torch's operators process images
    that need gradients or that the backend refuses.

    Args:
        images: images that have passed `check_images`, all on one device.
        options: the options of the batch.
    """
    images = without_subclasses(images)
    constants = options.channel_constants(images[0].shape[0])
    plan = plan_stack(list(map(_shape_of, images)), 2, image_name, options.padding)
    if set(map(_dtype_of, images)) not in _KERNEL_DTYPES:
        for i in range(len(images)):
            torch_stack.check_sample(images, image_name, i)
        images = [image.float() for image in images]
    if stack.are_plain(images):
        try:
            data, mask = _run_backend(images, options, plan, constants)
        except (TypeError, ValueError):  # before any write; see are_plain
            data, mask = _run_torch(images, options, plan, constants)
    else:
        data, mask = _run_torch(images, options, plan, constants)
    return stack.count_padding(data, images), mask


def _run_backend(
    images: Sequence[torch.Tensor],
    options: ImageOptions,
    plan: StackPlan,
    constants: ChannelConstants,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    device, mask = images[0].device, None
    if not all(map(torch.Tensor.is_contiguous, images)):
        images = [each if is_packed(each) else each.contiguous() for each in images]
    num, depth, *sides = plan.shape
    if options.channels_last:
        data = allocation.empty((num, *sides, depth), options.dtype, device)
        data = data.permute(0, 3, 1, 2)
    else:
        data = allocation.empty(plan.shape, options.dtype, device)
    if options.padding.mask:
        mask = allocation.empty((num, *sides), torch.bool, device)
    backend.image_batch(
        data, images, mask, *constants, options.swap_channels, options.exact
    )
    return data, mask


def _run_torch(
    images: Sequence[torch.Tensor],
    options: ImageOptions,
    plan: StackPlan,
    constants: ChannelConstants,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    first = images[0]
    mean, std, fill = (
        torch.tensor(values, dtype=torch.float32, device=first.device).view(-1, 1, 1)
        for values in constants
    )
    rows = []
    masks = []
    for i, image in enumerate(images):
        torch_stack.check_sample(images, image_name, i)
        pixels = (image.flip(0) if options.swap_channels else image).float()
        if options.exact:
            pixels = (pixels - mean) / std
        else:
            pixels = pixels * (1 / std.double()).float()
            pixels = pixels - (mean.double() / std.double()).float()
        sides = torch_stack.pad_argument(plan, image.shape[1:], i)
        inside = torch.ones(image.shape[1:], dtype=torch.bool, device=first.device)
        inside = torch_stack.pad(inside, sides)
        padded = torch_stack.pad(pixels, sides)
        row = torch.where(inside, padded, fill).to(options.dtype)
        rows.append(row.permute(1, 2, 0) if options.channels_last else row)
        masks.append(inside)
    with outside_autocast():
        data = torch.stack(rows).contiguous()
    if options.channels_last:
        data = data.permute(0, 3, 1, 2)
    return data, torch.stack(masks) if options.padding.mask else None
