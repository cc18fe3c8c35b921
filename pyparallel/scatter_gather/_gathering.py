"""One walk over the outputs of all replicas: what is joined with what, and how."""

from __future__ import annotations

import copy
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any

import torch

from ..batch import pytree
from ..batch.container import DataContainer
from ..batch.padding import Padded
from ..batch.ragged import Ragged
from ..core.errors import Field
from ..transfer.between_devices import carry_apart
from .checks import (
    check_alike,
    check_equal,
    check_keys,
    check_kinds,
    check_lengths,
    hold_data,
    is_array,
)

#: What makes a value of the gathered nest, of what all columns have become.
Make = Callable[[Sequence[torch.Tensor]], Any]
_Path = tuple[Any, ...]


class Gathering:
    """Walks all outputs at a time and collects what is joined, without moving it.

    Attributes:
        columns: tensors that become one, with the dimension along which they do; None
            for a single one that is only moved.
    """

    def __init__(self) -> None:
        self.columns: list[tuple[list[torch.Tensor], int | None]] = []

    def value(self, values: list[Any], path: _Path, dim: int) -> Make:
        """Return what makes the value at ``path`` of those of all replicas."""
        if len(path) > pytree.MAX_DEPTH:
            raise pytree.too_deep("outputs")
        first = values[0]
        check_kinds(values, path)
        if isinstance(first, torch.Tensor):
            return self._tensors(values, path, dim)
        if isinstance(first, DataContainer):
            return self._containers(values, path)
        if isinstance(first, Ragged):
            return self._ragged(values, path)
        if isinstance(first, Padded):
            return self._padded(values, path)
        if not isinstance(first, dict | list | tuple | deque):
            splits = [pytree.split_registered(each) for each in values]
            if splits[0] is not None:
                return self._registered(splits, path, dim)
        if isinstance(first, Mapping):
            return self._mappings(values, path, dim)
        if pytree.is_dataclass(first):
            fields = [pytree.field_values(each) for each in values]
            parts = [
                self.value([each[name] for each in fields], (*path, Field(name)), dim)
                for name in fields[0]
            ]
            return lambda joined: pytree.rebuild_dataclass(
                first, [make(joined) for make in parts]
            )
        if isinstance(first, list | tuple | deque):
            return self._sequences(values, path, dim)
        if is_array(first):
            check_alike(values, path, dim)
            array = _joined_arrays(values, dim)
            return lambda joined: array
        check_equal(values, path)
        return lambda joined: first

    def joined(self, target: torch.device | None) -> list[torch.Tensor]:
        """Return the tensor of every column on the target."""
        flat = list(chain.from_iterable(parts for parts, _ in self.columns))
        if target is None and flat:
            target = flat[0].device
        places: dict[torch.device, list[int]] = {}
        for i, tensor in enumerate(flat):
            if tensor.device != target:
                places.setdefault(tensor.device, []).append(i)
        for of_device in places.values():
            moved = carry_apart([flat[i] for i in of_device], target)  # type: ignore[arg-type]  # some tensor: a target
            for i, tensor in zip(of_device, moved, strict=True):
                flat[i] = tensor
        following = iter(flat)
        return [
            _join([next(following) for _ in parts], dim) for parts, dim in self.columns
        ]

    def _column(self, parts: list[torch.Tensor], dim: int | None) -> Make:
        number = len(self.columns)
        self.columns.append((parts, dim))
        return lambda joined: joined[number]

    def _tensors(self, values: list[torch.Tensor], path: _Path, dim: int) -> Make:
        check_alike(values, path, dim)
        return self._column(values, dim)

    def _mappings(self, values: list[Any], path: _Path, dim: int) -> Make:
        first = values[0]
        check_keys(values, path)
        parts = {
            key: self.value([each[key] for each in values], (*path, key), dim)
            for key in first
        }
        return lambda joined: pytree.rebuild_mapping(
            first, {key: make(joined) for key, make in parts.items()}
        )

    def _registered(self, splits: list[Any], path: _Path, dim: int) -> Make:
        like = splits[0][1]
        mappings = [dict(zip(steps, found, strict=True)) for found, _, steps in splits]
        check_keys(mappings, path)
        parts = [
            self.value([each[step] for each in mappings], (*path, step), dim)
            for step in mappings[0]
        ]
        return lambda joined: pytree.join_registered(
            like, [make(joined) for make in parts]
        )

    def _sequences(self, values: list[Any], path: _Path, dim: int) -> Make:
        first = values[0]
        if isinstance(first, list) and not hold_data(values):
            items = list(chain.from_iterable(values))
            return lambda joined: pytree.rebuild_sequence(first, items)
        check_lengths(values, path)
        names = getattr(first, "_fields", None) if isinstance(first, tuple) else None
        steps = range(len(first)) if names is None else map(Field, names)
        parts = [
            self.value(list(items), (*path, step), dim)
            for step, items in zip(steps, zip(*values, strict=True), strict=True)
        ]
        return lambda joined: pytree.rebuild_sequence(
            first, [make(joined) for make in parts]
        )

    def _ragged(self, values: list[Ragged], path: _Path) -> Make:
        field = (*path, Field("values"))
        make = self._tensors([each.values for each in values], field, 0)
        ends = [self._column([each.offsets], None) for each in values]

        def make_ragged(joined: Sequence[Any]) -> Ragged:
            first, *others = [end(joined) for end in ends]
            offsets = [first]
            for other in others:
                offsets.append(other[1:] + offsets[-1][-1])
            return Ragged.from_fields((make(joined), torch.cat(offsets)))

        return make_ragged

    def _padded(self, values: list[Padded], path: _Path) -> Make:
        fields = zip(*(each.fields() for each in values), strict=True)
        parts = [
            self.value(list(field), (*path, Field(name)), 0)
            for name, field in zip(("data", "sizes", "mask"), fields, strict=True)
        ]
        return lambda joined: Padded.from_fields(make(joined) for make in parts)

    def _containers(self, values: list[DataContainer], path: _Path) -> Make:
        first, inside = values[0], (*path, Field("data"))
        data = [each.data for each in values]
        check_kinds(data, inside)
        if isinstance(data[0], list):
            items = list(chain.from_iterable(data))
            make = (lambda joined: items) if first.cpu_only else self._moved(items)
        elif first.cpu_only:
            check_equal(data, inside)
            return lambda joined: first
        else:
            make = self.value(data, inside, 0)

        def make_container(joined: Sequence[Any]) -> DataContainer:
            result = copy.copy(first)
            result._data = make(joined)
            return result

        return make_container

    def _moved(self, items: list[Any]) -> Make:
        """Return what makes the same nest with its tensors on the target."""
        leaves, structure = pytree.flatten(items)
        parts = [
            self._column([leaf], None) if isinstance(leaf, torch.Tensor) else leaf
            for leaf in leaves
        ]
        return lambda joined: pytree.unflatten(
            structure,
            [
                part(joined) if isinstance(leaf, torch.Tensor) else leaf
                for part, leaf in zip(parts, leaves, strict=True)
            ],
        )


def _join(parts: list[torch.Tensor], dim: int | None) -> torch.Tensor:
    if dim is None or (len(parts) == 1 and parts[0].dim()):
        return parts[0]
    return torch.cat(parts, dim) if parts[0].dim() else torch.stack(parts)


def _joined_arrays(arrays: list[Any], dim: int) -> Any:
    numpy = sys.modules["numpy"]  # whose arrays they are
    return numpy.concatenate(arrays, dim) if arrays[0].ndim else numpy.stack(arrays)
