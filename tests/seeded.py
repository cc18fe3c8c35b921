"""Faults that are put in on purpose, to see that a test finds them."""

from __future__ import annotations

from collections.abc import Callable

#: How often a race is tried before it counts as not there.
ATTEMPTS = 50


def shows(wrong: Callable[[], int]) -> bool:
    """Tell whether a race that loses only sometimes goes wrong sooner or later."""
    return any(wrong() for _ in range(ATTEMPTS))
