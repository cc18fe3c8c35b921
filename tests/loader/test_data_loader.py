"""The DataLoader has the interface of torch's, and returns the same batches."""

from __future__ import annotations

import copy
import inspect
import json
import os
import pickle
import sys
import warnings
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.data
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    default_collate,
)
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data.datapipes.iter import IterableWrapper
from torch.utils.data.datapipes.map import SequenceWrapper

import pyparallel
from pyparallel import DataLoader
from pyparallel.core import errors
from tests.support.loader.loader_sets import (
    Making,
    Numbers,
    Records,
    Stream,
    as_list,
    same,
    seeds,
    slowly,
)
from tests.support.loader.resumed import Eager

# When an iterator ends, torch closes queues that their feeder threads may still use.
pytestmark = [
    pytest.mark.cuda_torch,
    pytest.mark.asan,
    pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    # Whole epochs are held here, and whichever test is the first is warned of it.
    pytest.mark.filterwarnings(r"ignore:\[PP201\]"),
    pytest.mark.timeout(120),
]


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(3)


def compare(
    dataset: Any, epochs: int = 2, ours: dict[str, Any] | None = None, **options: Any
) -> Any:
    """Compare the epochs of both loaders, and return what ours gave.

    ``ours`` has the options that torch's loader does not have.
    """
    both = []
    for cls, more in ((TorchLoader, {}), (DataLoader, ours or {})):
        # A sampler and a generator have a state of their own: each loader has its own.
        torch.manual_seed(11)
        made = {k: v() if k in MADE else v for k, v in options.items()}
        loader = cls(dataset, **made, **more)
        assert isinstance(loader, TorchLoader)
        length = len(loader) if hasattr(dataset, "__len__") else None
        found = [[copy.deepcopy(batch) for batch in loader] for _ in range(epochs)]
        both.append([found, length, torch.rand(1)])
    assert same(both[1], both[0])
    return both[1][0]


#: Arguments that are given as functions that make them.
MADE = {"generator", "sampler", "batch_sampler"}


@settings(max_examples=20, deadline=None)
@given(
    length=st.integers(1, 17),
    slabs=st.sampled_from([None, 0, 1, 3]),
    options=st.fixed_dictionaries(
        {
            "num_workers": st.sampled_from([0, 1, 2]),
            "batch_size": st.sampled_from([None, 1, 2, 5, 40]),
            "drop_last": st.booleans(),
            "shuffle": st.booleans(),
            "prefetch_factor": st.sampled_from([None, 1, 3]),
            "collate_fn": st.sampled_from(
                [None, default_collate, pyparallel.collate, as_list]
            ),
        }
    ),
)
def test_any_options_return_the_batches_of_torch(
    length: int, slabs: int | None, options: dict[str, Any]
) -> None:
    if options["batch_size"] is None:
        options |= {"collate_fn": None, "drop_last": False}
    if not options["num_workers"]:
        options["prefetch_factor"] = None
    compare(Records(length), 1, {"ring_slabs": slabs}, generator=seeded, **options)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_every_start_method_and_persistent_workers(method: str) -> None:
    ours = compare(
        Records(6),
        batch_size=2,
        num_workers=2 if method == "fork" else 1,
        persistent_workers=True,
        multiprocessing_context=method,
    )
    assert ours[1][2]["name"] == ["sample 4", "sample 5"]


def by_two() -> BatchSampler:
    return BatchSampler(SequentialSampler(range(7)), 2, False)


SAMPLERS: list[dict[str, Any]] = [
    {"sampler": lambda: SubsetRandomSampler([5, 2, 9], seeded()), "batch_size": 2},
    {"sampler": lambda: RandomSampler(range(9), True, 13, seeded()), "batch_size": 4},
    {"sampler": lambda: WeightedRandomSampler([1, 2, 3], 5, True, seeded())},
    {"sampler": lambda: [[3, 1], [2]], "batch_size": None},
    {"batch_sampler": by_two},
    {"batch_sampler": lambda: [[4, 4, 4], [], [1]], "collate_fn": as_list},
    {"sampler": lambda: Eager(9), "batch_size": 2},
]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("options", SAMPLERS, ids=range(len(SAMPLERS)))
def test_samplers(options: dict[str, Any], workers: int) -> None:
    dataset: Any = Numbers(20)
    if options.get("batch_size", 1) is None:
        dataset = Making(torch.tensor)
    compare(dataset, num_workers=workers, **options)


