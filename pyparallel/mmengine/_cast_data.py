"""Move a batch to a device: tensors in one packed copy, other objects by ``to``."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import torch

from ..batch import pytree
from ..batch.container import DataContainer, map_tensors
from ..core.devices import resolve_target
from ..core.tracing import span
from ..scatter_gather.move import move
from ..scatter_gather.split import Options, whole_parts
from ._upstream import BaseDataElement

_WHOLE = Options(num_targets=1)
#: Leaves of these classes contain no other objects.
_SIMPLE = frozenset({torch.Tensor, str, bytes, int, float, bool, type(None)})
#: Sequences whose items are not objects to move.
_BYTES = (str, bytes, bytearray, memoryview, range, array)
# mmengine's method. A subclass that overrides it keeps its own behaviour.
_element_to = getattr(BaseDataElement, "to", None)


def cast_data(data: Any, device: torch.device, non_blocking: bool = False) -> Any:
    """Return ``data`` on a device; see `BaseDataPreprocessor.cast_data`.

    ``non_blocking`` is passed to the method ``to`` of objects that are not tensors.
    """
    leaves, structure = pytree.flatten(data)

    def name(i: int) -> str:
        return pytree.accessors(structure)[i].codify("data")

    with span("pyparallel.scatter"):
        if _SIMPLE.issuperset(map(type, leaves)):
            return pytree.unflatten(structure, _move_tensors(leaves, leaves, device))
        parts = whole_parts(leaves, _WHOLE, name, set(map(type, leaves)))
        opened = {
            i: _movable_fields(leaf)
            for i, leaf in enumerate(leaves)
            if _is_plain_element(leaf)
        }
        fields, shape = pytree.flatten(list(opened.values()))
        all_leaves = [*leaves, *fields]
        moved = [
            part if _is_moved(leaf) else _cast_other(part, device, non_blocking)
            for leaf, part in zip(
                all_leaves,
                _move_tensors(all_leaves, [*parts, *fields], device),
                strict=True,
            )
        ]
        rest = iter(pytree.unflatten(shape, moved[len(leaves) :]))
        result = [
            _rebuild_element(leaf, next(rest)) if i in opened else part
            for i, (leaf, part) in enumerate(zip(leaves, moved, strict=False))
        ]
    return pytree.unflatten(structure, result)


def has_to_method(value: Any) -> bool:
    """Return True for an object that moves itself with a method ``to``.

    True for mmengine's data elements. False for tensors, DataContainers and classes.
    """
    return not isinstance(value, torch.Tensor | DataContainer | type) and callable(
        getattr(value, "to", None)
    )


def has_items(value: Any) -> bool:
    """Return True for a sequence whose items `cast_data` moves."""
    return isinstance(value, Sequence) and not isinstance(value, _BYTES)


def _move_tensors(
    leaves: Sequence[Any], parts: Sequence[Any], device: torch.device
) -> list[Any]:
    """Return the parts of leaves with their tensors on the device."""
    if device.type not in ("cpu", "meta"):
        target = resolve_target(device, "cast_data", "device")
        return move(leaves, parts, target, None)

    def to(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(device)  # blocking, because the host reads the result

    return [
        map_tensors(to, part) if _holds_tensors(leaf) else part
        for leaf, part in zip(leaves, parts, strict=True)
    ]


def _holds_tensors(leaf: Any) -> bool:
    if isinstance(leaf, DataContainer):
        return not leaf.cpu_only
    return isinstance(leaf, torch.Tensor)


def _is_moved(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor | DataContainer) or _is_plain_element(leaf)


def _cast_other(leaf: Any, device: torch.device, non_blocking: bool) -> Any:
    """Move a leaf that is not a tensor: by its method ``to``, or by its items."""
    if has_to_method(leaf):
        if non_blocking:
            return leaf.to(device, non_blocking=True)
        return leaf.to(device)
    if not has_items(leaf):
        return leaf
    # A sequence of a type that `pytree` does not flatten.
    items = [cast_data(item, device, non_blocking) for item in leaf]
    if all(new is old for new, old in zip(items, leaf, strict=True)):
        return leaf
    return pytree.rebuild_sequence(leaf, items)


def _is_plain_element(leaf: Any) -> bool:
    """Return True for a data element that mmengine would move field by field."""
    return (
        isinstance(leaf, BaseDataElement)
        and getattr(type(leaf), "to", None) is _element_to
    )


def _movable_fields(element: Any) -> dict[str, Any]:
    """Return the fields of a data element that move; nested elements become dicts."""
    return {
        key: _movable_fields(value) if _is_plain_element(value) else value
        for key, value in element.items()
        if isinstance(value, torch.Tensor) or has_to_method(value)
    }


def _rebuild_element(element: Any, fields: dict[str, Any]) -> Any:
    """Return a copy of a data element in which these fields are replaced."""
    result = element.new()
    for key, value in fields.items():
        old = getattr(element, key)
        is_plain = _is_plain_element(old)
        result.set_data({key: _rebuild_element(old, value) if is_plain else value})
    return result
