"""States of datasets are read only when a state of the loader is requested."""

from __future__ import annotations

import multiprocessing
from typing import Any

import pytest
import resumed
import torch
from resumed import Batch, Case, Stop, continued
from torch.utils.data import IterableDataset

from pyparallel import DataLoader

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

FORK = multiprocessing.get_context("fork")


class Asked(resumed.Remembering):
    """Counts over all processes how often its state is asked for."""

    def __init__(self, length: int) -> None:
        super().__init__(length)
        self.asked = FORK.Value("i", 0)

    def state_dict(self) -> dict[str, Any]:
        with self.asked:
            self.asked.value += 1
        return super().state_dict()


class AskedStream(resumed.UnevenSelf):
    """The same for an iterable data set, whose state exists after ``iter()``."""

    def __init__(self, lengths: tuple[int, ...]) -> None:
        super().__init__(lengths)
        self.asked = FORK.Value("i", 0)

    def state_dict(self) -> dict[str, Any]:
        with self.asked:
            self.asked.value += 1
        return super().state_dict()


@pytest.mark.parametrize("workers", [0, 2])
# More batches than workers make ahead: some are made after the state was taken.
@pytest.mark.parametrize("make", [lambda: Asked(18), lambda: AskedStream((9, 8))])
def test_a_run_without_states_requests_none(make: Any, workers: int) -> None:
    dataset = make()
    loader = DataLoader(dataset, 2, num_workers=workers)
    for _ in range(2):
        assert len(list(loader)) >= 4
    batches = iter(loader)
    next(batches)
    assert dataset.asked.value == 0
    assert loader.state_dict()["given"] == 1
    list(batches)
    assert dataset.asked.value > 0


def first_state(case: Case, given: int, later: int = 0) -> tuple[list[Batch], Stop]:
    """Return the batches after the first state of a run, or after a later one."""
    resumed.seed(1)
    loader = case.loader()
    batches = iter(loader)
    for _ in range(given):
        next(batches)
    state = loader.state_dict()
    for _ in range(later):
        next(batches)
        state = loader.state_dict()
    rest = [(0, batch.tolist()) for batch in batches]
    return rest, Stop(0, "batch", given + later, resumed.saved(state))


KINDS = [resumed.UnevenStateful, resumed.UnevenCursors, resumed.UnevenSelf]
KINDS += [resumed.UnevenOnward, resumed.UnevenDraws]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_the_first_state_of_an_iterable_dataset_is_exact(kind: type) -> None:
    for given, later in ((1, 0), (3, 0), (2, 2), (5, 1)):
        case = Case("", 2, 2, kind((9, 5)), {"num_workers": 2}, epochs=1)
        rest, stop = first_state(case, given, later)
        case.dataset = kind((9, 5))
        assert continued(case, stop) == rest, (given, later)


@pytest.mark.slow
@pytest.mark.parametrize("order", ["shuffle", "eager, one by one", "counting"])
def test_the_first_state_of_a_map_style_dataset_is_exact(order: str) -> None:
    for given, later in ((1, 0), (4, 0), (2, 3)):
        case = Case(order, 13, 2, options={"num_workers": 2}, epochs=1)
        case.dataset = resumed.Remembering(13)
        rest, stop = first_state(case, given, later)
        assert continued(case, stop) == rest, (given, later)


def test_a_state_after_a_batch_without_one_replays_the_failed_batch() -> None:
    case = Case("sequential", 14, 2, options={"num_workers": 2}, epochs=1)
    case.dataset = Failing(14)
    loader = case.loader()
    batches = iter(loader)
    next(batches), next(batches)
    with pytest.raises(OSError, match="the disk"):
        next(batches)
    next(batches)
    stop = Stop(0, "batch", 4, resumed.saved(loader.state_dict()))
    rest = [(0, batch.tolist()) for batch in batches]
    assert len(rest) == 3 and continued(case, stop) == rest


class Failing(resumed.Remembering):
    """A data set that changes its state before it fails."""

    def __getitem__(self, index: int) -> torch.Tensor:
        sample = super().__getitem__(index)
        if index == 5:
            raise OSError("the disk")
        return sample


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


@pytest.mark.parametrize("options", [{}, {"num_workers": 1}, {"persistent_workers": 1}])
def test_an_error_of_state_dict_is_raised_by_the_call_that_needs_it(
    options: dict[str, Any],
) -> None:
    workers = 1 if options else 0
    for dataset in (Unwilling(8), UnwillingStream()):
        loader = DataLoader(dataset, 2, **{"num_workers": workers, **options})
        assert [len(list(loader)) for _ in range(2)] == [4, 4]
        if not options and isinstance(dataset, UnwillingStream):
            continue  # without workers nothing is pickled
        with pytest.raises((LookupError, AttributeError, TypeError)):
            loader.state_dict()
            batches = iter(loader)
            next(batches)
            loader.state_dict()
            while True:
                next(batches)
                loader.state_dict()


def test_a_state_is_available_before_the_dataset_has_one() -> None:
    dataset = resumed.UnevenSelf((5,))
    loader = DataLoader(dataset, 2)
    again = DataLoader(resumed.UnevenSelf((5,)), 2)
    again.load_state_dict(loader.state_dict())
    assert [batch.tolist() for batch in again] == [batch.tolist() for batch in loader]
