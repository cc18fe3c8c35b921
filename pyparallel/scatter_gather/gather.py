"""gather: join the outputs of several replicas into the outputs of one.

`gather` walks all outputs at a time and checks their structure. Then it copies the
tensors of each device in one packed copy, and joins them on the target.
"""

from __future__ import annotations

import copy
import sys
from collections import deque
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, TypeVar

import torch

from ..backend.plain import without_subclasses
from ..batch import pytree
from ..batch.container import DataContainer
from ..batch.padding import Padded
from ..batch.ragged import Ragged
from ..batch.stack import is_array
from ..core.devices import HOST, Target, resolve_target
from ..core.errors import BatchTypeError, EmptyBatchError, Field, type_name
from ..core.torch_private import outside_autocast
from ..core.tracing import span
from ..transfer.between_devices import copy_with_separate_nodes
from ..transfer.device import torch_device
from .checks import (
    check_data,
    check_dim,
    check_equal,
    check_joinable,
    check_keys,
    check_lengths,
    check_types,
    contain_data,
)

#: Builds a gathered value from the joined tensors of all columns.
_Build = Callable[[Sequence[torch.Tensor]], Any]
_Path = tuple[Any, ...]
_T = TypeVar("_T")


def gather(outputs: Sequence[_T], target_device: Target | None, dim: int = 0) -> _T:
    """Return the outputs of several replicas as those of one on the whole batch.

    Args:
        outputs: one for each replica, in the order of the chunks of the batch: tensors,
            or nests of containers with the same structure.
        target_device: the device of the result, named as in `scatter`; -1 is the host;
            None is the device of the first tensor.
        dim: the dimension along which tensors are joined.

    Returns:
        One nest of the same containers, with the types of ``outputs[0]``:

        * tensors ``(n_i, *rest)`` and arrays joined along ``dim``, ``(sum(n_i),
          *rest)``; those without dimensions (losses) become a vector ``(replicas,)``;
        * DataContainers become one that holds all samples: lists are joined, tensors
          and `Padded` are joined along dimension 0, and `Ragged` are appended. `Padded`
          and `Ragged` outside a container are joined in the same way. ``cpu_only``
          content is not copied;
        * lists without tensors, arrays, DataContainers and None, such as lists of
          names, are joined. All other lists and tuples are gathered item by item;
        * every other value must be equal on all replicas, and is that of the first.

    Raises:
        TypeError: the outputs are not a list or tuple, or have different types at one
            place; ``dim`` is not an integer.
        ValueError: no outputs; keys, lengths, dtypes or values that differ, or shapes
            that differ outside ``dim``. The message names the place and the replica;
            nothing has been copied.
        RuntimeError: this machine does not have the device.

    Stream: the tensors of each device are copied in packed copies, queued on, or waited
    for by, the current streams. Gradients flow back to every output that requires them,
    each in a copy of its own.

    This replaces ``torch.nn.parallel.gather``, which does not accept sources on the
    host, warns about scalars, and casts to the dtype of the first output.

    Example:
        >>> gather([{"x": torch.ones(2), "ids": ["a", "b"]},
        ...         {"x": torch.zeros(1), "ids": ["c"]}], "cpu")
        {'x': tensor([1., 1., 0.]), 'ids': ['a', 'b', 'c']}
    """
    if not isinstance(outputs, list | tuple):
        raise BatchTypeError(
            "gather: outputs must be a list with one output for each replica, but is "
            f"{type_name(outputs)}."
        )
    if not outputs:
        raise EmptyBatchError(
            "gather: outputs must have at least one output, but is empty."
        )
    target = None
    if target_device is not None:
        target = resolve_target(target_device, "gather", "target_device") or HOST
    with span("pyparallel.gather"):
        plan = _Plan()
        build = plan.value(list(outputs), (), check_dim(dim, "gather"))
        with torch_device.relaxed(plan.device):
            result: _T = build(plan.join(target))
    return result


