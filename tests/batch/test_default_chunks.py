"""No sample of a batch is lost if the chunk size is not set."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import IterableDataset

import pyparallel
import pyparallel.mmcv
from pyparallel import (
    BatchWarning,
    DataContainer,
    DataLoader,
    collate,
    scatter,
)
from pyparallel.core.errors import _warned

pytestmark = pytest.mark.usefixtures("forked")

TEXT = (
    "[PP104] DataContainer: a batch should have one chunk for each device, but has 3 "
    "chunks of 1 sample, because collate got no samples_per_gpu. data[0] is 1 sample "
    "of 3. For one device use partial(collate, samples_per_gpu=3), or "
    "collate_fn=collate in pyparallel.DataLoader. Pass samples_per_gpu=1 to keep these "
    "chunks."
)


def sample(i: int) -> dict[str, Any]:
    return {
        "img": DataContainer(
            torch.full((1, 1 + i % 2), float(i)), stack=True, pad_dims=1
        ),
        "boxes": DataContainer(torch.ones(i, 4)),
        "points": DataContainer(torch.ones(i, 3), ragged=True),
        "meta": DataContainer(i, cpu_only=True),
        "label": i,
    }


SAMPLES: Any = [sample(i) for i in range(7)]


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return map(sample, range(7))


def sizes(batch: dict[str, Any]) -> set[tuple[int, ...]]:
    """Return the numbers of samples in the chunks of each field."""
    names = ("img", "boxes", "points", "meta")
    return {tuple(map(len, batch[name].data)) for name in names}


def read(batch: Any) -> list[str]:
    """Return the warnings of code of a user that reads a batch."""
    _warned.discard("PP104 ")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert batch["img"].data[0] is batch["img"].data[0]
        assert batch["meta"][0] is batch["meta"].data[0]
    _warned.discard("PP104 ")
    assert all(warning.category is BatchWarning for warning in caught)
    assert {warning.filename for warning in caught} <= {__file__}
    return [str(warning.message) for warning in caught]


# ------------------------------------------------------------------- the loader binds
@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("dataset", [SAMPLES, Stream()], ids=["map", "iterable"])
def test_a_batch_is_one_chunk_also_the_last_one(dataset: Any, num_workers: int) -> None:
    loader = DataLoader(dataset, 3, collate_fn=collate, num_workers=num_workers)
    found = list(loader)
    assert [sizes(batch) for batch in found] == [{(3,)}, {(3,)}, {(1,)}]
    assert [batch["label"].tolist() for batch in found] == [[0, 1, 2], [3, 4, 5], [6]]
    assert [m for batch in found for m in batch["meta"].data[0]] == list(range(7))
    assert not any(map(read, found))


@pytest.mark.parametrize(
    "function",
    [
        partial(collate),
        partial(collate, samples_per_gpu=1),
        lambda samples: collate(samples),
        pyparallel.mmcv.collate,
    ],
    ids=["partial", "given", "function", "mmcv"],
)
def test_other_functions_are_called_unchanged(function: Callable[..., Any]) -> None:
    loader = DataLoader(SAMPLES, 4, collate_fn=function)
    assert loader.collate_fn is function
    assert [len(batch["img"].data) for batch in loader] == [4, 3]


# ------------------------------------------------------------------- the user is warned
def batch_of(num_samples: int, **options: Any) -> Any:
    return collate([sample(i) for i in range(num_samples)], **options)


def test_reading_chunks_of_the_default_size_is_warned_of_once() -> None:
    assert read(batch_of(3)) == [TEXT]
    (batch,) = TorchLoader(SAMPLES[:3], 3, collate_fn=collate)
    assert read(batch) == [TEXT]


@pytest.mark.parametrize(
    "batch",
    [
        batch_of(3, samples_per_gpu=1),
        batch_of(3, samples_per_gpu=2),
        batch_of(1),
        pyparallel.mmcv.collate([sample(1)] * 3),
    ],
    ids=["one", "two", "a single sample", "mmcv"],
)
def test_requested_chunks_are_read_without_a_warning(batch: Any) -> None:
    assert read(batch) == []


def test_a_container_that_has_travelled_is_warned_of() -> None:
    (batch,) = DataLoader(SAMPLES[:3], 3, num_workers=1, collate_fn=partial(collate))
    moved = {key: batch[key].to("cpu") for key in ("img", "meta")}
    for each in (batch, copy.deepcopy(batch), pickle.loads(pickle.dumps(batch)), moved):
        assert read(each) == [TEXT]


def test_the_package_may_read() -> None:
    batch = batch_of(3)
    _warned.discard("PP104 ")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        parts = scatter(batch, ["cpu", "cpu", "cpu"])
        assert [part["meta"] for part in parts] == [[0], [1], [2]]
        loader = DataLoader([0], collate_fn=lambda _: batch)
        assert list(loader) == [batch] and loader.stats().nbytes > 0
