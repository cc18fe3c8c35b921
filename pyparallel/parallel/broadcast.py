"""Tensors become those of the first rank, several in one broadcast."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist

_BUCKET = 25 * 1024 * 1024  # bytes; what DDP takes too


def broadcast_from_first(
    tensors: Iterable[torch.Tensor], group: Any = None, max_nbytes: float = _BUCKET
) -> None:
    """Overwrite tensors with those that the first rank of a group has.

    Args:
        tensors: of any shapes and dtypes, the same ones on every rank.
        group: a process group; None for all ranks.
        max_nbytes: about how many bytes travel in one broadcast.
    """
    for bucket in _buckets(tensors, max_nbytes):
        flat = torch.cat([tensor.detach().reshape(-1) for tensor in bucket])
        # As bytes: gloo refuses some dtypes, int16 and float8 among them.
        dist.broadcast(flat.view(torch.uint8), group=group, group_src=0)
        parts = torch.split(flat, [tensor.numel() for tensor in bucket])
        for tensor, part in zip(bucket, parts, strict=True):
            tensor.detach().copy_(part.view_as(tensor))


def _buckets(
    tensors: Iterable[torch.Tensor], max_nbytes: float
) -> Iterator[list[torch.Tensor]]:
    """Group tensors of one dtype into buckets of about ``max_nbytes``, in order."""
    open_buckets: dict[torch.dtype, list[torch.Tensor]] = defaultdict(list)
    sizes: dict[torch.dtype, int] = defaultdict(int)
    for tensor in tensors:
        dtype = tensor.dtype
        open_buckets[dtype].append(tensor)
        sizes[dtype] += tensor.nbytes
        if sizes[dtype] >= max_nbytes:
            yield open_buckets.pop(dtype)
            sizes.pop(dtype)
    yield from open_buckets.values()
