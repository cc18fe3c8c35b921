"""A state that cannot be resumed exactly is an error, and changes nothing."""

from __future__ import annotations

import re
from typing import Any

import pytest
import resumed
import torch
from resumed import Case, uninterrupted
from torch.utils.data.datapipes.iter import IterableWrapper

from pyparallel import DataLoader

pytestmark = pytest.mark.one_backend


def state_of(case: Case) -> dict[str, Any]:
    return uninterrupted(case)[1][4].load()


def iterable(num_workers: int) -> Case:
    options = {"num_workers": num_workers}
    return Case("", dataset=resumed.Uneven((9, 9)), options=options)


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
        lambda: state_of(iterable(2)),
        iterable(1),
    ),
    "be of a loader with dataset='iterable' like this one, but is of one with "
    "dataset='map-style'. Make the loader with dataset='map-style'.": (
        lambda: state_of(Case()),
        iterable(2),
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
    "be of version 2, but is of version 7. Load it with the version of pyparallel that "
    "saved it.": (lambda: {**state_of(Case()), "version": 7}, Case()),
    "come from DataLoader.state_dict(), but is ['_snapshot', '_steps']. States of "
    "other loaders are not supported.": (
        lambda: {"_snapshot": {}, "_steps": 1},
        Case(),
    ),
    "come from DataLoader.state_dict(), but is list. States of other loaders are not "
    "supported.": (lambda: [1], Case()),
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
    assert loader.state_dict()["given"] == 1


@pytest.mark.parametrize(
    "steps, error, shown",
    [(-1, ValueError, "-1"), (1.5, TypeError, "1.5 (float)")],
)
def test_snapshot_every_n_steps_must_be_a_number(
    steps: Any, error: type[Exception], shown: str
) -> None:
    with pytest.raises(error) as caught:
        DataLoader(range(4), snapshot_every_n_steps=steps)
    assert str(caught.value) == (
        "DataLoader: snapshot_every_n_steps must be None or an integer of 0 or more, "
        f"but is {shown}."
    )


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


@pytest.mark.parametrize("length", [4, 9])
def test_a_dataset_of_another_length_is_an_error(length: int) -> None:
    loader = Case("shuffle", length, 2).loader()
    loader.load_state_dict(state_of(Case("shuffle", 8, 2)))
    with pytest.raises(RuntimeError, match="yields others"):
        iter(loader)


class Endless(resumed.Counting):
    """A stateful sampler that does not continue."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


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
    with pytest.raises(TypeError, match="has an IterDataPipe"):
        loader.state_dict()
