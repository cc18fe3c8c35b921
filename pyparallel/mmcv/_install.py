"""Install pyparallel as ``mmcv.parallel`` in ``sys.modules``.

Call `install` before any module imports ``mmcv.runner``:

    import pyparallel.mmcv
    pyparallel.mmcv.install()
    from mmcv.parallel import DataContainer, collate, scatter

With mmcv 1.x this replaces its module; with mmcv 2.x it adds the module that mmcv 2.x
removed. Without mmcv, ``mmcv`` becomes a substitute module that only has ``parallel``.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from importlib.machinery import ModuleSpec
from types import FunctionType, ModuleType
from typing import Any

import torch

from ..batch.collate import collate as _collate
from ..batch.collate import set_mmcv_mode
from ..batch.container import DataContainer
from ..parallel.data_parallel import MMDataParallel
from ..parallel.distributed import MMDistributedDataParallel
from ..parallel.registry import MODULE_WRAPPERS, is_module_wrapper, registries
from ..scatter_gather.scatter import scatter, scatter_kwargs
from . import _functions, distributed_deprecated

__all__ = ["install", "installed", "uninstall"]

_ROOT = "mmcv.parallel"

ScatterInputs = (
    torch.Tensor | DataContainer | tuple[Any, ...] | list[Any] | dict[Any, Any]
)

# The state that `uninstall` restores: modules by name (None for no module before), the
# attribute ``mmcv.parallel``, the registries.
_replaced: dict[str, ModuleType | None] = {}
_old_attribute: list[Any] = []
_added_registries: list[Any] = []


def install() -> None:
    """Make ``mmcv.parallel`` and its submodules importable, with pyparallel's classes.

    A second call does nothing. If ``mmcv.utils.Registry`` can be imported,
    ``mmcv.parallel.MODULE_WRAPPERS`` is an instance of it, so code can create child
    registries. `is_module_wrapper` then also accepts its classes.

    Raises:
        RuntimeError: ``mmcv.runner`` or another module has already imported objects
            from the old ``mmcv.parallel``, and would continue to use them.
        ImportError: mmcv is installed, but its import fails; this is its own error.
    """
    if _replaced:
        return
    package = _mmcv_package()
    _check_not_imported_from()
    modules = _modules(_module_wrappers())
    names = {*modules, *(name for name in sys.modules if _is_mmcv_parallel(name))}
    _replaced.update({name: sys.modules.pop(name, None) for name in names})
    if sys.modules.get("mmcv") is not package:
        _replaced["mmcv"] = None
        sys.modules["mmcv"] = package
    sys.modules.update(modules)
    _old_attribute[:] = [getattr(package, "parallel", None)]
    package.parallel = modules[_ROOT]  # type: ignore[attr-defined]  # of any module
    set_mmcv_mode(True)


def uninstall() -> None:
    """Undo `install`, and restore the modules that were importable before.

    Objects that were imported from ``mmcv.parallel`` in between do not change.
    """
    if not _replaced:
        return
    package = sys.modules["mmcv"]
    vars(package).pop("parallel", None)
    if _old_attribute[0] is not None:
        package.parallel = _old_attribute[0]  # type: ignore[attr-defined]  # as above
    for name, module in _replaced.items():
        sys.modules.pop(name, None)
        if module is not None:
            sys.modules[name] = module
    _replaced.clear()
    set_mmcv_mode(False)
    while _added_registries:
        registries.remove(_added_registries.pop())


@contextlib.contextmanager
def installed() -> Iterator[None]:
    """Install for the time of a ``with`` block, and undo it also after an error."""
    was_installed = bool(_replaced)
    install()
    try:
        yield
    finally:
        if not was_installed:
            uninstall()


def collate(batch: Any, samples_per_gpu: int = 1) -> Any:
    """Return ``pyparallel.collate`` of the arguments, with mmcv's default.

    A loader does not set ``samples_per_gpu`` of this function. Reading a chunk of one
    sample causes no warning, because code for mmcv expects such chunks.
    """
    return _collate(batch, samples_per_gpu)


def assert_tensor_type(function: Callable[..., Any]) -> Callable[..., Any]:
    """Make a method raise AttributeError unless ``self.data`` is a tensor."""

    @functools.wraps(function)
    def checked(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(self.data, torch.Tensor):
            raise AttributeError(
                f"{type(self).__name__} has no attribute {function.__name__} for type "
                f"{self.datatype}"
            )
        return function(self, *args, **kwargs)

    return checked


def _is_mmcv_parallel(name: str) -> bool:
    return name == _ROOT or name.startswith(f"{_ROOT}.")


def _mmcv_package() -> ModuleType:
    """Return mmcv, or a substitute whose missing attributes raise a clear error."""
    if "mmcv" in sys.modules or importlib.util.find_spec("mmcv") is not None:
        return importlib.import_module("mmcv")
    package = _module("mmcv", {}, is_package=True)

    def missing(name: str) -> Any:
        raise AttributeError(
            f"module 'mmcv' has no attribute {name!r}: mmcv is not installed, and "
            "pyparallel.mmcv.install() provides only mmcv.parallel."
        )

    package.__getattr__ = missing  # type: ignore[method-assign]  # PEP 562
    return package


def _check_not_imported_from() -> None:
    """Raise if a module refers to an object of the old ``mmcv.parallel``."""
    root = sys.modules.get(_ROOT)
    if root is None:
        return
    # Modules and the registry have no ``__module__``, so they are compared by identity.
    old = {
        id(module) for name, module in sys.modules.items() if _is_mmcv_parallel(name)
    }
    if hasattr(root, "MODULE_WRAPPERS"):
        old.add(id(root.MODULE_WRAPPERS))
    importers = sorted(
        name
        for name, module in list(sys.modules.items())
        if issubclass(type(module), ModuleType)
        and not (name in ("mmcv", "__mp_main__") or _is_mmcv_parallel(name))
        and any(_is_old(value, old) for value in list(vars(module).values()))
    )
    if importers:
        shown = ", ".join(importers[:3]) + (", ..." if len(importers) > 3 else "")
        raise RuntimeError(
            "pyparallel.mmcv.install() must run before other modules import from "
            f"mmcv.parallel, but {shown} already did. Call it first in the main script."
        )


def _is_old(value: Any, old: set[int]) -> bool:
    # isinstance would read ``__class__`` of lazy proxies, which may import or raise.
    if issubclass(type(value), type | FunctionType):
        name = value.__module__
        return isinstance(name, str) and _is_mmcv_parallel(name)
    return id(value) in old


def _module_wrappers() -> Any:
    """Return a registry of mmcv's class with our wrappers, or our own registry."""
    try:
        registry_class = importlib.import_module("mmcv.utils").Registry
    except (ImportError, AttributeError):
        return MODULE_WRAPPERS
    registry = registry_class("module wrapper", scope="mmcv")
    for name, cls in MODULE_WRAPPERS.module_dict.items():
        registry.register_module(name, module=cls)
    registries.append(registry)
    _added_registries.append(registry)
    return registry


