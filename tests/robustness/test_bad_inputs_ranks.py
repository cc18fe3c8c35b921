"""A bad batch on one of two ranks: the others continue, and no batch is lost."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.errors import bad_inputs_ranks
from tests.support.ranks.distributed_ranks import launch

pytestmark = [pytest.mark.one_backend, pytest.mark.slow]


@pytest.mark.timeout(150)
def test_a_refused_batch_leaves_the_group_and_the_training_as_they_were(
    tmp_path: Path,
) -> None:
    results = launch(
        tmp_path, "tests.support.errors.bad_inputs_ranks", ["refused_batches"]
    )
    first, second = results["refused_batches"]
    assert first["bad"] == 0
    assert second["bad"] >= 8
    calls = 3 * bad_inputs_ranks.STEPS * second["bad"]
    assert second["refused"] == (calls, calls)
    assert [first["joined"], second["joined"]] == [0, 0]
    assert [first["total"], second["total"]] == [3, 3]
    for rank in (first, second):
        undisturbed, model = rank["states"]
        assert all(map(torch.equal, undisturbed, model))
    # With all that is left of training: the ranks have agreed, and moved.
    assert torch.equal(first["states"][1][0], second["states"][1][0])
