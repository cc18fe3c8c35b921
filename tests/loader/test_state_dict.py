"""A loader resumes with the next batch, or refuses a state."""

from __future__ import annotations

import copy
import multiprocessing
import pickle
import re
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import IterableDataset, get_worker_info
from torch.utils.data.datapipes.iter import IterableWrapper

from pyparallel import DataLoader, SizeBatcher
from tests.support.loader import resumed
from tests.support.loader.resumed import (
    ORDERS,
    Batch,
    Case,
    Stop,
    continued,
    uninterrupted,
)

pytestmark = pytest.mark.one_backend

WITH_WORKERS: list[dict[str, Any]] = [
    {"num_workers": 1},
    {"num_workers": 2, "prefetch_factor": 1},
    {"num_workers": 2, "persistent_workers": True},
]


def check_continued(case: Case, batches: list[Batch], stop: Stop, **options: Any):
    found = continued(case, stop, **options)
    assert found == batches[stop.given :], (stop.epoch, stop.moment, stop.given)


@pytest.mark.slow
@pytest.mark.parametrize("order", ORDERS)
@settings(max_examples=10, deadline=None)
@given(
    length=st.integers(2, 10),
    batch_size=st.integers(1, 5),
    drop_last=st.booleans(),
    epochs=st.integers(1, 3),
    first=st.integers(0, 2),
)
def test_any_stop_is_continued_exactly(
    order: str, length: int, batch_size: int, drop_last: bool, epochs: int, first: int
) -> None:
    case = Case(order, length, batch_size, epochs=epochs, draws=order != "python")
    if not {"batch_size", "batch_sampler"} & set(ORDERS[order](2, torch.Generator())):
        case.options["drop_last"] = drop_last
    batches, stops = uninterrupted(case)
    for stop in stops[first :: max(1, len(stops) // 5)]:
        check_continued(case, batches, stop)


@settings(max_examples=8, deadline=None)
@given(data=st.data())
def test_any_order_is_continued_exactly_with_workers(data: st.DataObject) -> None:
    order = data.draw(st.sampled_from(sorted(ORDERS)))
    options = data.draw(st.sampled_from([{}, *WITH_WORKERS]))
    length, size = data.draw(st.integers(2, 14)), data.draw(st.integers(1, 5))
    draws = order != "python"  # this order draws from the consumer's generator
    case = Case(order, length, size, options=options, epochs=2, draws=draws)
    batches, stops = uninterrupted(case)
    later = data.draw(st.sampled_from([options, {"num_workers": 2}]))
    check_continued(case, batches, data.draw(st.sampled_from(stops)), **later)


TWO = WITH_WORKERS[1]
ONE_THREAD = {"num_workers": 1, "worker_method": "thread"}
STATEFUL_STREAMS = [resumed.UnevenStateful, resumed.UnevenCursors, resumed.UnevenSelf]
THREADS = {"num_workers": 2, "worker_method": "thread"}


@pytest.mark.parametrize(
    "options, later",
    [
        ({}, TWO),
        (TWO, {"num_workers": 0, "prefetch_factor": None}),
        ({}, THREADS),
        (THREADS, {"num_workers": 0, "worker_method": "multiprocessing"}),
        (WITH_WORKERS[2], {}),
        ({**THREADS, "persistent_workers": True}, {"num_workers": 1}),
    ],
    ids=str,
)
def test_an_order_that_iter_draws_does_not_depend_on_workers(
    options: dict[str, Any], later: dict[str, Any]
) -> None:
    # With workers, iter() of the sampler is called twice for each epoch.
    case = Case("eager, one by one", 4, 1, options=options, epochs=2)
    batches, stops = uninterrupted(case)
    for stop in stops:
        rest, seconds = uninterrupted(case, stop, **later)
        assert rest == batches[stop.given :], (stop.epoch, stop.moment)
        for second in seconds[2::3]:  # of a loader that has continued a state
            check_continued(case, batches, second)


def test_skipped_batches_are_not_read() -> None:
    case = Case("shuffle", 20, 2, epochs=1)
    _, stops = uninterrupted(case)
    loader = case.loader()
    loader.load_state_dict(stops[8].load())
    assert len(list(loader)) == 3
    assert loader.dataset.reads == 6  # type: ignore[attr-defined]


def test_a_state_that_waits_is_the_state() -> None:
    case = Case("shuffle")
    _, stops = uninterrupted(case)
    loader = case.loader()
    loader.load_state_dict(stops[3].load())
    assert resumed.saved(loader.state_dict()) == stops[3].state
    loader.load_state_dict({})  # and is forgotten
    assert resumed.opened(loader)["epoch"] is None


@pytest.mark.parametrize("options", [{}, *WITH_WORKERS[1:], ONE_THREAD], ids=str)
def test_a_stateful_map_style_dataset_keeps_its_state(options: dict[str, Any]) -> None:
    case = Case("sequential", 9, 2, resumed.Remembering(9), options, epochs=2)
    batches, stops = uninterrupted(case)
    for stop in (stops[3], *stops[7:9], stops[-3]):
        check_continued(case, batches, stop)


@pytest.mark.parametrize("begins", [False, True])
@pytest.mark.parametrize("options", [{}, *WITH_WORKERS[:1], ONE_THREAD], ids=str)
@pytest.mark.parametrize("kind", ["map-style", *STATEFUL_STREAMS])
def test_the_first_state_is_loaded_into_a_loader_that_was_read(
    kind: Any, options: dict[str, Any], begins: bool
) -> None:
    dataset = resumed.Remembering(7) if kind == "map-style" else kind((7,))
    expected = [b.tolist() for b in DataLoader(copy.deepcopy(dataset), 2, **options)]
    loader = DataLoader(dataset, 2, **options)
    state = None if begins else loader.state_dict()
    batches = iter(loader)
    state = state or loader.state_dict()
    next(batches), next(batches)
    del batches  # its thread would read the dataset, too
    loader.load_state_dict(state)
    assert [batch.tolist() for batch in loader] == expected


class Broken(resumed.Numbers):
    """A dataset with a sample that cannot be read at the first time."""

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 4:
            raise OSError("the disk")
        return super().__getitem__(index)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_failed_batch_is_repeated_until_another_is_returned(workers: int) -> None:
    loader = DataLoader(Broken(12), 2, num_workers=workers)
    batches = iter(loader)
    assert [next(batches).tolist() for _ in range(2)] == [[0, 1], [2, 3]]
    with pytest.raises(OSError, match="the disk"):
        next(batches)
    states = [loader.state_dict()]
    assert next(batches).tolist() == [6, 7]
    states.append(loader.state_dict())
    for state, expected in zip(states, ([4, 5], [8, 9]), strict=True):
        whole = DataLoader(resumed.Numbers(12), 2, num_workers=workers)
        whole.load_state_dict(state)
        assert next(iter(whole)).tolist() == expected


@pytest.mark.parametrize("workers", [0, 1])
def test_a_failed_last_batch_is_part_of_the_epoch(workers: int) -> None:
    loader = DataLoader(Broken(6), 3, sampler=resumed.Counting(6), num_workers=workers)
    batches = iter(loader)
    assert next(batches).tolist() == [1, 2, 3]
    with pytest.raises(OSError, match="the disk"):
        next(batches)
    assert next(batches, "the end") == "the end"
    later = DataLoader(resumed.Numbers(6), 3, sampler=resumed.Counting(6))
    later.load_state_dict(loader.state_dict())
    assert [batch.tolist() for batch in later] == [[2, 3, 4], [5, 0, 1]]


class EmptyFirst(resumed.Counting):
    """A stateful sampler whose first epoch is empty."""

    def __iter__(self) -> Any:
        self.epoch_seen += 1
        return iter([self.epoch_seen] * (self.epoch_seen - 1))


def test_a_state_after_an_epoch_without_batches() -> None:
    loader = DataLoader(resumed.Numbers(9), sampler=EmptyFirst(9))
    assert list(loader) == []
    later = DataLoader(resumed.Numbers(9), sampler=EmptyFirst(9))
    later.load_state_dict(loader.state_dict())
    assert [batch.tolist() for batch in later] == [[2]]


class Failing(resumed.Remembering):
    """A dataset that changes its state before it fails."""

    def __getitem__(self, index: int) -> torch.Tensor:
        sample = super().__getitem__(index)
        if index == 5:
            raise OSError("the disk")
        return sample


def test_a_state_after_a_failed_batch_replays_it() -> None:
    options = {"num_workers": 2}
    case = Case("sequential", 14, 2, Failing(14), options, epochs=1)
    batches = iter(loader := case.loader())
    next(batches), next(batches)
    with pytest.raises(OSError, match="the disk"):
        next(batches)
    next(batches)
    stop = Stop(0, "batch", 4, resumed.saved(loader.state_dict()))
    rest = [(0, batch.tolist()) for batch in batches]
    assert len(rest) == 3 and continued(case, stop) == rest


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["map-style", "iterable"])
def test_workers_may_import_the_dataset_anew(kind: str) -> None:
    options = {"num_workers": 1, "multiprocessing_context": "forkserver"}
    case = Case("sequential", 8, 2, resumed.Remembering(8), options, epochs=1)
    if kind == "iterable":
        case = Case("", 0, 2, resumed.UnevenStateful((7,)), options, epochs=1)
    batches, stops = uninterrupted(case)
    assert len(batches) == 4
    check_continued(case, batches, stops[3])


class Seeds(resumed.Numbers):
    """The seed of the worker."""

    def __getitem__(self, index: int) -> torch.Tensor:
        info = get_worker_info()
        assert info is not None
        return torch.tensor([index, info.seed - info.id])


@pytest.mark.slow
@pytest.mark.parametrize(
    "order, persistent",
    [("shuffle", False), ("shuffle, generator", True), ("eager", False)],
)
def test_workers_have_the_seeds_that_they_had(order: str, persistent: bool) -> None:
    options = {"num_workers": 2, "persistent_workers": persistent}
    case = Case(order, 8, 2, Seeds(8), options, epochs=3)
    batches, stops = uninterrupted(case)
    for stop in (stops[3], stops[6], stops[8]):
        check_continued(case, batches, stop)


def test_the_epoch_of_a_sampler_is_set_in_time() -> None:
    case = Case("distributed", 12, 2, epochs=2)
    batches, stops = uninterrupted(case)
    middle, ended = stops[-3], stops[-1]
    loader = case.loader()
    loader.load_state_dict(middle.load())
    rest = [(1, batch.tolist()) for batch in loader]  # without a call of set_epoch
    assert rest and rest == batches[middle.given :]
    loader.load_state_dict(ended.load())
    assert loader.sampler.epoch == 1  # type: ignore[union-attr]
    loader.sampler.set_epoch(0)  # type: ignore[union-attr]
    assert [(0, b.tolist()) for b in loader] == batches[:3]


class FixedEpoch(resumed.Eager):
    """A sampler whose epoch cannot be set."""

    @property
    def epoch(self) -> int:
        return 3


def test_an_epoch_that_cannot_be_set_is_left_alone() -> None:
    loader, later = (
        DataLoader(resumed.Numbers(6), 3, sampler=FixedEpoch(6)) for _ in range(2)
    )
    batches = iter(loader)
    next(batches)
    later.load_state_dict(loader.state_dict())
    assert [batch.tolist() for batch in later] == [batch.tolist() for batch in batches]


# -------------------------------------------------------------- iterable datasets
STREAMS = [
    *(resumed.Uneven, resumed.UnevenStateful, resumed.UnevenCursors),
    *(resumed.UnevenSelf, resumed.UnevenOnward, resumed.UnevenDraws),
]


def streams(
    kind: type, lengths: tuple[int, ...], batch_size: Any = 2, **options: Any
) -> Case:
    return Case("", 0, batch_size, kind(lengths), options, epochs=2)


def assert_continued(case: Case, chosen: slice) -> None:
    batches, stops = uninterrupted(case)
    assert len(stops[chosen]) > 3
    for stop in stops[chosen]:
        check_continued(case, batches, stop)


@pytest.mark.parametrize(
    "length, options",
    [(1, {}), (6, {}), (7, {}), (7, {"drop_last": True}), (5, {"batch_size": None})],
    ids=str,
)
@pytest.mark.parametrize("kind", STREAMS)
def test_every_stop_of_a_stream_without_workers(
    kind: type, length: int, options: dict[str, Any]
) -> None:
    assert_continued(streams(kind, (length,), **options), slice(None))


@pytest.mark.parametrize("kind", STREAMS[1:-1])  # the others draw beside the program
def test_every_stop_of_a_stream_that_one_thread_reads(kind: type) -> None:
    assert_continued(streams(kind, (7,), **ONE_THREAD), slice(None))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "lengths"),
    [
        *((kind, (1, 9, 4)) for kind in STREAMS),
        *((kind, (5, 0, 7)) for kind in (resumed.Uneven, resumed.UnevenCursors)),
    ],
)
def test_streams_of_workers_that_end_at_different_times(
    kind: type, lengths: tuple[int, ...]
) -> None:
    assert_continued(streams(kind, lengths, num_workers=3), slice(1, 11, 2))


