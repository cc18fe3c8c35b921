"""Lets a script be profiled that never imports pyparallel.

``pyparallel profile`` puts this folder first in PYTHONPATH, so Python imports this
module when it starts. Only the standard library is imported here. Once torch's loaders
are imported, the first loader that iterates imports pyparallel, which then watches the
process (see `profiler.hooks`). Another ``sitecustomize`` is imported as usual.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

_VARIABLE = "PYPARALLEL_PROFILE"
#: Each is made before the first batch: in the process that trains, and in workers.
_CLASSES = {
    "torch.utils.data.dataloader": "_BaseDataLoaderIter",
    "torch.utils.data._utils.fetch": "_BaseDatasetFetcher",
}


class _Finder:
    """Changes torch's modules when they are imported."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        """Return the specification that others find, with a loader that adds ours."""
        if name not in _CLASSES or name in self._found:
            return None
        self._found.add(name)  # so that others are asked
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            loader.exec_module = functools.partial(_execute, loader.exec_module)
        return spec

    def __init__(self) -> None:
        self._found: set[str] = set()


def _execute(execute: Any, module: ModuleType) -> None:
    execute(module)
    cls = getattr(module, _CLASSES[module.__name__], None)
    if cls is None:  # a torch of another form
        return
    make = cls.__init__

    @functools.wraps(make)
    def make_watched(made: Any, *args: Any, **settings: Any) -> None:
        if cls.__init__ is make_watched:
            cls.__init__ = make
            _watch()
        make(made, *args, **settings)

    cls.__init__ = make_watched


def _watch() -> None:
    """Import pyparallel, which watches this process; write down if it cannot be."""
    root = str(Path(__file__).resolve().parents[3])
    sys.path.append(root)  # last: the script's own pyparallel is preferred
    try:
        importlib.import_module("pyparallel")
    except Exception as error:
        folder = json.loads(os.environ[_VARIABLE])["folder"]
        text = f"{sys.executable}: {type(error).__name__}: {error}"
        try:
            Path(folder, f"{os.getpid()}.failed").write_text(text, encoding="utf-8")
        except OSError:
            pass
    finally:
        sys.path.remove(root)


def _import_others() -> None:
    """Import the ``sitecustomize`` that this one hides."""
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
    finder: Any = _Finder()
    sys.meta_path.insert(0, finder)
if __name__ == "sitecustomize":
    _import_others()
