"""Dicts by columns: the result of a Python loop, or None."""

from __future__ import annotations

import gc
import random
import sys
from typing import Any

import pytest

from tests.support.processes.backends import check, native, needs_native

pytestmark = [pytest.mark.asan, needs_native]

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
def test_a_list_that_is_cut_by_a_garbage_collection_is_left() -> None:
    keys = [str(i) for i in range(50)]
    dicts = [dict.fromkeys(keys, i) for i in range(8)]
    kept: list[Any] = []

    def cut(phase: str, info: dict[str, int]) -> None:
        if not kept:
            kept.append(dicts.pop())

    before = gc.get_threshold()
    gc.collect()
    while gc.get_count()[0] > 10:  # created by finalizers of collected objects
        gc.collect(0)
    gc.callbacks.append(cut)
    gc.set_threshold(20)  # the call makes one list for each key
    try:
        found = native.columns(dicts, False)
    finally:
        gc.set_threshold(*before)
        gc.callbacks.remove(cut)
    assert found is None and kept == [dict.fromkeys(keys, 7)]
