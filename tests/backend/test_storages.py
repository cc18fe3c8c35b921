"""Tensors of a batch have their own storages, as in torch's loader."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from torch import multiprocessing
from torch.distributed import distributed_c10d

import pyparallel
from pyparallel import DataContainer as DC

pytestmark = pytest.mark.usefixtures("forked")

LOADERS = (torch.utils.data.DataLoader, pyparallel.DataLoader)


def fields(i: int) -> dict[str, Any]:
    """Return a few bytes beside a few that are many."""
    return {
        "a": torch.tensor(i),
        "b": torch.arange(i, i + 20.0),
        "image": torch.full((3, 200, 200), i, dtype=torch.uint8),
        "names": {"ids": np.arange(i, i + 3), "flag": i % 2 == 0},
    }


FIELDS = [fields(i) for i in range(8)]


def first_batch(loader: type, dataset: Any, workers: int, **options: Any) -> Any:
    made = loader(dataset, batch_size=4, num_workers=workers, **options)
    return next(iter(made))


def tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [each for item in value.values() for each in tensors(item)]


def saved(value: Any) -> int:
    file = io.BytesIO()
    torch.save(value, file)
    return len(file.getvalue())


def num_bytes(data: bytes, tensor: torch.Tensor) -> int:
    """Return the length without the address of the storage: its digits vary."""
    address = str(tensor.untyped_storage()._cdata).encode()
    assert address in data
    return len(data.replace(address, b""))


def pickled(tensor: torch.Tensor) -> int:
    return num_bytes(pickle.dumps(tensor), tensor)


def gathered(tensor: torch.Tensor) -> int:
    """Return the bytes that all_gather_object and gather_object send."""
    cpu = torch.device("cpu")
    data = distributed_c10d._object_to_tensor(tensor, cpu, None)[0]
    return num_bytes(bytes(data.tolist()), tensor)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_serialized_tensor_has_the_size_of_torch(workers):
    expected, found = (first_batch(each, FIELDS, workers) for each in LOADERS)
    for one, other in zip(tensors(expected), tensors(found), strict=True):
        assert other.equal(one)
        for size in (saved, gathered, pickled):
            assert size(other) == size(one)
        for tensor in (other, copy.deepcopy(other), pickle.loads(pickle.dumps(other))):
            assert tensor.untyped_storage().nbytes() == one.untyped_storage().nbytes()
            assert tensor.storage_offset() == 0 and tensor.equal(one)
    assert saved(found) == saved(expected)


def collate_and_grow(samples: list[Any]) -> Any:
    """Write more into one tensor of a batch than it holds."""
    batch = pyparallel.collate(samples, samples_per_gpu=len(samples))
    try:
        torch.add(torch.zeros(3, 3, 200, 200), 1, out=batch["first"].data[0])
    except RuntimeError as error:
        batch["error"] = str(error)
    return batch


def pair(i: int) -> dict[str, Any]:
    image = fields(i)["image"].float()
    return {"first": DC(image[:2], stack=True), "second": DC(image, stack=True)}


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
def test_no_tensor_of_a_worker_grows_into_the_next_one():
    batch = first_batch(
        pyparallel.DataLoader, list(map(pair, range(4))), 1, collate_fn=collate_and_grow
    )
    assert batch["error"] == "Trying to resize storage that is not resizable"
    second = batch["second"].data[0]
    assert second.equal(torch.arange(4.0).view(4, 1, 1, 1).expand_as(second))


def test_a_tensor_that_is_sent_on_is_copied_alone():
    """A slab is reused when the batch dies, even while others have it mapped."""
    batch = first_batch(pyparallel.DataLoader, FIELDS, 1)
    queue = multiprocessing.get_context("fork").SimpleQueue()
    queue.put(batch["b"])
    received = queue.get()
    assert received.equal(batch["b"]) and received.is_shared()
    assert received.untyped_storage().nbytes() == received.nbytes
