"""What becomes of the pixels of a batch: a value made of options alone."""

from __future__ import annotations

from ctypes import c_float
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch

from ..batch.padding import Padding
from ..core.errors import BatchValueError

_Numbers = tuple[float, ...]


class Channels(NamedTuple):
    """Numbers for every channel of the result, each one of float32."""

    mean: _Numbers
    std: _Numbers
    fill: _Numbers


@dataclass(frozen=True, slots=True)
class ImageForm:
    """The form of a batch of images: a frozen value.

    Attributes:
        mean: one for every channel of the result, or one for all; None: no
            normalisation.
        std: as ``mean``.
        pad_value: one for every channel, or one for all.
        pad_first: whether ``pad_value`` stands for pixels that are normalised too, with
            channels in the order of the images; else it lands in the result as it is.
        swap_channels: whether the channels of the result are in the opposite order.
        exact: see `backend.image_batch`.
        padding: what the sizes are multiples of, and whether there is a mask.
        dtype: of the result.
        channels_last: whether the result has this memory format.
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

    def channels(self, num_channels: int) -> Channels:
        """Return the numbers for so many channels.

        Raises:
            ValueError: an option is for another number.
        """
        for option in ("mean", "std", "pad_value"):
            value = getattr(self, option)
            if value is not None and len(value) not in (1, num_channels):
                raise BatchValueError(
                    f"ImagePreprocessor: images[0] must have {len(value)} channels, "
                    f"since {option} has as many entries, but has {num_channels}. Give "
                    "one for each channel, or one for all."
                )
        spread = partial(_spread, num=num_channels)
        mean = spread((0.0,) if self.mean is None else self.mean)
        std = spread((1.0,) if self.std is None else self.std)
        fill = spread(self.pad_value)
        if self.pad_first:
            if self.swap_channels:
                fill = fill[::-1]
            # In doubles, then rounded: what one operation on float32 gives.
            less = [_float32(v - m) for v, m in zip(fill, mean, strict=True)]
            fill = tuple(_float32(v / s) for v, s in zip(less, std, strict=True))
        return Channels(mean, std, fill)


def _spread(values: _Numbers, num: int) -> _Numbers:
    rounded = tuple(map(_float32, values))
    return rounded if len(rounded) == num else rounded * num


def _float32(value: float) -> float:
    return c_float(value).value