@pytest.mark.slow
@pytest.mark.parametrize("kind", STREAMS)
def test_streams_of_persistent_workers(kind: type) -> None:
    case = streams(kind, (7, 2), num_workers=2, persistent_workers=True)
    batches, stops = uninterrupted(case)
    # Without a state of the dataset a worker's order of the next epoch goes on from
    # random numbers that only it knew, until it has given something.
    unknown = {"begin"} if kind is resumed.Uneven else set()
    chosen = [stop for stop in stops[1:] if stop.moment not in unknown]
    both_gave = [stop for stop in chosen if stop.given in (2, 4, 7, 9)]
    for stop in both_gave if unknown else chosen[::2]:
        if not (unknown and stop.moment == "end"):
            check_continued(case, batches, stop)


@pytest.mark.parametrize(
    "options", [{}, {"num_workers": 1, "persistent_workers": True}, ONE_THREAD], ids=str
)
def test_a_stream_that_stays_at_its_end_begins_the_next_epoch(
    options: dict[str, Any],
) -> None:
    case = streams(resumed.UnevenLoaded, (7,), **options)
    batches, stops = uninterrupted(case)
    (stop,) = (each for each in stops if (each.epoch, each.moment) == (0, "end"))
    check_continued(case, batches, stop)


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
        case = streams(resumed.Uneven, (9,), **options)
        _, stops = uninterrupted(case)
        expected = (
            r"DataLoader.load_state_dict: the dataset must yield its samples again, "
            r"but worker 0 had delivered 4 batches of 2 and now finds 3 samples. Add "
            r"state_dict and load_state_dict to the dataset, or restore its data."
        )
        with pytest.raises(RuntimeError, match=expected):
            continued(streams(resumed.Uneven, (3,), **options), stops[5])


