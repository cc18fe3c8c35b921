"""stack_batch: tensors of different sizes become one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..batch import stack
from ..batch.padding import Padding
from ..core.errors import BatchTypeError, BatchValueError, check_int, type_name


def stack_batch(
    tensor_list: Sequence[torch.Tensor],
    pad_size_divisor: int = 1,
    pad_value: float = 0,
) -> torch.Tensor:
    """Return tensors as one, padded at the ends of all dimensions but their first.

    Args:
        tensor_list: tensors ``(C, *sizes)`` of one number of dimensions and one C, at
            least one.
        pad_size_divisor: padded sizes are rounded up to multiples of it.
        pad_value: number written into the padding, converted as
            ``torch.nn.functional.pad`` does it.

    Returns:
        The tensor ``(n, C, *target)``, contiguous. Gradients flow through it.

    Raises:
        TypeError: anything but a list or tuple of tensors (an ``AssertionError`` too).
        ValueError: no tensors, different C or numbers of dimensions, a
            ``pad_size_divisor`` below 1. The tensor is named.

    Stream: on a GPU the work is queued on the current stream.

    From mmengine, where sizes above 2**24 were rounded.

    Example:
        >>> stack_batch([torch.ones(1, 2), torch.ones(1, 1)], 3).tolist()
        [[[1.0, 1.0, 0.0]], [[1.0, 0.0, 0.0]]]
    """
    return pad_to_batch(
        tensor_list, pad_size_divisor, pad_value, lambda i: f"tensor_list[{i}]"
    )


def pad_to_batch(
    tensors: Any, pad_size_divisor: int, pad_value: float, name: Callable[[int], str]
) -> torch.Tensor:
    """Do what `stack_batch` does; ``name`` names a tensor in messages."""
    if not isinstance(tensors, list | tuple):
        raise BatchTypeError(
            f"stack_batch: tensor_list must be a list of tensors, but is "
            f"{type_name(tensors)}."
        )
    if not tensors:
        raise BatchValueError(
            "stack_batch: tensor_list must have at least one tensor, but is empty."
        )
    for i, tensor in enumerate(tensors):
        if not isinstance(tensor, torch.Tensor):
            raise BatchTypeError(
                f"{name(i)} must be a tensor, but is {type_name(tensor)}."
            )
        if tensor.dim() != tensors[0].dim():
            raise BatchValueError(
                f"{name(i)} must have {tensors[0].dim()} dimensions like {name(0)}, "
                f"but has shape {tuple(tensor.shape)}."
            )
        if tensor.shape[:1] != tensors[0].shape[:1]:
            raise BatchValueError(
                f"{name(i)} must have size {tensors[0].shape[0]} in dimension 0 like "
                f"{name(0)}, but has shape {tuple(tensor.shape)}. Convert the images "
                "to one number of channels."
            )
    divisor = check_int(pad_size_divisor, 1, "stack_batch: pad_size_divisor")
    pad_dims = max(tensors[0].dim() - 1, 0)
    values = [pad_value] * len(tensors)
    stacked: Any = stack.stack_padded(
        list(tensors), pad_dims, values, name, Padding(size_divisor=divisor)
    )
    return stacked  # type: ignore[no-any-return]  # a Padded only with sizes or a mask
