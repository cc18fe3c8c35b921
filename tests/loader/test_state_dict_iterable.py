"""A loader of an iterable dataset resumes with the next batch."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import resumed
import torch
from resumed import Case, Stop, continued, uninterrupted
from torch.utils.data import IterableDataset, get_worker_info

from pyparallel import DataLoader

pytestmark = pytest.mark.one_backend

KINDS = [
    *(resumed.Uneven, resumed.UnevenStateful, resumed.UnevenCursors),
    *(resumed.UnevenSelf, resumed.UnevenOnward, resumed.UnevenDraws),
]


def case_of(
    kind: type, lengths: tuple[int, ...], batch_size: Any = 2, **options: Any
) -> Case:
    return Case("", 0, batch_size, kind(lengths), options, epochs=2)


def again(case: Case) -> Case:
    """Return the case with an unread dataset."""
    dataset = type(case.dataset)(case.dataset.lengths)
    return dataclasses.replace(case, dataset=dataset)


def assert_continued(case: Case, chosen: slice) -> None:
    batches, stops = uninterrupted(case)
    assert len(stops[chosen]) > 3
    for stop in stops[chosen]:
        found = continued(again(case), stop)
        assert found == batches[stop.given :], (stop.epoch, stop.moment, stop.given)


@pytest.mark.parametrize(
    "length, options",
    [(1, {}), (6, {}), (7, {}), (7, {"drop_last": True}), (5, {"batch_size": None})],
    ids=str,
)
@pytest.mark.parametrize("kind", KINDS)
def test_every_stop_in_the_process_itself(
    kind: type, length: int, options: dict[str, Any]
) -> None:
    assert_continued(case_of(kind, (length,), **options), slice(None))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "lengths"),
    [
        *((kind, (1, 9, 4)) for kind in KINDS),
        *((kind, (5, 0, 7)) for kind in (resumed.Uneven, resumed.UnevenCursors)),
    ],
)
def test_workers_that_end_at_different_times(
    kind: type, lengths: tuple[int, ...]
) -> None:
    assert_continued(case_of(kind, lengths, num_workers=3), slice(1, 11, 2))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_persistent_workers(kind: type) -> None:
    case = case_of(kind, (7, 2), num_workers=2, persistent_workers=True)
    batches, stops = uninterrupted(case)
    # Without a state of the dataset a worker's order of the next epoch goes on from
    # random numbers that only it knew, until it has given something.
    unknown = {"begin"} if kind is resumed.Uneven else set()
    chosen = [stop for stop in stops[1:] if stop.moment not in unknown]
    both_gave = [stop for stop in chosen if stop.given in (2, 4, 7, 9)]
    for stop in both_gave if unknown else chosen[::2]:
        if not (unknown and stop.moment == "end"):
            assert continued(again(case), stop) == batches[stop.given :], stop.given


@pytest.mark.usefixtures("forked")
def test_a_worker_sees_the_dataset_of_the_user() -> None:
    def see(worker: int) -> None:
        info = get_worker_info()
        assert info is not None and type(info.dataset) is resumed.Uneven
        info.dataset.lengths = (2, 2)

    loader = DataLoader(resumed.Uneven((9, 9)), num_workers=2, worker_init_fn=see)
    assert len(list(loader)) == 4


def test_a_dataset_that_has_become_shorter_is_an_error() -> None:
    for options in ({}, {"num_workers": 1}):
        case = case_of(resumed.Uneven, (9,), **options)
        _, stops = uninterrupted(case)
        expected = (
            r"DataLoader.load_state_dict: the dataset must yield its samples again, "
            r"but worker 0 had delivered 4 batches of 2 and now finds 3 samples. Add "
            r"state_dict and load_state_dict to the dataset, or restore its data."
        )
        with pytest.raises(RuntimeError, match=expected):
            continued(case_of(resumed.Uneven, (3,), **options), stops[5])


class Failing(IterableDataset[Any]):
    """Ends with an exception in worker 0."""

    def __iter__(self) -> Any:
        info = get_worker_info()
        assert info is not None
        for number in range(4):
            if number == 2 and info.id == 0:
                raise OSError("the line")
            yield torch.tensor(10 * info.id + number)


def test_after_an_exception_only_a_state_knows_the_returned_samples() -> None:
    loader = DataLoader(Failing(), 2, num_workers=2)
    batches = iter(loader)
    assert [next(batches).tolist() for _ in range(2)] == [[0, 1], [10, 11]]
    with pytest.raises(OSError, match="the line"):
        next(batches)
    assert loader.state_dict()["given"] == 2  # the batch that failed comes next
    assert next(batches).tolist() == [12, 13]
    expected = (
        r"DataLoader.state_dict must know which samples were delivered, but a batch of "
        r"this epoch raised an exception, and the iterable dataset has no known state. "
        r"Add state_dict and load_state_dict to the dataset, and set "
        r"snapshot_every_n_steps=1 of the loader."
    )
    with pytest.raises(RuntimeError, match=expected):
        loader.state_dict()


def test_workers_that_went_on_alone_are_waited_for() -> None:
    case = case_of(
        resumed.UnevenStateful, (9, 9), num_workers=2, persistent_workers=True
    )
    loader = case.loader()
    first = iter(loader)
    next(first), next(first)
    second = iter(loader)
    expected = r"persistent workers \[0, 1\] have delivered no batch since"
    with pytest.raises(RuntimeError, match=expected):
        loader.state_dict()
    next(second), next(second)
    stop = Stop(0, "batch", 0, resumed.saved(loader.state_dict()))
    rest = [(0, batch.tolist()) for batch in second]
    assert continued(again(case), stop)[: len(rest)] == rest
