"""`SizeBatchSampler` on real gloo ranks: equal plans, each sample once, one cache."""

from __future__ import annotations

import pytest
from distributed_ranks import Results, launch
from sampler_ranks import LIMITS, SIZES

from pyparallel import SizeBatchSampler

pytestmark = [pytest.mark.one_backend, pytest.mark.timeout(150)]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    folder = tmp_path_factory.mktemp("ranks")
    return launch(folder, "sampler_ranks", ["epochs", "caches"], limit=120)


def test_two_ranks_have_the_two_parts_of_one_plan(results: Results) -> None:
    first, second = (iter(rank) for rank in results["epochs"])
    for limit in LIMITS:
        for epoch in range(2):
            batches = list(zip(next(first), next(second), strict=True))
            expected = []
            for rank in range(2):
                sampler = SizeBatchSampler(
                    SIZES, **limit, window=5, num_replicas=2, rank=rank
                )
                sampler.set_epoch(epoch)
                expected.append(list(sampler))
            assert batches == list(zip(*expected, strict=True))
            # The last step may repeat a batch.
            distinct = {tuple(batch) for step in batches for batch in step}
            samples = sorted(i for batch in distinct for i in batch)
            assert samples == list(range(len(SIZES)))


def test_ranks_that_write_a_cache_at_once_leave_one_complete_file(
    results: Results,
) -> None:
    sizes = [list(size) for size in SIZES]
    every, files = list(range(len(SIZES))), ["sizes.npz"]
    for first, second in results["caches"]:
        assert first == (sizes, every, files)
        assert second == (sizes, [0, len(SIZES) - 1], files)
