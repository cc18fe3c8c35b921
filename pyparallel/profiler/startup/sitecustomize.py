"""Import pyparallel in a profiled script at the first iteration over a loader.

``pyparallel profile`` puts this folder first in PYTHONPATH, so Python imports this
module at its start. The module imports only the standard library, and then the
``sitecustomize`` that it hides. When a script imports torch's loaders, this module
changes them: the first iterator imports pyparallel, which then records the process (see
`profiler.hooks`).
"""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import sys
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

_VARIABLE = "PYPARALLEL_PROFILE"
#: Classes that are instantiated before the first batch: in the loop, and in workers.
_CLASSES = {
    "torch.utils.data.dataloader": "_BaseDataLoaderIter",
    "torch.utils.data._utils.fetch": "_BaseDatasetFetcher",
}
#: Found beside the command if the script's Python lacks them.
_PACKAGES = ("pyparallel", "optree")
_found: set[str] = set()


def _find_spec(name: str, path: Any = None, target: Any = None) -> Any:
    """Return the specification of a module in `_CLASSES`, whose loader changes it."""
    if name not in _CLASSES or name in _found:
        return None
    _found.add(name)  # so that find_spec asks the other finders
    spec = importlib.util.find_spec(name)
    if spec is not None and spec.loader is not None:
        loader: Any = spec.loader
        loader.exec_module = functools.partial(_execute, loader.exec_module)
    return spec


def _execute(execute: Any, module: ModuleType) -> None:
    execute(module)
    cls = getattr(module, _CLASSES[module.__name__], None)
    if cls is None:  # another version of torch
        return
    original = cls.__init__

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **settings: Any) -> None:
        if cls.__init__ is __init__:
            cls.__init__ = original
            _import_pyparallel()
        original(self, *args, **settings)

    cls.__init__ = __init__


def _find_package(name: str, path: Any = None, target: Any = None) -> Any:
    """Return the specification of a package that no other finder has found.

    A spawned worker imports pyparallel before this module could change ``sys.path``:
    it reads its arguments, which contain a function of the profiler.
    """
    if name not in _PACKAGES:
        return None
    return PathFinder.find_spec(name, [str(Path(__file__).resolve().parents[3])])


def _import_pyparallel() -> None:
    """Import pyparallel, which records this process; write a file if that fails."""
    try:
        importlib.import_module("pyparallel")
    except Exception as error:
        folder = json.loads(os.environ[_VARIABLE])["folder"]
        text = f"{sys.executable}: {type(error).__name__}: {error}"
        try:
            Path(folder, f"{os.getpid()}.failed").write_text(text, encoding="utf-8")
        except OSError:
            pass


def _import_hidden() -> None:
    """Import the ``sitecustomize`` that this module hides."""
    here = str(Path(__file__).resolve().parent)
    sys.path[:] = [path for path in sys.path if os.path.realpath(path) != here]
    this = sys.modules.pop("sitecustomize", None)
    try:
        importlib.import_module("sitecustomize")
    except ImportError as error:
        if error.name != "sitecustomize":
            raise
    finally:
        if this is not None:
            sys.modules.setdefault("sitecustomize", this)


if _VARIABLE in os.environ:
    finder: Any = SimpleNamespace(find_spec=_find_spec)
    sys.meta_path.insert(0, finder)
    last: Any = SimpleNamespace(find_spec=_find_package)
    sys.meta_path.append(last)  # the script's own packages have priority
if __name__ == "sitecustomize":
    _import_hidden()
