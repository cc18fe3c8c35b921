"""image_batch in torch operators: ragged images become one normalised batch."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import c_float

import torch
from torch import Tensor

from . import _checks, image_checks
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
        what: image_checks.floats(row, f"image_batch: {what}")
        for what, row in given.items()
    }
    image_checks.check_bool(swap_channels, "image_batch: swap_channels")
    image_checks.check_bool(exact, "image_batch: exact")
    image_checks.check_target(dst, len(tensors))
    for what, row in rows.items():
        image_checks.check_channels(row, what, dst.shape[1])
    image_checks.check_images(tensors, dst)
    if mask is not None:
        image_checks.check_places(mask, dst, tensors)
        _mark(mask, tensors)
    columns = {what: _column(row, dst) for what, row in rows.items()}
    if not exact:
        columns |= _rounded(rows, dst)
    _write(dst, tensors, columns, swap_channels)


def _write(
    dst: Tensor, images: list[Tensor], columns: dict[str, Tensor], swap_channels: bool
) -> None:
    fill, scale = columns["fill"], columns.get("scale")
    sides = dst.shape[2:]
    for row, image in zip(dst, images, strict=True):
        height, width = image.shape[1:]
        if image.shape[1:] != sides:
            row[:, height:] = fill
            row[:, :height, width:] = fill
        pixels = image.flip(0) if swap_channels else image
        corner = row[:, :height, :width]
        if scale is None:
            torch.div(pixels - columns["mean"], columns["std"], out=corner)
        else:
            torch.add(pixels * scale, columns["bias"], out=corner)


def _rounded(rows: dict[str, list[float]], dst: Tensor) -> dict[str, Tensor]:
    """Return what one multiplication and one addition need."""
    mean, std = (
        torch.tensor(rows[what], dtype=torch.float64, device="cpu")
        for what in ("mean", "std")
    )
    parts = {"scale": 1 / std, "bias": -mean / std}
    return {what: _column(part.tolist(), dst) for what, part in parts.items()}


def _column(values: list[float], dst: Tensor) -> Tensor:
    """Return values (C, 1, 1) in float32; on a GPU the host does not wait for them."""
    cells = [c_float(each).value for each in values]
    cell = torch.empty((1, 1), dtype=torch.float32, device=dst.device)
    return torch.stack([torch.full_like(cell, each) for each in cells])


def _mark(mask: Tensor, images: list[Tensor]) -> None:
    mask.zero_()
    for row, image in zip(mask, images, strict=True):
        row[: image.shape[1], : image.shape[2]].fill_(True)