class FailingStream(IterableDataset[Any]):
    """Ends with an exception in worker 0."""

    def __iter__(self) -> Any:
        info = get_worker_info()
        assert info is not None
        for number in range(4):
            if number == 2 and info.id == 0:
                raise OSError("the line")
            yield torch.tensor(10 * info.id + number)


class Interrupted(IterableDataset[Any]):
    """An iterator that is interrupted at its third sample, and goes on."""

    def __iter__(self) -> Any:
        self.numbers = iter(torch.arange(9))
        return self

    def __next__(self) -> Any:
        number = next(self.numbers)
        if number == 2:
            raise KeyboardInterrupt
        return number


def test_after_an_interrupt_no_one_knows_the_returned_samples() -> None:
    loader = DataLoader(Interrupted(), 2)
    batches = iter(loader)
    assert next(batches).tolist() == [0, 1]
    with pytest.raises(KeyboardInterrupt):
        next(batches)
    assert resumed.opened(loader)["given"] == 1
    assert next(batches).tolist() == [3, 4]
    with pytest.raises(RuntimeError, match="must know which samples were delivered"):
        loader.state_dict()


def test_after_an_exception_only_a_state_knows_the_returned_samples() -> None:
    loader = DataLoader(FailingStream(), 2, num_workers=2)
    batches = iter(loader)
    assert [next(batches).tolist() for _ in range(2)] == [[0, 1], [10, 11]]
    with pytest.raises(OSError, match="the line"):
        next(batches)
    assert resumed.opened(loader)["given"] == 2  # the batch that failed comes next
    assert next(batches).tolist() == [12, 13]
    expected = (
        r"DataLoader.state_dict must know which samples were delivered, but a batch of "
        r"this epoch raised an exception, and the iterable dataset has no known state. "
        r"Add state_dict and load_state_dict to the dataset, and set "
        r"snapshot_every_n_steps=1 of the loader."
    )
    with pytest.raises(RuntimeError, match=expected):
        loader.state_dict()


