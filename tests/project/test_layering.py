"""Imports run down the floors."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path

import pytest

from tests.support.repository.folders import ROOT

pytestmark = pytest.mark.one_backend

PACKAGE = ROOT / "pyparallel"

#: From the bottom to the top. Entries of one floor do not import each other.
FLOORS = [
    ["core"],
    ["backend"],
    ["transfer"],
    ["batch", "memory", "shm", "workers"],
    ["images", "loader", "sampler", "scatter_gather"],
    ["parallel", "prefetch"],
    ["mmcv", "mmengine", "profiler"],
    ["__init__", "registry"],
    ["__main__", "doctor"],
]
LEVEL = {name: level for level, names in enumerate(FLOORS) for name in names}
FOLDERS = sorted(path.parent.name for path in PACKAGE.glob("*/__init__.py"))
FILES = sorted(PACKAGE.rglob("*.py"))
#: Folders whose names other libraries define: all of their modules may be imported.
OTHERS = {"mmcv", "mmengine", "backend", "profiler"}


def imported_names(path: Path) -> list[list[str]]:
    """Return the parts of the full names that a file imports, at any depth of code."""
    package = ["pyparallel", *path.relative_to(PACKAGE).parent.parts]
    found: list[str] = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            up = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*up, *([node.module] if node.module else [])])
            found += [f"{base}.{alias.name}" for alias in node.names]
    return [name.split(".") for name in found]


def imported(path: Path) -> set[tuple[str, str]]:
    """Return the entries of the package that a file imports, with their modules."""
    found = set()
    for parts in imported_names(path):
        if parts[0] == "pyparallel" and len(parts) > 1:
            # A name from the package itself is not a module: it comes from __init__.
            entry = parts[1] if parts[1] in LEVEL else "__init__"
            module = parts[2] if entry in FOLDERS and len(parts) > 2 else ""
            found.add((entry, module))
    return found


def entry_of(path: Path) -> str:
    """Return the entry of ``FLOORS`` that a file belongs to."""
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


def modules_of(path: Path) -> dict[str, Path]:
    """Return the modules in the folder of a file, by name."""
    return {each.stem: each for each in path.parent.glob("*.py")}


def relative(path: Path) -> str:
    return str(path.relative_to(PACKAGE))


@pytest.mark.parametrize("path", FILES, ids=relative)
def test_imports_run_down_the_floors(path: Path) -> None:
    entry = entry_of(path)
    others = {name for name, _ in imported(path)} - {entry}
    wrong = {name for name in others if LEVEL[name] >= LEVEL[entry]}
    assert not wrong, f"{entry} must not import {', '.join(sorted(wrong))}"


@pytest.mark.parametrize("path", FILES, ids=relative)
def test_private_modules_are_imported_in_their_folder_only(path: Path) -> None:
    others = {found for found in imported(path) if found[0] != entry_of(path)}
    # The extension and its stub have one name.
    private = {found for found in others if found[1][:1] == "_" and found[1] != "_C"}
    assert not private, "only its own folder imports a module with an underscore"


@pytest.mark.parametrize("folder", FOLDERS)
def test_imports_inside_a_folder_have_no_cycle(folder: str) -> None:
    below: dict[str, set[str]] = {}
    for path in (PACKAGE / folder).rglob("*.py"):
        names = imported_names(path)
        found = {part[2] for part in names if part[:2] == ["pyparallel", folder]}
        below[path.stem] = found & set(modules_of(PACKAGE / folder / "__init__.py"))
    while below:
        leaves = {name for name, found in below.items() if not found & set(below)}
        assert leaves, f"{folder} has a cycle among {sorted(below)}"
        below = {name: found for name, found in below.items() if name not in leaves}


@pytest.mark.parametrize("folder", sorted(set(FOLDERS) - OTHERS))
def test_each_folder_lists_the_modules_that_others_use(folder: str) -> None:
    package = importlib.import_module(f"pyparallel.{folder}")
    used = {
        module
        for path in FILES
        if entry_of(path) != folder
        for entry, module in imported(path)
        if entry == folder
    }
    assert sorted(used - {""}) == sorted(set(package.__all__) & used - {""})
    assert set(package.__all__) <= set(modules_of(PACKAGE / folder / "__init__.py"))
    assert 5 <= len((package.__doc__ or "").splitlines()) <= 32
