"""The supported versions of Python and torch.

``setup.py`` runs this file without the package, so it imports no other module of the
package. pyproject.toml, README.md and docs/install.md repeat the range;
tests/project/test_versions.py compares them.
"""

from __future__ import annotations

import re
from importlib import metadata

#: The versions of CPython in the tests.
PYTHONS = ("3.10", "3.11", "3.12", "3.13", "3.14")
#: The import fails with older releases of torch.
OLDEST_TORCH = "2.8"
#: The newest release in the tests. Newer releases are accepted.
NEWEST_TORCH = "2.15"

try:
    #: The version of this package.
    VERSION = metadata.version("pyparallel-torch")
except metadata.PackageNotFoundError:  # a source tree that is not installed
    VERSION = "0+unknown"


def supported() -> dict[str, str]:
    """Return the supported ranges of Python and torch as text."""
    return {
        "python": f"{PYTHONS[0]} to {PYTHONS[-1]}",
        "torch": f"{OLDEST_TORCH} to {NEWEST_TORCH}",
    }


def untested(python_version: str, torch_version: str) -> list[str]:
    """Return a message for each version that is newer than the tested versions."""
    found = (
        ("Python", python_version, PYTHONS[-1]),
        ("torch", torch_version, NEWEST_TORCH),
    )
    return [
        f"No test of this pyparallel has run with {name} {version}: {newest} is the "
        "newest. Run the self-test, and look for a newer pyparallel."
        for name, version, newest in found
        if series(version) > series(newest)
    ]


def series(version: str) -> tuple[int, ...]:
    """Return ``(2, 13)`` for ``"2.13.0+cpu"`` and for ``"2.13.0a0+git1234"``."""
    return tuple(map(int, re.findall(r"\d+", version.partition("+")[0])[:2]))


def too_old(torch_version: str) -> str | None:
    """Return the error message for a torch that is too old, or None."""
    if series(torch_version) >= series(OLDEST_TORCH):
        return None
    return (
        f"pyparallel needs torch {OLDEST_TORCH} or newer, but torch {torch_version} "
        f'is installed. Type: pip install "torch>={OLDEST_TORCH}"'
    )