@pytest.mark.parametrize("delivered", [1, 2])  # worker 1 has at least read ahead
def test_workers_that_went_on_alone_are_waited_for(delivered: int) -> None:
    case = streams(
        resumed.UnevenStateful, (9, 9), num_workers=2, persistent_workers=True
    )
    loader = case.loader()
    first = iter(loader)
    for _ in range(delivered):
        next(first)
    second = iter(loader)
    for unknown in ("0, 1", "1"):
        expected = rf"persistent workers \[{unknown}\] have delivered no batch since"
        with pytest.raises(RuntimeError, match=expected):
            loader.state_dict()
        next(second)
    stop = Stop(0, "batch", 0, resumed.saved(loader.state_dict()))
    rest = [(0, batch.tolist()) for batch in second]
    assert continued(case, stop)[: len(rest)] == rest


# ------------------------------------------- states of datasets are read on request
FORK = multiprocessing.get_context("fork")


class Counted(resumed.Remembering):
    """Counts the reads of its state in all processes."""

    def __init__(self, length: int) -> None:
        super().__init__(length)
        self.read = FORK.Value("i", 0)

    def state_dict(self) -> dict[str, Any]:
        with self.read:
            self.read.value += 1
        return super().state_dict()


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize("workers", [0, 2])
def test_a_run_without_states_requests_none(workers: int) -> None:
    # More batches than workers make ahead: some are made after the state was taken.
    dataset = Counted(18)
    loader = DataLoader(dataset, 2, num_workers=workers)
    for _ in range(2):
        assert len(list(loader)) >= 4
    batches = iter(loader)
    next(batches)
    assert dataset.read.value == 0
    assert resumed.opened(loader)["given"] == 1
    list(batches)
    assert dataset.read.value > 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*STREAMS[1:], resumed.Remembering])
