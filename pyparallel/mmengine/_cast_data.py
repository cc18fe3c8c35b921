"""A batch goes to a device: its tensors in one copy, everything else as it can."""

from __future__ import annotations

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
#: Leaves of these classes need no second look.
_SIMPLE = frozenset({torch.Tensor, str, bytes, int, float, bool, type(None)})
#: Sequences that hold no objects.
_BYTES = (str, bytes, bytearray, memoryview, range)
# mmengine's own way of sending annotations; a class that has another keeps it.
_element_to = getattr(BaseDataElement, "to", None)


def cast(data: Any, device: torch.device, non_blocking: bool = False) -> Any:
    """Return ``data`` with all that can go to ``device`` there; containers are new.

    Args:
        data: any nest of containers. DataContainers in it are opened, as for one
            target of `pyparallel.scatter`.
        device: a host or an accelerator.
        non_blocking: given to ``to`` of objects that are no tensors.

    Raises:
        TypeError: a DataContainer that holds anything but tensors without ``cpu_only``.
        ValueError: a DataContainer of several chunks.
        RuntimeError: a device that this machine does not have.

    Stream: tensors of the host, those of mmengine's data elements too, go in one packed
    copy on the copy stream; the current stream of the device waits for it, the host
    does not. They arrive contiguous. On the host tensors are not copied.
    """
    leaves, structure = pytree.flatten(data)

    def name(i: int) -> str:
        return pytree.accessors(structure)[i].codify("data")

    with span("pyparallel.scatter"):
        if _SIMPLE.issuperset(map(type, leaves)):
            return pytree.unflatten(structure, _send(leaves, leaves, device))
        parts = whole_parts(leaves, _WHOLE, name)
        opened = {i: _open(leaf) for i, leaf in enumerate(leaves) if _opens(leaf)}
        fields, shape = pytree.flatten(list(opened.values()))
        all_leaves = [*leaves, *fields]
        moved = [
            part if _is_done(leaf) else _cast_other(part, device, non_blocking)
            for leaf, part in zip(
                all_leaves, _send(all_leaves, [*parts, *fields], device), strict=True
            )
        ]
        rest = iter(pytree.unflatten(shape, moved[len(leaves) :]))
        result = [
            _close(leaf, next(rest)) if i in opened else part
            for i, (leaf, part) in enumerate(zip(leaves, moved, strict=False))
        ]
    return pytree.unflatten(structure, result)


def is_element(value: Any) -> bool:
    """Tell whether this is one object that knows its way: it has a method ``to``.

    mmengine's data elements are such. Tensors, DataContainers and classes are not.
    """
    return not isinstance(value, torch.Tensor | DataContainer | type) and callable(
        getattr(value, "to", None)
    )


def _send(
    leaves: Sequence[Any], parts: Sequence[Any], device: torch.device
) -> list[Any]:
    """Return the parts with their tensors on the device, and the others as they are.

    Args:
        leaves: they tell what the parts are made of.
        parts: one for each leaf.
        device: a host or an accelerator.
    """
    if device.type not in ("cpu", "meta"):
        target = resolve_target(device, "cast_data", "device")
        return move(leaves, parts, target, None)

    def to(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(device)  # the host waits: it will read this

    return [
        map_tensors(to, part) if _holds_tensors(leaf) else part
        for leaf, part in zip(leaves, parts, strict=True)
    ]


def _holds_tensors(leaf: Any) -> bool:
    if isinstance(leaf, DataContainer):
        return not leaf.cpu_only
    return isinstance(leaf, torch.Tensor)


def _is_done(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor | DataContainer) or _opens(leaf)


def _cast_other(leaf: Any, device: torch.device, non_blocking: bool) -> Any:
    """Send a leaf that is no tensor by its own method, or by what it holds."""
    if is_element(leaf):
        if non_blocking:
            return leaf.to(device, non_blocking=True)
        return leaf.to(device)
    if not isinstance(leaf, Sequence) or isinstance(leaf, _BYTES):
        return leaf
    # Sequences of a kind that `pytree` does not walk.
    items = [cast(item, device, non_blocking) for item in leaf]
    if all(new is old for new, old in zip(items, leaf, strict=True)):
        return leaf
    return pytree.rebuild_sequence(leaf, items)


def _opens(leaf: Any) -> bool:
    """Tell whether this is a data element that mmengine would send field by field."""
    return (
        isinstance(leaf, BaseDataElement)
        and getattr(type(leaf), "to", None) is _element_to
    )


def _open(element: Any) -> dict[str, Any]:
    """Return what of a data element moves: nests of dicts for nests of elements."""
    return {
        key: _open(value) if _opens(value) else value
        for key, value in element.items()
        if isinstance(value, torch.Tensor) or is_element(value)
    }


def _close(element: Any, fields: dict[str, Any]) -> Any:
    """Return a new element like this one with the fields in it."""
    result = element.new()
    for key, value in fields.items():
        old = getattr(element, key)
        result.set_data({key: _close(old, value) if _opens(old) else value})
    return result
