"""MODEL_WRAPPERS and is_model_wrapper: which modules only wrap a model."""

from __future__ import annotations

from typing import Any

from torch import nn

from ..parallel.registry import Registry, is_instance_of, uncompiled
from ._upstream import provided, upstream


def _registry() -> Any:
    """Return mmengine's registry, or one with the classes that torch has."""
    found = upstream("MODEL_WRAPPERS")
    if found is None:
        found = Registry("model_wrapper")
        found.register_module(module=nn.DataParallel)
        found.register_module(module=nn.parallel.DistributedDataParallel)
    return found


#: The classes of which `is_model_wrapper` knows the instances, with all subclasses:
#: mmengine's registry where that is installed, otherwise one with torch's classes.
MODEL_WRAPPERS: Any = _registry()


def is_model_wrapper(model: Any, registry: Any = MODEL_WRAPPERS) -> bool:
    """Tell whether ``model`` wraps the real model in its attribute ``module``.

    True for instances of the classes in the registry or its children, and for their
    subclasses; also when ``torch.compile`` wraps the wrapper. `MODEL_WRAPPERS` has the
    wrappers of ``pyparallel.mmengine``, too. Objects that are not modules give False.

    Args:
        model: anything.
        registry: where to look.

    From mmengine, which did not look behind ``torch.compile``.
    """
    model = uncompiled(model)
    ours: tuple[Any, ...] = tuple(provided.get("MODEL_WRAPPERS", ()))
    if registry is MODEL_WRAPPERS and isinstance(model, ours):
        return True
    return is_instance_of(model, registry)
