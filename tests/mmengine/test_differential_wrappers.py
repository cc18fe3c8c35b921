"""The wrappers compared with mmengine 0.10.7 on real ranks: equal bits and keys.

Runs where mmengine is installed.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from distributed_ranks import launch

from pyparallel.mmengine import _upstream

pytestmark = pytest.mark.peers

if not _upstream.available:
    if os.environ.get("PYPARALLEL_NO_SKIP", "0") not in ("", "0"):
        raise RuntimeError(_upstream.reason)
    pytest.skip(_upstream.reason, allow_module_level=True)


def test_trainings_have_the_bits_and_keys_of_mmengine(tmp_path: Path) -> None:
    cases = ["training", "separate"]
    results = launch(tmp_path, "mmengine_differential_cases", cases, limit=180)
    assert [len(results[case]) for case in cases] == [2, 2]
