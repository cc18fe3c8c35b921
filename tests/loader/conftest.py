"""Fixtures of the loader's tests."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator

import pytest


@pytest.fixture
def forked() -> Iterator[None]:
    """Fork workers: a fork server receives no lambdas and sees no monkeypatch."""
    before = multiprocessing.get_start_method(allow_none=True)
    multiprocessing.set_start_method("fork", force=True)
    yield
    multiprocessing.set_start_method(before, force=True)
