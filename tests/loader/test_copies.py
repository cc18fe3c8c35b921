"""Loaders that other libraries make of a loader keep its arguments, or are refused."""

from __future__ import annotations

import copy
import gc
import inspect
import itertools
import pickle
import re
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch.utils.data
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
)

from pyparallel import DataLoader, PreDataLoader, SizeBatchSampler

pytestmark = pytest.mark.one_backend

#: The arguments that copies of accelerate and Ray have in common.
NAMES = (
    *("num_workers", "collate_fn", "pin_memory", "timeout"),
    *("worker_init_fn", "multiprocessing_context", "generator", "prefetch_factor"),
    *("persistent_workers", "in_order"),
)


class Damaged(torch.utils.data.Dataset[int]):
    """Numbers. The first and a later one raise."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        if index in (0, 5):
            raise ValueError(f"number {index} is damaged")
        return index


class Stream(IterableDataset[int]):
    """The numbers of `Damaged`, read in order."""

    def __iter__(self) -> Iterator[int]:
        return iter(map(int, range(8)))


class Shard(IterableDataset[int]):
    """A part of another stream, as accelerate makes it."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __iter__(self) -> Iterator[int]:
        return iter(self.dataset)


class Subclass(torch.utils.data.DataLoader[Any]):
    """A class with another collate function, as of Opacus."""

    def __init__(self, dataset: Any, *, collate_fn: Any, **arguments: Any) -> None:
        super().__init__(dataset, collate_fn=lambda it: collate_fn(it), **arguments)


class Rewritten(torch.utils.data.DataLoader[Any]):
    """A class that does not call torch's constructor, as of torchdata."""

    def __init__(self, dataset: Any, timeout: float = 0, **arguments: Any) -> None:
        self.timeout = timeout
        if timeout < 0:
            raise ValueError("negative")


def made_of(loader: Any, cls: Any = torch.utils.data.DataLoader) -> Any:
    """Copy a loader as accelerate does."""
    arguments = {name: getattr(loader, name) for name in NAMES}
    if isinstance(loader.dataset, IterableDataset):
        arguments["batch_size"] = loader.batch_size
        return cls(Shard(loader.dataset), **arguments)
    return cls(loader.dataset, batch_sampler=loader.batch_sampler, **arguments)


def made_for_rank(loader: Any) -> Any:
    """Copy a loader as Ray does."""
    sampler = DistributedSampler(loader.dataset, 1, 0, shuffle=False)
    arguments = {name: getattr(loader, name) for name in NAMES}
    return torch.utils.data.DataLoader(
        loader.dataset, batch_size=loader.batch_size, sampler=sampler, **arguments
    )


def numbers(loader: Any) -> list[list[int]]:
    return [batch.tolist() for batch in loader]


@pytest.mark.filterwarnings("ignore:.*is damaged:UserWarning")
@pytest.mark.parametrize("num_workers, timeout", [(0, 0), (1, 60), (1, 60.5)])
@pytest.mark.parametrize("make", [made_of, made_for_rank])
def test_a_copy_keeps_all_arguments(
    make: Callable[[Any], Any], num_workers: int, timeout: float
) -> None:
    options: Any = dict(
        num_workers=num_workers, timeout=timeout, max_ring_bytes=1 << 20
    )
    loader = DataLoader(Damaged(), 2, on_error="skip", max_errors=2, **options)
    again = make(loader)
    assert type(again) is DataLoader
    assert numbers(again) == [[1], [2, 3], [4], [6, 7]]
    assert (again.max_errors, again.max_ring_bytes, again.timeout) == (
        2,
        1 << 20,
        timeout,
    )
    assert type(vars(again)["timeout"]) is type(timeout)
    # The first loader reports the work of its copy.
    assert loader.stats().batches == again.stats().batches == 4
    assert [it.index for it in loader.sample_errors] == [0, 5]
    state = again.state_dict()
    for method in (loader.state_dict, lambda: loader.load_state_dict(state)):
        with pytest.raises(
            RuntimeError, match="on the loader that this library returned"
        ):
            method()
    # It has a position of its own after it was used itself, or without the copy.
    next(iter(loader))
    loader.state_dict()


