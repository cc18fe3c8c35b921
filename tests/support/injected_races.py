"""Faults that are put in on purpose, to see that a test finds them."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

#: How often a race is tried before it counts as not there.
ATTEMPTS = 50


def shows(wrong: Callable[[], int]) -> bool:
    """Tell whether a race that loses only sometimes goes wrong sooner or later."""
    if "libtsan" in os.environ.get("LD_PRELOAD", ""):
        pytest.skip("it races on purpose, as ThreadSanitizer would report")
    return any(wrong() for _ in range(ATTEMPTS))
