"""Import a file of the folder ``scripts``, which is not a package."""

from __future__ import annotations

import importlib.util
from types import ModuleType

from tests.support.repository.folders import ROOT

FOLDER = ROOT / "scripts"


def load(name: str) -> ModuleType:
    """Return ``scripts/<name>.py`` as a new module."""
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
