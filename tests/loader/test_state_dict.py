"""A loader of a map-style dataset resumes with the next batch."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import forkserver
import pytest
import resumed
import torch
import torch.utils.data
from hypothesis import given, settings
from hypothesis import strategies as st
from repository import ROOT, SUPPORT
from resumed import ORDERS, Case, continued, uninterrupted

from pyparallel import DataLoader

pytestmark = [
    pytest.mark.one_backend,
    pytest.mark.filterwarnings(
        "ignore:This DataLoader will create",
    ),
]

WITH_WORKERS: list[dict[str, Any]] = [
    {"num_workers": 1},
    {"num_workers": 2, "prefetch_factor": 1},
    {"num_workers": 2, "persistent_workers": True},
]


def quiet(order: str) -> bool:
    """Return True if the order comes from a generator that the consumer uses too."""
    return order == "python"


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
    case = Case(order, length, batch_size, epochs=epochs, draws=not quiet(order))
    if not {"batch_size", "batch_sampler"} & set(ORDERS[order](2, torch.Generator())):
        case.options["drop_last"] = drop_last
    batches, stops = uninterrupted(case)
    for stop in stops[first :: max(1, len(stops) // 5)]:
        assert continued(case, stop) == batches[stop.given :], (stop.epoch, stop.moment)


@pytest.mark.slow
@pytest.mark.parametrize("options", WITH_WORKERS, ids=str)
@pytest.mark.parametrize(
    "order", ["shuffle", "two rounds, generator", "eager, one by one", "counting"]
)
def test_stops_are_continued_exactly_with_workers(
    order: str, options: dict[str, Any]
) -> None:
    case = Case(order, 9, 2, options=options, epochs=2)
    batches, stops = uninterrupted(case)
    assert len(stops) > 12
    for stop in [*stops[1:4], *stops[6:9:2], stops[-3]]:
        assert continued(case, stop) == batches[stop.given :], (stop.epoch, stop.moment)


@settings(max_examples=6, deadline=None)
@given(data=st.data())
def test_any_order_is_continued_exactly_with_workers(data: st.DataObject) -> None:
    order = data.draw(st.sampled_from(sorted(ORDERS)))
    options = data.draw(st.sampled_from(WITH_WORKERS))
    length, size = data.draw(st.integers(2, 14)), data.draw(st.integers(1, 5))
    draws = not quiet(order)
    case = Case(order, length, size, options=options, epochs=2, draws=draws)
    batches, stops = uninterrupted(case)
    stop = data.draw(st.sampled_from(stops))
    assert continued(case, stop) == batches[stop.given :], (stop.epoch, stop.moment)


@pytest.mark.slow
@pytest.mark.parametrize("before, after", [(0, 2), (2, 0), (1, 2)])
@pytest.mark.parametrize("order", ["shuffle", "eager", "counting"])
def test_workers_may_be_more_or_fewer(order: str, before: int, after: int) -> None:
    case = Case(order, 11, 2, options={"num_workers": before}, epochs=1)
    batches, stops = uninterrupted(case)
    for stop in (stops[2], stops[4]):
        found = continued(case, stop, num_workers=after)
        assert found == batches[stop.given :]


FRESH = """
import json, pickle, resumed, torch
torch.rand(5)
with open({path!r}, "rb") as file:
    print(json.dumps(resumed.continued(*pickle.load(file))))
