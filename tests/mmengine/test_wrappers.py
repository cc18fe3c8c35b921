"""The wrappers on gloo ranks, compared with one process and the whole batch."""

from __future__ import annotations

from pathlib import Path

import pytest
from distributed_ranks import launch

pytestmark = [pytest.mark.one_backend, pytest.mark.slow]

CASES = ["plain", "accumulation", "clipping", "amp", "batches", "anomalies"]
CASES += ["adversaries", "structure", "no_sync"]


@pytest.mark.parametrize(
    ("world", "cases"), [(2, [*CASES, "fully_shard", "fsdp"]), (4, CASES)]
)
def test_all_ranks_pass(world: int, cases: list[str], tmp_path: Path) -> None:
    results = launch(tmp_path, "mmengine_cases", cases, world, limit=180)
    assert all(results[case] for case in cases)
