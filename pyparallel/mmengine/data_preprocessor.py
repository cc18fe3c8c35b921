"""BaseDataPreprocessor and ImgDataPreprocessor: the first step of a model."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from ctypes import c_float
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..batch import pytree
from ..batch.padding_values import padding_value_as_double
from ..core.errors import (
    BatchTypeError,
    BatchValueError,
    MissingKeyError,
    check_whole,
    type_name,
)
from ..core.torch_private import version_of
from ..images.preprocessor import ImagePreprocessor
from ._cast_data import cast_data, has_items
from ._upstream import (
    BaseDataPreprocessorBase,
    ImgDataPreprocessorBase,
    init_module,
    provides,
)
from .collate import pad_to_batch

#: The function that ``Module.to`` and similar methods pass to ``Module._apply``.
Apply = Callable[[torch.Tensor], torch.Tensor]
#: The dtypes that the kernel reads; other images are converted with torch.
_KERNEL_DTYPES = (torch.uint8, torch.float32)
_SWAPPED = [2, 1, 0]


@provides("MODELS")
class BaseDataPreprocessor(BaseDataPreprocessorBase):
    """Copies a batch to the device of its model, in one packed copy.

    Args:
        non_blocking: passed to the method ``to`` of objects that are not tensors. In
            both cases the host does not wait for tensors.

    The target device follows the model: every method that moves the model (``to``,
    ``cuda``, ``to_empty``, a wrapper's ``to``) also changes the device of the batches.
    Subclasses override `forward`.

    With mmengine installed this is a subclass of mmengine's class, so mmengine can
    build it as part of a model. mmengine's class copies each tensor separately,
    converts mappings to dicts, and raises for a range.
    """

    # mmengine's ``cuda`` ignores its argument and uses the current device.
    to: Any = nn.Module.to
    cuda: Any = nn.Module.cuda
    cpu: Any = nn.Module.cpu

    def __init__(self, non_blocking: bool | None = False) -> None:
        init_module(BaseDataPreprocessorBase, self)
        self._non_blocking = bool(non_blocking)
        self._device = torch.device("cpu")

    @property
    def device(self) -> torch.device:
        """The device of the batches that `cast_data` returns."""
        return self._device

    def cast_data(self, data: Any) -> Any:
        """Return ``data`` on the device, in new containers of the same types.

        DataContainers are opened, as by `pyparallel.scatter` for one target; contents
        with ``cpu_only`` stay on the host. mmengine's data elements and other objects
        with a method ``to`` are moved by that method. Mappings, lists, tuples and
        dataclasses are moved item by item, even if they have such a method. Other
        values (strings, arrays, ranges, ``None``) are returned unchanged.

        In a subclass that overrides this method, it calls the override for each value
        of a mapping or a sequence, as mmengine's method does. Each tensor is then
        copied separately.

        Raises:
            TypeError: a DataContainer without ``cpu_only`` holds anything but tensors.
            ValueError: a DataContainer has several chunks, or a container contains
                itself.
            RuntimeError: this machine does not have the device.

        Stream: host tensors, also those in data elements, are copied as one packed copy
        on the copy stream. The current stream of the device waits for the copy, the
        host does not. The results are contiguous. If the device is the host, nothing is
        copied.
        """
        if type(self).cast_data is not BaseDataPreprocessor.cast_data:
            if isinstance(data, Mapping):
                cast = {key: self.cast_data(data[key]) for key in data}
                return pytree.rebuild_mapping(data, cast)
            if has_items(data):
                items = [self.cast_data(item) for item in data]
                return pytree.rebuild_sequence(data, items)
        return cast_data(data, self._device, self._non_blocking)

    def forward(self, data: Any, training: bool = False) -> Any:
        """Return the arguments of the model, on the device.

        Args:
            data: a batch of the loader.
            training: True in a training step; for subclasses.

        Returns:
            The batch; see `cast_data`. A mapping becomes a dict, because it contains
            the keyword arguments of the model.
        """
        data = self.cast_data(data)
        if isinstance(data, Mapping) and not isinstance(data, dict):
            return dict(data)
        return data

    def _apply(self, fn: Apply, recurse: bool = True) -> BaseDataPreprocessor:
        """Update the device of the batches along with the tensors of the model."""
        nn.Module._apply(self, fn, recurse)
        self._device = device_after(fn, self._device)
        return self


@provides("MODELS")
class ImgDataPreprocessor(BaseDataPreprocessor, ImgDataPreprocessorBase):
    """Copies images to the device, and converts them to one float32 batch there.

    Args:
        mean: the mean of each channel of the result: 3 numbers, or 1 for all channels.
            None, together with ``std``, for no normalization.
        std: the standard deviation, as ``mean``.
        pad_size_divisor: height and width are rounded up to multiples of it.
        pad_value: the number in the padding. It is not normalized.
        bgr_to_rgb: swap the first and the third channel.
        rgb_to_bgr: the same as ``bgr_to_rgb``.
        non_blocking: see `BaseDataPreprocessor`.

    Raises:
        ValueError: only one of ``mean`` and ``std``, other than 1 or 3 numbers, both
            swaps, a ``pad_size_divisor`` below 1 (also an ``AssertionError``).

    The values are bitwise equal to those of mmengine's class. `ImagePreprocessor`
    swaps, normalizes, pads and stacks images of uint8 or float32 with at most 4
    channels in one pass; torch's operators convert other images.
    """

    mean: Tensor
    std: Tensor

    def __init__(
        self,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
        pad_size_divisor: int = 1,
        pad_value: float = 0,
        bgr_to_rgb: bool = False,
        rgb_to_bgr: bool = False,
        non_blocking: bool | None = False,
    ) -> None:
        super().__init__(non_blocking)
        if bgr_to_rgb and rgb_to_bgr:
            raise BatchValueError(
                "ImgDataPreprocessor: only one of bgr_to_rgb and rgb_to_bgr must be "
                "set, but both are. Both swap the first and the third channel."
            )
        if (mean is None) != (std is None):
            raise BatchValueError(
                "ImgDataPreprocessor: mean and std must be given together, but only "
                f"{'mean' if std is None else 'std'} is."
            )
        self._enable_normalize = mean is not None
        if mean is not None and std is not None:
            for option, values in {"mean": mean, "std": std}.items():
                if len(values) not in (1, 3):
                    raise BatchValueError(
                        f"ImgDataPreprocessor: {option} must have 1 or 3 values, but "
                        f"has {len(values)}."
                    )
                column = torch.tensor(values).view(-1, 1, 1)
                self.register_buffer(option, column, persistent=False)
        self._channel_conversion = rgb_to_bgr or bgr_to_rgb
        where = "ImgDataPreprocessor: pad_size_divisor"
        self.pad_size_divisor: int = check_whole(pad_size_divisor, 1, where)
        self.pad_value = pad_value
        # The kernel with the options and the rows from which it was created. The
        # reference to the rows keeps their ids unique.
        self._cached_kernel: tuple[Any, Any, ImagePreprocessor | None] | None = None

    def forward(self, data: Any, training: bool = False) -> Any:
        """Return the batch with its images as one tensor on the device.

        Args:
            data: a mapping with ``inputs``, and optionally ``data_samples``. ``inputs``
                is a list of n images ``(C, h, w)`` of any size, one tensor
                ``(n, C, h, w)``, or a DataContainer with one of these.
            training: not used here; for subclasses.

        Returns:
            The batch as a dict, on the device. ``inputs`` is a new float32 tensor
            ``(n, C, H, W)``, and ``data_samples`` is None if the batch has none. The
            argument is not changed.

        Raises:
            TypeError: ``data`` is not a mapping, or ``inputs`` are not tensors.
            ValueError: no ``inputs`` (also a ``KeyError``), or an image of another
                shape. The message names the image.

        Stream: see `BaseDataPreprocessor.cast_data`. The images are converted on the
        current stream of the device.
        """
        batch = super().forward(data, training)
        _check_batch(batch)
        inputs = batch["inputs"]
        if isinstance(inputs, Tensor):
            images = self._batch_from_tensor(inputs)
        elif isinstance(inputs, list | tuple):
            images = self._batch_from_list(list(inputs))
        else:
            raise BatchTypeError(
                "data['inputs'] must be a list of tensors (C, h, w) or one tensor "
                f"(n, C, h, w), but is {type_name(inputs)}."
            )
        batch["inputs"] = images
        batch.setdefault("data_samples", None)
        return batch

    def _batch_from_list(self, images: list[Tensor]) -> Tensor:
        for i, image in enumerate(images):
            self._check_image(image, _image_name(i))
        result = self._in_one_pass(images)
        if result is not None:
            return result
        converted = [self._convert_with_torch(image, 0) for image in images]
        divisor = self.pad_size_divisor
        return pad_to_batch(converted, divisor, self.pad_value, _image_name)

    def _batch_from_tensor(self, batch: Tensor) -> Tensor:
        if batch.dim() != 4:
            raise BatchValueError(
                "data['inputs'] must be a list of tensors or have 4 dimensions "
                f"(n, C, h, w), but has shape {tuple(batch.shape)}."
            )
        self._check_channels(batch.shape, 1, "data['inputs']")
        result = self._in_one_pass(list(batch) if batch.is_contiguous() else [])
        if result is not None:
            return result
        divisor = self.pad_size_divisor
        height, width = (-size % divisor for size in batch.shape[2:])
        value = 0.0
        if height or width:
            value = padding_value_as_double(self.pad_value, _image_name, 0)
        images = self._convert_with_torch(batch, 1)
        return F.pad(images, (0, width, 0, height), "constant", value)

    def _check_image(self, image: Any, name: str) -> None:
        if not isinstance(image, Tensor):
            raise BatchTypeError(f"{name} must be a tensor, but is {type_name(image)}.")
        self._check_channels(image.shape, 0, name)
        needs_three = self._enable_normalize and self.mean.shape[0] == 3
        # A swap selects the first three channels if there are more.
        has_three = self._channel_conversion or image.shape[:1] == (3,)
        if needs_three and not (has_three and image.dim() == 3):
            raise BatchValueError(
                f"{name} must have the shape (3, h, w) for a mean of 3 channels, but "
                f"has {tuple(image.shape)}."
            )

    def _check_channels(self, shape: Sequence[int], dim: int, name: str) -> None:
        if self._channel_conversion and (len(shape) <= dim or shape[dim] < 3):
            raise BatchValueError(
                f"{name} must have 3 channels in dimension {dim} for two of them to be "
                f"swapped, but has shape {tuple(shape)}."
            )
        num_channels = 3 if self._channel_conversion else shape[dim] if shape else 1
        if self._normalizes_three() and len(shape) >= 3 and num_channels not in (1, 3):
            raise BatchValueError(
                f"{name} must have 1 or 3 channels in dimension {dim} for mean and std "
                f"of 3, but has shape {tuple(shape)}."
            )

    def _normalizes_three(self) -> bool:
        """Return True if mean or std has a number for each of three channels."""
        return self._enable_normalize and 3 in (self.mean.shape[0], self.std.shape[0])

    def _convert_with_torch(self, images: Tensor, dim: int) -> Tensor:
        """Swap and normalize images with their channels in a dimension."""
        if self._channel_conversion:
            images = images[(slice(None),) * dim + (_SWAPPED,)]
        images = images.float()
        return (images - self.mean) / self.std if self._enable_normalize else images

    def _in_one_pass(self, images: list[Tensor]) -> Tensor | None:
        """Return the batch of images that the kernel converts; None for others."""
        if not images:
            return None
        first = images[0]
        needs_three = self._channel_conversion or self._normalizes_three()
        fits = (
            first.dtype in _KERNEL_DTYPES
            and first.dim() == 3
            and (first.shape[0] == 3 if needs_three else 1 <= first.shape[0] <= 4)
            and all(
                type(image) is Tensor
                and image.dtype is first.dtype
                and image.shape[:1] == first.shape[:1]
                and image.dim() == 3
                and image.numel()
                and image.device == first.device
                for image in images
            )
            and not (
                torch.is_grad_enabled() and any(image.requires_grad for image in images)
            )
        )
        kernel = self._current_kernel() if fits else None
        result: Any = None if kernel is None else kernel(images)
        return result  # type: ignore[no-any-return]  # a Padded only with a mask

    def _current_kernel(self) -> ImagePreprocessor | None:
        """Return the kernel for the present attributes, which subclasses may set."""
        rows = (self.mean, self.std) if self._enable_normalize else ()
        if any(row.is_inference() or row.is_meta or row.requires_grad for row in rows):
            return None  # without a version counter, without values, with a gradient
        versions = [(id(row), version_of(row)) for row in rows]
        swaps = self._channel_conversion
        options = (swaps, self.pad_size_divisor, self.pad_value, *versions)
        if self._cached_kernel is None or self._cached_kernel[0] != options:
            self._cached_kernel = options, rows, self._make_kernel(rows)
        return self._cached_kernel[2]

    def _make_kernel(self, rows: Sequence[Tensor]) -> ImagePreprocessor | None:
        """Return a new kernel, or None if it does not support the settings."""
        normalization: dict[str, Any] = {}
        numbers = [self.pad_value] if isinstance(self.pad_value, int | float) else []
        if rows:
            if torch.float64 in [row.dtype for row in rows]:
                return None  # the result is float64 too
            mean, std = (row.flatten().tolist() for row in rows)
            normalization = {"mean": mean, "std": std}
            if 0.0 in map(_to_float32, std):
                return None
            numbers += mean + std
        if not all(math.isfinite(_to_float32(number)) for number in numbers):
            return None
        return ImagePreprocessor(
            **normalization,
            size_divisor=self.pad_size_divisor,
            pad_value=self.pad_value,
            swap_channels=self._channel_conversion,
        )


def device_after(fn: Apply, device: torch.device) -> torch.device:
    """Return the device to which ``fn`` moves tensors of ``device``."""
    return fn(torch.empty(0, device=device)).device


def _check_batch(data: Any) -> None:
    if not isinstance(data, Mapping):
        raise BatchTypeError(
            "ImgDataPreprocessor: data must be a mapping with 'inputs', but is "
            f"{type_name(data)}. Use pseudo_collate or default_collate."
        )
    if "inputs" not in data:
        keys = ", ".join(map(repr, data)) or "nothing"
        raise MissingKeyError(
            f"ImgDataPreprocessor: data must have 'inputs', but has {keys}."
        )


def _to_float32(number: float) -> float:
    """Return the number rounded to float32; infinity if no double can hold it."""
    try:
        return c_float(number).value
    except OverflowError:
        return math.inf


def _image_name(i: int) -> str:
    return f"data['inputs'][{i}]"
