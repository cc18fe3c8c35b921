"""Ours: pyparallel's functions with the compiled and with the pure Python backend."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from pyparallel import backend
from pyparallel.backend import _python
from pyparallel.batch import pytree

from ._harness import Contender

#: The attributes that differ between the backends; `use_backend` sets them.
_OPERATORS = tuple(backend._OPERATORS)
AS_LOADED = {each: getattr(backend, each) for each in ("name", *_OPERATORS)}
IN_PYTHON = {
    "name": "python",
    **{each: getattr(_python, each) for each in _OPERATORS},
}


def use_backend(functions: Mapping[str, Any]) -> None:
    """Make pyparallel use these functions; `AS_LOADED` restores the original ones."""
    for name, function in functions.items():
        setattr(backend, name, function)


def ours(call: Callable[[], Any]) -> list[Contender]:
    """Return ``call`` with the compiled and with the pure Python backend."""

    def with_backend(functions: Mapping[str, Any]) -> Callable[[], Any]:
        def run() -> Any:
            use_backend(functions)
            return call()

        return run

    native = with_backend(AS_LOADED) if AS_LOADED["name"] == "native" else None
    return [
        Contender("ours, native", native, "ours"),
        Contender("ours, Python", with_backend(IN_PYTHON), "ours"),
    ]


def pack_and_rebuild(tree: Any) -> Any:
    """Return a copy of nested CPU tensors, packed into one slab.

    This is the work of `scatter` on the host for one device, without the device's copy.
    """
    leaves, structure = pytree.flatten(tree)
    plan = backend.plan_slab(leaves)
    slab = backend.empty((plan.nbytes,), torch.uint8)
    backend.pack(slab, leaves, plan)
    return pytree.unflatten(structure, backend.views(slab, plan))
