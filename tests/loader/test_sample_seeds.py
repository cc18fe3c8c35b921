"""With sample_seeds, a sample depends only on the seed, the epoch and its index."""

from __future__ import annotations

import importlib.abc
import importlib.util
import json
import marshal
import random
import sys
import threading
from hashlib import blake2b
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Subset

from pyparallel import DataLoader
from tests.support.loader import resumed
from tests.support.loader.loader_sets import wait_for
from tests.support.loader.resumed import Case, continued, opened, uninterrupted


class Augmented(resumed.Numbers):
    """Samples that draw from every generator; later ones would see how often."""

    def __getitem__(self, index: int) -> torch.Tensor:
        info = torch.utils.data.get_worker_info()
        assert info is None or info.dataset is self
        drawn = [random.random(), np.random.rand(), float(torch.rand(()))]
        for _ in range(index % 3):
            random.random(), np.random.rand(), torch.rand(())
        return torch.tensor([index, *drawn], dtype=torch.float64)


def mixed(samples: list[torch.Tensor]) -> torch.Tensor:
    """Collate with random weights, as MixUp does."""
    weights = [random.random(), np.random.rand(), float(torch.rand(()))]
    return torch.cat([torch.stack(samples), torch.tensor([[0.0, *weights]])])


SERVED = {"num_workers": 2, "multiprocessing_context": "forkserver"}


def case(**options: Any) -> Case:
    seeds = {"sample_seeds": True, "collate_fn": mixed}
    return Case("shuffle", 11, 3, Augmented(11), {**seeds, **options}, epochs=2)


class Transform:
    """A transform with a generator of its own, as those of albumentations and MONAI."""

    def __init__(self) -> None:
        self.generator = random.Random(0)

    def set_seed(self, seed: int) -> None:
        assert type(seed) is int and 0 <= seed < 2**32
        self.generator.seed(seed)

    def __len__(self) -> int:
        return 0  # a loader must not ask for its truth


class Transformed(Augmented):
    """The samples, after the transform."""

    def __init__(self, length: int) -> None:
        super().__init__(length)
        self.transform = Transform()

    def __getitem__(self, index: int) -> torch.Tensor:
        own = torch.tensor([self.transform.generator.random()], dtype=torch.float64)
        return torch.cat([super().__getitem__(index), own])


@pytest.mark.parametrize("options", [{}, {"num_workers": 2}, SERVED], ids=str)
def test_a_function_seeds_generators_of_the_dataset(options: dict[str, Any]) -> None:
    def make(**others: Any) -> DataLoader[Any]:
        dataset = Transformed(9)
        generator = torch.Generator().manual_seed(3)
        seeds = dataset.transform.set_seed
        return DataLoader(
            dataset, 2, True, generator=generator, sample_seeds=seeds, **others
        )

    def read(loader: DataLoader[Any]) -> list[list[list[float]]]:
        return [batch.tolist() for batch in loader]

    whole = make()
    expected = [read(whole) for _ in range(2)]
    drawn = [row[-1] for epoch in expected for batch in epoch for row in batch]
    assert len({*drawn}) == 18
    loader = make(**options)
    assert [read(loader) for _ in range(2)] == expected
    batches = iter(begun := make())
    assert [next(batches).tolist() for _ in range(2)] == expected[0][:2]
    resumed_loader = make(**options)
    resumed_loader.load_state_dict(json.loads(json.dumps(begun.state_dict())))
    assert read(resumed_loader) == expected[0][2:]


@pytest.mark.slow
@pytest.mark.parametrize(
    "before, after", [({}, 2), ({"num_workers": 2}, 3), (SERVED, 0)]
)
def test_a_resumed_run_draws_the_same(before: dict[str, Any], after: int) -> None:
    expected, _ = uninterrupted(case())
    assert len({str(batch) for batch in expected}) == 8
    batches, stops = uninterrupted(case(**before))
    assert batches == expected
    for stop in (stops[0], stops[3], stops[5], stops[6], stops[8]):
        found = continued(case(num_workers=after), stop)
        assert found == batches[stop.given :], (stop.epoch, stop.moment)


#: A dataset and options of its loader. A `Subset` reads batches.
SEEDED: list[tuple[Any, dict[str, Any]]] = [
    (Augmented(5), {"num_workers": 2, "persistent_workers": True}),
    (Augmented(5), {"batch_size": None}),
    (Subset(Augmented(5), range(5)), {"batch_size": 3}),  # type: ignore[arg-type]
]


