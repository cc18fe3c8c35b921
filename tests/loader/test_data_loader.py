"""The DataLoader returns the batches of torch's, for the same arguments."""

from __future__ import annotations

import copy
import itertools
import pickle
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loader_sets import (
    Making,
    Noting,
    Numbers,
    Records,
    Stream,
    as_list,
    same,
    seeds,
    slowly,
)
from torch.utils.data import (
    BatchSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    default_collate,
)
from torch.utils.data import DataLoader as TorchLoader

import pyparallel

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


def compare(dataset: Any, epochs: int = 1, ordered: bool = True, **options: Any) -> Any:
    """Compare two epochs of both loaders, and return what ours gave."""
    both = []
    for cls in (TorchLoader, pyparallel.DataLoader):
        # A sampler and a generator have a state of their own: each loader has its own.
        torch.manual_seed(11)
        loader = cls(
            dataset, **{k: v() if k in MADE else v for k, v in options.items()}
        )
        assert isinstance(loader, TorchLoader)
        length = len(loader) if hasattr(dataset, "__len__") else None
        made = [list(loader) for _ in range(epochs)]
        assert length is None or all(len(epoch) == length for epoch in made)
        both.append(made)
    theirs, ours = both
    if not ordered:
        theirs, ours = (
            [sorted(epoch, key=lambda batch: batch.tolist()) for epoch in made]
            for made in (theirs, ours)
        )
    assert same(ours, theirs)
    return ours


#: Arguments that are given as functions that make them.
MADE = {"generator", "sampler", "batch_sampler"}


@settings(max_examples=20, deadline=None)
@given(
    workers=st.sampled_from([0, 1, 2]),
    length=st.integers(1, 17),
    batch_size=st.sampled_from([None, 1, 2, 5, 40]),
    drop_last=st.booleans(),
    shuffle=st.booleans(),
    prefetch=st.sampled_from([None, 1, 3]),
    collate_fn=st.sampled_from([None, default_collate, pyparallel.collate, as_list]),
    slabs=st.sampled_from([None, 0, 1, 3]),
)
def test_any_options_return_the_batches_of_torch(
    workers: int,
    length: int,
    batch_size: int | None,
    drop_last: bool,
    shuffle: bool,
    prefetch: int | None,
    collate_fn: Any,
    slabs: int | None,
) -> None:
    options: dict[str, Any] = {"num_workers": workers, "shuffle": shuffle}
    options |= {"batch_size": batch_size, "generator": seeded}
    if batch_size is None:
        collate_fn = None
    else:
        options["drop_last"] = drop_last
    if workers:
        options["prefetch_factor"] = prefetch
    both = []
    for cls, more in (
        (TorchLoader, {}),
        (pyparallel.DataLoader, {"ring_slabs": slabs}),
    ):
        made = {k: v() if k in MADE else v for k, v in options.items()}
        loader = cls(Records(length), collate_fn=collate_fn, **made, **more)
        both.append([copy.deepcopy(batch) for batch in loader])
    assert same(both[1], both[0])


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_every_start_method_and_persistent_workers(method: str) -> None:
    ours = compare(
        Records(6),
        epochs=2,
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
]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("options", SAMPLERS, ids=range(len(SAMPLERS)))
def test_samplers(options: dict[str, Any], workers: int) -> None:
    dataset: Any = Numbers(20)
    if options.get("batch_size", 1) is None:
        dataset = Making(torch.tensor)
    compare(dataset, num_workers=workers, epochs=2, **options)


@pytest.mark.parametrize("workers", [0, 1, 2])
@pytest.mark.parametrize("batch_size", [None, 3])
@pytest.mark.parametrize("has_len", [False, True])
def test_streams(workers: int, batch_size: int | None, has_len: bool) -> None:
    dataset = Stream(11, has_len)
    # torch's queue forwards the message of a worker without samples.
    for persistent in {False, workers > 0}:
        options = {"num_workers": workers, "persistent_workers": persistent}
        both = [
            [b.tolist() for b in cls(dataset, batch_size=batch_size, **options)]
            for cls in (TorchLoader, pyparallel.DataLoader)
        ]
        assert both[0] == both[1]
        flat = itertools.chain(*both[1]) if batch_size else both[1]
        assert sorted(flat) == list(range(11))


def test_a_stream_longer_than_it_said_warns_as_with_torch() -> None:
    for cls in (TorchLoader, pyparallel.DataLoader):
        dataset = Stream(3, True)
        loader = cls(dataset, batch_size=None, num_workers=1)
        assert len(loader) == 3
        dataset.length = 4
        with pytest.warns(UserWarning, match="was reported to be 3.*but 4 samples"):
            assert len(list(loader)) == 4


