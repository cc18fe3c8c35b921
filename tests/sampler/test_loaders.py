"""Samplers compare themselves with the loader that they are passed to."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch.utils.data
from torch.utils.data import BatchSampler, Dataset, IterableDataset, Subset

from pyparallel import (
    DataLoader,
    DistributedEvalSampler,
    PreDataLoader,
    SizeBatchSampler,
)

pytestmark = [
    pytest.mark.one_backend,
    # torch's iterator with workers cannot be deleted if iter() of its sampler raised.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

TorchLoader = torch.utils.data.DataLoader


def by_sizes(number: int) -> SizeBatchSampler:
    return SizeBatchSampler([1] * number, 4)


def by_function(number: int) -> SizeBatchSampler:
    return SizeBatchSampler(lambda i: 1, 4, num_samples=number, progress=False)


def without_oversized(number: int) -> SizeBatchSampler:
    return SizeBatchSampler([1] * number, max_padded=4, skip_oversized=True)


SAMPLERS = [by_sizes, by_function, without_oversized]


class WithoutLength(Dataset[int]):
    def __getitem__(self, index: int) -> int:
        return index


class Unknown(WithoutLength):
    def __len__(self) -> int:
        raise NotImplementedError


def use(loader: Any) -> None:
    """Read a batch, or all batches with ``next``."""
    list(loader)


#: How a program gets batches, by the class of the loader and its arguments.
LOADERS: dict[str, Callable[..., Any]] = {
    "DataLoader": DataLoader,
    "torch": lambda *args, **options: use(TorchLoader(*args, **options)),
    "torch, iter": lambda *args, **options: iter(TorchLoader(*args, **options)),
    "torch, workers": lambda *args, **options: iter(
        TorchLoader(*args, num_workers=1, **options)
    ),
    "prefetch": lambda *args, **options: use(
        PreDataLoader(TorchLoader(*args, **options))
    ),
    "copied": lambda *args, **options: use(copy.copy(TorchLoader(*args, **options))),
}


@pytest.mark.parametrize("sampler_of", SAMPLERS)
@pytest.mark.parametrize("name", LOADERS)
def test_another_number_of_samples_is_an_error(
    name: str, sampler_of: Callable[[int], SizeBatchSampler]
) -> None:
    subset = " To load a part of it, use torch.utils.data.Subset."
    for number, advice in ((60, subset), (100 - 1, subset), (101, ""), (140, "")):
        message = (
            "SizeBatchSampler: the sampler must be for the 100 samples of the loader's "
            f"dataset, but is for {number}. Make the sampler for this dataset.{advice}"
        )
        with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
            LOADERS[name](range(100), batch_sampler=sampler_of(number))
        LOADERS[name](range(number), batch_sampler=sampler_of(number))
        part: Any = Subset(range(200), range(number))  # type: ignore[arg-type]
        LOADERS[name](part, batch_sampler=sampler_of(number))
    for dataset in (WithoutLength(), Unknown()):
        LOADERS[name](dataset, batch_sampler=sampler_of(60))


def test_a_dataset_that_grows_is_found_in_the_next_pass() -> None:
    data = list(range(8))
    for cls in (DataLoader, TorchLoader):
        loader: Any = cls(data, batch_sampler=by_sizes(len(data)))  # type: ignore[arg-type]
        use(loader)
        data.append(0)
        with pytest.raises(ValueError, match=rf"for the {len(data)} samples of the lo"):
            use(loader)


@pytest.mark.parametrize("name", LOADERS)
def test_a_batch_sampler_as_sampler_is_an_error(name: str) -> None:
    message = (
        "SizeBatchSampler: the loader must get the sampler as batch_sampler, because "
        "it yields batches, but got it as sampler. Use "
        "batch_sampler=SizeBatchSampler(...) without batch_size, shuffle and drop_last."
    )
    for options in ({}, {"batch_size": 4}, {"batch_size": 4, "drop_last": True}):
        with pytest.raises(TypeError, match=f"^{re.escape(message)}$"):
            made = LOADERS[name](range(100), sampler=by_sizes(100), **options)
            next(made)  # torch's loader calls iter() of the sampler here
    # Such a loader passes a batch of indices to the dataset.
    LOADERS[name](torch.arange(100), sampler=by_sizes(100), batch_size=None)
    with pytest.raises(ValueError, match="is for 60"):
        LOADERS[name](torch.arange(100), sampler=by_sizes(60), batch_size=None)
    with pytest.raises(TypeError, match=f"^{re.escape(message)}$"):
        list(BatchSampler(by_sizes(100), 2, False))  # type: ignore[arg-type]


def test_an_evaluation_sampler_of_another_dataset_is_an_error() -> None:
    for number in (9, 11):
        sampler = DistributedEvalSampler(range(number), 1, 0)
        message = (
            "DistributedEvalSampler: the sampler must be for the 10 samples of the "
            f"loader's dataset, but is for {number}. Make the sampler for this dataset."
        )
        with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
            DataLoader(range(10), sampler=sampler)
        DataLoader(range(number), sampler=sampler)


def test_a_sampler_may_be_read_in_a_dataset() -> None:
    """The loader of another sampler is not compared."""

    class Batches(IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter(by_sizes(6))

    assert len(list(TorchLoader(Batches(), batch_size=None))) == 2
    assert len(list(DataLoader(Batches(), batch_size=None))) == 2


# ------------------------------------------------------------------------ divided twice
class Shard(BatchSampler):
    """Yields each n-th batch, as accelerate's ``BatchSamplerShard``."""

    def __init__(self, batch_sampler: Any, num_processes: int) -> None:
        self.batch_sampler, self.num_processes = batch_sampler, num_processes

    def __len__(self) -> int:
        return len(self.batch_sampler) // self.num_processes

    def __iter__(self) -> Any:
        for number, batch in enumerate(self.batch_sampler):
            if number % self.num_processes == 0:
                yield batch


def divided_by_size(ranks: int) -> Any:
    return SizeBatchSampler([1] * 24, 2, num_replicas=ranks, rank=0, shuffle=False)


def divided_for_evaluation(ranks: int) -> Any:
    sampler = DistributedEvalSampler(range(24), ranks, 0)  # type: ignore[arg-type]
    return BatchSampler(sampler, 2, False)


@pytest.mark.parametrize("cls", [DataLoader, TorchLoader])
@pytest.mark.parametrize("make", [divided_by_size, divided_for_evaluation])
def test_samples_are_divided_between_ranks_once(cls: Any, make: Any) -> None:
    for ranks, processes, num_batches in ((1, 1, 12), (1, 2, 6), (2, 1, 6)):
        data: Any = range(24)
        loader = cls(data, batch_sampler=Shard(make(ranks), processes))
        assert len(list(loader)) == num_batches
    loader = cls(data, batch_sampler=Shard(make(3), 2))
    name = "SizeBatchSampler" if make is divided_by_size else "DistributedEvalSampler"
    text = (
        f"{name}: only one of the samplers must divide the samples between ranks, but "
        f"{name} divides them by 3, and Shard divides its batches by 2. Leave the "
        f"loader out of prepare(), or use {name}(..., num_replicas=1, rank=0)."
    )
    for _ in range(2):
        with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
            list(loader)