@pytest.mark.parametrize("workers", [0, 1, 2])
@pytest.mark.parametrize("batch_size", [None, 3])
@pytest.mark.parametrize("has_len", [False, True])
def test_streams(workers: int, batch_size: int | None, has_len: bool) -> None:
    options: dict[str, Any] = {"num_workers": workers, "batch_size": batch_size}
    # torch's queue forwards the message of a worker without samples.
    for persistent in {False, workers > 0}:
        options["persistent_workers"] = persistent
        (batches,) = compare(Stream(11, has_len), 1, **options)
        samples = [int(i) for batch in batches for i in batch.view(-1)]
        assert sorted(samples) == list(range(11))


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", [IterableWrapper, SequenceWrapper])
def test_datapipes(kind: Any, workers: int) -> None:
    compare(kind(range(6)), batch_size=2, num_workers=workers)
    if workers:
        with pytest.raises(TypeError, match="torch's own iterator reads in processes"):
            DataLoader(kind(range(6)), num_workers=workers, worker_method="thread")


def test_batches_out_of_order_are_all_there() -> None:
    options: dict[str, Any] = {"num_workers": 2, "in_order": False}
    loader = DataLoader(Numbers(24), 2, collate_fn=slowly, **options)
    firsts = sorted(batch[:, 0].tolist() for batch in loader)
    assert firsts == [[i, i + 1] for i in range(0, 24, 2)]


def fail_in_init(worker_id: int) -> None:
    raise KeyError("init", worker_id)


def test_an_error_in_worker_init_fn_arrives_as_with_torch() -> None:
    texts = []
    for cls in (TorchLoader, DataLoader):
        loader = cls(Numbers(), num_workers=1, worker_init_fn=fail_in_init)
        batches: Any = iter(loader)
        with pytest.raises(KeyError, match="in DataLoader worker process 0") as caught:
            next(batches)
        batches._shutdown_workers()  # the garbage collector would wait 5 s
        texts.append(str(caught.value).splitlines()[-1])
    assert texts[0] == texts[1] == "KeyError: ('init', 0)"


def test_workers_are_seeded_as_with_torch() -> None:
    compare(Numbers(4), num_workers=2, collate_fn=seeds, generator=seeded)


@pytest.mark.parametrize("made", [copy.copy, copy.deepcopy, pickle.dumps])
@pytest.mark.parametrize("persistent", [False, True])
def test_a_copy_of_a_loader_is_a_loader(made: Any, persistent: bool) -> None:
    options = {"batch_size": 2, "num_workers": 1, "persistent_workers": persistent}
    loader = DataLoader(Numbers(4), ring_slabs=3, **options)
    before = list(loader)
    again = pickle.loads(made(loader)) if made is pickle.dumps else made(loader)
    assert type(again) is DataLoader
    assert (again.ring_slabs, again.max_ring_bytes) == (3, None)
    assert again.stats().batches == 0
    assert same(list(again), before)
    assert same(list(loader), before)
    assert (again.stats().batches, loader.stats().batches) == (2, 4)


class Unknown(list[Any]):
    """A dataset without a length."""

    def __len__(self) -> int:
        raise OSError("the index of the files is not there")


