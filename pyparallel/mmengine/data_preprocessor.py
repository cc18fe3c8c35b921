"""BaseDataPreprocessor and ImgDataPreprocessor."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from ctypes import c_float
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..core.errors import (
    BatchTypeError,
    BatchValueError,
    MissingKeyError,
    check_int,
    type_name,
)
from ..core.torch_private import version_of
from ..images.preprocessor import ImagePreprocessor
from ._cast_data import cast
from ._upstream import BaseDataPreprocessorBase, ImgDataPreprocessorBase, provides
from .collate import pad_to_batch

#: What ``Module.to`` and its kind give to ``Module._apply``.
Apply = Callable[[torch.Tensor], torch.Tensor]
#: What the kernel reads; everything else goes by torch's operators.
_DTYPES = (torch.uint8, torch.float32)
_SWAPPED = [2, 1, 0]


@provides("MODELS")
class BaseDataPreprocessor(BaseDataPreprocessorBase):
    """Sends a batch to the device of the model that it is part of, in one copy.

    Args:
        non_blocking: passed to the method ``to`` of objects that are no tensors. The
            host waits for no tensor either way.

    It follows the model: whatever moves the model (``to``, ``cuda``, ``to_empty``, a
    wrapper's ``to``) moves the target of its batches. Subclasses override `forward`.

    From mmengine, where every tensor was a copy of its own, mappings became dicts and a
    range raised. As a subclass of mmengine's class, where that is installed, it can be
    part of models that are built by mmengine.
    """

    # mmengine's ``cuda`` forgets which device it was given. Typed as Any, since the
    # annotation would make them fields.
    to: Any = nn.Module.to
    cuda: Any = nn.Module.cuda
    cpu: Any = nn.Module.cpu

    def __init__(self, non_blocking: bool | None = False) -> None:
        nn.Module.__init__(self)
        self._non_blocking = bool(non_blocking)
        self._device = torch.device("cpu")

    @property
    def device(self) -> torch.device:
        """Where batches go."""
        return self._device

    def cast_data(self, data: Any) -> Any:
        """Return ``data`` on the device, in new containers of the same types.

        DataContainers are opened, as `pyparallel.scatter` does for one target; what is
        ``cpu_only`` stays on the host. mmengine's data elements and other objects with
        a method ``to`` go by it. All else (strings, arrays, ranges, ``None``) is passed
        through.

        Raises:
            TypeError: a DataContainer that holds anything but tensors, without
                ``cpu_only``.
            ValueError: a DataContainer of several chunks; containers that hold
                themselves.
            RuntimeError: a device that this machine does not have.

        Stream: tensors of the host, those in data elements too, go in one packed copy
        on the copy stream; the stream that is current on the device waits for it, the
        host does not. They arrive contiguous. On the host nothing is copied.
        """
        return cast(data, self._device, self._non_blocking)

    def forward(self, data: Any, training: bool = False) -> Any:
        """Return what the model takes, on the device.

        Args:
            data: a batch as the loader gives it.
            training: whether this is a training step; for subclasses.

        Returns:
            The batch; see `cast_data`. Mappings that are no dicts become dicts, because
            they are the keyword arguments of the model.
        """
        data = self.cast_data(data)
        if isinstance(data, Mapping) and not isinstance(data, dict):
            return dict(data)
        return data

    def _apply(self, fn: Apply, recurse: bool = True) -> BaseDataPreprocessor:
        """Follow the tensors of the model to their device."""
        nn.Module._apply(self, fn, recurse)
        self._device = device_after(fn, self._device)
        return self


class _Prepared(NamedTuple):
    """What works as long as the attributes that it was made from are the same."""

    rows: tuple[Tensor, ...]  # mean and std, or nothing; held, so that ids are theirs
    options: tuple[Any, ...]
    kernel: ImagePreprocessor | None


@provides("MODELS")
class ImgDataPreprocessor(BaseDataPreprocessor, ImgDataPreprocessorBase):
    """Sends images as they are, and makes one float32 batch of them where they are.

    Args:
        mean: of every channel of the result: 3 numbers, or 1 for all. None, together
            with ``std``: no normalisation.
        std: as ``mean``.
        pad_size_divisor: height and width are rounded up to multiples of it.
        pad_value: number in the padding, as it is: it is not normalised.
        bgr_to_rgb: swap the first and the third channel.
        rgb_to_bgr: the same, by the other name.
        non_blocking: see `BaseDataPreprocessor`.

    Raises:
        ValueError: ``mean`` without ``std`` or the reverse, other than 1 or 3 numbers,
            both swaps, a ``pad_size_divisor`` below 1 (an ``AssertionError`` too).

    Values have the very bits of mmengine's class, from which this is. Images of uint8
    or float32 with at most 4 channels are swapped, normalised, padded and stacked in
    one pass by `ImagePreprocessor`; others by torch's operators.
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
                "set, but both are. They do the same."
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
        self.pad_size_divisor: int = check_int(pad_size_divisor, 1, where)
        self.pad_value = pad_value
        self._prepared: _Prepared | None = None

    def forward(self, data: Any, training: bool = False) -> Any:
        """Return the batch with its images as one tensor on the device.

        Args:
            data: a mapping with ``inputs``: n images ``(C, h, w)`` of any size in a
                list, or one tensor ``(n, C, h, w)``, or a DataContainer with one of
                these; and ``data_samples``, if there are any.
            training: changes nothing; for subclasses.

        Returns:
            The batch as a dict, on the device; ``inputs`` is a new float32 tensor
            ``(n, C, H, W)``, ``data_samples`` is None if there were none. What was
            given is not changed.

        Raises:
            TypeError: ``data`` is no mapping; ``inputs`` are no tensors.
            ValueError: no ``inputs`` (a ``KeyError`` too); images of other shapes. The
                image is named.

        Stream: see `BaseDataPreprocessor.cast_data`; the images are made on the current
        stream of the device.
        """
        _check_batch(data)
        batch = super().forward(data, training)
        inputs = batch["inputs"]
        if isinstance(inputs, Tensor):
            images = self._batch_of_one_size(inputs)
        elif isinstance(inputs, list | tuple):
            images = self._batch_of_list(list(inputs))
        else:
            raise BatchTypeError(
                "data['inputs'] must be a list of tensors (C, h, w) or one tensor "
                f"(n, C, h, w), but is {type_name(inputs)}."
            )
        batch["inputs"] = images
        batch.setdefault("data_samples", None)
        return batch

    def _batch_of_list(self, images: list[Tensor]) -> Tensor:
        for i, image in enumerate(images):
            self._check(image, _name(i))
        kernel = self._kernel(images)
        if kernel is not None:
            made: Any = kernel(images)
            return made  # type: ignore[no-any-return]  # a Padded only with a mask
        ready = [self._by_torch(image) for image in images]
        return pad_to_batch(ready, self.pad_size_divisor, self.pad_value, _name)

    def _batch_of_one_size(self, batch: Tensor) -> Tensor:
        if batch.dim() != 4:
            raise BatchValueError(
                "data['inputs'] must be a list of tensors or have 4 dimensions "
                f"(n, C, h, w), but has shape {tuple(batch.shape)}."
            )
        self._check_channels(batch.shape, 1, "data['inputs']")
        images = list(batch) if batch.is_contiguous() else []
        kernel = self._kernel(images)
        if kernel is not None:
            made: Any = kernel(images)
            return made  # type: ignore[no-any-return]  # as above
        if self._channel_conversion:
            batch = batch[:, _SWAPPED]
        ready = self._normalized(batch)
        divisor = self.pad_size_divisor
        height, width = (-size % divisor for size in batch.shape[2:])
        return F.pad(ready, (0, width, 0, height), "constant", self.pad_value)

    def _check(self, image: Any, name: str) -> None:
        if not isinstance(image, Tensor):
            raise BatchTypeError(f"{name} must be a tensor, but is {type_name(image)}.")
        self._check_channels(image.shape, 0, name)
        of_three = self._enable_normalize and self.mean.shape[0] == 3
        # A swap takes the first three channels of more.
        has_three = self._channel_conversion or image.shape[:1] == (3,)
        if of_three and not (has_three and image.dim() == 3):
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
        if self._of_three() and len(shape) >= 3 and num_channels not in (1, 3):
            raise BatchValueError(
                f"{name} must have 1 or 3 channels in dimension {dim} for mean and std "
                f"of 3, but has shape {tuple(shape)}."
            )

    def _of_three(self) -> bool:
        """Tell whether there are numbers for three channels."""
        return self._enable_normalize and 3 in (self.mean.shape[0], self.std.shape[0])

    def _by_torch(self, image: Tensor) -> Tensor:
        if self._channel_conversion:
            image = image[_SWAPPED]
        return self._normalized(image)

    def _normalized(self, images: Tensor) -> Tensor:
        images = images.float()
        return (images - self.mean) / self.std if self._enable_normalize else images

    def _kernel(self, images: list[Tensor]) -> ImagePreprocessor | None:
        """Return what makes a batch of these images in one pass, or None."""
        if not images:
            return None
        first = images[0]
        of_three = self._channel_conversion or self._of_three()
        fits = (
            first.dtype in _DTYPES
            and first.dim() == 3
            and (first.shape[0] == 3 if of_three else 1 <= first.shape[0] <= 4)
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
        return self._made_kernel() if fits else None

    def _made_kernel(self) -> ImagePreprocessor | None:
        """Return the kernel for the present attributes, which subclasses may set."""
        rows = (self.mean, self.std) if self._enable_normalize else ()
        if any(row.is_inference() for row in rows):
            return None  # which do not tell whether they were changed
        versions = [version_of(row) for row in rows]
        swaps = self._channel_conversion
        options = (swaps, self.pad_size_divisor, self.pad_value, *versions)
        made = self._prepared
        if (
            made is None
            or list(map(id, made.rows)) != list(map(id, rows))
            or made.options != options
        ):
            made = _Prepared(rows, options, self._new_kernel(rows))
            self._prepared = made
        return made.kernel

    def _new_kernel(self, rows: Sequence[Tensor]) -> ImagePreprocessor | None:
        given: dict[str, Any] = {}
        numbers = [self.pad_value] if isinstance(self.pad_value, int | float) else []
        if rows:
            if torch.float64 in [row.dtype for row in rows]:
                return None  # as the result then is
            mean, std = (row.flatten().tolist() for row in rows)
            given = {"mean": mean, "std": std}
            if 0.0 in map(_rounded, given["std"]):
                return None
            numbers += mean + std
        if not all(math.isfinite(_rounded(number)) for number in numbers):
            return None
        return ImagePreprocessor(
            **given,
            size_divisor=self.pad_size_divisor,
            pad_value=self.pad_value,
            swap_channels=self._channel_conversion,
        )


def device_after(fn: Apply, device: torch.device) -> torch.device:
    """Return where ``fn`` leaves tensors that were on ``device``."""
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


def _rounded(number: float) -> float:
    """Return the number as float32 has it."""
    return c_float(number).value


def _name(i: int) -> str:
    return f"data['inputs'][{i}]"
