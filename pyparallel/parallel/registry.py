"""MODULE_WRAPPERS and is_module_wrapper: which modules only wrap another one."""

from __future__ import annotations

from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn

from ..core.torch_private import compiled_from

_Class = TypeVar("_Class", bound=type)


class Registry:
    """A register of classes by name, with the part of mmcv's interface that is used.

    Args:
        name: what is registered, for messages.
        parent: a registry that also sees the classes of this one.
        scope: name of the library that owns the registry.
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
        """Register a class under ``name`` or its own name; a decorator without one.

        Args:
            name: one name or several; the class's own by default.
            force: replace what is registered under the name.
            module: the class. Without it, a decorator is returned.

        Raises:
            KeyError: the name is taken by another class and ``force`` is not set.
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
        """Return the class of this name, or of ``scope.name`` in a child; else None."""
        scope, _, rest = key.partition(".")
        if rest and scope in self.children:
            return self.children[scope].get(rest)
        return self.module_dict.get(key)

    def __contains__(self, key: str) -> bool:
        """Tell whether ``key`` is registered."""
        return self.get(key) is not None

    def __len__(self) -> int:
        """Return the number of classes registered here."""
        return len(self.module_dict)

    def __repr__(self) -> str:
        """Show name and classes."""
        return f"Registry(name={self.name!r}, items={self.module_dict})"


#: The classes that `is_module_wrapper` recognises, with all their subclasses.
MODULE_WRAPPERS = Registry("module wrapper")
MODULE_WRAPPERS.register_module(module=nn.DataParallel)
MODULE_WRAPPERS.register_module(module=nn.parallel.DistributedDataParallel)

#: All registries that count; `pyparallel.mmcv.install` adds mmcv's own to them.
registries: list[Any] = [MODULE_WRAPPERS]


def is_module_wrapper(module: Any) -> bool:
    """Tell whether ``module`` wraps the real model in its attribute ``module``.

    True for instances of the classes in `MODULE_WRAPPERS` or its children, and for
    their subclasses; also when ``torch.compile`` wraps the wrapper. Objects that are
    not modules give False.

    From mmcv 1.x, where a compiled wrapper went unrecognised.
    """
    module = uncompiled(module)
    return any(is_instance_of(module, registry) for registry in registries)


def uncompiled(module: Any) -> Any:
    """Return the module that ``torch.compile`` was given, or ``module`` itself."""
    while isinstance(inner := compiled_from(module), torch.nn.Module):
        module = inner
    return module


def is_instance_of(module: Any, registry: Any) -> bool:
    """Tell whether a class of the registry, or of its children, has this instance."""
    return isinstance(module, tuple(registry.module_dict.values())) or any(
        is_instance_of(module, child) for child in registry.children.values()
    )
