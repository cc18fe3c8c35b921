"""The one place that knows whether mmengine can be imported.

Where it can, its classes are the bases of ours, so that its ``isinstance`` checks pass.
Our classes define every method themselves and never call the ones of these bases; they
behave the same without mmengine, where the bases are empty classes (or ``nn.Module``).

``PYPARALLEL_MMENGINE`` is ``auto`` (the default) or ``off``. With ``auto``, an mmengine
that is not installed is no news; one that cannot be imported is reported by one
``RuntimeWarning``, and it counts as absent.

Attributes:
    available: True if mmengine's classes are the bases.
    reason: why, in a sentence.
    OptimWrapperBase, AmpOptimWrapperBase, OptimWrapperDictBase, BaseModelBase,
    BaseDataPreprocessorBase, ImgDataPreprocessorBase, MMDistributedDataParallelBase,
    MMSeparateDistributedDataParallelBase: what our classes derive from.
    BaseDataElement: mmengine's class for annotations; without mmengine, a class that
        has no instances.
    provided: what `provides` collected.
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
#: Where mmengine has what is used of it, and what stands for it without mmengine.
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
    """What there is of mmengine, and why not more."""

    available: bool
    reason: str
    names: dict[str, Any]  # of mmengine; empty if it is not available
    warns: bool = False


def find(requested: str, load: Callable[[str], Any] = importlib.import_module) -> Found:
    """Look for mmengine.

    Args:
        requested: value of ``PYPARALLEL_MMENGINE``.
        load: imports a module of mmengine by name.

    Raises:
        ValueError: ``requested`` is neither ``auto`` nor ``off``.
    """
    if requested not in _VALUES:
        raise ValueError(
            f"PYPARALLEL_MMENGINE must be auto or off, but is {requested!r}. Unset it "
            "for auto."
        )
    if requested == "off":
        return Found(False, "PYPARALLEL_MMENGINE=off asks for it.", {})
    wanted = {name: module for name, (module, _) in _CLASSES.items()} | _OTHERS
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what mmengine does is not our news
            modules = {name: load(name) for name in sorted({*wanted.values()})}
        names = {each: getattr(modules[at], each) for each, at in wanted.items()}
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
        f"[PP002] {_found.reason}\nUntil then, our classes are not subclasses of "
        "mmengine's."
    )
    warnings.warn(_text, RuntimeWarning, stacklevel=2)

available = _found.available
reason = _found.reason
#: What our classes and functions are for, by the name of mmengine's registry.
provided: dict[str, list[Callable[..., Any]]] = {}


def provides(registry: str) -> Callable[[_Provided], _Provided]:
    """Note a class or function for one of mmengine's registries, as a decorator.

    It is registered by ``pyparallel.mmengine.install``, not here: importing leaves
    mmengine's registries as they are.

    Args:
        registry: name of the registry in ``mmengine.registry``: ``"OPTIM_WRAPPERS"``.
    """

    def note(item: _Provided) -> _Provided:
        provided.setdefault(registry, []).append(item)
        return item

    return note


def upstream(name: str) -> Any:
    """Return mmengine's object of this name, or None without mmengine.

    Args:
        name: a class named above, ``"MessageHub"``, or a registry such as
            ``"OPTIM_WRAPPERS"``.

    Raises:
        KeyError: the name is in neither of the two tables above.
    """
    if name not in _CLASSES and name not in _OTHERS:
        raise KeyError(
            f"{name} must be one of the names that are looked up in mmengine."
        )
    return _found.names.get(name)


def _base(name: str) -> type:
    """Return mmengine's class of this name, or a new one that stands for it."""
    found: type | None = upstream(name)
    return found or type(name, (_CLASSES[name][1],), {"__module__": __name__})


if TYPE_CHECKING:  # bases that are chosen at run time have no types

    class OptimWrapperBase: ...

    class AmpOptimWrapperBase: ...

    class OptimWrapperDictBase: ...

    class BaseModelBase(nn.Module): ...

    class BaseDataPreprocessorBase(nn.Module): ...

    class ImgDataPreprocessorBase(nn.Module): ...

    class MMDistributedDataParallelBase(DistributedDataParallel): ...

    class MMSeparateDistributedDataParallelBase(DistributedDataParallel): ...

    class BaseDataElement: ...

else:
    OptimWrapperBase = _base("OptimWrapper")
    AmpOptimWrapperBase = _base("AmpOptimWrapper")
    OptimWrapperDictBase = _base("OptimWrapperDict")
    BaseModelBase = _base("BaseModel")
    BaseDataPreprocessorBase = _base("BaseDataPreprocessor")
    ImgDataPreprocessorBase = _base("ImgDataPreprocessor")
    MMDistributedDataParallelBase = _base("MMDistributedDataParallel")
    MMSeparateDistributedDataParallelBase = _base("MMSeparateDistributedDataParallel")
    BaseDataElement = _base("BaseDataElement")