def test_a_copy_seeds_samples_and_continues_a_loaded_state() -> None:
    loader = DataLoader(range(8), 2, sample_seeds=True)
    batches = iter(loader)
    next(batches)
    again = DataLoader(range(8), 2, sample_seeds=True)
    again.load_state_dict(loader.state_dict())
    copied = made_of(made_of(again))
    assert copied.sample_seeds
    assert numbers(copied) == [[2, 3], [4, 5], [6, 7]]


class Skipping(BatchSampler):
    """Leaves out the first batch, as the sampler of ``skip_first_batches``."""

    def __init__(self, batches: Any) -> None:
        self.batches = batches

    def __iter__(self) -> Any:
        return itertools.islice(self.batches, 1, None)


@pytest.mark.parametrize(
    "options, rule",
    [
        ({"batch_size": 2}, "yield its first 2 batches of indices again, but yields"),
        (
            {"batch_sampler": SizeBatchSampler([1] * 8, 2, shuffle=False)},
            "continue at the state of a sampler, but test_copies.Skipping has no load",
        ),
    ],
    ids=["", "with a state"],
)
def test_a_copy_that_cannot_continue_a_state_names_the_reason(
    options: dict[str, Any], rule: str
) -> None:
    first = iter(loader := DataLoader(range(8), **options))
    next(first), next(first)
    state = loader.state_dict()
    loader = DataLoader(range(8), **copy.deepcopy(options))
    loader.load_state_dict(state)
    arguments: Any = {name: getattr(loader, name) for name in NAMES}
    arguments["batch_sampler"] = Skipping(loader.batch_sampler)
    made = torch.utils.data.DataLoader(loader.dataset, **arguments)
    with pytest.raises(RuntimeError, match=rule.replace("test_copies", ".*")) as caught:
        iter(made)
    reason = r"made this loader from one .* with .*Skipping in place of .*Sampler\. "
    assert re.search(reason, str(caught.value))
    assert numbers(made_of(loader)) == [[4, 5], [6, 7]]  # the advice


class Skips:
    """Leaves out batches of a stream, as the ``SkipDataLoader`` of accelerate."""

    def __init__(self, skip_batches: int, **arguments: Any) -> None:
        self.loader = torch.utils.data.DataLoader(**arguments)


def test_a_copy_that_skips_batches_of_a_stream_twice_is_an_error() -> None:
    next(iter(loader := DataLoader(Stream(), 2)))
    state = loader.state_dict()
    for num_skipped in (0, 1):
        loader = DataLoader(Stream(), 2)
        loader.load_state_dict(state)
        arguments: Any = {name: getattr(loader, name) for name in NAMES}
        arguments.update(dataset=loader.dataset, batch_size=2)
        made = Skips(num_skipped, **arguments).loader
        if num_skipped:
            with pytest.raises(RuntimeError, match="accelerate leaves out 1 more"):
                iter(made)
        else:
            assert numbers(made) == numbers(loader)


class Divided(BatchSampler):
    """The batches of one rank of two, as the ``BatchSamplerShard`` of accelerate."""

    def __init__(self, batch_sampler: Any) -> None:
        self.batch_sampler = batch_sampler

    def __iter__(self) -> Any:
        return itertools.islice(self.batch_sampler, 0, None, 2)

    def __len__(self) -> int:
        return len(self.batch_sampler) // 2


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_copy_that_divides_batches_continues_its_own_state(num_workers: int) -> None:
    def make(seed: int) -> Any:
        order = RandomSampler(range(32), generator=torch.Generator().manual_seed(seed))
        loader = DataLoader(range(32), batch_sampler=BatchSampler(order, 2, False))
        arguments: Any = {name: getattr(loader, name) for name in NAMES}
        arguments["batch_sampler"] = Divided(loader.batch_sampler)
        arguments["num_workers"] = num_workers
        return torch.utils.data.DataLoader(loader.dataset, **arguments)

    whole = numbers(first := make(1))
    stopped, again = make(1), make(2)
    batches = iter(stopped)
    read = [next(batches).tolist() for _ in range(3)]
    again.load_state_dict(stopped.state_dict())
    assert [*read, *numbers(again)] == whole and len(whole) == 8
    assert numbers(again) == numbers(first)  # the epoch after it


