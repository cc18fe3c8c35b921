"""Decide which leaves of a batch are packed into one slab, and which stay in place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from .. import backend

#: Pinned leaves of at least this many bytes are copied in place, without packing.
DIRECT_NBYTES = 1 << 20
#: Average bytes for each leaf from which on a pinned span of all leaves is copied in
#: place. Finding the span costs as much as packing 8 KiB of memory not in a cache.
SPAN_NBYTES = 8 << 10

_MOST_EXCESS = 1.25  # bytes of the span for each byte of its leaves


class TransferLayout(NamedTuple):
    """The division of leaves into one slab and copies of their own.

    Attributes:
        plan: the layout of the slab on the device.
        packed: leaves that are packed into a slab of this layout on the host.
        span: pinned memory that has this layout already, or None; it may lack the last
            63 bytes.
        direct: indices of the other leaves, which the device reads in place.
        order: the index of the leaf of each view of the slab; None: in order of the
            leaves.
        pageable_nbytes: bytes that are packed only because they are not pinned.
    """

    plan: backend.SlabPlan
    packed: Sequence[torch.Tensor]
    span: torch.Tensor | None = None
    direct: Sequence[int] = ()
    order: Sequence[int] | None = None
    pageable_nbytes: int = 0


def plan_transfer(
    leaves: Sequence[torch.Tensor], is_pinned: Callable[[torch.Tensor], bool]
) -> TransferLayout:
    """Return the layout of a host-to-device copy.

    Args:
        leaves: dense CPU tensors.
        is_pinned: returns True if copies can read a CPU tensor in place.

    Raises:
        TypeError: a leaf is not plain.
    """
    plan = backend.plan_slab(leaves)
    if plan.nbytes and plan.nbytes >= SPAN_NBYTES * len(leaves):
        span = _find_span(leaves)
        if span is not None and is_pinned(span.source):
            return TransferLayout(span.plan, (), span.source, order=span.order)
    if plan.nbytes >= DIRECT_NBYTES:  # else no leaf is large
        large = [i for i, leaf in enumerate(leaves) if is_large(leaf)]
        direct = [i for i in large if is_pinned(leaves[i])]
        pageable = sum(leaves[i].nbytes for i in large)
        if direct:
            pageable -= sum(leaves[i].nbytes for i in direct)
            in_place = frozenset(direct)
            packed = [leaf for i, leaf in enumerate(leaves) if i not in in_place]
            plan = backend.plan_slab(packed)
            return TransferLayout(plan, packed, direct=direct, pageable_nbytes=pageable)
        return TransferLayout(plan, leaves, pageable_nbytes=pageable)
    return TransferLayout(plan, leaves)


class _Span(NamedTuple):
    """Memory that has the layout of a slab.

    Attributes:
        source: its bytes, ``torch.uint8``; keeps the memory of the leaves alive.
        plan: the places of the leaves in it, ascending.
        order: the index of the leaf at each place of the plan.
    """

    source: torch.Tensor
    plan: backend.SlabPlan
    order: list[int]


def _find_span(leaves: Sequence[torch.Tensor]) -> _Span | None:
    """Return the span of plain leaves, or None if they must be packed.

    They have a span if all are contiguous in one storage or slab, share no bytes, and
    start at multiples of 64 bytes from the first of them. At most a fifth of the span
    may belong to no leaf. Empty leaves may be anywhere.
    """
    order: list[int] = []
    placed: list[tuple[int, int, int]] = []
    for index, leaf in enumerate(leaves):
        nbytes = leaf.nbytes
        if not nbytes:
            order.append(index)
            continue
        if not leaf.is_contiguous():
            return None
        placed.append((leaf.data_ptr(), nbytes, index))
    if not placed:
        return None
    placed.sort()
    begin = end = placed[0][0]
    for start, nbytes, index in placed:
        if start < end or (start - begin) % backend.ALIGNMENT:
            return None
        end = start + nbytes
        order.append(index)
    length = end - begin
    total = sum(nbytes for _, nbytes, _ in placed)
    if length > _MOST_EXCESS * total:
        return None
    # The first leaf keeps this memory alive, so no other memory has its addresses.
    memory = backend.memory_of(leaves[placed[0][2]])
    start = begin - memory.data_ptr()
    if not 0 <= start <= memory.numel() - length:
        return None
    num_empty = len(leaves) - len(placed)
    offsets = [0] * num_empty + [address - begin for address, _, _ in placed]
    ordered = [leaves[index] for index in order]
    shapes = [leaf.shape for leaf in ordered]
    dtypes = [leaf.dtype for leaf in ordered]
    padded = -(-length // backend.ALIGNMENT) * backend.ALIGNMENT
    plan = backend.SlabPlan(offsets, shapes, dtypes, padded)
    return _Span(memory[start : start + length], plan, order)


def is_large(leaf: torch.Tensor) -> bool:
    """Return True if a leaf is copied in place, where that is possible."""
    return leaf.nbytes >= DIRECT_NBYTES and leaf.is_contiguous()
