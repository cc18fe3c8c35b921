"""Faults added on purpose, to check that a test finds them."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

#: The number of attempts before a race counts as absent.
ATTEMPTS = 50


def shows(wrong: Callable[[], int]) -> bool:
    """Return True if a race that occurs only sometimes is found."""
    if "libtsan" in os.environ.get("LD_PRELOAD", ""):
        pytest.skip("it races on purpose, as ThreadSanitizer would report")
    return any(wrong() for _ in range(ATTEMPTS))
