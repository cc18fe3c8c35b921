"""Keep the arguments of a loader that another library copies.

Note: [copies]. accelerate (``prepare``, ``skip_first_batches``), Ray
(``prepare_data_loader``) and Opacus read the arguments of torch's ``DataLoader`` from a
loader, and call torch's class with them. The result would lack all other arguments,
without an error. So the attribute ``timeout`` of a loader is a number that refers to
the loader, and torch's class gets a method ``__new__``, which it lacks. If this method
gets such a number, it makes a loader of this package, or raises an error. Libraries
that read ``vars(loader)`` make loaders of the same class, and get an ordinary number.
"""

from __future__ import annotations

import functools
import inspect
import sys
import weakref
from collections.abc import Mapping
from numbers import Real
from typing import Any

from torch.utils.data import IterableDataset

from ..core.errors import BatchTypeError, plain_number
from ..core.torch_private import TorchLoader


class _Owned:
    """A number with a weak reference to a loader. Its pickles are plain numbers."""

    owner: weakref.ref[Any]
    real: float  # the plain number

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self.real), (self.real,)


class _Integer(_Owned, int):  # type: ignore[misc]
    pass


class _Float(_Owned, float):
    pass


class TimeoutWithOwner:
    """An attribute ``timeout`` whose values refer to the loader, see Note [copies]."""

    def __get__(self, loader: Any, owner: type) -> Any:
        if loader is None:
            return self
        try:
            value = vars(loader)["timeout"]
        except KeyError:  # before the constructor has set it
            raise AttributeError("timeout") from None
        kinds: dict[type, Any] = {int: _Integer, float: _Float}
        if type(value) not in kinds:
            return value
        number = kinds[type(value)](value)
        number.owner = weakref.ref(loader)
        return number

    def __set__(self, loader: Any, value: Any) -> None:
        value = value.real if isinstance(value, _Owned) else plain_number(value)
        if type(value) is not int and isinstance(value, Real):
            value = float(value)  # not of a subclass, whose copies would be ordinary
        vars(loader)["timeout"] = value


def _source(cls: type, arguments: Mapping[str, Any]) -> Any:
    """Return the loader of this package whose arguments a new loader has, or None.

    Raises:
        TypeError: a loader was passed as the dataset. SpeechBrain does so with all
            loaders of other classes than torch's.
    """
    timeout, found = arguments.get("timeout"), arguments.get("dataset")
    if hasattr(type(found), "_source_of_copies") and _takes_dataset(cls):
        raise BatchTypeError(
            f"DataLoader: dataset must be a data set, but is a {type(found).__name__}. "
            "If a framework made this call, give it a pyparallel.DataLoader."
        )
    owner = timeout.owner() if isinstance(timeout, _Owned) else None
    if owner is None:
        return None
    dataset = owner.dataset
    is_same = found is dataset or getattr(found, "dataset", None) is dataset
    is_shard = isinstance(dataset, IterableDataset) and type(found) is type(dataset)
    return owner._source_of_copies(cls, arguments) if is_same or is_shard else None


def skipped_batches() -> int:
    """Return the number of batches that the class around a new copy skips.

    accelerate's ``skip_first_batches`` passes it to the constructor of such a class,
    which calls that of a loader. For a stream, its iterator skips them itself.
    """
    frame = sys._getframe(1).f_back
    while frame is not None and frame.f_code.co_name == "__init__":
        if type(found := frame.f_locals.get("skip_batches")) is int:
            return found
        frame = frame.f_back
    return 0


def _takes_dataset(cls: type) -> bool:
    """Return True unless the class wraps a loader, as Ray's class does."""
    first = next(iter(inspect.signature(cls).parameters.values()), None)
    return (
        first is None or first.name == "dataset" or first.kind is first.VAR_POSITIONAL
    )


def _extend_torch() -> None:
    torch_class: Any = TorchLoader
    names = list(inspect.signature(torch_class).parameters)
    make = torch_class.__new__

    @functools.wraps(torch_class.__init__)  # the signature of the class
    def new(cls: type, *args: Any, **kwargs: Any) -> Any:
        source = _source(cls, {**dict(zip(names, args, strict=False)), **kwargs})
        if source is not None:
            cls = source._class_of_copy(cls)
        made = make(cls) if make is object.__new__ else make(cls, *args, **kwargs)
        if source is not None and hasattr(cls, "_source"):
            vars(made)["_source"] = source
        return made

    torch_class.__new__ = staticmethod(new)


_extend_torch()
