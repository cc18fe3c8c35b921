"""A prefetcher in several ranks has a sampler that divides the samples."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torch.utils.data import DataLoader as TorchLoader

from pyparallel import DataLoader, PreDataLoader, SizeBatchSampler
from pyparallel.core.errors import LoaderWarning

pytestmark = pytest.mark.one_backend

DATA: Any = list(range(8))


@pytest.fixture(autouse=True)
def two_ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    monkeypatch.setattr(dist, "get_world_size", lambda group=None: 2)
    yield
    dist.destroy_process_group()


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(DATA)


def drawn(sampler: Any) -> Any:
    """Return a loader whose batches torch makes of a sampler."""
    return DataLoader(DATA, 2, sampler=sampler)


def batched(sampler: Any) -> Any:
    return DataLoader(DATA, batch_sampler=BatchSampler(sampler, 2, False))


class Own(Sampler[int]):
    """A sampler of a user."""

    def __iter__(self) -> Iterator[int]:
        return iter([5, 6])


UNDIVIDED: list[Any] = [
    lambda: DataLoader(DATA, 2),
    lambda: DataLoader(DATA, 2, shuffle=True),
    lambda: DataLoader(DATA, batch_size=None),
    lambda: DataLoader(DATA, 2, num_workers=1, persistent_workers=True),
    lambda: TorchLoader(DATA, 2),
    lambda: drawn(RandomSampler(DATA)),
    lambda: batched(SequentialSampler(DATA)),
]
DIVIDED: list[Any] = [
    lambda: drawn(DistributedSampler(DATA, 2, 1, shuffle=False)),
    lambda: batched(DistributedSampler(DATA, 2, 1, shuffle=False)),
    lambda: drawn(Own()),
    lambda: DataLoader(DATA, batch_sampler=[[5, 6]]),
    lambda: DataLoader(
        DATA, batch_sampler=SizeBatchSampler([1] * 8, 2, num_replicas=2, rank=0)
    ),
    lambda: DataLoader(Stream(), 2),
    lambda: [1, 2],
    lambda: lambda: iter([1]),
    # The advice for ranks with all samples.
    lambda: drawn(DistributedSampler(DATA, num_replicas=1, rank=0)),
    lambda: drawn(DistributedSampler(DATA, num_replicas=1, rank=0, shuffle=False)),
]


@pytest.mark.parametrize("number", range(len(UNDIVIDED)))
def test_a_loader_that_no_sampler_divides_is_refused(number: int) -> None:
    ahead = PreDataLoader(UNDIVIDED[number]())
    for _ in range(2):
        with pytest.raises(ValueError, match=r"with 2 ranks, .*=DistributedSampler\("):
            iter(ahead)
    shuffles = type(ahead.sampler) is RandomSampler
    with pytest.raises(RuntimeError) as caught:
        ahead.next()
    assert ("shuffle=False" in str(caught.value)) is not shuffles


@pytest.mark.parametrize("number", range(len(DIVIDED)))
def test_other_loaders_are_read(number: int) -> None:
    with PreDataLoader(DIVIDED[number]()) as ahead:
        assert len(list(ahead)) > 0


@pytest.mark.parametrize(
    "sampler", [SubsetRandomSampler(DATA), WeightedRandomSampler([1.0] * 8, 4)]
)
def test_samplers_that_a_user_chose_are_reported(sampler: Any) -> None:
    with pytest.warns(LoaderWarning, match=rf"PP220.*a {type(sampler).__name__}"):
        assert len(list(PreDataLoader(drawn(sampler)))) == len(sampler) / 2


def test_a_single_rank_needs_no_sampler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_world_size", lambda group=None: 1)
    assert len(list(PreDataLoader(DataLoader(DATA, 2)))) == 4


def test_attributes_of_the_loader_are_set_there() -> None:
    # Lightning sets `worker_init_fn`; torch refuses others after the constructor.
    loader = DataLoader(DATA, 2)
    ahead: Any = PreDataLoader(loader)
    ahead.worker_init_fn = print
    ahead.timeout, ahead.device, ahead.note = 5, None, "mine"
    assert (loader.worker_init_fn, loader.timeout) == (print, 0)
    assert (vars(ahead)["timeout"], ahead.note) == (5, "mine")
    with pytest.raises(ValueError, match="dataset attribute should not be set"):
        ahead.dataset = []


class DataLoaderDispatcher:
    """A loader with the name of accelerate's class that sends batches."""

    def __iter__(self) -> Iterator[int]:
        raise AssertionError("a thread would send batches")


def test_a_loader_that_sends_batches_between_ranks_is_refused() -> None:
    with pytest.raises(ValueError) as caught:
        iter(PreDataLoader(DataLoaderDispatcher()))
    assert str(caught.value) == (
        "PreDataLoader: with 2 ranks, each rank must read its own batches, but the "
        "loader is a DataLoaderDispatcher of accelerate, which sends them between "
        "ranks. In a thread it would do so in the middle of the step. Iterate over the "
        "loader itself, or prepare it with "
        "DataLoaderConfiguration(dispatch_batches=False)."
    )
