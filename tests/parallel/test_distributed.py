"""MMDistributedDataParallel on real gloo ranks, compared with DDP and mmcv 1.x."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.ranks.distributed_ranks import Results, launch

pytestmark = [pytest.mark.one_backend, pytest.mark.slow, pytest.mark.timeout(150)]

CASES = ["training", "calls", "outputs", "subclasses", "on_a_device", "failing_step"]
CASES += ["reducer_in_the_step", "updates_in_the_step", "static_graphs", "deprecated"]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    folder = tmp_path_factory.mktemp("two ranks")
    return launch(
        folder, "tests.support.ranks.distributed_cases", ["buffers", *CASES, "join"]
    )


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_pass(results: Results, case: str) -> None:
    assert len(results[case]) == 2


def test_buffers_are_broadcast_again_after_a_validation_step(results: Results) -> None:
    first, second = results["buffers"]
    for kind in ("ours", "torch"):
        assert [
            torch.equal(*pair) for pair in zip(first[kind], second[kind], strict=True)
        ] == [
            True,
            True,
            True,  # the validation step
            False,  # torch skips one broadcast, and so do we
            True,
            True,
        ]
    for rank in (first, second):
        assert all(map(torch.equal, rank["ours"], rank["torch"]))


def test_ranks_with_unequal_numbers_of_batches_end_equal_under_join(
    results: Results,
) -> None:
    first, second = results["join"]
    assert [first["ours"]["steps"], second["ours"]["steps"]] == [3, 5]
    assert torch.equal(first["ours"]["values"], second["ours"]["values"])
    assert torch.equal(first["ours"]["values"], first["torch"]["values"])


@pytest.mark.cuda
def test_on_a_gpu_all_but_cpu_only_data_is_moved(tmp_path: Path) -> None:
    assert launch(
        tmp_path, "tests.support.ranks.distributed_cases", ["on_a_gpu"], world=1
    )["on_a_gpu"]