@pytest.mark.parametrize("given, later", [(1, 0), (2, 2), (5, 1)])
def test_the_first_state_of_a_run_is_exact(kind: Any, given: int, later: int) -> None:
    is_map = kind is resumed.Remembering
    order, size = ("shuffle", 13) if is_map else ("", (9, 5))
    case = Case(order, 13, 2, kind(size), {"num_workers": 2}, epochs=1)
    resumed.seed(1)
    batches = iter(loader := case.loader())
    for _ in range(given):
        next(batches)
    state = loader.state_dict()
    for _ in range(later):
        next(batches)
        state = loader.state_dict()
    rest = [(0, batch.tolist()) for batch in batches]
    stop = Stop(0, "batch", given + later, resumed.saved(state))
    assert continued(case, stop) == rest


class Unwilling(resumed.Remembering):
    def state_dict(self) -> dict[str, Any]:
        raise LookupError("no state")


class UnwillingStream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(torch.arange(8))

    def state_dict(self) -> dict[str, Any]:
        return {"function": lambda: 1}  # does not pickle

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise AssertionError("there is no state")


@pytest.mark.parametrize("workers, persistent", [(0, False), (1, False), (1, True)])
def test_an_error_of_state_dict_is_raised_by_the_call_that_needs_it(
    workers: int, persistent: bool
) -> None:
    options: Any = {"num_workers": workers, "persistent_workers": persistent}
    for dataset in (Unwilling(8), UnwillingStream()):
        loader = DataLoader(dataset, 2, **options)
        assert [len(list(loader)) for _ in range(2)] == [4, 4]
        if not workers and isinstance(dataset, UnwillingStream):
            continue  # without workers nothing is pickled
        with pytest.raises((LookupError, AttributeError, pickle.PicklingError)):
            loader.state_dict()
            for _ in loader:
                loader.state_dict()


