"""MODULE_WRAPPERS and is_module_wrapper: the classes of modules that wrap another."""

from __future__ import annotations

from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn

from ..core.torch_private import compiled_from

_Class = TypeVar("_Class", bound=type)


class Registry:
    """A registry of classes by name, with the part of mmcv's interface that is used.

    Args:
        name: the name of the registry, for messages.
        parent: a registry that also finds the classes of this one.
        scope: the name of the library that owns the registry.
    """

    def __init__(
        self, name: str, parent: Registry | None = None, scope: str = "pyparallel"
    ) -> None:
        self.name = name
        self.scope = scope
        self.parent = parent
        self.children: dict[str, Registry] = {}
        self.module_dict: dict[str, type] = {}
        if parent is not None:
            if scope in parent.children:
                raise KeyError(
                    f"Registry {name!r}: scope must be new in {parent.name!r}, but "
                    f"{scope!r} is taken."
                )
            parent.children[scope] = self

    def register_module(
        self,
        name: str | list[str] | None = None,
        force: bool = False,
        module: _Class | None = None,
    ) -> Any:
        """Register a class under its name or other names.

        Args:
            name: one name or several; by default the name of the class.
            force: replace a class that is registered under the name.
            module: the class. Without it, a decorator is returned.

        Raises:
            KeyError: another class has the name, and ``force`` is False.
            TypeError: ``module`` is not a class.
        """
        if isinstance(name, type):  # a bare @registry.register_module
            return self.register_module(module=name)
        if module is None:
            return partial(self._register, name, force)
        return self._register(name, force, module)

    def _register(
        self, name: str | list[str] | None, force: bool, module: _Class
    ) -> _Class:
        if not isinstance(module, type):
            raise TypeError(
                f"Registry {self.name!r}: module must be a class, but is {module!r}."
            )
        keys = [name] if isinstance(name, str) else name or [module.__name__]
        for key in keys:
            if not force and self.module_dict.get(key, module) is not module:
                raise KeyError(
                    f"Registry {self.name!r}: {key} must be a new name, but is "
                    f"registered for {self.module_dict[key]!r}. Pass force=True to "
                    "replace it."
                )
        self.module_dict.update(dict.fromkeys(keys, module))
        return module

    def get(self, key: str) -> type | None:
        """Return the class of this name, or of ``scope.name`` in a child; or None."""
        scope, _, rest = key.partition(".")
        if rest and scope in self.children:
            return self.children[scope].get(rest)
        return self.module_dict.get(key)

    def __contains__(self, key: str) -> bool:
        """Return True if ``key`` is registered."""
        return self.get(key) is not None

    def __len__(self) -> int:
        """Return the number of classes registered here."""
        return len(self.module_dict)

    def __repr__(self) -> str:
        """Return the name and the classes as text."""
        return f"Registry(name={self.name!r}, items={self.module_dict})"


#: The classes that `is_module_wrapper` recognises, with all their subclasses.
MODULE_WRAPPERS = Registry("module wrapper")
MODULE_WRAPPERS.register_module(module=nn.DataParallel)
MODULE_WRAPPERS.register_module(module=nn.parallel.DistributedDataParallel)

#: The registries that `is_module_wrapper` uses; `mmcv.install` adds mmcv's own.
registries: list[Any] = [MODULE_WRAPPERS]


def is_module_wrapper(module: Any) -> bool:
    """Return True if ``module`` wraps another model in its attribute ``module``.

    This holds for instances of the classes in `MODULE_WRAPPERS` or its children, for
    instances of their subclasses, and for such modules compiled by ``torch.compile``.
    For objects that are not modules the result is False.

    From mmcv 1.x, which does not recognise a compiled wrapper.
    """
    module = uncompiled(module)
    return any(is_instance_of(module, registry) for registry in registries)


def uncompiled(module: Any) -> Any:
    """Return the argument of ``torch.compile`` for a compiled module, or ``module``."""
    while isinstance(inner := compiled_from(module), torch.nn.Module):
        module = inner
    return module


def is_instance_of(module: Any, registry: Any) -> bool:
    """Return True for an instance of a class of the registry or of its children."""
    return isinstance(module, tuple(registry.module_dict.values())) or any(
        is_instance_of(module, child) for child in registry.children.values()
    )
