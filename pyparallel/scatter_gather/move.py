"""The parts of a batch that belong to one target go there, in one copy if they can."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from ..backend.plain import PLAIN, check_storage
from ..batch.container import DataContainer
from ..batch.tensor_fields import TensorFields
from ..transfer import to_device

#: Names leaf ``i``: ``inputs['img']``. Called only for a message: it is slow.
LeafName = Callable[[int], str]

_is_contiguous = torch.Tensor.is_contiguous


def move(
    leaves: Sequence[Any],
    parts: Sequence[Any],
    target: torch.device | None,
    dtype: torch.dtype | None,
    stream: Any = None,
    name: LeafName = "tensors[{}]".format,
) -> list[Any]:
    """Return the parts of one target, with all their tensors there; see `depart`."""
    return depart(leaves, parts, target, dtype, stream, name)()


def depart(
    leaves: Sequence[Any],
    parts: Sequence[Any],
    target: torch.device | None,
    dtype: torch.dtype | None,
    stream: Any = None,
    name: LeafName = "tensors[{}]".format,
) -> Callable[[], list[Any]]:
    """Send the parts of one target; return what lands them, with all tensors there.

    What is sent to several targets is on its way to all of them before the first lands.
    What never lands may be dropped.

    Args:
        leaves: of the batch: they tell whose parts are data and whose only look so.
        parts: of this target, one for each leaf.
        target: None is the host, where only what is not contiguous is copied.
        dtype: of floating-point tensors, or None.
        stream: of the copy, if it is on the target; else the target's own.
        name: names leaf ``i`` in an error.

    Raises:
        ValueError: a tensor that is to be read has no memory any more.
    """
    if target is None and dtype is None:
        return lambda: _keep(leaves, parts, name)
    moves = list(map(_moves, leaves))
    if dtype is not None or (target is not None and target.type == "cpu"):
        for i, part in enumerate(parts):
            if moves[i]:  # what is packed for a device is looked at there
                check_memory(part, partial(name, i))
    flat: list[torch.Tensor] = []
    _collect([part for part, move in zip(parts, moves, strict=True) if move], flat)
    land = to_device.depart(flat, target, dtype, stream)

    def fill() -> list[Any]:
        sent = iter(land())
        return [
            (next(sent) if isinstance(part, torch.Tensor) else _refill(part, sent))
            if move
            else part
            for part, move in zip(parts, moves, strict=True)
        ]

    return fill


def _moves(leaf: Any) -> bool:
    """Tell whether tensors and lists of tensors, made of this leaf, go to the target.

    Other lists than the chunks of a container stay as they are.
    """
    if isinstance(leaf, DataContainer):
        return not leaf.cpu_only
    return isinstance(leaf, torch.Tensor)


def _keep(leaves: Sequence[Any], parts: Sequence[Any], name: LeafName) -> list[Any]:
    try:
        if PLAIN.issuperset(map(type, parts)) and all(map(_is_contiguous, parts)):
            return list(parts)
    except RuntimeError:  # compressed sparse tensors do not say
        pass
    kept = []
    for i, (leaf, part) in enumerate(zip(leaves, parts, strict=True)):
        if _moves(leaf):
            part = _contiguous(part, partial(name, i))
        kept.append(part)
    return kept


def check_memory(part: Any, where: Callable[[], str]) -> None:
    """Raise if a tensor, or one in nested lists, `Padded` and `Ragged`, has no memory.

    torch would read there all the same.

    Args:
        part: of a batch.
        where: names it.

    Raises:
        ValueError: the storage is smaller than the shape needs it to be.
    """
    if isinstance(part, list | TensorFields):
        for each in part if isinstance(part, list) else part.fields():
            check_memory(each, where)
    else:
        check_storage(part, where)


def _collect(items: Sequence[Any], into: list[torch.Tensor]) -> None:
    """Append the tensors of nested lists and of `Padded` and `Ragged`."""
    for item in items:
        if isinstance(item, torch.Tensor):
            into.append(item)
        elif item is not None:  # a field that a Padded lacks
            _collect(item if isinstance(item, list) else item.fields(), into)


def _refill(items: Any, tensors: Iterator[torch.Tensor]) -> Any:
    """Return the same nested lists, `Padded` and `Ragged` with the next tensors."""
    if items is None:
        return None
    filled = [
        next(tensors) if isinstance(item, torch.Tensor) else _refill(item, tensors)
        for item in (items if isinstance(items, list) else items.fields())
    ]
    return filled if isinstance(items, list) else items.from_fields(filled)


def _contiguous(part: Any, where: Callable[[], str]) -> Any:
    """Return a tensor, or those of nested lists, `Padded` and `Ragged`, contiguous.

    First check the memory of the tensors that have to be copied.
    """
    if part is None:
        return None
    if isinstance(part, list):
        return [_contiguous(each, where) for each in part]
    if isinstance(part, TensorFields):
        return part.from_fields(_contiguous(each, where) for each in part.fields())
    if part.layout is torch.strided and not part.is_contiguous():
        check_memory(part, where)
    return to_device.contiguous(part)