class UnwillingSampler(resumed.Counting):
    def state_dict(self) -> dict[str, Any]:
        raise LookupError("no state")


def test_an_error_of_a_sampler_is_raised_by_state_dict_alone() -> None:
    loader = DataLoader(resumed.Numbers(6), 3, sampler=UnwillingSampler(6))
    for _epoch in range(2):
        batches = iter(loader)
        for _batch in range(2):
            next(batches)
            with pytest.raises(LookupError, match="no state"):
                loader.state_dict()
        assert next(batches, "the end") == "the end"
        with pytest.raises(LookupError, match="no state"):
            loader.state_dict()


class NoState(resumed.Counting):
    state_dict = load_state_dict = None  # type: ignore[assignment]


def test_a_sampler_whose_methods_are_none_has_no_state() -> None:
    loader = DataLoader(resumed.Numbers(6), 3, sampler=NoState(6))
    assert len(list(loader)) == 2
    assert resumed.opened(loader)["sampler"] is None


def test_with_snapshot_every_n_steps_workers_report_from_the_first_batch() -> None:
    options: dict[str, Any] = {"num_workers": 2, "snapshot_every_n_steps": 3}
    batches = iter(loader := DataLoader(resumed.Remembering(9), 2, **options))
    next(batches), next(batches)
    reported = [r["state"] for r in resumed.opened(loader)["workers"].values()]
    assert reported == [{"own": {"reads": 2}}, {"own": {"reads": 2}}]


def state_of(case: Case) -> dict[str, Any]:
    return uninterrupted(case)[1][4].load()


TWO_WORKERS, ONE_WORKER = (
    streams(resumed.Uneven, (9, 9), 3, num_workers=number) for number in (2, 1)
)
#: The state and the case of the loader, by the message of the error.
REFUSED: dict[str, tuple[Any, Case]] = {
    "be of a loader with batch_size=3 like this one, but is of one with batch_size=2. "
    "Make the loader with batch_size=2.": (
        lambda: state_of(Case(batch_size=2)),
        Case(),
    ),
    "be of a loader with drop_last=True like this one, but is of one with "
    "drop_last=False. Make the loader with drop_last=False.": (
        lambda: state_of(Case()),
        Case(options={"drop_last": True}),
    ),
    "be of a loader with num_workers=1 like this one, but is of one with "
    "num_workers=2. Make the loader with num_workers=2.": (
        lambda: state_of(TWO_WORKERS),
        ONE_WORKER,
    ),
    "be of a loader with dataset='iterable' like this one, but is of one with "
    "dataset='map-style'. Make the loader with dataset='map-style'.": (
        lambda: state_of(Case()),
        TWO_WORKERS,
    ),
    "be of a loader with sample_seeds=True like this one, but is of one with "
    "sample_seeds=False. Make the loader with sample_seeds=False.": (
        lambda: state_of(Case()),
        Case(options={"sample_seeds": True}),
    ),
    "have the generators of this loader, [], but has ['generator']. Make the loader "
    "and its samplers with the same generators.": (
        lambda: state_of(Case("shuffle, generator")),
        Case(),
    ),
    "be of version 4, but is of version 7. Load it with the version of pyparallel that "
    "saved it.": (lambda: {**state_of(Case()), "version": 7}, Case()),
    "come from DataLoader.state_dict(), but is ['_snapshot', '_steps']. States of "
    "other loaders are not supported.": (
        lambda: {"_snapshot": {}, "_steps": 1},
        Case(),
    ),
    "come from DataLoader.state_dict(), but is list. States of other loaders are not "
    "supported.": (lambda: [1], Case()),
    "come from DataLoader.state_dict(), but is NoneType. States of other loaders are "
    "not supported.": (lambda: None, Case()),
}


@pytest.mark.parametrize("message", REFUSED)
def test_a_state_of_another_loader_is_refused(message: str) -> None:
    make, case = REFUSED[message]
    state = make()
    loader = case.loader()
    batches = iter(loader)
    next(batches)
    expected = re.escape(f"DataLoader.load_state_dict: the state must {message}")
    with pytest.raises(ValueError, match=f"^{expected}$"):
        loader.load_state_dict(state)
    assert resumed.opened(loader)["given"] == 1


