"""What is installed: versions, whose ``mmcv.parallel`` is, what only has our name."""

from __future__ import annotations

import importlib.util
import platform
import sys
import sysconfig
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import pyparallel

from ..core import versions as versions_module
from ._problem import Problem

#: Distributions that have a package ``mmcv``.
_MMCV = ("mmcv", "mmcv-full", "mmcv-lite", "onedl-mmcv")
_PEERS = (*_MMCV, "mmengine", "mmengine-lite", "onedl-mmengine")


def installed(distribution: str) -> str | None:
    """Return the version of an installed distribution."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def versions(problems: list[Problem]) -> dict[str, Any]:
    """Return what there is of which version; a wrong distribution is a problem."""
    wrong = installed("pyparallel")
    if wrong is not None:
        text = (
            "The distribution pyparallel must not be installed: it drives parallel "
            f"ports, and this library is pyparallel-torch. Found: pyparallel {wrong}. "
            "Type: pip uninstall pyparallel"
        )
        problems.append(Problem(text, fails=True))
    for text in versions_module.untested(platform.python_version(), torch.__version__):
        problems.append(Problem(text, fails=False))
    return {
        "pyparallel": pyparallel.__version__,
        "path": str(Path(pyparallel.__file__).parent),
        "python": platform.python_version(),
        "free_threaded": bool(sysconfig.get_config_var("Py_GIL_DISABLED")),
        "gil_enabled": _gil_enabled(),
        "executable": sys.executable,
        "torch": torch.__version__,
        "optree": installed("optree"),
        "peers": {name: found for name in _PEERS if (found := installed(name))},
        "wrong_distribution": wrong,
        "supported": versions_module.supported(),
    }


def _gil_enabled() -> bool:
    """Return False only without a GIL: imports and PYTHON_GIL=1 can enable it."""
    enabled: Callable[[], bool] = getattr(sys, "_is_gil_enabled", lambda: True)
    return enabled()


def mmcv_parallel(problems: list[Problem]) -> dict[str, Any]:
    """Return whose ``import mmcv.parallel`` is, without importing it.

    It is pyparallel's only after `pyparallel.mmcv.install` in this very process.
    """
    found = {name: version for name in _MMCV if (version := installed(name))}
    if len(found) > 1:
        listed = ", ".join(f"{name} {version}" for name, version in found.items())
        text = (
            "One distribution must own the package mmcv, but there are "
            f"{len(found)}: {listed}. Files of the last one that was installed lie "
            "over the others. Uninstall all of them, then install the one you need."
        )
        problems.append(Problem(text, fails=False))
    functions = sys.modules.get("mmcv.parallel._functions")
    if functions is not None and functions.__name__.startswith("pyparallel."):
        return {"owner": "pyparallel", "path": functions.__file__}
    folder = _folder("mmcv")
    path = folder and folder / "parallel"
    if path is not None and path.is_dir():
        owner = " or ".join(f"{name} {version}" for name, version in found.items())
        return {"owner": owner or "unknown", "path": str(path)}
    return {"owner": "nobody", "path": None}


def _folder(package: str) -> Path | None:
    """Return where a package would be imported from."""
    try:
        spec = importlib.util.find_spec(package)
    except ValueError:  # it is a module that was made by hand
        return None
    places = spec and spec.submodule_search_locations
    return Path(next(iter(places))) if places else None
