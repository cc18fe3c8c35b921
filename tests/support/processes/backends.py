"""The two backends, and functions to run a test on both."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import pytest

from pyparallel import backend as backend_module
from pyparallel.backend import _python as reference

native: ModuleType | None
try:
    native = importlib.import_module("pyparallel.backend._C")
    _absent = ""
except ImportError as error:
    native, _absent = None, f"pyparallel.backend._C cannot be imported: {error}"

needs_native = pytest.mark.skipif(native is None, reason=_absent)
each_backend = [
    pytest.param(reference, id="reference"),
    pytest.param(native, id="native", marks=needs_native),
]
#: Without memory and rings: one backend cannot free an object of the other.
_SWAPPED = ("pad_copy", "pad_small_batch", "stack_equal", "image_batch", "SlabPlan")
_SWAPPED += ("plan_slab", "pack", "views", "forbid_use", "send", "columns")
_SWAPPED += ("encode", "decode", "flatten", "select_tensors", "replace_tensors")
_SWAPPED += ("find_unpackable", "are_compact", "copy_compact", "are_on_one_device")
both = pytest.mark.parametrize("backend", each_backend)


@contextmanager
def using(backend: ModuleType) -> Iterator[None]:
    """Run on this backend, regardless of the choice at import."""
    chosen: dict[str, Any] = {each: getattr(backend, each) for each in _SWAPPED}
    chosen["name"] = "python" if backend is reference else "native"
    before = {name: getattr(backend_module, name) for name in chosen}
    backend_module.__dict__.update(chosen)
    try:
        yield
    finally:
        backend_module.__dict__.update(before)


def check(
    call: Callable[..., Any], args: Any, error: type[Exception], message: str
) -> None:
    """Expect exactly this class and this message."""
    with pytest.raises(error) as caught:
        call(*args)
    assert type(caught.value) is error
    assert str(caught.value) == message


def last(case: tuple[Any, ...]) -> Any:
    """Name a case after its message."""
    return case[-1]
