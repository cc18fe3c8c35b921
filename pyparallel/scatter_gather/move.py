"""Copy the parts of a batch to their targets, packed into one copy where possible."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import torch

from .. import backend
from ..backend.plain import check_storage
from ..batch import pytree
from ..batch.container import DataContainer, are_only_tensors
from ..batch.tensor_fields import TensorFields
from ..core.errors import NoDataError
from ..transfer import to_device
from ..transfer.static import StaticTarget

#: Names leaf ``i``: ``inputs['img']``. Called only for a message: it is slow.
LeafName = Callable[[int], str]

_Rebuild = Callable[[Sequence[torch.Tensor]], list[Any]]


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
    nest = None if is_simple else _Nest(leaves, parts)
    if nest is not None and static is None:
        compiled = nest.start_copy(target, stream, dtype)
        if compiled is not None:
            return compiled
    if target is None and static is None and dtype is None:
        return lambda: _keep(leaves, parts, name)
    tensors, rebuild = _open_tensors(parts) if nest is None else nest.open()
    tensor_name = partial(_name_tensor, leaves, parts, name)
    if dtype is not None or (on_host and not is_compact):
        # Tensors that are packed for a device are checked there.
        for number, tensor in enumerate(tensors):
            check_storage(tensor, partial(tensor_name, number))
    prepare = None
    if static is not None:
        prepare = partial(static.prepare, target, tensor_name)
    wait_flat = to_device.start_copy(tensors, target, dtype, stream, prepare)

    def wait() -> list[Any]:
        try:
            copies = wait_flat()
        except NotImplementedError as error:
            _check_data(tensors, tensor_name, target, error)
            raise
        return rebuild(copies)

    return wait


def _open_tensors(parts: Sequence[Any]) -> tuple[list[torch.Tensor], _Rebuild]:
    """Return the tensors to move, and a function that returns the parts with copies.

    Requires `are_only_tensors` of the leaves. No Python code runs for each leaf.
    """
    return backend.select_tensors(parts), partial(backend.replace_tensors, parts)


class _Nest:
    """The parts of a batch with other leaves than those of `are_only_tensors`.

    No Python code runs for each tensor of a list, unless a tensor needs torch's copy.
    """

    def __init__(self, leaves: Sequence[Any], parts: Sequence[Any]) -> None:
        self._parts = parts
        self._places = [
            i
            for i, leaf in enumerate(leaves)
            if type(leaf) is torch.Tensor or _moves(leaf)  # nearly all are tensors
        ]
        # The backend walks tuples, but not the classes of their fields.
        self._fields = {
            i: parts[i] for i in self._places if isinstance(parts[i], TensorFields)
        }
        self._moved = [
            self._fields[i].fields() if i in self._fields else parts[i]
            for i in self._places
        ]

    def start_copy(
        self, target: torch.device | None, stream: Any, dtype: torch.dtype | None
    ) -> Callable[[], list[Any]] | None:
        """Return the same as `start_copy` if the backend can do all of it, or None."""
        if target is None or target.type == "cpu":
            if dtype is not None:
                return None
            copied = pytree.copy_compact(self._moved, 0, on_cpu=target is not None)
            if copied is None or not are_only_tensors(copied[1]):
                return None
            return lambda: self._replace(copied[0])
        own = stream if stream is not None and stream.device == target else None
        copy = send_flat(pytree.flatten_arguments(self._moved, 0), target, own, dtype)
        return None if copy is None else lambda: self._replace(copy.wait())

    def open(self) -> tuple[list[torch.Tensor], _Rebuild]:
        """Return the same as `_open_tensors`."""
        items, structure = pytree.flatten(self._moved)

        def rebuild(copies: Sequence[torch.Tensor]) -> list[Any]:
            following = iter(copies)
            # None is an absent field of a Padded.
            moved = [each if each is None else next(following) for each in items]
            return self._replace(pytree.unflatten(structure, moved))

        return [each for each in items if each is not None], rebuild

    def _replace(self, moved: Sequence[Any]) -> list[Any]:
        rebuilt = list(self._parts)
        for i, part in zip(self._places, moved, strict=True):
            fields = self._fields.get(i)
            rebuilt[i] = part if fields is None else fields.from_fields(part)
        return rebuilt


def send_flat(
    flat: pytree.Flat,
    target: torch.device,
    stream: Any,
    dtype: torch.dtype | None = None,
) -> backend.BatchCopy | None:
    """Send a nest by one compiled call, or return None.

    No Python code runs for each leaf. With ``dtype``, a nest with a large tensor is not
    sent here: the device reads a pinned one in place, and casts it then.
    """
    if not flat.is_native or not are_only_tensors(flat.classes):
        return None
    structure: Any = flat.structure
    plan = partial(backend.plan_copy, flat.leaves, structure=structure)
    if dtype is not None:
        plan = partial(_plan_cast, flat.leaves, structure=structure, dtype=dtype)
    return to_device.send_planned(plan, target, stream=stream)


def _plan_cast(
    leaves: Sequence[Any],
    stream: Any,
    leaf_nbytes: int,
    mean_nbytes: int,
    structure: Any,
    dtype: torch.dtype,
) -> backend.BatchCopy | None:
    """Plan a copy that casts each tensor on the host, or return None."""
    try:
        copy = backend.plan_copy(
            leaves, stream, leaf_nbytes, mean_nbytes, dtype, structure
        )
    except ValueError:  # the other way names the tensor
        return None
    return None if copy is None or copy.sources is not None else copy


def _name_tensor(
    leaves: Sequence[Any], parts: Sequence[Any], name: LeafName, number: int
) -> str:
    """Return the name of the leaf with this tensor to move."""
    owners = [
        i
        for i, (leaf, part) in enumerate(zip(leaves, parts, strict=True))
        if _moves(leaf)
        for each in pytree.flatten(part)[0]
        if each is not None
    ]
    return name(owners[number])


def _check_data(
    tensors: Sequence[torch.Tensor],
    name: LeafName,
    target: torch.device | None,
    cause: Exception,
) -> None:
    """Raise an error that names the first tensor without data."""
    for number, tensor in enumerate(tensors):
        if tensor.is_meta:
            raise NoDataError(
                f"{name(number)} must have data to be copied to {target}, but is on "
                "the meta device. Give it data first, or keep it in "
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
    """Return the parts on the host, with contiguous tensors."""
    return [
        _contiguous(part, partial(name, i))
        if type(leaf) is torch.Tensor or _moves(leaf)
        else part
        for i, (leaf, part) in enumerate(zip(leaves, parts, strict=True))
    ]


def _contiguous(part: Any, where: Callable[[], str]) -> Any:
    """Return the same tensor, list, `Padded` or `Ragged` with contiguous tensors."""
    if part is None:  # an absent field of a Padded
        return None
    if isinstance(part, list):
        return [_contiguous(each, where) for each in part]
    if isinstance(part, TensorFields):
        return part.from_fields(_contiguous(each, where) for each in part.fields())
    if part.layout is torch.strided:
        if part.is_contiguous():
            return part
        check_storage(part, where)
    return to_device.contiguous(part)
