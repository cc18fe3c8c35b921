"""Notice when another library makes a loader from the arguments of a loader.

Note: [copies]. accelerate (``prepare``, ``skip_first_batches``), Ray
(``prepare_data_loader``) and Opacus read the arguments of torch's ``DataLoader`` from a
loader, and call torch's class with them. The result would lack all other arguments,
without an error. No method of the loader is called. But torch's constructor compares
one of these arguments, ``timeout``, with 0. So the loaders of this package return a
number that calls a function when a constructor of a loader compares it. Libraries that
read ``vars(loader)`` make loaders of the same class, and get an ordinary number.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Mapping
from types import MethodType
from typing import Any

from torch.utils.data import IterableDataset

from ..core.torch_private import TorchLoader

#: Called with the new loader and the arguments of its constructor.
OnCopy = Callable[[Any, Mapping[str, Any]], None]


class _Noticed:
    """A base class of numbers that notice the constructor of another loader."""

    on_copy: weakref.WeakMethod[Any]

    def __lt__(self, other: Any) -> Any:
        frame = sys._getframe(1)
        made, on_copy = frame.f_locals.get("self"), self.on_copy()
        is_constructor = frame.f_code.co_name == "__init__"
        if is_constructor and isinstance(made, TorchLoader) and on_copy is not None:
            on_copy(made, frame.f_locals)
        return super().__lt__(other)  # type: ignore[misc]

    def __reduce__(self) -> tuple[Any, ...]:
        kind = type(self).__mro__[2]  # pickles and deep copies are plain numbers
        return kind, (kind(self),)


class _Integer(_Noticed, int):
    pass


class _Float(_Noticed, float):
    pass


class TimeoutOfCopies:
    """An attribute ``timeout`` whose values notice copies, see Note [copies].

    Args:
        method: the name of the method of the owner to call, see `OnCopy`.
    """

    def __init__(self, method: str) -> None:
        self.method = method

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
        noticed = kinds[type(value)](value)
        bound: MethodType = getattr(loader, self.method)
        noticed.on_copy = weakref.WeakMethod(bound)
        return noticed

    def __set__(self, loader: Any, value: Any) -> None:
        plain = type(value).__mro__[2] if isinstance(value, _Noticed) else None
        vars(loader)["timeout"] = value if plain is None else plain(value)


def reads_data_of(loader: Any, arguments: Mapping[str, Any]) -> bool:
    """Return True if a constructor has the dataset of a loader, perhaps in another."""
    dataset, found = loader.dataset, arguments.get("dataset")
    if found is dataset or getattr(found, "dataset", None) is dataset:
        return True
    # A shard of a stream.
    return isinstance(dataset, IterableDataset) and type(found) is type(dataset)
