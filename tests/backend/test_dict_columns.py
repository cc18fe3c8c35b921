"""Dicts by columns: the result of a Python loop, or None."""

from __future__ import annotations

import gc
import random
import sys
from typing import Any

import pytest

from tests.support.processes.backends import check, native, needs_native

pytestmark = [pytest.mark.asan, pytest.mark.one_backend, needs_native]

NAMES = ["a", "b", "", "name", 1, -5, 2**70, None, ()]


def test_values_come_by_key_in_the_order_of_the_first_dict() -> None:
    for seed in range(200):
        rng = random.Random(seed)
        keys = rng.sample(NAMES, seed % 6)
        dicts = [{key: rng.random() for key in keys} for _ in range(1 + seed % 5)]
        expected = {key: [each[key] for each in dicts] for key in keys}
        for stack in (False, True):
            found = native.columns(dicts, stack)
            assert list(found.items()) == list(expected.items())


def test_it_must_be_a_list() -> None:
    message = "columns: dicts must be a list, but is of type tuple."
    check(native.columns, [({"a": 1},), True], TypeError, message)


@pytest.mark.skipif(
    sys.version_info >= (3, 12), reason="nothing is collected in the middle of a call"
)
def test_a_garbage_collection_in_the_call_changes_no_column() -> None:
    keys = [str(i) for i in range(50)]
    counts = set()
    for threshold in range(1, 40, 3):
        dicts = [{key: f"{key} of {i}" for key in keys} for i in range(8)]
        expected = {key: [f"{key} of {i}" for i in range(8)] for key in keys}
        found = _columns_while_collected(dicts, threshold)
        assert found is not None and list(found) == keys
        counts.add(num := len(found["0"]))
        assert found == {key: values[:num] for key, values in expected.items()}
    assert 8 in counts  # the list was cut during the call


def _columns_while_collected(dicts: list[Any], threshold: int) -> Any:
    """Call `columns`; a garbage collection frees the last dict."""
    is_cut: list[bool] = []

    def cut(phase: str, info: dict[str, int]) -> None:
        if not is_cut:
            is_cut.append(True)
            dicts.pop()

    before = gc.get_threshold()
    gc.collect()
    while gc.get_count()[0] > 10:  # created by finalizers of collected objects
        gc.collect(0)
    gc.callbacks.append(cut)
    gc.set_threshold(threshold)  # the call makes one list for each key
    try:
        found = native.columns(dicts, False)
    finally:
        gc.set_threshold(*before)
        gc.callbacks.remove(cut)
    return found if is_cut else None
