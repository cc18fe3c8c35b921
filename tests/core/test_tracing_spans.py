"""collate, scatter, copies and steps appear in a profile, correctly nested."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import DataLoader, IterableDataset, dataloader

from pyparallel import (
    DataContainer,
    MMDataParallel,
    MMDistributedDataParallel,
    collate,
    scatter,
    scatter_kwargs,
)
from pyparallel import DataLoader as Ours
from pyparallel.transfer import to_device
from tests.support.devices.fake_device import DEVICE, FakeDevice

pytestmark = pytest.mark.cuda_torch


class Net(torch.nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 1)

    def train_step(self, x: Any, *_: Any) -> Any:
        return self(x).mean()

    val_step = train_step


def batch() -> Any:
    return collate([DataContainer(torch.ones(2), stack=True, pad_dims=None)] * 2, 2)


def ranges(body: Any) -> list[tuple[str, str | None]]:
    """Return every range of the package with the one of its ranges around it."""
    with profile(activities=[ProfilerActivity.CPU]) as watched:
        body()
    found = []
    for event in watched.events():
        if event.name.startswith("pyparallel."):
            parent = event.cpu_parent
            while parent and not parent.name.startswith("pyparallel."):
                parent = parent.cpu_parent
            found.append((event.name, parent and parent.name))
    return sorted(found, key=str)


def test_collate_and_both_scatters_are_ranges():
    made = batch()
    assert ranges(batch) == [("pyparallel.collate", None)]
    assert ranges(lambda: scatter(made, [-1])) == [("pyparallel.scatter", None)]
    both = ranges(lambda: scatter_kwargs((made,), {}, [-1]))
    assert both == [("pyparallel.scatter", None)]


def test_an_iterator_without_workers_is_a_range_as_torchs_is():
    for cls, name in (
        (DataLoader, "_SingleProcessDataLoaderIter"),
        (Ours, "Epoch"),
    ):
        iterator = iter(cls(range(6), 2))
        next(iterator)
        with profile(activities=[ProfilerActivity.CPU]) as watched:
            next(iterator)
        names = [event.name for event in watched.events()]
        assert names.count(f"enumerate(DataLoader)#{name}.__next__") == 1


def test_a_method_that_another_library_put_on_torchs_iterator_runs(monkeypatch):
    """As tracers do, ours among them; also while an iterator is in use."""
    seen = []
    inherited = dataloader._BaseDataLoaderIter.__next__

    @functools.wraps(inherited)
    def traced(iterator: Any) -> Any:
        seen.append(inherited(iterator).tolist())
        return torch.tensor(-1)

    iterator = iter(Ours(range(6), 2))
    assert next(iterator).tolist() == [0, 1]
    monkeypatch.setattr(dataloader._BaseDataLoaderIter, "__next__", traced)
    assert next(iterator).tolist() == -1
    assert seen == [[2, 3]]
    monkeypatch.undo()
    assert next(iterator).tolist() == [4, 5]


def test_an_iterable_dataset_longer_than_its_length_is_warned_of_as_by_torch():
    class Longer(IterableDataset[int]):
        def __len__(self) -> int:
            return 1

        def __iter__(self) -> Any:
            return iter(range(3))

    for cls in (DataLoader, Ours):
        loader = cls(Longer(), batch_size=None)
        assert len(loader) == 1
        with pytest.warns(UserWarning, match="was reported to be 1") as caught:
            assert list(loader) == [0, 1, 2]
        assert len(caught) == 2


def test_a_copy_packs_while_it_is_sent():
    with FakeDevice() as device:
        leaves = [torch.ones(3), torch.ones(4)]
        found = ranges(lambda: to_device.send(leaves, DEVICE, device).wait())
    assert found == [("pyparallel.pack", "pyparallel.send"), ("pyparallel.send", None)]


STEP = [("pyparallel.scatter", "pyparallel.step"), ("pyparallel.step", None)]


@pytest.mark.parametrize("name", ["train_step", "val_step"])
def test_a_step_of_data_parallel_contains_its_scatter_and_the_model(name):
    model, made = MMDataParallel(Net(), [-1]), batch()
    assert ranges(lambda: getattr(model, name)(made, None)) == STEP
    with profile(activities=[ProfilerActivity.CPU]) as watched:
        getattr(model, name)(made, None)
    (linear,) = [e for e in watched.events() if e.name == "aten::linear"]
    assert linear.cpu_parent.name == "pyparallel.step"


@pytest.fixture
def one_rank(tmp_path):
    store = f"file://{tmp_path}/store"
    dist.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("name", ["train_step", "val_step"])
def test_a_step_of_ddp_scatters_within_it(one_rank, name):
    model, made = MMDistributedDataParallel(Net()), batch()
    assert ranges(lambda: getattr(model, name)(made, None)) == STEP
    # The gradients of the step are reduced by torch as ever.
    model.train_step(batch(), None).backward()
    assert model.module.weight.grad.tolist() == [[1.0, 1.0]]