def _modules(module_wrappers: Any) -> dict[str, ModuleType]:
    """Return ``mmcv.parallel`` and its submodules by full name."""
    both = {"scatter_kwargs": scatter_kwargs, "ScatterInputs": ScatterInputs}
    contents: dict[str, dict[str, Any]] = {
        "collate": {"collate": collate, "DataContainer": DataContainer},
        "data_container": {
            "DataContainer": DataContainer,
            "assert_tensor_type": assert_tensor_type,
        },
        "data_parallel": {"MMDataParallel": MMDataParallel, **both},
        "distributed": {"MMDistributedDataParallel": MMDistributedDataParallel, **both},
        "registry": {"MODULE_WRAPPERS": module_wrappers},
        "scatter_gather": {
            "scatter": scatter,
            "DataContainer": DataContainer,
            "Scatter": _functions.Scatter,
            **both,
        },
        "utils": {
            "is_module_wrapper": is_module_wrapper,
            "MODULE_WRAPPERS": module_wrappers,
        },
    }
    modules = {
        f"{_ROOT}.{name}": _module(f"{_ROOT}.{name}", names)
        for name, names in contents.items()
    }
    # The modules themselves, so that a patched attribute takes effect.
    modules[f"{_ROOT}._functions"] = _functions
    modules[f"{_ROOT}.distributed_deprecated"] = distributed_deprecated
    public = {
        "collate": collate,
        "DataContainer": DataContainer,
        "MMDataParallel": MMDataParallel,
        "MMDistributedDataParallel": MMDistributedDataParallel,
        "scatter": scatter,
        "scatter_kwargs": scatter_kwargs,
        "is_module_wrapper": is_module_wrapper,
        "MODULE_WRAPPERS": module_wrappers,
    }
    children = {name.rpartition(".")[2]: module for name, module in modules.items()}
    # The function collate, not the module of that name, is the package's attribute.
    root = _module(_ROOT, {**children, **public, "__all__": list(public)}, True)
    return {_ROOT: root, **modules}


def _module(name: str, names: dict[str, Any], is_package: bool = False) -> ModuleType:
    module = ModuleType(name, "Provided by pyparallel.")
    module.__spec__ = ModuleSpec(name, None, is_package=is_package)
    if is_package:
        module.__path__ = []
    module.__dict__.update(names)
    return module
