"""Import mmengine if possible, and provide base classes either way.

With mmengine its classes are the bases of ours, so that its ``isinstance`` checks pass.
Our classes define every method themselves and never call a method of these bases. So
they behave the same without mmengine, with empty classes or torch's as bases.

``PYPARALLEL_MMENGINE`` is ``auto`` (the default) or ``off``. With ``auto``, a missing
mmengine is no reason for a warning. If mmengine is installed but its import fails, one
``RuntimeWarning`` says so, and the package works as without mmengine.

Attributes:
    available: True if mmengine's classes are the bases.
    reason: the reason for that, as a sentence.
    OptimWrapperBase and others: the base classes of our classes.
    BaseDataElement: mmengine's class for annotations; without mmengine, a class that
        has no instances.
"""

from __future__ import annotations

import importlib
import os
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from torch import nn
from torch.nn.parallel import DistributedDataParallel

_Provided = TypeVar("_Provided", bound=Callable[..., Any])

_VALUES = ("auto", "off")
#: By class of mmengine: its module, and the base of its substitute without mmengine.
_CLASSES: dict[str, tuple[str, type]] = {
    "OptimWrapper": ("mmengine.optim", object),
    "AmpOptimWrapper": ("mmengine.optim", object),
    "OptimWrapperDict": ("mmengine.optim", object),
    "BaseModel": ("mmengine.model", nn.Module),
    "BaseDataPreprocessor": ("mmengine.model", nn.Module),
    "ImgDataPreprocessor": ("mmengine.model", nn.Module),
    "MMDistributedDataParallel": ("mmengine.model", DistributedDataParallel),
    "MMSeparateDistributedDataParallel": ("mmengine.model", DistributedDataParallel),
    "BaseDataElement": ("mmengine.structures", object),
}
#: By name of any other object of mmengine: its module.
_OTHERS = {
    "MessageHub": "mmengine.logging",
    "print_log": "mmengine.logging",
    "MMFullyShardedDataParallel": "mmengine.model",
    "OPTIM_WRAPPERS": "mmengine.registry",
    "MODELS": "mmengine.registry",
    "MODEL_WRAPPERS": "mmengine.registry",
    "FUNCTIONS": "mmengine.registry",
}


class Found(NamedTuple):
    """The result of the search for mmengine."""

    available: bool
    reason: str
    names: dict[str, Any]  # objects of mmengine by name; empty if it is not available
    warns: bool = False  # mmengine is installed, but its import failed


def find(requested: str, load: Callable[[str], Any] = importlib.import_module) -> Found:
    """Search for mmengine and import its modules.

    Args:
        requested: the value of ``PYPARALLEL_MMENGINE``.
        load: the function that imports a module of mmengine by name.
    """
    if requested not in _VALUES:
        raise ValueError(
            f"PYPARALLEL_MMENGINE must be auto or off, but is {requested!r}. Unset it "
            "for auto."
        )
    if requested == "off":
        return Found(False, "PYPARALLEL_MMENGINE=off is set.", {})
    wanted = {name: module for name, (module, _) in _CLASSES.items()} | _OTHERS
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # mmengine's own, at its import
            modules = {name: load(name) for name in sorted({*wanted.values()})}
        names = {name: getattr(modules[path], name) for name, path in wanted.items()}
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and error.name == "mmengine":
            return Found(False, "mmengine is not installed.", {})
        reason = (
            "mmengine must be importable, but importing it raised "
            f"{type(error).__name__}: {error}. "
            "Repair it, or set PYPARALLEL_MMENGINE=off."
        )
        return Found(False, reason, {}, warns=True)
    return Found(True, "mmengine is installed.", names)


_found = find(os.environ.get("PYPARALLEL_MMENGINE") or "auto")
if _found.warns:
    _text = (
        f"[PP002] {_found.reason}\nUntil then, pyparallel's classes are not subclasses "
        "of mmengine's."
    )
    warnings.warn(_text, RuntimeWarning, stacklevel=2)

available = _found.available
reason = _found.reason
#: Our classes and functions, by the name of the mmengine registry that they are for.
provided: dict[str, list[Callable[..., Any]]] = {}


def provides(registry: str) -> Callable[[_Provided], _Provided]:
    """Return a decorator that adds a class or function to `provided`.

    ``pyparallel.mmengine.install`` registers the collected items in mmengine. The
    decorator does not, so importing this package does not change mmengine's registries.
    """

    def collect(item: _Provided) -> _Provided:
        provided.setdefault(registry, []).append(item)
        return item

    return collect


def upstream(name: str) -> Any:
    """Return an object of mmengine by its name, or None without mmengine."""
    if name not in _CLASSES and name not in _OTHERS:
        raise KeyError(
            f"{name} must be one of the names that are imported from mmengine."
        )
    return _found.names.get(name)


def init_module(base: type, module: nn.Module) -> None:
    """Call the ``__init__`` after mmengine's: of a mixin, or of ``nn.Module``."""
    order = base.__mro__
    last: Any = order[order.index(nn.Module) - 1]
    super(last, module).__init__()


def _base(name: str) -> type:
    """Return mmengine's class of this name, or its substitute without mmengine."""
    found: type | None = upstream(name)
    return found or type(name, (_CLASSES[name][1],), {"__module__": __name__})


if TYPE_CHECKING:  # mypy cannot check bases that are chosen at run time
    OptimWrapperBase = object
    AmpOptimWrapperBase = object
    OptimWrapperDictBase = object
    BaseModelBase = nn.Module
    BaseDataPreprocessorBase = nn.Module
    ImgDataPreprocessorBase = nn.Module
    MMDistributedDataParallelBase = DistributedDataParallel
    MMSeparateDistributedDataParallelBase = DistributedDataParallel

    class BaseDataElement: ...

else:
    globals().update({f"{name}Base": _base(name) for name in _CLASSES})
    BaseDataElement = globals().pop("BaseDataElementBase")