class Sized(torch.utils.data.IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(())

    def __len__(self) -> int:
        return 7


LOADERS: list[tuple[Any, str]] = [
    (
        DataLoader(torch.arange(10**6), batch_size=4, shuffle=True),
        "DataLoader(dataset=<Tensor: 1000000 samples>, batch_size=4, "
        "sampler=<RandomSampler>, num_workers=0)",
    ),
    (
        DataLoader(["x" * 10**6], None, sampler=[0] * 999, num_workers=2),
        "DataLoader(dataset=<list: 1 sample>, batch_size=None, sampler=<list>, "
        "num_workers=2)",
    ),
    (
        DataLoader(range(9), batch_sampler=pyparallel.SizeBatchSampler([1] * 9, 2)),
        "DataLoader(dataset=<range: 9 samples>, batch_sampler=<SizeBatchSampler>, "
        "num_workers=0)",
    ),
    (
        DataLoader(Sized(), batch_size=2),
        "DataLoader(dataset=<Sized: 7 samples>, batch_size=2, num_workers=0)",
    ),
    (
        DataLoader(Unknown([1]), batch_size=2),
        "DataLoader(dataset=<Unknown>, batch_size=2, sampler=<SequentialSampler>, "
        "num_workers=0)",
    ),
    (
        DataLoader.__new__(DataLoader),  # as in the traceback of a refused argument
        "DataLoader(dataset=<NoneType>, batch_size=None, sampler=<NoneType>, "
        "num_workers=None)",
    ),
    (
        pyparallel.PreDataLoader(DataLoader(range(2)), "cpu"),
        "PreDataLoader(DataLoader(dataset=<range: 2 samples>, batch_size=1, "
        "sampler=<SequentialSampler>, num_workers=0), device=cpu, queue_size=2)",
    ),
    (
        pyparallel.PreDataLoader([torch.zeros(10**6)], queue_size=3),
        "PreDataLoader(<list>, device=None, queue_size=3)",
    ),
    (
        pyparallel.PreDataLoader.__new__(pyparallel.PreDataLoader),
        "PreDataLoader(<NoneType>, device=None, queue_size=None)",
    ),
]


@pytest.mark.parametrize(("loader", "shown"), LOADERS)
def test_a_loader_is_shown_in_one_line_without_its_data(
    loader: Any, shown: str
) -> None:
    assert repr(loader) == str(loader) == shown


def test_torch_checks_its_own_arguments() -> None:
    with pytest.raises(ValueError, match="num_workers option should be non-negative"):
        DataLoader(Numbers(), num_workers=-1)
    with pytest.raises(ValueError, match="prefetch_factor"):
        DataLoader(Numbers(), prefetch_factor=2)


@pytest.mark.parametrize(
    ("arguments", "kind", "text"),
    [
        (
            {"num_workers": 1.5},
            TypeError,
            "DataLoader: num_workers must be an integer of 0 or more, but is 1.5 "
            "(float).",
        ),
        (
            {"prefetch_factor": 0},
            ValueError,
            "DataLoader: prefetch_factor must be an integer of 1 or more, but is 0.",
        ),
        (
            {"num_workers": None},
            TypeError,
            "DataLoader: num_workers must be an integer of 0 or more, but is None "
            "(None).",
        ),
        (
            {"prefetch_factor": "2"},
            TypeError,
            "DataLoader: prefetch_factor must be None or an integer of 0 or more, but "
            "is '2' (str).",
        ),
        (
            {"timeout": None},
            TypeError,
            "DataLoader: timeout must be a number of seconds, 0 for no limit, but is "
            "None (None).",
        ),
        (
            {"timeout": float("nan")},
            TypeError,
            "DataLoader: timeout must be a number of seconds, 0 for no limit, but is "
            "nan (float).",
        ),
    ],
)
def test_numbers_with_which_no_worker_starts_are_refused(
    arguments: dict[str, Any], kind: type[Exception], text: str
) -> None:
    with pytest.raises(kind) as caught:
        DataLoader(Numbers(), **{"num_workers": 1, **arguments})
    assert isinstance(caught.value, AssertionError) and str(caught.value) == text


@pytest.mark.parametrize("worker_method", ["multiprocessing", "thread"])
@pytest.mark.parametrize(
    ("name", "value", "plain"),
    [
        ("batch_size", np.int64(2), 2),
        ("drop_last", np.bool_(True), True),
        ("num_workers", np.uint8(2), 2),
        ("num_workers", torch.tensor(2), 2),
        ("prefetch_factor", np.int32(2), 2),
        ("ring_slabs", np.int16(8), 8),
        ("max_ring_bytes", np.uint32(1 << 30), 1 << 30),
        ("snapshot_every_n_steps", np.int64(1), 1),
        ("timeout", np.float16(50), 50),
        ("timeout", torch.tensor(50.0), 50),
        ("timeout", Fraction(50), 50),
    ],
)
def test_scalars_of_numpy_and_torch_are_ordinary_numbers(
    worker_method: Any, name: str, value: Any, plain: Any
) -> None:
    arguments = {"batch_size": 2, "num_workers": 2, "worker_method": worker_method}
    loaders: list[Any] = [
        DataLoader(range(5), **{**arguments, name: each}) for each in (value, plain)
    ]
    batches = iter(loaders[0])
    assert next(batches).tolist() == [0, 1]
    loaders[1].load_state_dict(json.loads(json.dumps(loaders[0].state_dict())))
    rest = [batch.tolist() for batch in batches]
    assert rest == [batch.tolist() for batch in loaders[1]]
    assert rest == ([[2, 3]] if name == "drop_last" else [[2, 3], [4]])
    # Libraries copy a loader in this way, see Note [copies].
    data, timeout = loaders[0].dataset, loaders[0].timeout
    copied: Any = TorchLoader(data, num_workers=1, timeout=timeout)
    assert type(copied) is DataLoader


OURS = {"ring_slabs", "max_ring_bytes", "sample_seeds", "snapshot_every_n_steps"}
OURS |= {"on_error", "max_errors", "replay_dataset", "worker_method"}


def test_the_signature_is_torchs_with_types() -> None:
    found = dict(inspect.signature(DataLoader).parameters)
    assert all(p.annotation is not inspect.Parameter.empty for p in found.values())
    ours = {name: found.pop(name) for name in OURS}
    assert {p.kind for p in ours.values()} == {inspect.Parameter.KEYWORD_ONLY}
    expected = inspect.signature(torch.utils.data.DataLoader).parameters
    assert [(p.name, p.kind, p.default) for p in found.values()] == [
        (p.name, p.kind, p.default) for p in expected.values()
    ]


def test_every_argument_arrives() -> None:
    generator = torch.Generator()
    given: dict[str, Any] = {
        **{"drop_last": True, "num_workers": 1, "timeout": 7.0},
        **{"collate_fn": list, "worker_init_fn": print, "generator": generator},
        **{"prefetch_factor": 5, "persistent_workers": True, "in_order": False},
        **{"pin_memory": True, "pin_memory_device": "cuda"},
    }
    loader = DataLoader(range(7), 3, None, [1, 0], **given)
    assert {name: getattr(loader, name) for name in given} == given
    assert loader.sampler == [1, 0]


@pytest.fixture
def heard(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """All warnings of a test."""
    monkeypatch.setattr(errors, "_warned", set())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield caught


def test_too_many_workers_are_warned_of_once_at_the_users_line(
    heard: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0}, raising=False)
    line = sys._getframe().f_lineno + 1
    loader = DataLoader(range(2), num_workers=2)
    assert len(list(loader)) == len(list(loader)) == 2
    (found,) = [each for each in heard if "fork" not in str(each.message)]
    text = "This DataLoader will create 2 worker processes in total."
    assert str(found.message).startswith(text)
    assert (found.filename, found.lineno) == (__file__, line)


def test_a_warning_without_a_line_of_the_user_is_given(heard: list[Any]) -> None:
    samples: Any = [{"a": 1}, {"a": 2, "b": 3}]
    list(
        pyparallel.PreDataLoader(
            DataLoader(samples, collate_fn=pyparallel.collate, batch_size=2)
        )
    )
    (found,) = heard
    assert str(found.message).startswith("[PP101]")


def test_all_errors_have_one_base() -> None:
    found = [
        value
        for value in vars(errors).values()
        if isinstance(value, type) and issubclass(value, Exception)
        if value.__module__ == errors.__name__ and not issubclass(value, Warning)
    ]
    assert len(found) > 12
    assert pyparallel.Error.__bases__ == (Exception,)
    for error in found:
        assert issubclass(error, pyparallel.Error), error
        assert error is pyparallel.Error or len(error.__bases__) > 1
