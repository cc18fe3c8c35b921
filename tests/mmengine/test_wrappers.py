"""The wrappers on gloo ranks, compared with one process and the whole batch."""

from __future__ import annotations

import pytest
from distributed_ranks import Results, launch

pytestmark = [pytest.mark.one_backend, pytest.mark.slow]

CASES = ["plain", "accumulation", "clipping", "amp", "batches", "anomalies"]
CASES += ["adversaries", "structure", "no_sync"]
SHARDED = ["fully_shard", "fsdp"]


@pytest.fixture(scope="module", params=[2, 4])
def results(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Results:
    folder, world = tmp_path_factory.mktemp("ranks"), request.param
    cases = [*CASES, *(SHARDED if world == 2 else [])]
    return launch(folder, "mmengine_cases", cases, world, limit=180)


@pytest.mark.parametrize("case", CASES)
def test_all_ranks_pass(results: Results, case: str) -> None:
    assert results[case]


@pytest.mark.parametrize("results", [2], indirect=True)
@pytest.mark.parametrize("case", SHARDED)
def test_two_ranks_pass(results: Results, case: str) -> None:
    assert results[case]
