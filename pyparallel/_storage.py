"""Whether a tensor still has the memory that its shape and strides speak of.

Sharding (FSDP) takes the memory of a tensor away under it, and torch's operators read
there all the same.
"""

from __future__ import annotations

import torch


def lacking(tensor: torch.Tensor) -> str:
    """Return "" if a strided tensor lies within its storage, else what is found."""
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
