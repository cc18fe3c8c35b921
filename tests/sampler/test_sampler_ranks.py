"""`SizeBatchSampler` on real gloo ranks: equal plans, and each sample once."""

from __future__ import annotations

from pathlib import Path

import pytest
from distributed_ranks import launch
from sampler_ranks import LIMITS, SIZES

from pyparallel import SizeBatchSampler

pytestmark = [pytest.mark.one_backend, pytest.mark.timeout(150)]


def test_two_ranks_have_the_two_parts_of_one_plan(tmp_path: Path) -> None:
    ranks = launch(tmp_path, "sampler_ranks", ["epochs"], limit=120)["epochs"]
    first, second = (iter(rank) for rank in ranks)
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
