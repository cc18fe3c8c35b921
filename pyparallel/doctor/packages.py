"""Installed versions, the owner of ``mmcv.parallel``, and the wrong pyparallel."""

from __future__ import annotations

import importlib.util
import platform
import sys
import sysconfig
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import pyparallel

from ..core import versions as versions_module
from ..core.cpu_time import is_gil_enabled
from .report import Problem

#: Distributions that contain a package ``mmcv``.
_MMCV = ("mmcv", "mmcv-full", "mmcv-lite", "onedl-mmcv")
_PEERS = (*_MMCV, "mmengine", "mmengine-lite", "onedl-mmengine")


def installed(distribution: str) -> str | None:
    """Return the version of a distribution; None if it is not installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def versions(problems: list[Problem]) -> dict[str, Any]:
    """Return the installed versions; a wrong distribution is a problem."""
    wrong = installed("pyparallel")
    if wrong is not None:
        text = (
            "The distribution pyparallel must not be installed, but version "
            f"{wrong} is: it drives parallel ports, and this library is "
            "pyparallel-torch. Run: pip uninstall pyparallel"
        )
        problems.append(Problem(text, fails=True))
    for text in versions_module.untested(platform.python_version(), torch.__version__):
        problems.append(Problem(text, fails=False))
    return {
        "pyparallel": pyparallel.__version__,
        "path": str(Path(pyparallel.__file__).parent),
        "python": platform.python_version(),
        "free_threaded": bool(sysconfig.get_config_var("Py_GIL_DISABLED")),
        "gil_enabled": is_gil_enabled(),
        "executable": sys.executable,
        "torch": torch.__version__,
        "optree": installed("optree"),
        "peers": {name: found for name in _PEERS if (found := installed(name))},
        "wrong_distribution": wrong,
        "supported": versions_module.supported(),
    }


def mmcv_parallel(problems: list[Problem]) -> dict[str, Any]:
    """Return the owner of ``mmcv.parallel``, without importing it.

    The owner is pyparallel after `pyparallel.mmcv.install` in the same process.
    """
    found = {name: version for name in _MMCV if (version := installed(name))}
    if len(found) > 1:
        listed = ", ".join(f"{name} {version}" for name, version in found.items())
        text = (
            "One distribution must own the package mmcv, but there are "
            f"{len(found)}: {listed}. The last one to be installed has overwritten "
            "files of the others. Uninstall all of them, then install one."
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
    return {"owner": None, "path": None}


def _folder(package: str) -> Path | None:
    """Return the folder from which a package would be imported."""
    try:
        spec = importlib.util.find_spec(package)
    except ValueError:  # a module in sys.modules without a specification
        return None
    paths = spec and spec.submodule_search_locations
    return Path(next(iter(paths))) if paths else None
