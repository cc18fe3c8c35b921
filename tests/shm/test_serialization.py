"""Serialization without processes: batches are restored, in every kind of memory."""

from __future__ import annotations

import pickle
from multiprocessing import resource_sharer
from typing import Any

import numpy as np
import pytest
import torch

import pyparallel
from pyparallel.batch import allocation
from pyparallel.shm import memfd, messages
from pyparallel.shm.messages import LazySlab
from pyparallel.shm.ring import FREE, Ring
from tests.support.loader.loader_sets import Scene, num_fds, same
from tests.support.loader.ring_workers import Received, Worker, send

HOLDER = 2


def through(ring: Ring | None, make: Any) -> tuple[Any, Received]:
    """Return a worker's batch, and the received batch."""
    lazy = LazySlab(ring, HOLDER, -1)
    with allocation.allocate_from(lazy):
        batch = make()
    if lazy.slab is not None:  # drop the batch like a worker, though a test keeps it
        lazy.slab._owner = lambda: None
    return batch, send([batch], lazy)


def test_a_tensor_at_two_places_is_one_and_two_views_are_two() -> None:
    ring = Ring(1, 1 << 20)
    base = torch.arange(100.0)
    scene = Scene(1)
    batch, received = through(ring, lambda: [base, {"x": base}, base[10:], scene])
    opened = received.batch
    assert opened[0] is opened[1]["x"]
    assert opened[3].image is opened[3].again
    assert same(opened, batch)
    opened[0].zero_()
    assert opened[2].tolist() == list(range(10, 100))


def test_an_expanded_tensor_is_sent_in_its_stored_size() -> None:
    wide = torch.tensor([3.0]).expand(1 << 22)
    _, received = through(Ring(1, 1 << 20), lambda: [wide, torch.ones(2)])
    arrived, beside = received.batch
    assert arrived.shape == wide.shape and arrived[-1] == 3 and beside.sum() == 2
    nbytes = arrived.untyped_storage().nbytes()
    assert nbytes == 4


def test_tensors_in_the_slab_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    ring, packed = Ring(1, 1 << 20), []
    pack = messages.backend.pack

    def record(plan: Any, tensors: Any, *others: Any) -> Any:
        packed.append([tensor.shape for tensor in tensors])
        return pack(plan, tensors, *others)

    def make() -> Any:
        made = allocation.empty((300, 70), torch.float32, torch.device("cpu"))
        small = pyparallel.collate([torch.ones(2)] * 2)
        return [torch.ones(3), made.fill_(2), made[3:5], small]

    monkeypatch.setattr(messages.backend, "pack", record)
    batch, received = through(ring, make)
    assert packed == [[(3,), (2, 70), (2, 2)]]
    assert same(received.batch, batch)
    assert received.batch[1].data_ptr() == batch[1].data_ptr()


@pytest.mark.parametrize("values", [torch.arange(5), torch.empty(0, 3)])
def test_a_default_device_does_not_matter(values: torch.Tensor) -> None:
    _, received = through(None, lambda: [values])
    with torch.device("meta"):
        (arrived,) = received.batch
    assert same(arrived, values)


def test_fresh_memory_keeps_no_descriptor_on_either_side() -> None:
    def there_and_back(value: int) -> torch.Tensor:
        return memfd.receive(memfd.write_new(64, lambda memory: memory.fill_(value)))

    there_and_back(0)  # starts what multiprocessing has for all that is sent
    resource_sharer.stop(10)  # it closes its remaining descriptors
    before = num_fds()
    arrived = [there_and_back(i) for i in range(5)]
    resource_sharer.stop(10)
    assert num_fds() == before
    assert [int(each[-1]) for each in arrived] == [0, 1, 2, 3, 4]
    resource_sharer.stop(10)


def test_where_there_are_no_slabs_all_is_sent_as_torch_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(memfd, "is_supported", lambda: False)
    batch = [torch.arange(5), np.arange(5000.0), Scene(2)]
    _, received = through(None, lambda: batch)
    message = received.message
    assert message.location is None and message.unsupported is not None
    assert same(received.batch, batch)


class Blob:
    """An object whose pickle has a buffer, which is no array of numpy."""

    def __init__(self, data: bytearray) -> None:
        self.data = data

    def __reduce__(self) -> Any:
        return Blob, (pickle.PickleBuffer(self.data),)


@pytest.mark.parametrize("nbytes", [1 << 8, 1 << 13])
def test_a_buffer_that_is_no_array_keeps_its_class(nbytes: int) -> None:
    made = [Blob(bytearray(range(256)) * (nbytes // 256)), torch.ones(1 << 13)]
    _, received = through(Ring(1, 1 << 20), lambda: made)
    found = received.batch[0].data
    assert type(found) is bytearray and found == made[0].data


def test_a_batch_that_cannot_be_pickled_raises_the_error_of_pickle() -> None:
    ring = Ring(1, 1 << 12)
    with pytest.raises((AttributeError, pickle.PicklingError)):
        Worker(ring, lambda samples: [torch.ones(2), lambda: 1]).make(None)
    assert ring.holders() == [FREE]


def test_a_message_is_unpickled_only_with_its_tensors() -> None:
    ring = Ring(1, 1 << 12)
    _, received = through(ring, lambda: [torch.ones(2)])
    with pytest.raises(pickle.UnpicklingError) as caught:
        pickle.loads(received.message.body)
    assert (
        str(caught.value)
        == "tensor 0 of a pickled batch is missing. Use `unpack` to unpickle."
    )
    assert messages.tensor_placeholder.__doc__