class _Plan:
    """One walk over all outputs that collects the tensors to join, without copies.

    So structure errors are raised before any copy, and the tensors of each device can
    be copied together.

    Attributes:
        columns: tensors that become one, with the dimension along which they are
            joined; None for a single tensor that is only moved. The path is that of
            each tensor in its output.
    """

    def __init__(self) -> None:
        self.columns: list[tuple[list[torch.Tensor], int | None, _Path]] = []

    @property
    def device(self) -> torch.device:
        """The first device of the tensors, or the host."""
        found = (each.device for parts, _, _ in self.columns for each in parts)
        return next((device for device in found if device.type != "cpu"), HOST)

    def value(self, values: list[Any], path: _Path, dim: int) -> _Build:
        """Return a function that builds the gathered value at ``path``."""
        if len(path) > pytree.MAX_DEPTH:
            raise pytree.nesting_error("outputs")
        first = values[0]
        check_types(values, path)
        if isinstance(first, torch.Tensor):
            return self._tensors(values, path, dim)
        if isinstance(first, DataContainer):
            return self._data_containers(values, path)
        if isinstance(first, Ragged):
            return self._ragged(values, path)
        return self._nested(values, path, 0 if isinstance(first, Padded) else dim)

    def _nested(self, values: list[Any], path: _Path, dim: int) -> _Build:
        first = values[0]
        if isinstance(first, list) and not contain_data(values):
            items = list(chain.from_iterable(values))
            return lambda tensors: pytree.rebuild_sequence(first, items)
        opened = pytree.open_container(first)
        if opened is not None:
            return self._containers(opened, values, path, dim)
        if is_array(first):
            check_joinable(values, path, dim)
            array = _join_arrays(values, dim)
            return lambda tensors: array
        check_equal(values, path)
        return lambda tensors: first

    def join(self, target: torch.device | None) -> list[torch.Tensor]:
        """Return the tensor of every column on the target."""
        flat = list(chain.from_iterable(parts for parts, _, _ in self.columns))
        if flat:
            target = flat[0].device if target is None else target
            try:
                flat = _copy(flat, target)
            except RuntimeError as error:
                for parts, _, path in self.columns:
                    check_data(parts, path, target, error)
                raise
        following = iter(flat)
        return [
            _join_tensors([next(following) for _ in parts], dim)
            for parts, dim, _ in self.columns
        ]

    def _column(
        self, parts: list[torch.Tensor], dim: int | None, path: _Path
    ) -> _Build:
        number = len(self.columns)
        self.columns.append((parts, dim, path))
        return lambda tensors: tensors[number]

    def _tensors(self, values: list[torch.Tensor], path: _Path, dim: int) -> _Build:
        check_joinable(values, path, dim)
        if len(values) > 1:
            values = list(without_subclasses(values))
        return self._column(values, dim, path)

    def _containers(
        self, first: pytree.Container, values: list[Any], path: _Path, dim: int
    ) -> _Build:
        if isinstance(values[0], list | tuple | deque):
            check_lengths(values, path)
        others = map(pytree.open_container, values[1:])
        columns = [first.items, *(each.items for each in others if each is not None)]
        check_keys(columns, path)
        parts = [
            self.value([each[step] for each in columns], (*path, step), dim)
            for step in first.items
        ]
        return lambda tensors: first.rebuild([build(tensors) for build in parts])

    def _ragged(self, values: list[Ragged], path: _Path) -> _Build:
        field = (*path, Field("values"))
        build = self._tensors([each.values for each in values], field, 0)
        ends = [self._column([each.offsets], None, path) for each in values]

        def build_ragged(tensors: Sequence[Any]) -> Ragged:
            first, *others = [end(tensors) for end in ends]
            offsets = [first]
            for other in others:
                offsets.append(other[1:] + offsets[-1][-1])
            return Ragged.from_fields((build(tensors), torch.cat(offsets)))

        return build_ragged

    def _data_containers(self, values: list[DataContainer], path: _Path) -> _Build:
        first, inside = values[0], (*path, Field("data"))
        data = [each.data for each in values]
        check_types(data, inside)
        if isinstance(data[0], list):
            items = list(chain.from_iterable(data))
            build = (
                (lambda tensors: items)
                if first.cpu_only
                else self._move_each(items, inside)
            )
        elif first.cpu_only:
            check_equal(data, inside)
            return lambda tensors: first
        else:
            build = self.value(data, inside, 0)

        def build_container(tensors: Sequence[Any]) -> DataContainer:
            result = copy.copy(first)
            result._data = build(tensors)
            return result

        return build_container

    def _move_each(self, items: list[Any], path: _Path) -> _Build:
        """Return a function that builds the nest with its tensors on the target."""
        leaves, structure = pytree.flatten(items)
        parts = [
            self._column([leaf], None, path) if isinstance(leaf, torch.Tensor) else leaf
            for leaf in leaves
        ]
        return lambda tensors: pytree.unflatten(
            structure,
            [
                part(tensors) if isinstance(leaf, torch.Tensor) else leaf
                for part, leaf in zip(parts, leaves, strict=True)
            ],
        )


def _copy(tensors: list[torch.Tensor], target: torch.device) -> list[torch.Tensor]:
    """Return the tensors on the target, in one packed copy per device."""
    copies = list(tensors)
    by_device: dict[torch.device, list[int]] = {}
    for i, tensor in enumerate(tensors):
        if tensor.device != target:
            by_device.setdefault(tensor.device, []).append(i)
    for indices in by_device.values():
        moved = copy_with_separate_nodes([tensors[i] for i in indices], target)
        for i, tensor in zip(indices, moved, strict=True):
            copies[i] = tensor
    return copies


def _join_tensors(parts: list[torch.Tensor], dim: int | None) -> torch.Tensor:
    if dim is None or (len(parts) == 1 and parts[0].dim()):
        return parts[0]
    with outside_autocast():
        return torch.cat(parts, dim) if parts[0].dim() else torch.stack(parts)


def _join_arrays(arrays: list[Any], dim: int) -> Any:
    numpy = sys.modules["numpy"]  # imported already: these are its arrays
    if isinstance(arrays[0], numpy.ma.MaskedArray):
        numpy = numpy.ma  # the functions of numpy drop the masks
    return numpy.concatenate(arrays, dim) if arrays[0].ndim else numpy.stack(arrays)
