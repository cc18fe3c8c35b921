"""The build record beside the extension, which is read before the extension is loaded.

An extension that was built for another torch can load without an error and then misread
every tensor. So the record's versions are compared with those of the running torch.
"""

from __future__ import annotations

import json
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any, NamedTuple

#: The command that rebuilds the extension, in the source folder.
REBUILD = "pip install --no-build-isolation ."


class Build(NamedTuple):
    """A compiled module on disk, and its build record."""

    path: Path
    record: dict[str, Any]


def find(folder: Path) -> Build | None:
    """Return the module that this interpreter would load from ``folder``.

    A record that is missing or unreadable is empty; `mismatch` rejects it.
    """
    for suffix in EXTENSION_SUFFIXES:
        path = folder / f"_C{suffix}"
        if path.exists():
            try:
                record = json.loads(path.with_suffix(".json").read_text("utf-8"))
            except (OSError, ValueError):
                record = {}
            return Build(path, record if isinstance(record, dict) else {})
    return None


def list_other_pythons(folder: Path) -> list[str]:
    """Return the names of modules that were built for other Python versions."""
    loaded = {f"_C{suffix}" for suffix in EXTENSION_SUFFIXES}
    return sorted(p.name for p in folder.glob("_C.*.so") if p.name not in loaded)


def describe(torch_version: object, cuda_version: object) -> str:
    """Return ``torch 2.13.0 (CUDA 13.0)`` or ``torch 2.13.0 (CPU)``."""
    flavour = f"CUDA {cuda_version}" if cuda_version else "CPU"
    return f"torch {str(torch_version).partition('+')[0]} ({flavour})"


def mismatch(
    record: dict[str, Any], torch_version: str, cuda_version: str | None
) -> str | None:
    """Return the reason not to load the module, or None if it fits.

    A module fits if torch has the major and minor version of the build. For a build
    with CUDA, CUDA's major version must also be equal. A CPU build fits every build of
    its torch version.
    """
    rule = "pyparallel's extension must be built for the torch that runs it"
    if not record.get("torch"):
        return (
            f"{rule}, but its build record is missing or cannot be read. "
            f"Rebuild it in the source folder: {REBUILD}"
        )
    built = describe(record["torch"], record.get("cuda"))
    present = describe(torch_version, cuda_version)
    fits = _series(record["torch"], 2) == _series(torch_version, 2)
    if record.get("cuda"):
        fits = fits and _series(record["cuda"], 1) == _series(cuda_version or "", 1)
    if fits:
        return None
    return (
        f"{rule}, but it was built for {built} and {present} is installed. "
        f"Rebuild it in the source folder: {REBUILD}"
    )


def _series(version: object, parts: int) -> list[str]:
    return str(version).partition("+")[0].split(".")[:parts]
