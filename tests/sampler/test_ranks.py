"""Samplers take their ranks from the group when they are used, and no other later."""

from __future__ import annotations

import copy
import pickle
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.data import IterableDataset

from pyparallel import DataLoader, DistributedEvalSampler, SizeBatchSampler

pytestmark = pytest.mark.one_backend

SIZES = [17 * i % 50 for i in range(101)]


@contextmanager
def group(world: int, rank: int) -> Iterator[None]:
    """Be a rank of a group whose other ranks do not exist."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        dist.destroy_process_group()


def batches(*ranks: int) -> Any:
    return SizeBatchSampler(SIZES, 4, **dict(zip(RANKS, ranks, strict=False)))


def measured(*ranks: int) -> Any:
    options: Any = dict(zip(RANKS, ranks, strict=False))
    return SizeBatchSampler(
        SIZES.__getitem__, 4, num_samples=101, progress=False, **options
    )


def evaluation(*ranks: int) -> Any:
    return DistributedEvalSampler(SIZES, *ranks)


def padded_evaluation(*ranks: int) -> Any:
    return DistributedEvalSampler(SIZES, *ranks, pad=True)


RANKS = ("num_replicas", "rank")
SAMPLERS = [batches, measured, evaluation, padded_evaluation]


def loader_of(sampler: Any) -> DataLoader[Any]:
    name = "batch_sampler" if isinstance(sampler, SizeBatchSampler) else "sampler"
    options: Any = {name: sampler}
    return DataLoader(range(101), collate_fn=list, **options)


#: Uses of a sampler, by name. Each returns a value for users.
USES: dict[str, Callable[[Any], Any]] = {
    "iter": lambda sampler: list(sampler),
    "first batch": lambda sampler: next(iter(sampler)),
    "len": len,
    "num_replicas": lambda sampler: sampler.num_replicas,
    "rank": lambda sampler: sampler.rank,
    "loader": lambda sampler: list(loader_of(sampler)),
    "len of loader": lambda sampler: len(loader_of(sampler)),
    "report": lambda sampler: sampler.report(),
    "num_valid": lambda sampler: sampler.num_valid,
    "num_samples": lambda sampler: sampler.num_samples,
}
CASES = [
    (make, use)
    for make in SAMPLERS
    for use in USES
    if hasattr(type(make()), use) or use not in ("report", *list(USES)[-2:])
]


@pytest.mark.parametrize(("make", "use"), CASES)
def test_the_group_may_be_made_after_the_sampler(
    make: Callable[..., Any], use: str
) -> None:
    see = USES[use]
    sampler = make()
    repr(sampler), copy.copy(sampler)
    if isinstance(sampler, SizeBatchSampler):
        sampler.load_state_dict(sampler.state_dict())
        sampler.set_epoch(0)
    with group(2, 1):
        assert see(sampler) == see(make(2, 1))
        assert see(copy.deepcopy(sampler)) is not None


@pytest.mark.parametrize(("make", "use"), CASES)
def test_a_group_made_after_the_first_use_is_an_error(
    make: Callable[..., Any], use: str
) -> None:
    see = USES[use]
    sampler = make()
    assert see(sampler) == see(make(1, 0))
    message = (
        f"{type(sampler).__name__}: the group of torch.distributed must be made before "
        "the sampler is used, but the sampler was used with 1 rank, and now it has 2 "
        "ranks, and this is rank 1. Make a new sampler for this group."
    )
    with group(2, 1):
        for again in (see, list, len):
            with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
                again(sampler)
        assert see(make()) == see(make(2, 1))  # as the message says
    assert list(sampler) is not None  # the group is the one of the first use


#: Groups after one of 2 ranks with rank 1, with the end of the message.
OTHER_GROUPS: dict[tuple[int, int] | None, str] = {
    None: "there is no group now",
    (3, 1): "now it has 3 ranks, and this is rank 1",
    (2, 0): "now it has 2 ranks, and this is rank 0",
    (1, 0): "now it has 1 rank, and this is rank 0",
}


@pytest.mark.parametrize("make", SAMPLERS)
@pytest.mark.parametrize("other", OTHER_GROUPS)
def test_another_group_is_an_error(
    make: Callable[..., Any], other: tuple[int, int] | None
) -> None:
    sampler, given = make(), make(2, 1)
    with group(2, 1):
        expected = len(sampler)
    message = (
        f"{type(sampler).__name__}: the group must have 2 ranks, as when the sampler "
        f"was first used, and this must be rank 1, but {OTHER_GROUPS[other]}. Make a "
        "new sampler for this group."
    )
    if other is None:
        with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
            iter(sampler)
    else:
        with group(*other):
            for use in (iter, len):
                with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
                    use(sampler)
            assert len(given) == expected  # given numbers are not compared
    with group(2, 1):
        assert len(sampler) == expected


def test_a_new_sampler_continues_in_another_group() -> None:
    sampler = batches()
    with group(2, 1):
        taken = iter(sampler)
        used = [next(taken) for _ in range(5)]
    with group(1, 0):
        again = batches()
        again.load_state_dict(sampler.state_dict())
        rest = list(again)
    with group(2, 0):  # the batches of the other rank
        used += [batch for batch, _ in zip(batches(), range(5), strict=False)]
    assert sorted(i for batch in used + rest for i in batch) == list(range(101))


class Stream(IterableDataset[Any]):
    """A dataset that reads a sampler in the workers of a loader."""

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler

    def __iter__(self) -> Iterator[Any]:
        return iter(self.sampler)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fork", "spawn"])
@pytest.mark.parametrize("make", [batches, evaluation])
def test_workers_have_the_ranks_of_their_parent(
    make: Callable[..., Any], method: str
) -> None:
    sampler = make()
    with group(2, 1):
        for _ in range(2):  # before the first use in this process, and after it
            loader = DataLoader(
                Stream(sampler),
                None,
                num_workers=1,
                multiprocessing_context=method,
                collate_fn=same,
            )
            assert list(loader) == list(make(2, 1))
            assert len(sampler) == len(make(2, 1))


def same(value: Any) -> Any:
    return value


def test_a_sampler_of_another_process_is_compared_too() -> None:
    sampler = batches()
    with group(2, 1):
        content = pickle.dumps(sampler)
    with group(2, 0), pytest.raises(ValueError, match="and this must be rank 1, but"):
        list(pickle.loads(content))


def test_one_number_may_be_given() -> None:
    sampler = SizeBatchSampler(SIZES, 4, num_replicas=2)
    with group(4, 1):
        assert list(sampler) == list(batches(2, 1))
    sampler = SizeBatchSampler(SIZES, 4, num_replicas=2)
    message = "rank must be less than num_replicas=2, but is 3. Ranks count from 0."
    with (
        group(4, 3),
        pytest.raises(ValueError, match=f"^SizeBatchSampler: {re.escape(message)}$"),
    ):
        iter(sampler)


def test_a_sampler_is_shown_with_its_ranks() -> None:
    sampler, evaluated = batches(), evaluation()
    shown = (
        "SizeBatchSampler(101 samples, batch_size=4, epoch=0, num_replicas={}, rank={})"
    )
    assert repr(sampler) == shown.format(None, None)
    with group(2, 1):
        len(sampler), len(evaluated)
    assert repr(sampler) == shown.format(2, 1)
    assert repr(evaluated) == (
        "DistributedEvalSampler(101 samples, num_replicas=2, rank=1, pad=False)"
    )