"""


def test_a_fresh_process_continues(tmp_path: Path) -> None:
    case = Case("shuffle", 9, 2, options={"num_workers": 1}, epochs=2)
    batches, stops = uninterrupted(case)
    stop = stops[4]
    path = tmp_path / "stop.pickle"
    path.write_bytes(pickle.dumps((case, stop)))
    code, text = forkserver.run(FRESH.format(path=str(path)), [str(ROOT), str(SUPPORT)])
    assert code == 0, text
    found = [tuple(batch) for batch in json.loads(text)]
    assert stop.given == 3 and found == batches[3:]


def test_an_order_is_that_of_torch() -> None:
    for workers in (0, 1):
        found = []
        for made in (DataLoader, torch.utils.data.DataLoader):
            resumed.seed(5)
            dataset = resumed.Numbers(9)
            loader = made(dataset, 2, sampler=resumed.Eager(9), num_workers=workers)
            epochs = [[b.tolist() for b in loader] for _ in range(2)]
            found.append((epochs, torch.rand(1)))
        assert found[0] == found[1]


def test_skipped_batches_are_not_read() -> None:
    case = Case("shuffle", 20, 2, epochs=1)
    _, stops = uninterrupted(case)
    loader = case.loader()
    loader.load_state_dict(stops[8].load())
    assert len(list(loader)) == 3
    assert loader.dataset.reads == 6  # type: ignore[attr-defined]


def test_only_the_first_iteration_is_continued() -> None:
    case = Case("sequential", 6, 2)
    _, stops = uninterrupted(case)
    loader = case.loader()
    loader.load_state_dict(stops[3].load())
    assert len(loader) == 3
    assert [len(list(loader)) for _ in range(3)] == [1, 3, 3]


def test_a_state_after_the_last_batch_leaves_nothing_of_the_epoch() -> None:
    case = Case("sequential", 6, 2, epochs=1)
    _, stops = uninterrupted(case)
    loader = case.loader()
    loader.load_state_dict(stops[-2].load())
    assert [len(list(loader)) for _ in range(2)] == [0, 3]
    loader.load_state_dict(stops[-1].load())
    assert [len(list(loader)) for _ in range(2)] == [3, 3]


def test_a_state_that_waits_is_the_state() -> None:
    case = Case("shuffle")
    _, stops = uninterrupted(case)
    loader = case.loader()
    loader.load_state_dict(stops[3].load())
    assert resumed.saved(loader.state_dict()) == stops[3].state
    loader.load_state_dict({})  # and is forgotten
    assert loader.state_dict()["epoch"] is None


def test_a_continued_loader_is_stopped_and_continued_again() -> None:
    case = Case("shuffle, generator", 20, 2, options={"num_workers": 2}, epochs=2)
    batches, stops = uninterrupted(case)
    resumed.seed(3)
    loader = case.loader()
    loader.load_state_dict(stops[4].load())
    resumed_batches = iter(loader)
    for number in (3, 4, 5):
        assert (0, next(resumed_batches).tolist()) == batches[number]
    stop = resumed.Stop(0, "batch", 6, resumed.saved(loader.state_dict()))
    assert continued(case, stop) == batches[6:]


@pytest.mark.parametrize("options", [{}, {"num_workers": 2}], ids=str)
def test_a_stateful_map_style_dataset_keeps_its_state(options: dict[str, Any]) -> None:
    for options_ in (options, {**options, "persistent_workers": bool(options)}):
        case = Case("sequential", 9, 2, options=options_, epochs=2)
        case.dataset = resumed.Remembering(9)
        batches, stops = uninterrupted(case)
        for stop in (stops[3], stops[7], stops[-3]):
            case.dataset = resumed.Remembering(9)
            assert continued(case, stop) == batches[stop.given :], stop.moment


class Untouched(resumed.Remembering):
    """A dataset that must not be put back."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise AssertionError("an unexpected call")


def test_a_run_that_is_not_stopped_puts_nothing_back() -> None:
    loader = DataLoader(Untouched(4), 2)
    for epoch in range(2):
        batches = [batch.tolist() for batch in loader]
        assert batches[0] == [[0, 4 * epoch + 1], [1, 4 * epoch + 2]]


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


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["map-style", "iterable"])
def test_workers_may_import_the_dataset_anew(kind: str) -> None:
    options = {"num_workers": 1, "multiprocessing_context": "forkserver"}
    case = Case("sequential", 8, 2, options=options, epochs=1)
    case.dataset = resumed.Remembering(8)
    if kind == "iterable":
        case = Case("", batch_size=2, options=options, epochs=1)
        case.dataset = resumed.UnevenStateful((7,))
    batches, stops = uninterrupted(case)
    assert len(batches) == 4 and continued(case, stops[3]) == batches[2:]


class Seeds(resumed.Numbers):
    """The seed of the worker."""

    def __getitem__(self, index: int) -> torch.Tensor:
        info = torch.utils.data.get_worker_info()
        assert info is not None
        return torch.tensor([index, info.seed - info.id])


@pytest.mark.slow
@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("order", ["shuffle", "shuffle, generator", "eager"])
def test_workers_have_the_seeds_that_they_had(order: str, persistent: bool) -> None:
    options = {"num_workers": 2, "persistent_workers": persistent}
    case = Case(order, 8, 2, Seeds(8), options, epochs=3)
    batches, stops = uninterrupted(case)
    for stop in (stops[3], stops[6], stops[8]):
        assert continued(case, stop) == batches[stop.given :], stop.moment


def test_a_consumer_finds_its_own_random_numbers_again() -> None:
    case = Case("shuffle", options={"num_workers": 1})
    resumed.seed(4)
    loader = case.loader()
    batches = iter(loader)
    next(batches)
    state = loader.state_dict()
    expected = torch.rand(4)
    resumed.seed(5)
    loader = case.loader()
    loader.load_state_dict(state)
    next(iter(loader))
    assert torch.equal(torch.rand(4), expected)