def test_batches_out_of_order_are_all_there() -> None:
    compare(
        Numbers(24),
        ordered=False,
        in_order=False,
        batch_size=2,
        num_workers=2,
        collate_fn=slowly,
    )


def test_worker_init_fn_is_called_in_each_worker_with_its_number() -> None:
    dataset = Making(torch.tensor, 6)
    options = {"num_workers": 2, "worker_init_fn": Noting()}
    ((*batches,),) = compare(dataset, **options)
    assert [batch.tolist() for batch in batches] == [[[i, i % 2]] for i in range(6)]


def test_an_error_in_worker_init_fn_arrives_as_with_torch() -> None:
    texts = []
    for cls in (TorchLoader, pyparallel.DataLoader):
        loader = cls(Numbers(), num_workers=1, worker_init_fn=Noting(spoil=True))
        with pytest.raises(KeyError, match="in DataLoader worker process 0") as caught:
            list(loader)
        texts.append(str(caught.value).splitlines()[-1])
    assert texts[0] == texts[1] == "KeyError: ('init', 0)"


def test_workers_are_seeded_as_with_torch() -> None:
    compare(Numbers(4), num_workers=2, collate_fn=seeds, generator=seeded, epochs=2)


@pytest.mark.parametrize("made", [copy.copy, copy.deepcopy, pickle.dumps])
@pytest.mark.parametrize("persistent", [False, True])
def test_a_copy_of_a_loader_is_a_loader(made: Any, persistent: bool) -> None:
    options = {"batch_size": 2, "num_workers": 1, "persistent_workers": persistent}
    loader = pyparallel.DataLoader(Numbers(4), ring_slabs=3, **options)
    before = list(loader)
    again = pickle.loads(made(loader)) if made is pickle.dumps else made(loader)
    assert type(again) is pyparallel.DataLoader
    assert (again.ring_slabs, again.max_ring_bytes) == (3, None)
    assert again.stats().batches == 0
    assert same(list(again), before)
    assert same(list(loader), before)
    assert (again.stats().batches, loader.stats().batches) == (2, 4)


def test_two_iterators_of_one_loader_at_a_time() -> None:
    loader = pyparallel.DataLoader(Numbers(8), batch_size=2, num_workers=1)
    pairs = list(zip(loader, loader, strict=True))
    assert [a[0, 0].item() for a, _ in pairs] == [0, 2, 4, 6]
    assert all(same(a, b) for a, b in pairs)
    assert loader.stats().ring_hits == 8


def test_arguments_of_the_ring_are_checked() -> None:
    cases: list[tuple[str, Any, type[Exception], str]] = [
        ("ring_slabs", -1, ValueError, "-1"),
        ("ring_slabs", 1.5, TypeError, "1.5 (float)"),
        ("ring_slabs", "4", TypeError, "'4' (str)"),
        ("max_ring_bytes", -5, ValueError, "-5"),
        ("max_ring_bytes", 1e9, TypeError, "1000000000.0 (float)"),
    ]
    for name, value, kind, found in cases:
        with pytest.raises(kind) as caught:
            pyparallel.DataLoader(Numbers(), **{name: value})
        assert str(caught.value) == (
            f"DataLoader: {name} must be None or an integer of 0 or more, "
            f"but is {found}."
        )


def test_torch_checks_its_own_arguments() -> None:
    with pytest.raises(ValueError, match="num_workers option should be non-negative"):
        pyparallel.DataLoader(Numbers(), num_workers=-1)
    with pytest.raises(ValueError, match="prefetch_factor"):
        pyparallel.DataLoader(Numbers(), prefetch_factor=2)


def test_a_subscript_is_an_annotation() -> None:
    loader = pyparallel.DataLoader[torch.Tensor](Numbers(2), num_workers=1)
    assert [batch[0, 0].item() for batch in loader] == [0, 1]


@pytest.mark.parametrize(
    "options",
    [{"ring_slabs": 1 << 40}, {"prefetch_factor": 70_000}, {"max_ring_bytes": 1 << 80}],
    ids=str,
)
def test_numbers_beyond_those_of_a_ring_are_no_limit(options: Any) -> None:
    loader = pyparallel.DataLoader(Numbers(2), num_workers=1, **options)
    assert [batch[0, 0].item() for batch in loader] == [0, 1]
    assert loader.stats().ring_hits == 2