OTHERS = (
    "DataLoader.load_state_dict: the sampler must yield its first {} batches of "
    "indices again, but yields others with the restored random states. Load the state "
    "of the same rank, sampler and data. If the sampler has its own randomness, add "
    "state_dict and load_state_dict to it."
)


class Secret(resumed.Eager):
    """A sampler with randomness of its own."""

    def __iter__(self) -> Any:
        source = torch.Generator()
        source.seed()
        return iter(torch.randperm(self.length, generator=source).tolist())


@pytest.mark.parametrize("workers, drawn", [(0, 2), (2, 6)])
def test_other_indices_are_an_error(workers: int, drawn: int) -> None:
    options: Any = {"sampler": Secret(60), "num_workers": workers}
    loader = DataLoader(resumed.Numbers(60), 5, **options)
    batches = iter(loader)
    next(batches), next(batches)
    state = loader.state_dict()
    loader = DataLoader(resumed.Numbers(60), 5, **options)
    loader.load_state_dict(state)
    for _ in range(2):  # and stays one: the state is not lost
        with pytest.raises(RuntimeError, match=re.escape(OTHERS.format(drawn))):
            iter(loader)


class Endless(resumed.Counting):
    """A stateful sampler that does not continue."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


@pytest.mark.parametrize("length", [4, 9])
def test_a_dataset_of_another_length_is_an_error(length: int) -> None:
    loader = Case("shuffle", length, 2).loader()
    loader.load_state_dict(state_of(Case("shuffle", 8, 2)))
    with pytest.raises(RuntimeError, match="yields others"):
        iter(loader)


def test_a_stateful_sampler_that_continues_after_its_end_is_an_error() -> None:
    loader = DataLoader(resumed.Numbers(4), 2, sampler=Endless(4))
    list(loader)
    state = loader.state_dict()
    loader = DataLoader(resumed.Numbers(4), 2, sampler=Endless(4))
    loader.load_state_dict(state)
    expected = (
        "DataLoader.load_state_dict: the sampler must be at the end of its epoch after "
        "2 batches, but yields more after its state was restored. Make its "
        "load_state_dict continue at the position of state_dict."
    )
    with pytest.raises(RuntimeError, match=re.escape(expected)):
        iter(loader)


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
def test_batches_out_of_order_and_datapipes_have_no_state() -> None:
    loader = DataLoader(resumed.Numbers(4), num_workers=1, in_order=False)
    for call in (loader.state_dict, lambda: loader.load_state_dict({})):
        with pytest.raises(RuntimeError, match="the loader has in_order=False"):
            call()
    assert DataLoader(resumed.Numbers(4), in_order=False).state_dict()
    loader = DataLoader(IterableWrapper(range(4)), 2)
    assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3]]
    with pytest.raises(TypeError, match="has a DataPipe"):
        loader.state_dict()


class OfAnotherLoader(IterableDataset[Any]):
    """Its state needs arguments, as those of litdata and MosaicML streaming."""

    def __iter__(self) -> Any:
        info = get_worker_info()
        yield from range(info.id, 12, info.num_workers) if info else range(12)

    def state_dict(self, num_samples: int) -> dict[str, Any]:
        raise AssertionError("the loader has no number")

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise AssertionError("there is no state")


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("batcher", [False, True])
def test_a_dataset_whose_state_needs_arguments_is_read_again(
    batcher: bool, num_workers: int
) -> None:
    def make() -> Any:
        stream: Any = OfAnotherLoader()
        if batcher:
            stream = SizeBatcher(stream, int, 2, window=2)
        size = None if batcher else 2
        return DataLoader(stream, size, num_workers=num_workers, collate_fn=list)

    whole = list(make())
    assert sorted(i for batch in whole for i in batch) == list(range(12))
    for num_steps in (1, 4):
        batches = iter(stopped := make())
        first = [next(batches) for _ in range(num_steps)]
        resumed_loader = make()
        resumed_loader.load_state_dict(stopped.state_dict())
        assert first + list(resumed_loader) == whole
