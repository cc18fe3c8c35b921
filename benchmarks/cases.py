"""All comparisons by name."""

from __future__ import annotations

from . import cases_images, cases_leaves, cases_preprocess
from .case import Case

__all__ = ["Case", "cases"]


def cases(quick: bool) -> list[Case]:
    """Return all cases; with ``quick``, small versions only, to prove that they run."""
    modules = (cases_images, cases_leaves, cases_preprocess)
    return [case for module in modules for case in module.cases(quick)]