def test_a_copy_of_a_stream_keeps_the_arguments() -> None:
    loader = DataLoader(Stream(), 2, on_error="skip")
    assert made_of(loader).on_error == "skip"
    arguments: Any = {name: getattr(loader, name) for name in NAMES}
    assert torch.utils.data.DataLoader(Stream(), **arguments).on_error == "skip"  # type: ignore[attr-defined]


LOST: list[Any] = [
    {"on_error": "skip"},
    {"on_error": "replace"},
    {"sample_seeds": True},
]


@pytest.mark.parametrize("options", LOST)
@pytest.mark.parametrize("cls", [Subclass, Rewritten])
def test_a_copy_of_another_class_is_refused(cls: Any, options: Any) -> None:
    loader = DataLoader(range(8), 2, **options)
    ((name, value),) = options.items()
    with pytest.raises(
        RuntimeError, match=f"{cls.__name__} cannot keep {name}={value!r}"
    ):
        made_of(loader, cls)
    # The advice.
    made_of(DataLoader(range(8), 2), cls)


@pytest.mark.parametrize("options", LOST)
def test_a_copy_without_a_state_is_refused(options: Any) -> None:
    kinds: Any = dict(num_workers=1, in_order=False)
    with pytest.raises(RuntimeError, match="cannot keep"):
        made_of(DataLoader(range(8), 2, **kinds, **options))
    # accelerate asks each loader that has the method for its state.
    assert not hasattr(made_of(DataLoader(range(8), 2, **kinds)), "state_dict")


def test_a_copy_with_another_collate_function_keeps_the_other_arguments() -> None:
    loader = DataLoader(range(4), 2, on_error="skip")
    torch_class: Any = torch.utils.data.DataLoader
    copied = torch_class(loader.dataset, collate_fn=sum, timeout=loader.timeout)
    assert (copied.on_error, copied.collate_fn) == ("skip", sum)


def test_the_class_of_torch_keeps_its_signature() -> None:
    torch_class: Any = torch.utils.data.DataLoader
    names = list(inspect.signature(torch_class.__init__).parameters)
    assert list(inspect.signature(torch_class).parameters) == names[1:]
    assert torch_class.__new__(torch_class).__class__ is torch_class


class OurSubclass(DataLoader[Any]):
    """The same after ``torch.utils.data.DataLoader = pyparallel.DataLoader``."""

    def __init__(self, dataset: Any, *, collate_fn: Any, **arguments: Any) -> None:
        super().__init__(dataset, collate_fn=lambda it: collate_fn(it), **arguments)


@pytest.mark.parametrize("cls", [DataLoader, OurSubclass])
def test_a_copy_of_our_class_keeps_the_arguments(cls: Any) -> None:
    loader = DataLoader(Damaged(), 2, on_error="skip")
    assert made_of(loader, cls).on_error == "skip"
    # Loaders that a user makes are no copies.
    val: Any = DataLoader(Damaged(), 2, timeout=loader.timeout)
    assert val.on_error == "raise"
    plain = torch.utils.data.DataLoader(range(3), timeout=loader.timeout)
    assert type(plain) is torch.utils.data.DataLoader
    assert loader.timeout == 0 and not loader.timeout < 0


