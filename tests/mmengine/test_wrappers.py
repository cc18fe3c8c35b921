"""The wrappers on two gloo ranks, compared with one process and the whole batch."""

from __future__ import annotations

import pytest
from distributed_ranks import Results, launch

pytestmark = [pytest.mark.one_backend, pytest.mark.slow]

CASES = ["plain", "accumulation", "batches", "anomalies"]
CASES += ["adversaries", "structure", "no_sync", "fully_shard", "fsdp"]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    folder = tmp_path_factory.mktemp("two ranks")
    return launch(folder, "mmengine_cases", CASES, limit=180)


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_pass(results: Results, case: str) -> None:
    assert len(results[case]) == 2