@pytest.mark.parametrize("dataset, options", SEEDED, ids=range(len(SEEDED)))
@pytest.mark.parametrize("has_generator", [False, True])
def test_the_states_are_those_that_the_documentation_derives(
    dataset: Any, options: dict[str, Any], has_generator: bool
) -> None:
    torch.manual_seed(6 if has_generator else 12345)
    if has_generator:
        options = {**options, "generator": torch.Generator().manual_seed(12345)}
    loader = DataLoader(dataset, sample_seeds=True, **options)
    for epoch in range(2):
        rows = torch.cat(list(loader)).view(5, 4)
        for index, *drawn in rows.tolist():
            data = marshal.dumps((12345, epoch, "sample", int(index)), 2)
            key = blake2b(data, digest_size=32).digest()
            source = torch.Generator().manual_seed(int.from_bytes(key[:8], "little"))
            numbers = np.random.RandomState(int.from_bytes(key[16:20], "little"))
            assert drawn == [
                random.Random(int.from_bytes(key[8:16], "little")).random(),
                numbers.rand(),
                float(torch.rand((), generator=source)),
            ]


class Failing(Augmented):
    def __getitem__(self, index: int) -> torch.Tensor:
        sample = super().__getitem__(index)
        if index == 3:
            raise OSError("the disk")
        return sample


def test_the_callers_random_states_are_unchanged() -> None:
    resumed.seed(3)
    batches = iter(DataLoader(Failing(6), 2, sample_seeds=True))
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    next(batches)
    with pytest.raises(OSError, match="the disk"):
        next(batches)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert np.random.get_state()[1].tolist() == states[2]


class Nested(resumed.Numbers):
    """Whether a loader of its own leaves the random states alone."""

    def __getitem__(self, index: int) -> torch.Tensor:
        before = torch.get_rng_state()
        inner = DataLoader(
            resumed.Numbers(2), sample_seeds=True, generator=torch.Generator()
        )
        assert len(list(inner)) == 2
        return torch.tensor(torch.equal(torch.get_rng_state(), before))


@pytest.mark.parametrize("num_workers", [0, 1])
def test_the_random_states_of_a_dataset_with_a_loader_are_unchanged(
    num_workers: int,
) -> None:
    assert all(DataLoader(Nested(2), num_workers=num_workers))


#: A dataset and sample_seeds by the message of their error.
REFUSED: dict[str, tuple[Any, Any]] = {
    "DataLoader: with sample_seeds=True dataset must be map-style, so that each sample "
    "has an index, but is iterable (tests.support.loader.resumed.Uneven). Draw from a "
    "generator that the dataset keeps in its state_dict.": (resumed.Uneven((3,)), True),
    "DataLoader: sample_seeds must be True, False or a function, but is 1 (int).": (
        range(3),
        1,
    ),
}


def test_datasets_that_cannot_be_seeded_are_refused() -> None:
    for message, (dataset, seeds) in REFUSED.items():
        with pytest.raises(TypeError) as caught:
            DataLoader(dataset, sample_seeds=seeds)
        assert str(caught.value) == message


def test_an_index_must_be_plain_data() -> None:
    thing = object()
    loader = DataLoader({thing: 1}, sampler=[thing], sample_seeds=True)
    with pytest.raises(TypeError) as caught:
        next(iter(loader))
    assert str(caught.value) == (
        "DataLoader: with sample_seeds=True an index must be an integer, a string or a "
        f"tuple of these, but is {thing!r} (object)."
    )
    named = DataLoader(
        {"a": 1, ("b", 2): 3}, sampler=["a", ("b", 2)], sample_seeds=True
    )
    assert [int(batch) for batch in named] == [1, 3]


class SlowImport(importlib.abc.Loader):
    """Imports ``numpy.random`` while another thread asks for its state."""

    def __init__(self, other: threading.Thread) -> None:
        self.other, self.complete = other, np.random

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name == "numpy.random":
            return importlib.util.spec_from_loader(name, self)
        return None

    def exec_module(self, module: Any) -> None:
        self.other.start()
        assert wait_for(lambda: not self.other.is_alive() or self.is_importing())
        module.get_state = self.complete.get_state

    def is_importing(self) -> bool:
        frame = sys._current_frames().get(self.other.ident or 0)
        return frame is not None and "importlib" in frame.f_code.co_filename


def test_a_thread_waits_for_the_import_of_numpy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(np, "random", np.random)  # the import replaces it
    monkeypatch.delitem(sys.modules, "numpy.random")
    states: list[Any] = []
    other = threading.Thread(target=lambda: states.append(opened(DataLoader([1]))))
    monkeypatch.setattr(sys, "meta_path", [SlowImport(other), *sys.meta_path])
    importlib.import_module("numpy.random")
    other.join()
    assert [len(state["random"]["numpy"]) for state in states] == [4]
