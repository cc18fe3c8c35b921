"""Use the sizes and the mask of a batch on the outputs of a network."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from ..core.errors import (
    BatchTypeError,
    BatchValueError,
    add_note,
    check_int,
    type_name,
    with_advice,
)
from .padding import Padded, Padding, Sizes, check_num_dims, start_offsets

#: The largest number of dimensions that torch can interpolate.
_MOST_DIMS = 3


def unpad(
    outputs: torch.Tensor,
    sizes: torch.Tensor | Sequence[Sequence[int]] | Sequence[int],
    *,
    dim: int | None = None,
    side: str | tuple[str, ...] = "right",
) -> list[torch.Tensor]:
    """Return each sample of a padded batch without its padding, as views.

    Args:
        outputs: ``(n, *)``, such as the outputs of a network for a padded batch.
        sizes: ``(n, k)``, the sizes of k dimensions without padding, as in `Padded`, or
            ``(n,)`` for one dimension. If the network changes the resolution, they are
            those of its outputs: ``-(-sizes // stride)``.
        dim: the first of these k dimensions. None: they are the last k. Outputs
            ``(n, time, classes)`` with ``sizes`` ``(n, 1)`` need ``dim=1``.
        side: the side of the padding, as of `Padding`. A `Padded` does not know it.

    Returns:
        ``outputs[i]`` of the given sizes, for every sample. Gradients flow through.

    Raises:
        TypeError: ``outputs`` is not a tensor, or ``sizes`` or ``dim`` are no integers.
        ValueError: another number of samples or dimensions, or a sample that is larger
            than the outputs. The message names the sample.

    Stream: the host waits for sizes on a GPU. In ``torch.compile(fullgraph=True)``, and
    under ``vmap``, pass them as lists.

    Example:
        >>> from pyparallel import pad_stack
        >>> batch = pad_stack([torch.ones(1, 2), torch.ones(2, 1)], sizes=True)
        >>> [each.tolist() for each in unpad(batch.data, batch.sizes)]
        [[[1.0, 1.0]], [[1.0], [1.0]]]
    """
    if not isinstance(outputs, torch.Tensor):
        raise with_advice(
            BatchTypeError,
            f"unpad: outputs must be a tensor, but is {type_name(outputs)}.",
            "Pass its data." if isinstance(outputs, Padded) else "",
        )
    rows = _rows(sizes, outputs)
    first = _first_dim(dim, len(rows[0]), outputs) if rows else 1
    padding, views = Padding(side=side), []
    for i, (sample, row) in enumerate(zip(outputs.unbind(), rows, strict=True)):
        target = tuple(sample.shape[first - 1 :][: len(row)])
        if not all(0 <= size <= width for size, width in zip(row, target, strict=True)):
            raise BatchValueError(
                f"unpad: sizes[{i}] must be 0 to {target}, the padded sizes of "
                f"outputs, but is {row}. If the network changes the resolution, pass "
                "the sizes of its outputs. If the padded dimensions are not the last "
                "ones, pass dim."
            )
        check_num_dims(padding, len(row), "unpad")
        starts = start_offsets(padding, row, target)
        for at, (start, size) in enumerate(zip(starts, row, strict=True), first - 1):
            sample = sample.narrow(at, start, size)
        views.append(sample)
    return views


def _rows(sizes: Any, outputs: torch.Tensor) -> list[Sizes]:
    """Return the sizes as one tuple for each sample."""
    if not outputs.dim():
        raise BatchValueError("unpad: outputs must have samples, but has shape ().")
    try:
        values = sizes.tolist() if isinstance(sizes, torch.Tensor) else list(sizes)
        rows = [_row(each) for each in values]
    except TypeError:
        found = f"{sizes!r:.80} ({type_name(sizes)})"
        if isinstance(sizes, torch.Tensor):
            found = f"{sizes.dtype} of shape {tuple(sizes.shape)}"
        raise BatchTypeError(
            f"unpad: sizes must be (n, k) integers, but is {found}. Pass the sizes of "
            "a Padded, as Pad(sizes=True) makes it. Round up: -(-sizes // stride)."
        ) from None
    except RuntimeError as error:
        add_note(error, "unpad: the host reads sizes. Here, pass them as lists.")
        raise
    if len(rows) != outputs.shape[0] or len(set(map(len, rows))) > 1:
        raise BatchValueError(
            "unpad: sizes must have one row for each of the "
            f"{outputs.shape[0]} samples in outputs, and equal rows, but is "
            f"{rows!r:.80}. Pass the sizes of this batch."
        )
    return rows


def _row(sizes: Any) -> Sizes:
    """Return the sizes of a sample; a number is the size of one dimension."""
    try:
        return (operator.index(sizes),)
    except TypeError:
        return tuple(map(operator.index, sizes))


def _first_dim(dim: int | None, num_sizes: int, outputs: torch.Tensor) -> int:
    """Return the first of the dimensions with sizes, which follow the samples."""
    num_dims = outputs.dim()
    least = -num_dims
    first = num_dims - num_sizes if dim is None else check_int(dim, least, "unpad: dim")
    first += num_dims if first < 0 else 0
    if not 1 <= first <= num_dims - num_sizes:
        raise BatchValueError(
            f"unpad: outputs must have the {num_sizes} dimensions of sizes after "
            f"dimension 0, from dim={dim} on, but has shape {tuple(outputs.shape)}. "
            "Use the first dimension that was padded."
        )
    return first


def resize_mask(mask: torch.Tensor, size: int | Sequence[int]) -> torch.Tensor:
    """Return the mask of a padded batch at the size of a feature map.

    Each cell has the value of the nearest element of the mask, as in DETR:
    ``F.interpolate(mask, size, mode="nearest")`` of the mask as numbers. It works for
    masks that are True for the data, and for those that are True for the padding.

    Args:
        mask: ``torch.bool`` ``(n, *)`` with 1 to 3 padded dimensions, as in `Padded`.
        size: the sizes of these dimensions in the feature map: ``features.shape[-2:]``
            for images. An integer is the size of each.

    Returns:
        ``torch.bool`` ``(n, *size)``, on the device of the mask.

    Raises:
        TypeError: ``mask`` is not a bool tensor, or ``size`` are not integers.
        ValueError: another number of dimensions, or a size below 1.

    Stream: on a GPU the host does not wait.

    Example:
        >>> mask = torch.tensor([[[True, True, False, False]] * 4])
        >>> resize_mask(mask, (1, 2))
        tensor([[[ True, False]]])
    """
    if not isinstance(mask, torch.Tensor) or mask.dtype != torch.bool:
        found = mask.dtype if isinstance(mask, torch.Tensor) else type_name(mask)
        raise BatchTypeError(
            f"resize_mask: mask must be a torch.bool tensor, but is {found}. Use the "
            "mask of a Padded, as Pad(mask=True) makes it, or mask.bool() of 0 and 1."
        )
    num_dims = mask.dim() - 1
    if not 1 <= num_dims <= _MOST_DIMS or 0 in mask.shape[1:]:
        raise BatchValueError(
            f"resize_mask: mask must have 1 to {_MOST_DIMS} dimensions after that of "
            f"the samples, all of 1 or more, but has shape {tuple(mask.shape)}."
        )
    sizes = _feature_sizes(size, mask)
    cells = F.interpolate(mask.unsqueeze(1).to(torch.uint8), size=sizes, mode="nearest")
    return cells.squeeze(1).to(torch.bool)


def _feature_sizes(size: Any, mask: torch.Tensor) -> list[int]:
    """Return the size of each padded dimension of a mask in a feature map."""
    num_dims = mask.dim() - 1
    try:
        sizes = list(size)
    except TypeError:  # also of a tensor without dimensions
        sizes = [size] * num_dims
    if len(sizes) != num_dims:
        advice = (
            f"Use the last {num_dims} of features.shape, and mask[None] of one sample."
        )
        if len(sizes) < num_dims:
            advice = (
                f"Pad the last {len(sizes)} dimensions only: Pad(dims={len(sizes)})."
            )
        raise BatchValueError(
            f"resize_mask: size must have {num_dims} entries for a mask of shape "
            f"{tuple(mask.shape)}, but has {len(sizes)}. {advice}"
        )
    return [_feature_size(each, i) for i, each in enumerate(sizes)]


def _feature_size(size: Any, i: int) -> Any:
    """Return a size as an integer, or a symbol, which ``torch.export`` must not fix."""
    if isinstance(size, torch.SymInt):
        return size
    return check_int(size, 1, f"resize_mask: size[{i}]")
