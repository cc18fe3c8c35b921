"""Copy the parts of a batch to their targets, packed into one copy where possible."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from operator import attrgetter
from typing import Any

import torch

from .. import backend
from ..backend.plain import check_storage
from ..batch.container import DataContainer, are_only_tensors
from ..batch.tensor_fields import TensorFields
from ..core.errors import NoDataError
from ..transfer import to_device
from ..transfer.static import StaticTarget

#: Names leaf ``i``: ``inputs['img']``. Called only for a message: it is slow.
LeafName = Callable[[int], str]

_Rebuild = Callable[[Sequence[torch.Tensor]], list[Any]]

_TENSOR = frozenset({torch.Tensor})
_is_meta = attrgetter("is_meta")


def move(
    leaves: Sequence[Any],
    parts: Sequence[Any],
    target: torch.device | None,
    dtype: torch.dtype | None,
    stream: Any = None,
    name: LeafName = "tensors[{}]".format,
    classes: Collection[type] | None = None,
    static: StaticTarget | None = None,
) -> list[Any]:
    """Copy the parts of one target, and return them there; see `start_copy`."""
    return start_copy(leaves, parts, target, dtype, stream, name, classes, static)()


def start_copy(
    leaves: Sequence[Any],
    parts: Sequence[Any],
    target: torch.device | None,
    dtype: torch.dtype | None,
    stream: Any = None,
    name: LeafName = "tensors[{}]".format,
    classes: Collection[type] | None = None,
    static: StaticTarget | None = None,
) -> Callable[[], list[Any]]:
    """Start to copy the parts of one target; return a function that returns them there.

    Copies to several targets can all be started before the first one is waited for. The
    returned function need not be called.

    Args:
        leaves: the leaves of the batch. The tensors in a part are copied only if its
            leaf is a tensor, or a DataContainer that is not ``cpu_only``.
        parts: of this target, one for each leaf.
        target: None is the host, where only tensors that are not contiguous are copied.
        dtype: of floating-point tensors, or None.
        stream: of the copy, if it is on the target; else the target's own.
        name: names leaf ``i`` in an error.
        classes: of the leaves; None: they are looked up.
        static: the slabs that the parts are copied into by the returned function; None:
            they get memory of their own.

    Raises:
        TypeError: a tensor to copy cannot be in such a slab.
        ValueError: the memory of a tensor to copy was freed, or it has no data.
    """
    on_host = target is None or target.type == "cpu"
    is_simple = are_only_tensors(set(map(type, leaves)) if classes is None else classes)
    is_compact = (
        is_simple
        and on_host
        and dtype is None
        and backend.are_compact(parts, on_cpu=target is not None or static is not None)
    )
    if is_compact and static is None:
        return lambda: list(parts)
    if target is None and static is None and dtype is None:
        return lambda: _keep(leaves, parts, name)
    if dtype is not None or (on_host and not is_compact):
        for i, (leaf, part) in enumerate(zip(leaves, parts, strict=True)):
            if _moves(leaf):  # tensors that are packed for a device are checked there
                check_memory(part, partial(name, i))
    rebuild: _Rebuild
    if is_simple and classes is not None and _TENSOR.issuperset(classes):
        flat, rebuild = list(parts), list
    else:
        flat, rebuild = _open_tensors(parts) if is_simple else _open(leaves, parts)
    prepare = None
    if static is not None:
        tensor_name = partial(_name_tensor, leaves, parts, name)
        prepare = partial(static.prepare, target, tensor_name)
    wait_flat = to_device.start_copy(flat, target, dtype, stream, prepare)

    def wait() -> list[Any]:
        try:
            copies = wait_flat()
        except NotImplementedError as error:
            _check_data(leaves, parts, target, name, error)
            raise
        return rebuild(copies)

    return wait


def _open_tensors(parts: Sequence[Any]) -> tuple[list[torch.Tensor], _Rebuild]:
    """Return the tensors to move, and a function that returns the parts with copies.

    Requires `are_only_tensors` of the leaves. No Python code runs for each leaf.
    """
    return backend.select_tensors(parts), partial(backend.replace_tensors, parts)


def _open(
    leaves: Sequence[Any], parts: Sequence[Any]
) -> tuple[list[torch.Tensor], _Rebuild]:
    """Return the same as `_open_tensors` for all leaves."""
    moves = list(map(_moves, leaves))
    flat: list[torch.Tensor] = []
    _collect([part for part, move in zip(parts, moves, strict=True) if move], flat)

    def rebuild(tensors: Sequence[torch.Tensor]) -> list[Any]:
        copies = iter(tensors)
        return [
            (next(copies) if isinstance(part, torch.Tensor) else _rebuild(part, copies))
            if move
            else part
            for part, move in zip(parts, moves, strict=True)
        ]

    return flat, rebuild


def _name_tensor(
    leaves: Sequence[Any], parts: Sequence[Any], name: LeafName, number: int
) -> str:
    """Return the name of the leaf with this tensor to move."""
    tensors: list[torch.Tensor] = []
    for i, (leaf, part) in enumerate(zip(leaves, parts, strict=True)):
        if _moves(leaf):
            _collect([part], tensors)
        if len(tensors) > number:
            return name(i)
    raise IndexError(number)


def _check_data(
    leaves: Sequence[Any],
    parts: Sequence[Any],
    target: torch.device | None,
    name: LeafName,
    cause: Exception,
) -> None:
    """Raise an error that names the first part that is moved and has no data."""
    for i, (leaf, part) in enumerate(zip(leaves, parts, strict=True)):
        tensors: list[torch.Tensor] = []
        if _moves(leaf):
            _collect([part], tensors)
        if any(map(_is_meta, tensors)):
            raise NoDataError(
                f"{name(i)} must have data to be copied to {target}, but is on the "
                "meta device. Give it data first, or keep it in "
                "DataContainer([tensor], cpu_only=True)."
            ) from cause


def _moves(leaf: Any) -> bool:
    """Return True if the tensors in the parts of this leaf are copied to the target.

    Lists that are not chunks of a container stay unchanged.
    """
    if isinstance(leaf, DataContainer):
        return not leaf.cpu_only
    return isinstance(leaf, torch.Tensor)


def _keep(leaves: Sequence[Any], parts: Sequence[Any], name: LeafName) -> list[Any]:
    kept = []
    for i, (leaf, part) in enumerate(zip(leaves, parts, strict=True)):
        if _moves(leaf):
            part = _contiguous(part, partial(name, i))
        kept.append(part)
    return kept


def check_memory(part: Any, where: Callable[[], str]) -> None:
    """Raise if the memory of a tensor was freed, also in lists, `Padded` and `Ragged`.

    torch reads beyond such a storage without an error.

    Args:
        part: a part of a batch.
        where: returns its name for the error.

    Raises:
        ValueError: the storage is smaller than the shape requires.
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
        elif item is not None:  # an absent field of a Padded
            _collect(item if isinstance(item, list) else item.fields(), into)


def _rebuild(items: Any, tensors: Iterator[torch.Tensor]) -> Any:
    """Return the same nested lists, `Padded` and `Ragged` with the next tensors."""
    if items is None:
        return None
    rebuilt = [
        next(tensors) if isinstance(item, torch.Tensor) else _rebuild(item, tensors)
        for item in (items if isinstance(items, list) else items.fields())
    ]
    return rebuilt if isinstance(items, list) else items.from_fields(rebuilt)


def _contiguous(part: Any, where: Callable[[], str]) -> Any:
    """Return the same tensor, list, `Padded` or `Ragged` with contiguous tensors.

    First check the memory of the tensors that have to be copied.
    """
    if part is None:
        return None
    if isinstance(part, list):
        return [_contiguous(each, where) for each in part]
    if isinstance(part, TensorFields):
        return part.from_fields(_contiguous(each, where) for each in part.fields())
    if part.layout is torch.strided:
        if part.is_contiguous():
            return part
        check_memory(part, where)
    return to_device.contiguous(part)
