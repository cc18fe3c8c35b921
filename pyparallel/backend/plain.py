"""Checks for plain tensors, and for tensors with too little memory.

The bytes of a plain tensor are its complete value. Sharding (FSDP) frees the storage of
tensors that are still in use, and torch's operators read the freed memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd.forward_ad import unpack_dual

from ..core.errors import BatchValueError
from ..core.torch_private import (
    as_subclass,
    in_forward_ad,
    is_wrapped,
    is_zero_tensor,
    runs_in_python,
)

#: The classes of plain tensors.
PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})

#: The casts, from and to a dtype, that operators make while they copy on the host.
CASTS = frozenset(
    {
        (torch.float32, torch.float16),
        (torch.float32, torch.bfloat16),
        (torch.float64, torch.float16),
        (torch.float64, torch.bfloat16),
        (torch.float64, torch.float32),
    }
)


def missing_bytes(tensor: torch.Tensor) -> str:
    """Describe the bytes that a strided tensor lacks in its storage; "" if none."""
    numel, end = tensor.numel(), tensor.storage_offset() + 1
    if numel == 0:
        return ""
    if tensor.is_contiguous():
        end += numel - 1
    else:
        reach = zip(tensor.shape, tensor.stride(), strict=True)
        end += sum((size - 1) * step for size, step in reach)
    need, have = end * tensor.element_size(), tensor.untyped_storage().nbytes()
    return f"needs {need} bytes where {have} are left" if need > have else ""


def is_plain(tensor: torch.Tensor) -> bool:
    """Return True if the bytes of a tensor are its complete value, except gradients."""
    return (
        type(tensor) in PLAIN
        and tensor.layout is torch.strided
        and not (tensor.is_quantized or tensor.is_nested or is_zero_tensor(tensor))
        and not (tensor.is_conj() or tensor.is_neg())
    )


def can_pack(tensor: torch.Tensor) -> bool:
    """Return True if the bytes of a CPU tensor are all that a copy needs."""
    return (
        is_plain(tensor)
        and tensor.is_cpu
        and not is_wrapped(tensor)
        and not (tensor.requires_grad and torch.is_grad_enabled())
        and not (in_forward_ad() and unpack_dual(tensor).tangent is not None)
    )


def without_subclasses(tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Return tensors of subclasses as plain tensors with their memory and gradients.

    A subclass may give the result of an operator the attributes of its first argument.
    In a batch these are the attributes of one sample. So batches are plain tensors. A
    class that implements operators in Python (``__torch_dispatch__``) is kept, because
    its memory is not its value.
    """
    if PLAIN.issuperset(map(type, tensors)):
        return tensors
    return list(map(_without_subclass, tensors))


def _without_subclass(tensor: torch.Tensor) -> torch.Tensor:
    if type(tensor) in PLAIN or runs_in_python(tensor):
        return tensor
    try:
        return as_subclass(tensor, torch.Tensor)
    except RuntimeError:  # sparse tensors, which no batch accepts
        return tensor


def check_storage(tensor: Any, where: Callable[[], str]) -> None:
    """Raise `BatchValueError` if a plain tensor has less memory than its shape needs.

    Args:
        tensor: the value to check. Objects other than plain tensors pass.
        where: returns the name of the tensor for the message.
    """
    if type(tensor) not in PLAIN or not is_plain(tensor) or is_wrapped(tensor):
        return
    found = missing_bytes(tensor)
    if found:
        raise BatchValueError(
            f"{where()} must lie within its storage, but {found}. Use it before "
            "its storage is resized."
        )
