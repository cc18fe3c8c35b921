"""All comparisons by name."""

from __future__ import annotations

from . import cases_images, cases_leaves
from .case import Case

__all__ = ["Case", "cases"]


def cases(quick: bool) -> list[Case]:
    """Return all cases; with ``quick``, tiny versions that only prove that they run."""
    return [*cases_images.cases(quick), *cases_leaves.cases(quick)]
