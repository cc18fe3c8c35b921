"""Comparison with torchdata's StatefulDataLoader: the same batches after a stop.

The form is the same too: methods, protocol, the moments at which a state may be taken.
The contents of a state differ. Here torch shuffles for ``shuffle=True``; torchdata has
an order of its own.
"""

from __future__ import annotations

from typing import Any

import pytest
import resumed
import torch
from torch.utils.data import DistributedSampler, RandomSampler

from pyparallel import DataLoader

try:
    from torchdata.stateful_dataloader import Stateful, StatefulDataLoader
    from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler
except ImportError as error:
    pytest.skip(f"needs torchdata: {error}", allow_module_level=True)

pytestmark = [
    pytest.mark.peers,
    pytest.mark.filterwarnings(
        "ignore:'set_vital' is deprecated:UserWarning",
        "ignore:This DataLoader will create",
    ),
]


class Copied(resumed.Counting):
    """A sampler whose state stays: theirs keeps it without a copy."""

    def state_dict(self) -> dict[str, Any]:
        return dict(super().state_dict())


def arguments(order: str) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(3)
    numbers = resumed.Numbers(11)
    return {
        "sequential": lambda: {"dataset": numbers},
        "random": lambda: {
            "dataset": numbers,
            "sampler": RandomSampler(range(11), generator=generator),
        },
        "distributed": lambda: {
            "dataset": numbers,
            "sampler": DistributedSampler(range(22), 2, 0),  # type: ignore[arg-type]
        },
        "their distributed": lambda: {
            "dataset": numbers,
            "sampler": StatefulDistributedSampler(range(22), 2, 0),  # type: ignore[arg-type]
        },
        "counting": lambda: {"dataset": numbers, "sampler": Copied(11)},
        "with state": lambda: {"dataset": numbers, "sampler": resumed.WithState(11)},
        "remembering": lambda: {"dataset": resumed.Remembering(11)},
        "uneven": lambda: {"dataset": resumed.UnevenStateful((9, 7))},
        "own iterator": lambda: {"dataset": resumed.UnevenSelf((9, 7))},
        "cursors": lambda: {"dataset": resumed.UnevenCursors((9, 3))},
    }[order]()


ORDERS = ["sequential", "random", "distributed", "their distributed", "counting"]
ORDERS += ["with state", "remembering", "uneven", "cursors", "own iterator"]


def rest(cls: Any, order: str, stop: int, workers: int) -> list[Any]:
    """Return the rest of an epoch that was stopped."""
    options = {"batch_size": 2, "num_workers": workers}
    loader = cls(**arguments(order), **options)
    batches = iter(loader)
    for _ in range(stop):
        next(batches)
    state = loader.state_dict()
    del batches
    loader = cls(**arguments(order), **options)
    loader.load_state_dict(state)
    return [batch.tolist() for batch in loader]


@pytest.mark.parametrize("workers, stops", [(0, (0, 1, 3, 4)), (2, (1, 3))])
@pytest.mark.parametrize("order", ORDERS)
def test_the_next_batches_are_equal(
    order: str, workers: int, stops: tuple[int, ...]
) -> None:
    for stop in stops:
        ours = rest(DataLoader, order, stop, workers)
        assert ours == rest(StatefulDataLoader, order, stop, workers)


@pytest.mark.parametrize("ask_for_more", [False, True])
def test_the_epoch_after_the_last_batch_is_equal(ask_for_more: bool) -> None:
    found = []
    for cls in (DataLoader, StatefulDataLoader):
        loader = cls(resumed.Numbers(6), 2)
        batches = iter(loader)
        for _ in range(3):
            next(batches)
        assert not ask_for_more or next(batches, None) is None
        state = loader.state_dict()
        loader = cls(resumed.Numbers(6), 2)
        loader.load_state_dict(state)
        found.append([len(list(loader)) for _ in range(2)])
    assert found[0] == found[1] == ([3, 3] if ask_for_more else [0, 3])


def test_a_loader_is_stateful_as_torchdata_has_it() -> None:
    assert isinstance(DataLoader(resumed.Numbers(2)), Stateful)
