"""The base class of `Padded` and `Ragged`: a batch of samples in a few tensors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, ClassVar, TypeVar

import optree
import torch
from optree.registry import __GLOBAL_NAMESPACE as _EVERY_NAMESPACE

from ..core.torch_private import pytree as _pytree

_Self = TypeVar("_Self", bound="TensorFields")


class TensorFields:
    """Samples in named tensors; the first tensor holds the data.

    Instances are pytree nodes of torch and of optree, so torch.compile, torch.export
    and tree_map of both walk their tensors. They are not sequences, because code that
    walks sequences would split them into samples.
    """

    _names: ClassVar[tuple[str, ...]]

    def __init_subclass__(cls) -> None:
        """Register the class as a pytree node."""
        super().__init_subclass__()
        cls.__module__ = "pyparallel"  # pickles name the public path
        keys = tuple(map(_pytree.GetAttrKey, cls._names))

        def split(value: TensorFields) -> tuple[list[Any], None]:
            return list(value.fields()), None

        def join(fields: Iterable[Any], _: Any) -> TensorFields:
            return cls.from_fields(fields)

        def split_with_keys(value: TensorFields) -> tuple[list[Any], None]:
            return list(zip(keys, value.fields(), strict=True)), None

        _pytree.register_pytree_node(
            cls,
            split,
            join,
            serialized_type_name=f"pyparallel.{cls.__name__}",
            flatten_with_keys_fn=split_with_keys,
        )
        register: Any = optree.register_pytree_node
        register(
            cls,
            lambda value: (value.fields(), None, cls._names),
            lambda _, fields: cls.from_fields(fields),
            path_entry_type=optree.GetAttrEntry,
            namespace=_EVERY_NAMESPACE,
        )

    @classmethod
    def from_fields(cls: type[_Self], fields: Iterable[Any]) -> _Self:
        """Return an instance with these fields; they need not be tensors."""
        result = cls.__new__(cls)  # the constructor may check its arguments
        for name, field in zip(cls._names, fields, strict=True):
            setattr(result, name, field)
        return result

    def fields(self) -> tuple[Any, ...]:
        """Return the fields, tensors or None, in the order of the constructor."""
        return tuple([getattr(self, name) for name in self._names])

    @property
    def device(self) -> torch.device:
        """The device of all tensors."""
        data: torch.Tensor = self.fields()[0]
        return data.device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the data."""
        data: torch.Tensor = self.fields()[0]
        return data.dtype

    def to(
        self: _Self,
        device: torch.device | str | int | torch.dtype | None = None,
        dtype: torch.dtype | None = None,
        non_blocking: bool = False,
        copy: bool = False,
    ) -> _Self:
        """Return the samples on ``device``, with their data as ``dtype``.

        The arguments are those of ``Tensor.to``. If nothing changes, the method returns
        ``self``.
        """
        if isinstance(device, torch.dtype):
            flag: Any = dtype
            if isinstance(flag, bool):  # to(dtype, non_blocking, copy)
                non_blocking, copy = flag, copy or non_blocking
            device, dtype = None, device
        options: Any = {"device": device, "non_blocking": non_blocking, "copy": copy}
        data, *others = self.fields()
        moved = [data.to(dtype=dtype, **options)]
        moved += [None if each is None else each.to(**options) for each in others]
        if all(new is old for new, old in zip(moved, self.fields(), strict=True)):
            return self
        return self.from_fields(moved)

    def pin_memory(self: _Self, device: Any = None) -> _Self:
        """Return the samples in pinned memory."""
        arguments = () if device is None else (device,)
        return self.from_fields(
            None if each is None else each.pin_memory(*arguments)
            for each in self.fields()
        )

    def part(self: _Self, start: int, stop: int) -> _Self:
        """Return the samples from ``start`` up to ``stop``, as views."""
        raise NotImplementedError

    def _sample(self, index: int) -> torch.Tensor:
        """Return one sample; ``0 <= index < len(self)``."""
        raise NotImplementedError

    def __len__(self) -> int:
        """Return the number of samples."""
        raise NotImplementedError

    def __iter__(self) -> Iterator[torch.Tensor]:
        """Iterate over the samples."""
        return (self._sample(i) for i in range(len(self)))

    def __getitem__(self, index: Any) -> Any:
        """Return one sample, or the samples of a slice of step 1, as views."""
        if isinstance(index, slice):
            start, stop, step = index.indices(len(self))
            if step != 1:
                raise ValueError(
                    f"{type(self).__name__}: a slice must have the step 1, but has "
                    f"{step}. Index the samples one by one."
                )
            return self.part(start, max(start, stop))
        position = range(len(self))[index]  # raises the errors of a list
        return self._sample(position)

    def __eq__(self, other: object) -> bool:
        """Compare the values of all tensors; on a GPU the host waits."""
        if not isinstance(other, TensorFields) or type(self) is not type(other):
            return NotImplemented
        return all(map(_equal, self.fields(), other.fields()))

    # Tensors may change.
    __hash__: ClassVar[None] = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        """Show the shape, the dtype and the device of the data, and not its values."""
        first, *others = zip(self._names, self.fields(), strict=True)
        if not isinstance(first[1], torch.Tensor):  # a node in a tree of other objects
            shown = [f"{name}={value!r}" for name, value in (first, *others)]
        else:
            shown = [f"{first[0]}={tuple(first[1].shape)}"]
            shown += [f"dtype={self.dtype}", f"device={self.device}"]
            shown += [
                f"{name}={tuple(value.shape)}"
                for name, value in others
                if isinstance(value, torch.Tensor)
            ]
        return f"{type(self).__name__}({', '.join(shown)})"


def _equal(one: Any, other: Any) -> bool:
    if not (isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)):
        return one is other
    if one.dtype != other.dtype or one.device != other.device:
        return False
    return torch.equal(one, other)