class Wrapper(DataLoader[Any]):
    """A loader with the attributes of another one, as of Ray for a replaced class."""

    def __init__(self, loader: Any) -> None:
        vars(self).update(vars(loader))
        self.inner = loader

    def __iter__(self) -> Any:
        return iter(self.inner)


@pytest.mark.filterwarnings("ignore:.*is damaged:UserWarning")
def test_a_wrapper_reports_the_errors_of_the_loader_that_it_reads() -> None:
    wrapper = Wrapper(DataLoader(Damaged(), 2, on_error="skip"))
    assert numbers(wrapper) == [[1], [2, 3], [4], [6, 7]]
    assert [it.index for it in wrapper.sample_errors] == [0, 5]
    assert wrapper.stats().batches == 4
    with pytest.raises(RuntimeError, match="or reads it ahead"):
        wrapper.state_dict()
    assert pickle.loads(pickle.dumps(wrapper)).on_error == "skip"


def test_a_prefetcher_is_copied_without_a_transform_alone() -> None:
    ahead = PreDataLoader(DataLoader(range(4), 2, on_error="skip"))
    assert made_of(ahead).on_error == "skip"  # as transformers' Trainer resumes
    ahead = PreDataLoader(DataLoader(range(4), 2), transform=lambda batch: batch + 1)
    with pytest.raises(RuntimeError, match=r"PreDataLoader\(prepare\(loader\), device"):
        made_of(ahead)
    assert numbers(PreDataLoader(made_of(ahead.loader))) == [[0, 1], [2, 3]]


def test_the_timeout_is_a_number_that_keeps_no_loader_alive() -> None:
    loader = DataLoader(range(4), 2, num_workers=1, timeout=60)
    timeout, alive = loader.timeout, weakref.ref(loader)
    for plain in (copy.deepcopy(timeout), pickle.loads(pickle.dumps(timeout))):
        assert (type(plain), plain) == (int, 60)
    assert pickle.loads(pickle.dumps(loader)).timeout == 60
    del loader
    gc.collect()
    assert alive() is None and f"{timeout}" == "60"


class Saveable(torch.utils.data.DataLoader[Any]):
    """A loader that passes its arguments on, as that of SpeechBrain."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)


@pytest.mark.parametrize("make", [torch.utils.data.DataLoader, DataLoader, Saveable])
@pytest.mark.parametrize("loader", [PreDataLoader([1]), DataLoader([1])], ids=repr)
def test_a_loader_is_no_dataset(make: Any, loader: Any) -> None:
    for arguments, options in (((loader, 2), {}), ((), {"dataset": loader})):
        with pytest.raises(TypeError) as caught:
            make(*arguments, **options)
        assert str(caught.value) == (
            "DataLoader: dataset must be a data set, but is a "
            f"{type(loader).__name__}. If a framework made this call, give it a "
            "pyparallel.DataLoader."
        )
    assert numbers(Wrapper(PreDataLoader(DataLoader([1, 2], 2)))) == [[1, 2]]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_the_position_of_speechbrain_is_that_of_the_next_epoch(
    num_workers: int,
) -> None:
    def at(position: int) -> Any:
        loader: Any = DataLoader(range(6), 2, num_workers=num_workers)
        loader._speechbrain_recovery_skip_to = position  # set by its checkpoint
        return loader

    assert numbers(at(0)) == [[0, 1], [2, 3], [4, 5]]
    loader = at(1)
    batches = iter(loader)
    next(batches)
    again: Any = DataLoader(range(6), 2, num_workers=num_workers)
    again.load_state_dict(loader.state_dict())
    assert numbers(again) == numbers(batches) == [[4, 5]]
    assert numbers(loader) == [[0, 1], [2, 3], [4, 5]]
    assert numbers(at(3)) == []
    with pytest.raises(RuntimeError) as caught:
        iter(at(4))
    assert str(caught.value) == (
        "DataLoader: the sampler must have at least 4 batches, the position in the "
        "checkpoint of SpeechBrain, but has 3. Load the checkpoint of the same data "
        "and batch size."
    )
