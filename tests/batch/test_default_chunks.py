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
    MMDataParallel,
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


def sizes(batch: dict[str, Any]) -> dict[str, list[int]]:
    """Return the number of samples in each chunk of each field."""
    containers = {key: value for key, value in batch.items() if key != "label"}
    return {key: [len(chunk) for chunk in dc.data] for key, dc in containers.items()}


def whole(*numbers: int) -> list[dict[str, list[int]]]:
    names = ("img", "boxes", "points", "meta")
    return [{name: [number] for name in names} for number in numbers]


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
    assert [sizes(batch) for batch in found] == whole(3, 3, 1)
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


def test_on_several_devices_no_sample_is_lost() -> None:
    class Model(torch.nn.Linear):
        def train_step(self, data: Any, optimizer: Any = None) -> Any:
            seen.append((len(data["img"]), data["label"].tolist()))
            loss = self(data["img"]).sum()
            return {"loss": loss, "log_vars": {}, "num_samples": len(data["img"])}

    model = MMDataParallel(Model(2, 1), ["cpu", "cpu"])
    for function, parts in (
        (collate, [(4, [1, 1, 1, 1])]),
        (partial(collate, samples_per_gpu=2), [(2, [1, 1]), (2, [1, 1])]),
    ):
        seen: list[Any] = []
        loader = DataLoader([sample(1)] * 4, 4, collate_fn=function)
        outputs = [model.train_step(batch) for batch in loader]
        assert [output["num_samples"] for output in outputs] == [4]
        assert sorted(seen) == parts


# ------------------------------------------------------------------- the user is warned
def batch_of(num_samples: int, **options: Any) -> Any:
    return collate([sample(i) for i in range(num_samples)], **options)


def test_reading_chunks_of_the_default_size_is_warned_of_once() -> None:
    assert read(batch_of(3)) == [TEXT]
    (batch,) = TorchLoader(SAMPLES, 3, sampler=range(3), collate_fn=collate)
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
    loader = DataLoader(
        *(SAMPLES, 3), sampler=range(3), num_workers=1, collate_fn=partial(collate)
    )
    (batch,) = loader
    assert read(batch) == [TEXT]
    for each in (copy.deepcopy(batch), pickle.loads(pickle.dumps(batch))):
        assert read(each) == [TEXT]
    assert read({key: batch[key].to("cpu") for key in ("img", "meta")}) == [TEXT]


def test_the_package_may_read() -> None:
    batch = batch_of(3)
    _warned.discard("PP104 ")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        parts = scatter(batch, ["cpu", "cpu", "cpu"])
        assert [part["meta"] for part in parts] == [[0], [1], [2]]
        loader = DataLoader([0], collate_fn=lambda _: batch)
        assert list(loader) == [batch]
        assert loader.stats().nbytes > 0
        assert (len(batch["meta"]), list(batch["meta"])) == (3, [[0], [1], [2]])
