"""An epoch continues with another number of ranks: each sample is used once."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DistributedSampler

from pyparallel import DataLoader, SizeBatchSampler

pytestmark = pytest.mark.one_backend


def make(
    length: int,
    batch_size: int | None,
    num_ranks: int,
    rank: int,
    *,
    kind: type[DistributedSampler[Any]] = DistributedSampler,
    sampling: dict[str, Any] | None = None,
    **options: Any,
) -> DataLoader[Any]:
    data: Any = range(length)
    sampler = kind(data, num_ranks, rank, **(sampling or {}))
    return DataLoader(data, batch_size, sampler=sampler, **options)


def run_part(loaders: list[DataLoader[Any]], batches: int) -> list[list[Any]]:
    """Return the samples of each step of all ranks, for at most this many steps."""
    iterators = [iter(loader) for loader in loaders]
    steps = []
    for _ in range(batches):
        found = [next(iterator, None) for iterator in iterators]
        if any(batch is None for batch in found):
            assert all(batch is None for batch in found), "ranks differ in batches"
            break
        steps.append([i for batch in found for i in torch.as_tensor(batch).view(-1)])
    return [[int(i) for i in step] for step in steps]


def load(loaders: list[DataLoader[Any]], earlier: list[DataLoader[Any]]) -> None:
    """Load the state of the same rank, or that of the last rank in all new ranks."""
    states = [json.dumps(loader.state_dict()) for loader in earlier]
    if len(loaders) != len(states):
        states = [states[-1]] * len(loaders)
    for loader, state in zip(loaders, states, strict=True):
        loader.load_state_dict(json.loads(state))


@settings(max_examples=60, deadline=None)
@given(
    length=st.integers(1, 30),
    batch_size=st.sampled_from([None, 1, 2, 3]),
    parts=st.lists(
        st.tuples(st.integers(1, 4), st.integers(1, 3)), min_size=1, max_size=3
    ),
    last=st.integers(1, 4),
    sampling=st.builds(
        dict, shuffle=st.booleans(), seed=st.integers(0, 3), drop_last=st.booleans()
    ),
    epoch=st.integers(0, 2),
)
def test_unused_samples_are_dealt_again_each_once(
    length: int,
    batch_size: int | None,
    parts: list[tuple[int, int]],
    last: int,
    sampling: dict[str, Any],
    epoch: int,
) -> None:
    def all_ranks(num_ranks: int) -> list[DataLoader[Any]]:
        shared: Any = (length, batch_size, num_ranks)
        return [make(*shared, rank, sampling=sampling) for rank in range(num_ranks)]

    single = make(length, batch_size, 1, 0, sampling=sampling).sampler
    single.set_epoch(epoch)
    order, used = list(single), []
    loaders: list[DataLoader[Any]] = []
    for num_ranks, batches in [*parts, (last, 1000)]:
        earlier, loaders = loaders, all_ranks(num_ranks)
        if not earlier:
            for loader in loaders:
                loader.sampler.set_epoch(epoch)
        else:
            load(loaders, earlier)
        steps = run_part(loaders, batches)
        for step in steps:  # the steps of any number of ranks follow one order
            expected = order[len(used) :][: len(step)]
            assert {*expected} <= {*step}
            used += step
        if len(steps) < batches:
            break
    most = max(len(loaders), *(num_ranks for num_ranks, _ in parts))
    missing, repeated = set(range(length)) - set(used), len(used) - len(set(used))
    if sampling["drop_last"]:
        assert repeated == 0 and len(missing) < most
    else:
        assert not missing and repeated < most
    # The next epoch is that of the sampler of today.
    found = run_part(loaders, 1000)
    for loader in (fresh := all_ranks(num_ranks)):
        loader.sampler.set_epoch(epoch)
    assert found == run_part(fresh, 1000)


def by_sizes(num_ranks: int, num_workers: int) -> list[DataLoader[Any]]:
    return [
        DataLoader(
            range(23),
            batch_sampler=SizeBatchSampler(
                [1 + i % 7 for i in range(23)],
                2,
                drop_last=True,
                num_replicas=num_ranks,
                rank=rank,
            ),
            num_workers=num_workers,
        )
        for rank in range(num_ranks)
    ]


def dealt(
    sampling: dict[str, Any], num_ranks: int, num_workers: int, **options: Any
) -> list[DataLoader[Any]]:
    shared: Any = {"num_workers": num_workers, "sampling": sampling, **options}
    return [make(23, 2, num_ranks, rank, **shared) for rank in range(num_ranks)]


#: Loaders of all ranks that leave out samples at the end of an epoch.
LEAVE_OUT: dict[str, Any] = {
    "sizes": by_sizes,
    "drop_last of the sampler": partial(dealt, {"drop_last": True}),
    "drop_last of the loader": partial(dealt, {}, drop_last=True),
    "drop_last of both": partial(dealt, {"drop_last": True}, drop_last=True),
}


@pytest.mark.parametrize("num_workers", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", LEAVE_OUT)
def test_the_end_of_an_epoch_is_the_end_for_other_ranks(
    kind: str, num_workers: int
) -> None:
    """Samples that an epoch has left out stay out, and the next epoch begins."""
    for ranks in ([2, 3], [3, 1, 2]):
        for asks_for_more in (False, True):
            loaders = LEAVE_OUT[kind](ranks[0], num_workers)
            iterators = [iter(loader) for loader in loaders]
            for _ in range(len(loaders[0])):
                for iterator in iterators:
                    next(iterator)
            if asks_for_more:
                assert [next(each, None) for each in iterators] == [None] * ranks[0]
            for num_ranks in ranks[1:]:
                earlier, loaders = loaders, LEAVE_OUT[kind](num_ranks, num_workers)
                load(loaders, earlier)
                if not asks_for_more:  # also in the states of such a loader
                    iterators = [iter(loader) for loader in loaders]
            if not asks_for_more:
                assert [next(each, None) for each in iterators] == [None] * num_ranks
            expected = LEAVE_OUT[kind](num_ranks, 0)
            for loader in [*loaders, *expected]:
                part: Any = loader.batch_sampler if kind == "sizes" else loader.sampler
                part.set_epoch(1)
            assert run_part(loaders, 1000) == run_part(expected, 1000)


@pytest.mark.parametrize("num_workers", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("ends", [False, True], ids=["", "to the end"])
@pytest.mark.parametrize("kind", ["sizes", "drop_last of the sampler"])
@pytest.mark.parametrize("ranks", [(2, 4, 2), (4, 2, 4), (4, 3, 2), (2, 3, 4)])
def test_ranks_without_a_batch_pass_the_epoch_on(
    ranks: tuple[int, int, int], kind: str, ends: bool, num_workers: int
) -> None:
    """Ranks that stop before their first batch keep the rest of the epoch."""
    first, middle, last = ranks
    loaders = LEAVE_OUT[kind](first, num_workers)
    num_given = len(loaders[0]) - (first == 2)
    used = [i for step in run_part(loaders, num_given) for i in step]
    earlier, loaders = loaders, LEAVE_OUT[kind](middle, num_workers)
    load(loaders, earlier)
    found = run_part(loaders, 1000 if ends else 0)
    earlier, loaders = loaders, LEAVE_OUT[kind](last, num_workers)
    load(loaders, earlier)
    if not ends:  # else the next epoch begins
        found = run_part(loaders, 1000)
    used += [i for step in found for i in step]
    assert len(set(used)) == len(used)
    assert 23 - len(used) < 2 * max(ranks)
    expected = LEAVE_OUT[kind](last, 0)
    for loader in [*loaders, *expected]:
        part: Any = loader.batch_sampler if kind == "sizes" else loader.sampler
        part.set_epoch(1)
    assert run_part(loaders, 1000) == run_part(expected, 1000)


def test_ranks_keep_their_own_random_states() -> None:
    """The random numbers after a resumption are those without one."""
    torch.manual_seed(100)
    next(iter(earlier := make(12, 2, 2, 0)))
    for rank in range(3):
        drawn = []
        for resumes in (True, False):
            loader = make(12, 2, 3, rank)
            if resumes:
                loader.load_state_dict(earlier.state_dict())
            torch.manual_seed(rank)
            iter(loader)
            drawn.append(float(torch.rand(())))
        assert drawn[0] == drawn[1]


class Reversed(DistributedSampler[Any]):
    """A sampler with an order of its own."""

    def __iter__(self) -> Iterator[Any]:
        return reversed(list(super().__iter__()))


def test_an_unknown_order_is_an_error() -> None:
    loaders = [make(12, 2, 2, rank, kind=Reversed) for rank in (0, 1)]
    run_part(loaders, 1)
    loader = make(12, 2, 3, 0, kind=Reversed)
    loader.load_state_dict(loaders[0].state_dict())
    with pytest.raises(RuntimeError) as raised:
        iter(loader)
    assert str(raised.value) == (
        "DataLoader.load_state_dict: the state must be of 3 ranks like this job, but "
        f"is of 2, and the order of a {__name__}.Reversed is unknown. Use torch's "
        "DistributedSampler or pyparallel.SizeBatchSampler, or continue with 2 ranks."
    )


@pytest.mark.parametrize(
    "num_ranks, length, sampling",
    [(2, 13, {}), (3, 12, {"seed": 1}), (3, 12, {"shuffle": False})],
)
def test_other_data_or_another_seed_is_an_error(
    num_ranks: int, length: int, sampling: dict[str, Any]
) -> None:
    loaders = [make(12, 2, 2, rank) for rank in (0, 1)]
    run_part(loaders, 2)
    loader = make(length, 2, num_ranks, 0, sampling=sampling)
    loader.load_state_dict(loaders[0].state_dict())
    with pytest.raises(RuntimeError, match="must yield its first 2 batches of indices"):
        iter(loader)


@pytest.mark.parametrize("batch_size", [None, 2])
def test_a_rank_continues_its_samples_after_the_state_of_another(
    batch_size: int | None,
) -> None:
    """Also in an epoch that has changed its number of ranks before."""
    length = 36 + 4 * (batch_size or 1)
    states: list[Any] = []
    used: list[Any] = []
    for num_ranks, steps in ((2, 2), (3, 1), (3, 1), (3, 1000)):
        runs = []
        for other in (0, 1):
            loaders = [
                make(length, batch_size, num_ranks, rank) for rank in range(num_ranks)
            ]
            for rank, loader in enumerate(loaders if states else []):
                loader.load_state_dict(states[(rank + other) % len(states)])
            runs.append(run_part(loaders, steps))
        assert runs[0] == runs[1]
        used += [index for step in runs[0] for index in step]
        states = [loader.state_dict() for loader in loaders]
    assert sorted(used) == [*range(length)]


def test_the_state_of_another_rank_of_an_unknown_order_is_an_error() -> None:
    loaders = [make(12, 2, 2, rank, kind=Reversed) for rank in (0, 1)]
    run_part(loaders, 1)
    loader = make(12, 2, 2, 1, kind=Reversed)
    loader.load_state_dict(loaders[0].state_dict())
    with pytest.raises(RuntimeError, match="Load the state of the same rank"):
        iter(loader)
