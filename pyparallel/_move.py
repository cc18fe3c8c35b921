"""The parts of a batch that belong to one target go there, in one copy if they can."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from operator import attrgetter
from typing import Any

import torch

from . import _slab
from ._errors import BatchValueError
from ._storage import lacking
from ._tensor_fields import TensorFields
from ._torch_private import is_wrapped, is_zero_tensor
from .container import DataContainer

#: Names leaf ``i``: ``inputs['img']``. Called only for a message: it is slow.
LeafName = Callable[[int], str]

_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})
_is_contiguous = torch.Tensor.is_contiguous
_is_cpu = attrgetter("is_cpu")
_requires_grad = attrgetter("requires_grad")


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
    if dtype is not None:
        flat = [_cast(tensor, dtype) for tensor in flat]
    land = _send(flat, target, stream)

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
        if _PLAIN.issuperset(map(type, parts)) and all(map(_is_contiguous, parts)):
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
    elif type(part) in _PLAIN and is_plain(part) and not is_wrapped(part):
        found = lacking(part)
        if found:
            raise BatchValueError(
                f"{where()} must lie within its storage, but {found}. Use it before "
                "its storage is resized."
            )


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


def _cast(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def _send(
    tensors: list[torch.Tensor], target: torch.device | None, stream: Any
) -> Callable[[], list[torch.Tensor]]:
    """Return what gives the tensors on ``target``, those that can be in one copy."""
    if target is None:
        return lambda: list(map(_contiguous, tensors))
    if target.type == "cpu":
        return lambda: [_contiguous(tensor).to(target) for tensor in tensors]
    if not has_streams(target):
        return lambda: [tensor.to(target) for tensor in tensors]
    on_target = stream is not None and stream.device == target
    return Departure(tensors, target, stream=stream if on_target else None).land


def has_streams(device: torch.device) -> bool:
    """Tell whether copies to ``device`` can be queued; MPS has one queue for all."""
    return hasattr(torch.get_device_module(device), "Stream")


class Departure:
    """Tensors of any kind that leave for a device with streams.

    Those whose bytes are all that has to get there are packed and on their way at
    once. The others follow by torch's own operators when this lands.

    Stream: that of `_slab.send`; the others are copied on the landing's stream.
    """

    def __init__(
        self,
        tensors: list[torch.Tensor],
        device: torch.device,
        api: _slab.DeviceApi = _slab.torch_device,
        home: Any = None,
        stream: Any = None,
    ) -> None:
        self._device, self._api = device, api
        self._flight: _slab.Flight | None = None
        packed: Sequence[int] = range(len(tensors))
        if tensors and _look_plain(tensors):
            try:
                self._flight = _slab.send(tensors, device, api, home, stream)
            except TypeError:  # and nothing was sent; one of them is conjugated, or so
                pass
        if self._flight is None:
            packed = [i for i, tensor in enumerate(tensors) if packs(tensor)]
            if packed:
                chosen = [tensors[i] for i in packed]
                self._flight = _slab.send(chosen, device, api, home, stream)
        places = frozenset(packed)
        # What is packed is not held: memory of the host is free for the next batch.
        self._others = {
            i: tensor for i, tensor in enumerate(tensors) if i not in places
        }

    def land(self) -> list[torch.Tensor]:
        """Return the tensors on the device; the host does not wait for the copy."""
        landed = self._flight.land() if self._flight else []
        for i, tensor in self._others.items():  # ascending: each finds its place
            landed.insert(i, tensor.to(self._device, non_blocking=True))
        lent = [tensor for tensor in self._others.values() if self._is_lent(tensor)]
        if lent:
            _slab.hold_while_read(lent, self._device, self._api)
        self._others = {}
        return landed

    def _is_lent(self, tensor: torch.Tensor) -> bool:
        strided = tensor.is_cpu and tensor.layout is torch.strided
        return strided and self._api.is_pinned(tensor)


def _contiguous(part: Any, where: Callable[[], str] | None = None) -> Any:
    """Return a tensor, or those of nested lists, `Padded` and `Ragged`, contiguous.

    With ``where`` the memory of what has to be copied is looked at first.
    """
    if part is None:
        return None
    if isinstance(part, list):
        return [_contiguous(each, where) for each in part]
    if isinstance(part, TensorFields):
        return part.from_fields(_contiguous(each, where) for each in part.fields())
    try:
        if where is not None and not part.is_contiguous():
            check_memory(part, where)
        return part.contiguous()
    except RuntimeError:  # sparse tensors have no such thing
        if part.layout is torch.strided:
            raise
        return part


def _look_plain(tensors: list[torch.Tensor]) -> bool:
    """Tell whether all may be packed, as far as a quick look can tell."""
    return (
        _PLAIN.issuperset(map(type, tensors))
        and all(map(_is_cpu, tensors))
        and not (torch.is_grad_enabled() and any(map(_requires_grad, tensors)))
    )


def packs(tensor: torch.Tensor) -> bool:
    """Tell whether only the bytes of this CPU tensor have to reach its consumer."""
    return (
        tensor.device.type == "cpu"
        and is_plain(tensor)
        and not (tensor.requires_grad and torch.is_grad_enabled())
    )


def is_plain(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor is no more than its bytes, but for its gradient."""
    return (
        type(tensor) in _PLAIN
        and tensor.layout is torch.strided
        and not (tensor.is_quantized or tensor.is_nested or is_zero_tensor(tensor))
        and not (tensor.is_conj() or tensor.is_neg())
    )
