"""The module `ImagePreprocessor`: normalise images of different sizes into a batch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from ctypes import c_float
from functools import partial
from typing import Any, SupportsFloat

import torch
from torch import Tensor, nn

from ..backend.plain import PLAIN, check_storage
from ..batch import stack
from ..batch.padding import Padded, Padding, check_num_dims
from ..core.devices import resolve_target
from ..core.errors import BatchTypeError, BatchValueError, type_name, warn_once
from ..transfer import to_device
from . import _batch, _custom_op
from ._batch import ImageOptions

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_FORMATS = (torch.contiguous_format, torch.channels_last)
_Numbers = float | Iterable[float]


class ImagePreprocessor(nn.Module):
    """Copy images to the device unchanged, and make one batch of them in one kernel.

    The module copies to the device, swaps channels, normalises, casts, pads and stacks.
    It has no parameters and an empty state dict. It can be the first layer of a model,
    or part of a ``collate_fn``.

    Args:
        mean: the mean of every channel of the result, after a swap, or one number for
            all. None, together with ``std``: no normalisation.
        std: as ``mean``; not 0.
        scale: ``mean`` and ``std`` are for images multiplied by this number: ``1/255``
            for uint8 images and the means of torchvision. The module divides them by
            it, in double precision. Without a mean the images are multiplied by it.
        size_divisor: round height and width of the batch up to multiples of this
            number; one number, or one for each.
        pad_value: the number in the padding, or one for every channel of the result. It
            is written unchanged, as in mmengine.
        pad_before_normalize: normalise ``pad_value`` like a pixel, as if the images
            were padded first (mmcv). Its values for every channel are then in the order
            of the *images*, before a swap.
        swap_channels: reverse the order of all channels (BGR to RGB).
        dtype: the dtype of the result: ``torch.float32``, ``torch.float16`` or
            ``torch.bfloat16``.
        memory_format: the memory format of the result: ``torch.contiguous_format`` or
            ``torch.channels_last``.
        return_mask: return a `Padded`, with a mask that is True inside the images.
        exact: compute ``(x - mean) / std`` in float32, with each step rounded as in
            torch, then round to ``dtype``. False: compute ``x * scale + bias`` without
            a division. Before rounding to ``dtype``, its error is at most
            ``2**-22 * (abs(x) + abs(mean)) / std``.
        device: the device to which images are copied first: an index, ``"cuda"``, or a
            `torch.device`. None: images stay on their device.

    Raises:
        TypeError: an option has the wrong type.
        ValueError: an option has an impossible value.
        RuntimeError: this machine does not have the device.

    Numbers are rounded to doubles, and then to float32. In exact mode, results are
    bit-identical to those of mmengine's ``ImgDataPreprocessor`` and of the same steps
    in torch.

    Example:
        >>> pre = ImagePreprocessor(mean=[1.0], std=[2.0], size_divisor=2, pad_value=9)
        >>> image = torch.tensor([[[1, 3, 5]]], dtype=torch.uint8)
        >>> pre([image, image[..., :2]]).tolist()[1]
        [[[0.0, 1.0, 9.0, 9.0], [9.0, 9.0, 9.0, 9.0]]]
    """

    def __init__(
        self,
        mean: _Numbers | None = None,
        std: _Numbers | None = None,
        *,
        scale: float = 1.0,
        size_divisor: int | Sequence[int] = 1,
        pad_value: _Numbers = 0,
        pad_before_normalize: bool = False,
        swap_channels: bool = False,
        dtype: torch.dtype = torch.float32,
        memory_format: torch.memory_format = torch.contiguous_format,
        return_mask: bool = False,
        exact: bool = True,
        device: int | str | torch.device | None = None,
    ) -> None:
        super().__init__()
        if (mean is None) != (std is None):
            raise BatchValueError(
                "ImagePreprocessor: mean and std must be given together, but only "
                f"{'mean' if std is None else 'std'} is."
            )
        flags = {
            "pad_before_normalize": pad_before_normalize,
            "swap_channels": swap_channels,
            "return_mask": return_mask,
            "exact": exact,
        }
        for option, value in flags.items():
            _check_one_of(option, value, (True, False))
        _check_one_of("dtype", dtype, _DTYPES)
        _check_one_of("memory_format", memory_format, _FORMATS)
        divisor: Any = size_divisor
        padding = Padding(size_divisor=divisor, mask=return_mask)
        check_num_dims(padding, 2, "ImagePreprocessor")
        means, stds = _divide_by_scale(mean, std, scale)
        self._options = ImageOptions(
            means,
            stds,
            _parse_numbers("pad_value", pad_value),
            pad_before_normalize,
            swap_channels,
            exact,
            padding,
            dtype,
            memory_format is torch.channels_last,
        )
        self.device: torch.device | None = None
        if device is not None:
            self.device = resolve_target(device, "ImagePreprocessor", "device")

    def forward(self, images: Sequence[Tensor] | Tensor) -> Tensor | Padded:
        """Return one batch ``(n, C, H, W)``, or a `Padded` with it and its mask.

        Args:
            images: n tensors ``(C, h, w)`` on one device, with the same C of 1 to 4 for
                all; or one tensor ``(n, C, h, w)``; or a list of numeric arrays
                ``(C, h, w)`` or of PIL images. The dtype is any dtype of real numbers.
                All but uint8 are converted to float32 first, so float64 images lose
                precision. Permuted views of ``(h, w, C)``, the layout of image
                decoders, are read without a copy.

        Returns:
            A new tensor. Each image starts at row 0 and column 0. Gradients flow to
            floating-point images. In a ``DataLoader`` worker it is written directly
            into shared memory.

        Raises:
            TypeError: an image is not a dense tensor or an array of real numbers.
            ValueError: no images, or an image with a wrong shape or on another device.
                The message names the first one.

        Stream: with a ``device``, images on the host are copied in one packed copy on
        its copy stream, with their bytes unchanged. Its current stream waits for the
        copy and runs the kernel. The host waits for neither, unless staging memory is
        at its limit (`memory.set_pinned_limit`). References to pinned images may be
        dropped at once, but the images must not be changed before the copy is done.
        """
        tensors = _as_image_list(images)
        _batch.check_images(tensors)
        if not torch.compiler.is_compiling():
            _check_scale(tensors, self._options)
        if self.device is not None:
            tensors = _copy_to_device(tensors, self.device)
        mask: Tensor | None
        if torch.compiler.is_compiling():
            data, mask = _custom_op.image_batch(tensors, self._options)
        else:
            data, mask = _batch.image_batch(tensors, self._options)
        return Padded(data, None, mask) if self._options.padding.mask else data

    def extra_repr(self) -> str:
        """Show the options that are not the default."""
        options = self._options
        shown: list[tuple[str, Any, Any]] = [
            ("mean", options.mean, None),
            ("std", options.std, None),
            ("size_divisor", options.padding.size_divisor, 1),
            ("pad_value", options.pad_value, (0.0,)),
            ("pad_before_normalize", options.pad_first, False),
            ("swap_channels", options.swap_channels, False),
            ("dtype", options.dtype, torch.float32),
            ("channels_last", options.channels_last, False),
            ("return_mask", options.padding.mask, False),
            ("exact", options.exact, True),
            ("device", self.device, None),
        ]
        changed = [(name, value) for name, value, default in shown if value != default]
        return ", ".join(f"{name}={value}" for name, value in changed)


def _as_image_list(images: Any) -> list[Any]:
    if isinstance(images, Tensor) and images.dim() == 4:
        return list(images)
    if not isinstance(images, (list, tuple)):
        found = type_name(images)
        if isinstance(images, Tensor):
            found = f"a tensor of shape {tuple(images.shape)}"
        raise BatchTypeError(
            "ImagePreprocessor: images must be a list of tensors (C, h, w), or one "
            f"tensor (n, C, h, w), but is {found}."
        )
    if PLAIN.issuperset(map(type, images)) or all(
        isinstance(image, Tensor) for image in images
    ):
        return list(images)
    stack.check_masks(images, lambda i: f"ImagePreprocessor: {_batch.image_name(i)}")
    tensors = stack.as_tensors(images)
    for i, image in enumerate(images):
        if stack.is_image(image):  # its array is (h, w, C), or (h, w) for one channel
            pixels = tensors[i]
            tensors[i] = pixels[None] if pixels.dim() == 2 else pixels.permute(2, 0, 1)
    return tensors


def _check_scale(images: list[Tensor], options: ImageOptions) -> None:
    """Warn if uint8 images are normalised with a mean for values up to 1."""
    if options.mean is None or options.std is None or images[0].dtype != torch.uint8:
        return
    if any(options.mean) and max(options.mean) <= 1 and max(options.std) < 1:
        warn_once(
            "PP103",
            "ImagePreprocessor: images are uint8 with values up to 255, but mean "
            f"{options.mean} and std {options.std} are for values up to 1. The result "
            "is too large. Pass scale=1/255, or multiply both by 255.",
        )


def _copy_to_device(images: list[Tensor], device: torch.device) -> list[Tensor]:
    """Copy the images to the device; permuted views keep their channels-last layout."""
    if torch.compiler.is_compiling():
        return [image.to(device) for image in images]
    permuted = [not each.is_contiguous() for each in images]
    rows = [
        each.permute(1, 2, 0) if is_permuted else each
        for each, is_permuted in zip(images, permuted, strict=True)
    ]
    if device.type == "cpu":
        for i, row in enumerate(rows):
            check_storage(row, partial("images[{}]".format, i))
    sent = to_device.start_copy(rows, device)()
    return [
        each.permute(2, 0, 1) if is_permuted else each
        for each, is_permuted in zip(sent, permuted, strict=True)
    ]


def _parse_numbers(option: str, value: Any) -> tuple[float, ...]:
    where = f"ImagePreprocessor: {option}"
    single = isinstance(value, (str, bytes)) or getattr(value, "ndim", None) == 0
    entries = [value] if single or not isinstance(value, Iterable) else list(value)
    if not all(isinstance(each, SupportsFloat) for each in entries):
        raise BatchTypeError(
            f"{where} must be a number or one for each channel, but is {value!r}."
        )
    numbers = tuple(_as_double(each, f"{where}[{i}]") for i, each in enumerate(entries))
    if not 1 <= len(numbers) <= 4:
        raise BatchValueError(
            f"{where} must have 1 to 4 entries, but has {len(numbers)}."
        )
    for i, number in enumerate(numbers):
        rounded = c_float(number).value
        if option != "pad_value" and not math.isfinite(rounded):
            raise BatchValueError(f"{where}[{i}] must be finite, but is {number}.")
        if option == "std" and rounded == 0:
            raise BatchValueError(f"{where}[{i}] must not be 0, but is {number}.")
    return numbers


def _as_double(value: SupportsFloat, where: str) -> float:
    try:
        return float(value)
    except OverflowError as error:
        raise BatchValueError(
            f"{where} must be a number that a double can hold, but is a larger integer."
        ) from error


def _divide_by_scale(
    mean: Any, std: Any, scale: Any
) -> tuple[tuple[float, ...], tuple[float, ...]] | tuple[None, None]:
    """Convert the mean and std of scaled images to those of the images themselves."""
    if not isinstance(scale, SupportsFloat):
        raise BatchTypeError(
            f"ImagePreprocessor: scale must be a number, but is {scale!r}."
        )
    factor = _as_double(scale, "ImagePreprocessor: scale")
    if not (math.isfinite(factor) and factor > 0):
        raise BatchValueError(
            f"ImagePreprocessor: scale must be positive and finite, but is {factor}."
        )
    if mean is None:
        if factor == 1:
            return None, None
        mean, std = 0.0, 1.0
    means, stds = _parse_numbers("mean", mean), _parse_numbers("std", std)
    return (
        _parse_numbers("mean", [each / factor for each in means]),
        _parse_numbers("std", [each / factor for each in stds]),
    )


def _check_one_of(option: str, value: Any, allowed: tuple[Any, ...]) -> None:
    if not any(value is each for each in allowed):
        names = ", ".join(map(str, allowed[:-1])) + f" or {allowed[-1]}"
        raise BatchTypeError(
            f"ImagePreprocessor: {option} must be {names}, but is {value!r}."
        )
