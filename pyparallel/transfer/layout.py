"""Which leaves of a batch are packed for their way to a device, and which lie well."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from .. import backend

#: Leaves of at least this many bytes are not packed if they are page-locked already.
DIRECT_NBYTES = 1 << 20
#: Bytes for each leaf from which on one page-locked span of all leaves is not packed:
#: to find that they have one costs as much as to pack 8 KiB of memory not in a cache.
SPAN_NBYTES = 8 << 10

_ALIGNMENT = 64  # of the slots of a slab
_MOST_EXCESS = 1.25  # bytes of the span for each byte of its leaves


class Cargo(NamedTuple):
    """How leaves travel: most in one slab, some on their own.

    Attributes:
        plan: of the slab on the device.
        packed: leaves that are packed into one like it on the host.
        span: page-locked bytes that are one already, or None; it may lack the last 63.
        direct: indices of the other leaves, each of which the device reads in place.
        order: for each view of the slab the index of its leaf; None: all, as they are.
        pageable_nbytes: what is packed only because it is not page-locked.
    """

    plan: backend.SlabPlan
    packed: Sequence[torch.Tensor]
    span: torch.Tensor | None = None
    direct: Sequence[int] = ()
    order: Sequence[int] | None = None
    pageable_nbytes: int = 0


def load(
    leaves: Sequence[torch.Tensor], is_pinned: Callable[[torch.Tensor], bool]
) -> Cargo:
    """Decide how leaves travel; TypeError unless all are plain.

    Args:
        leaves: dense CPU tensors.
        is_pinned: tells whether copies can read a CPU tensor in place.
    """
    plan = backend.plan_slab(leaves)
    if plan.nbytes and plan.nbytes >= SPAN_NBYTES * len(leaves):
        span = _find_span(leaves)
        if span is not None and is_pinned(span.source):
            return Cargo(span.plan, (), span.source, order=span.order)
    if plan.nbytes >= DIRECT_NBYTES:  # else no leaf is large
        large = [i for i, leaf in enumerate(leaves) if _is_large(leaf)]
        direct = [i for i in large if is_pinned(leaves[i])]
        pageable = sum(leaves[i].nbytes for i in large)
        if direct:
            pageable -= sum(leaves[i].nbytes for i in direct)
            alone = frozenset(direct)
            packed = [leaf for i, leaf in enumerate(leaves) if i not in alone]
            plan = backend.plan_slab(packed)
            return Cargo(plan, packed, direct=direct, pageable_nbytes=pageable)
        return Cargo(plan, leaves, pageable_nbytes=pageable)
    return Cargo(plan, leaves)


class _Span(NamedTuple):
    """Memory that has the form of a slab.

    Attributes:
        source: its bytes, ``torch.uint8``; holds the memory of the leaves.
        plan: where the leaves lie in it, ascending.
        order: the index of the leaf that the plan has at each place.
    """

    source: torch.Tensor
    plan: backend.SlabPlan
    order: list[int]


def _find_span(leaves: Sequence[torch.Tensor]) -> _Span | None:
    """Return the span of plain leaves, or None if they must be packed.

    They have one if all are contiguous in one storage or slab, share no bytes, start at
    multiples of 64 bytes from the first of them, and at most a fifth of the span is
    something else. Empty leaves may be anywhere.
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
        if start < end or (start - begin) % _ALIGNMENT:
            return None
        end = start + nbytes
        order.append(index)
    length = end - begin
    total = sum(nbytes for _, nbytes, _ in placed)
    if length > _MOST_EXCESS * total:
        return None
    # The first leaf keeps this memory alive, so an address in it belongs to no other.
    memory = backend.memory_of(leaves[placed[0][2]])
    start = begin - memory.data_ptr()
    if not 0 <= start <= memory.numel() - length:
        return None
    offsets = [0] * (len(leaves) - len(placed)) + [at - begin for at, _, _ in placed]
    ordered = [leaves[index] for index in order]
    shapes = [leaf.shape for leaf in ordered]
    dtypes = [leaf.dtype for leaf in ordered]
    padded = -(-length // _ALIGNMENT) * _ALIGNMENT
    plan = backend.SlabPlan(offsets, shapes, dtypes, padded)
    return _Span(memory[start : start + length], plan, order)


def _is_large(leaf: torch.Tensor) -> bool:
    return leaf.nbytes >= DIRECT_NBYTES and leaf.is_contiguous()
