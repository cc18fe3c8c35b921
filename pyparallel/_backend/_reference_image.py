"""image_batch in torch operators: ragged images become one normalised batch."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import c_float

import torch
from torch import Tensor

from . import _checks, _checks_image
from ._plainly import plainly


@plainly
def image_batch(
    dst: Tensor,
    images: Sequence[Tensor],
    mask: Tensor | None,
    mean: Sequence[float],
    std: Sequence[float],
    fill: Sequence[float],
    swap_channels: bool,
    exact: bool,
) -> None:
    """See ``_C.pyi``."""
    _checks.require("image_batch: dst", Tensor, "a torch.Tensor", dst)
    tensors = _checks.tensors(images, "image_batch: images")
    if mask is not None:
        _checks.require("image_batch: mask", Tensor, "a torch.Tensor", mask)
    given = {"mean": mean, "std": std, "fill": fill}
    rows = {
        what: _checks_image.numbers(row, f"image_batch: {what}")
        for what, row in given.items()
    }
    _checks_image.check_target(dst, len(tensors))
    for what, row in rows.items():
        _checks_image.check_channels(row, what, dst.shape[1])
    _checks_image.check_images(tensors, dst)
    if mask is not None:
        _checks_image.check_places(mask, dst, tensors)
        _mark(mask, tensors)
    _write(dst, tensors, rows, swap_channels, exact)


def _write(
    dst: Tensor,
    images: list[Tensor],
    rows: dict[str, list[float]],
    swap_channels: bool,
    exact: bool,
) -> None:
    mean, std = rows["mean"], rows["std"]
    less, by, outside = (_column(row, dst) for row in rows.values())
    scale = _column([1 / each for each in std], dst)
    bias = _column([-one / each for one, each in zip(mean, std, strict=True)], dst)
    for row, image in zip(dst, images, strict=True):
        height, width = image.shape[1:]
        row[:, height:].copy_(outside)
        row[:, :height, width:].copy_(outside)
        pixels = (image.flip(0) if swap_channels else image).float()
        pixels = (pixels - less) / by if exact else pixels * scale + bias
        row[:, :height, :width].copy_(pixels)


def _column(values: list[float], dst: Tensor) -> Tensor:
    """Return values (C, 1, 1) in float32; on a GPU the host does not wait for them."""
    cells = [c_float(each).value for each in values]
    make = torch.full
    return torch.stack(
        [make((1, 1), x, dtype=torch.float32, device=dst.device) for x in cells]
    )


def _mark(mask: Tensor, images: list[Tensor]) -> None:
    mask.zero_()
    for row, image in zip(mask, images, strict=True):
        row[: image.shape[1], : image.shape[2]].fill_(True)
