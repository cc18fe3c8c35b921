"""A sampler continues after any step, in loaders and with another number of ranks."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch.utils.data
from hypothesis import given
from hypothesis import strategies as st

from pyparallel import DataLoader, SizeBatchSampler

pytestmark = pytest.mark.one_backend

SIZES = [(17 * i % 50, 29 * i % 40) for i in range(101)]
LIMITS: list[dict[str, Any]] = [{"batch_size": 4}, {"max_padded": 9000}]


def samplers_of(
    num_replicas: int, number: int = len(SIZES), **options: Any
) -> list[SizeBatchSampler]:
    options = {"batch_size": 4, "window": 5, **options}
    if "max_padded" in options:
        del options["batch_size"]
    return [
        SizeBatchSampler(
            SIZES[:number] if number else [],
            **options,
            num_replicas=num_replicas,
            rank=rank,
        )
        for rank in range(num_replicas)
    ]


def take(batches: list[Iterator[Any]], num_steps: int) -> list[list[int]]:
    """Return the batches of the next steps on all ranks, without repeated ones."""
    steps = [[list(next(each)) for each in batches] for _ in range(num_steps)]
    return [list(batch) for step in steps for batch in dict.fromkeys(map(tuple, step))]


@given(
    number=st.integers(1, 101),
    parts=st.lists(st.tuples(st.integers(1, 4), st.integers(0, 100)), max_size=3),
    last=st.integers(1, 4),
    limit=st.sampled_from(LIMITS),
    epoch=st.integers(0, 2),
    shuffle=st.booleans(),
)
def test_each_sample_is_used_once_with_any_changes_of_ranks(
    number: int,
    parts: list[tuple[int, int]],
    last: int,
    limit: dict[str, Any],
    epoch: int,
    shuffle: bool,
) -> None:
    used: list[list[int]] = []
    state: dict[str, Any] = {}
    done = 0
    for replicas, percentage in [*parts, (last, 100)]:
        samplers = samplers_of(replicas, number, **limit, shuffle=shuffle)
        for sampler in samplers:
            sampler.set_epoch(epoch)
            if state:
                sampler.load_state_dict(json.loads(json.dumps(state)))
        lengths = {len(sampler) for sampler in samplers}
        assert len(lengths) == 1
        (length,) = lengths
        num_steps = (length - done) * percentage // 100
        batches = [iter(sampler) for sampler in samplers]
        used += take(batches, num_steps)
        done += num_steps
        states = [sampler.state_dict() for sampler in samplers]
        assert all(each == states[0] for each in states)
        state = states[0]
    assert [list(each) for each in batches] == [[]] * last
    assert sorted(i for batch in used for i in batch) == list(range(number))


def test_a_position_belongs_to_its_epoch() -> None:
    sampler, again = samplers_of(1) + samplers_of(1)
    batches = iter(sampler)
    first = next(batches)
    state = sampler.state_dict()
    again.load_state_dict(state)
    again.set_epoch(0)
    assert list(again) == list(batches)
    again.load_state_dict(state)
    again.set_epoch(1)
    sampler.set_epoch(1)
    assert list(again) == list(sampler)
    again.load_state_dict(state)
    again.set_epoch(1)
    again.set_epoch(0)
    assert next(iter(again)) == first


def test_a_new_pass_after_a_break_is_complete() -> None:
    (sampler,) = samplers_of(1)
    state = samplers_of(2)[0].state_dict()
    state["step"] = 3
    sampler.load_state_dict(state)
    batches = iter(sampler)
    rest = [next(batches)]
    assert sorted(i for batch in sampler for i in batch) == list(range(101))
    sampler.load_state_dict(state)
    rest = list(sampler)
    assert sorted(i for batch in rest for i in batch) != list(range(101))
    assert sorted(i for batch in sampler for i in batch) == list(range(101))


def loader_of(sampler: SizeBatchSampler, num_workers: int) -> DataLoader[Any]:
    return DataLoader(range(len(SIZES)), batch_sampler=sampler, num_workers=num_workers)


def rest_of(loader: DataLoader[Any]) -> list[list[int]]:
    return [batch.tolist() for batch in loader]


@pytest.mark.parametrize("before, after, left", [(0, 2, 20), (2, 0, 1), (2, 2, 0)])
def test_loaders_continue_with_the_next_batch(
    before: int, after: int, left: int
) -> None:
    loader = loader_of(samplers_of(1)[0], before)
    loader.batch_sampler.set_epoch(2)
    batches = iter(loader)
    for _ in range(len(loader) - left):
        next(batches)
    again = loader_of(samplers_of(1)[0], after)
    again.load_state_dict(json.loads(json.dumps(loader.state_dict())))
    assert rest_of(again) == [batch.tolist() for batch in batches]
    # The next epoch, by the usual set_epoch.
    for each in (loader, again):
        each.batch_sampler.set_epoch(3)
    assert rest_of(again) == rest_of(loader)


@pytest.mark.parametrize(("delivered", "num_workers"), [("none", 2), ("all", 0)])
def test_set_epoch_after_a_state_between_epochs_counts(
    delivered: str, num_workers: int
) -> None:
    loader = loader_of(samplers_of(1)[0], num_workers)
    if delivered == "all":
        rest_of(loader)
    again = loader_of(samplers_of(1)[0], num_workers)
    again.load_state_dict(loader.state_dict())
    expected = samplers_of(1)[0]
    for sampler in (again.batch_sampler, expected):
        sampler.set_epoch(1)
    assert sorted(map(tuple, rest_of(again))) == sorted(map(tuple, expected))


def test_a_state_of_a_resumed_loader_with_other_ranks_is_exact() -> None:
    loader = loader_of(samplers_of(2)[0], 0)
    next(iter(loader))
    middle = loader_of(samplers_of(1)[0], 2)
    middle.load_state_dict(loader.state_dict())
    batches = iter(middle)
    for _ in range(3):
        next(batches)
    again = loader_of(samplers_of(1)[0], 2)
    again.load_state_dict(middle.state_dict())
    assert rest_of(again) == [batch.tolist() for batch in batches]


def test_torch_loaders_continue_from_the_state_of_the_sampler() -> None:
    sampler, again = samplers_of(1) + samplers_of(1)
    batches = iter(torch.utils.data.DataLoader(range(101), batch_sampler=sampler))  # type: ignore[arg-type, var-annotated]
    for _ in range(4):
        next(batches)
    again.load_state_dict(sampler.state_dict())
    loader: Any = torch.utils.data.DataLoader(
        range(101),  # type: ignore[arg-type]
        batch_sampler=again,
        num_workers=2,
    )
    assert rest_of(loader) == [batch.tolist() for batch in batches]


def state_of(**options: Any) -> dict[str, Any]:
    return samplers_of(1, **options)[0].state_dict()


#: States by the problem.
STATE_ERRORS: dict[str, Any] = {
    "come from SizeBatchSampler.state_dict(), but is ['a']. States of other samplers "
    "are not supported.": {"a": 1},
    "come from SizeBatchSampler.state_dict(), but is list. States of other samplers "
    "are not supported.": [1],
    "be of version 1, but is of version 9. Load it with the version of pyparallel that "
    "saved it.": {**state_of(), "version": 9},
    "be of a sampler with batch_size=4 like this one, but is of one with batch_size=3. "
    "Make the sampler with batch_size=3.": state_of(batch_size=3),
    "be of a sampler with num_samples=101 like this one, but is of one with "
    "num_samples=99. Make the sampler with num_samples=99.": state_of(number=99),
    "be of a sampler with the same sizes, but the checksums of the sizes differ. Use "
    "the data set of the saved run.": SizeBatchSampler(
        [(1, 1)] * 101, 4, window=5
    ).state_dict(),
}


def test_states_of_other_samplers_are_errors() -> None:
    (sampler,) = samplers_of(1)
    expected = list(sampler)
    for message, state in STATE_ERRORS.items():
        text = f"SizeBatchSampler.load_state_dict: the state must {message}"
        with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
            sampler.load_state_dict(state)
        assert list(sampler) == expected
