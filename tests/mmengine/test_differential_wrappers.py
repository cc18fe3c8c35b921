"""The wrappers compared with mmengine 0.10.7 on real ranks, except for FIXED.

Runs where mmengine is installed.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from distributed_ranks import Results, launch

from pyparallel.mmengine import _upstream

pytestmark = pytest.mark.peers

if not _upstream.available:
    if os.environ.get("PYPARALLEL_NO_SKIP", "0") not in ("", "0"):
        raise RuntimeError(_upstream.reason)
    pytest.skip(_upstream.reason, allow_module_level=True)

CASES = ["training", "separate", "classes", "fixed"]
#: What mmengine raises where ours works.
FIXED = {
    "device_ids": "ValueError",
    "no_sync": "RuntimeError",
    "a child that is None": "AttributeError",
}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    folder = tmp_path_factory.mktemp("two ranks")
    return launch(folder, "mmengine_differential_cases", CASES, limit=180)


def same(one: Any, other: Any) -> bool:
    return all(
        torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b
        for a, b in zip(one, other, strict=True)
    )


@pytest.mark.parametrize("options", ["plain", "static_graph", "unused"])
def test_a_training_has_equal_bits_and_keys(results: Results, options: str) -> None:
    for rank in results["training"]:
        assert same(rank[options]["ours"], rank[options]["theirs"])


def test_a_separate_training_has_equal_bits_and_keys(results: Results) -> None:
    for rank in results["separate"]:
        assert same(rank["ours"], rank["theirs"])


def test_our_wrappers_are_instances_and_wrappers_of_mmengine(results: Results) -> None:
    for rank in results["classes"]:
        assert rank == [True] * 5


@pytest.mark.parametrize("what", FIXED)
def test_fixed_defects_still_fail_in_mmengine(results: Results, what: str) -> None:
    for rank in results["fixed"]:
        assert (rank[what, "ours"], rank[what, "theirs"]) == ("", FIXED[what])
