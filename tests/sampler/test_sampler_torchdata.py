"""torchdata's loader saves and restores a sampler in the middle of an epoch."""

from __future__ import annotations

from typing import Any

import pytest

from pyparallel import SizeBatchSampler

try:
    from torchdata.stateful_dataloader import StatefulDataLoader
except ImportError as error:
    pytest.skip(f"needs torchdata: {error}", allow_module_level=True)

pytestmark = [
    pytest.mark.peers,
    pytest.mark.filterwarnings(
        "ignore:'set_vital' is deprecated:UserWarning",
        "ignore:This DataLoader will create",
    ),
]

SIZES = [17 * i % 50 for i in range(101)]


def loader_of(num_replicas: int, rank: int, num_workers: int) -> Any:
    sampler = SizeBatchSampler(SIZES, 4, window=5, num_replicas=num_replicas, rank=rank)
    return StatefulDataLoader(
        range(len(SIZES)), batch_sampler=sampler, num_workers=num_workers
    )


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("num_steps", [1, 7, 25])
def test_the_next_batch_follows(num_steps: int, num_workers: int) -> None:
    loader = loader_of(1, 0, num_workers)
    batches = iter(loader)
    for _ in range(num_steps):
        next(batches)
    again = loader_of(1, 0, num_workers)
    again.load_state_dict(loader.state_dict())
    rest = [batch.tolist() for batch in again]
    assert rest == [batch.tolist() for batch in batches]
    assert len(rest) == 26 - num_steps
