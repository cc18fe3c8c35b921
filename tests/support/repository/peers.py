"""Find the installed peers. A run that may skip nothing needs all."""

from __future__ import annotations

import importlib.util
import os


def installed(*names: str) -> list[str]:
    """Return the installed ones of some libraries.

    Raises:
        ModuleNotFoundError: one is missing, and ``PYPARALLEL_NO_SKIP`` is set.
    """
    found = [name for name in names if importlib.util.find_spec(name)]
    missing = sorted(set(names) - set(found))
    if missing and os.environ.get("PYPARALLEL_NO_SKIP", "0") not in ("", "0"):
        raise ModuleNotFoundError(
            f"PYPARALLEL_NO_SKIP is set, but these peers are missing: {missing}"
        )
    return found
