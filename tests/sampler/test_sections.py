"""Epochs that are planned in sections: the guarantees of one plan, in less memory."""

from __future__ import annotations

import itertools
import json
import re
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyparallel import SizeBatchSampler
from pyparallel.sampler import planner

pytestmark = pytest.mark.one_backend

#: Budgets of about four samples of `sizes_of`.
LIMITS: list[dict[str, int]] = [
    {"batch_size": 4},
    {"max_padded": 12_000},
    {"max_padded": 12_000, "max_batch_size": 3},
    {"max_total": 400},
]
limits = st.sampled_from(LIMITS)


def sizes_of(number: int) -> Any:
    return np.random.default_rng(number).integers(30, 60, (number, 2))


def ranks(num_replicas: int, *args: Any, **options: Any) -> list[SizeBatchSampler]:
    return [
        SizeBatchSampler(*args, **options, num_replicas=num_replicas, rank=rank)
        for rank in range(num_replicas)
    ]


def batches_of(samplers: list[SizeBatchSampler]) -> list[list[int]]:
    """Return the batches of all ranks, also repeated ones."""
    return [batch for step in zip(*samplers, strict=True) for batch in step]


def in_any_order(batches: list[list[int]]) -> list[list[int]]:
    return sorted(sorted(batch) for batch in batches)


@given(
    plan_size=st.integers(40, 120),
    number=st.integers(0, 300),
    replicas=st.integers(1, 4),
    limit=limits,
    shuffle=st.booleans(),
    epoch=st.integers(0, 2),
)
def test_no_step_repeats_a_batch(
    plan_size: int,
    number: int,
    replicas: int,
    limit: dict[str, int],
    shuffle: bool,
    epoch: int,
) -> None:
    number = max(number, plan_size)  # a section has half of plan_size or more
    options: dict[str, Any] = {**limit, "shuffle": shuffle, "plan_size": plan_size}
    samplers = ranks(replicas, sizes_of(number), **options)
    for sampler in samplers:
        sampler.set_epoch(epoch)
    num_steps = len(samplers[0])
    batches = batches_of(samplers)
    assert len(batches) == replicas * num_steps
    assert sorted(itertools.chain.from_iterable(batches)) == list(range(number))
    if "batch_size" in limit:  # at most one step more for each section
        least = -(-number // 4)
        assert len(batches) <= least + -(-number // plan_size) * replicas


@given(
    sections=st.integers(1, 4),
    windows=st.integers(1, 3),
    replicas=st.sampled_from([1, 2, 3, 6]),
    num_dims=st.integers(1, 2),
)
def test_sections_in_order_are_the_windows_of_the_plan_of_the_epoch(
    sections: int, windows: int, replicas: int, num_dims: int
) -> None:
    plan_size = windows * 6 * 4  # windows of 6 batches of 4 samples
    sizes = sizes_of(sections * plan_size)[:, :num_dims]
    options: dict[str, Any] = {"window": 6, "shuffle": False}
    whole = batches_of(ranks(replicas, sizes, 4, **options))
    found = batches_of(ranks(replicas, sizes, 4, **options, plan_size=plan_size))
    assert in_any_order(found) == in_any_order(whole)
    if replicas == 1:
        assert found == whole


@given(
    number=st.integers(1, 300),
    plan_size=st.integers(1, 300),
    epoch=st.integers(0, 5),
    seed=st.none() | st.integers(0, 5),
)
def test_each_sample_is_in_one_section(
    number: int, plan_size: int, epoch: int, seed: int | None
) -> None:
    sections = planner.Sections(number, plan_size, seed)
    assert len(sections) == -(-number // plan_size)
    found = [sections.samples(epoch, each).tolist() for each in range(len(sections))]
    assert sorted(itertools.chain.from_iterable(found)) == list(range(number))
    lengths = [sections.length(epoch, each) for each in range(len(sections))]
    assert [len(each) for each in found] == lengths
    assert max(lengths) <= plan_size
    assert max(lengths) - min(lengths) <= 1
    assert all(each == sorted(each) for each in found)
    if seed is not None and len(sections) > 1:
        runs = [np.array(each) // len(sections) for each in found]
        assert all(np.diff(each).tolist() == [1] * (len(each) - 1) for each in runs)


def test_sections_are_random_and_differ_between_epochs() -> None:
    sections = planner.Sections(4000, 1000, 0)
    found = [sections.samples(epoch, 0) for epoch in range(200)]
    counts = np.bincount(np.concatenate(found), minlength=4000)
    # Each sample is in the first section of a quarter of the epochs: 50 of 200, with a
    # standard deviation of 6.
    assert 20 < counts.min()
    assert counts.max() < 85
    pairs = [np.intersect1d(a, b).size for a, b in itertools.pairwise(found)]
    assert 200 < min(pairs)
    assert max(pairs) < 300


@given(
    number=st.integers(1, 300),
    plan_size=st.integers(20, 300),
    replicas=st.integers(1, 5),
    limit=limits,
    shuffle=st.booleans(),
)
def test_drop_last_drops_less_than_one_step_of_each_section(
    number: int, plan_size: int, replicas: int, limit: dict[str, int], shuffle: bool
) -> None:
    options: dict[str, Any] = {**limit, "shuffle": shuffle, "plan_size": plan_size}
    samplers = ranks(replicas, sizes_of(number), **options, drop_last=True)
    num_steps = len(samplers[0])
    batches = batches_of(samplers)
    used = list(itertools.chain.from_iterable(batches))
    assert len(set(used)) == len(used)
    assert len(batches) == num_steps * replicas
    if size := limit.get("batch_size"):
        assert {len(batch) for batch in batches} <= {size}
        dropped = -(-number // plan_size) * size * replicas
        assert number - len(used) < max(1, dropped)


def test_a_resumed_section_needs_no_plan_of_the_sections_before_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    options: dict[str, Any] = {"max_padded": 12_000, "plan_size": 100}
    state: dict[str, Any] = {}
    used: list[int] = []
    for replicas in (2, 3, 1, 4, 3, 2):
        samplers = ranks(replicas, sizes_of(400), **options)
        for sampler in samplers:
            sampler.load_state_dict(state) if state else None
        passes = [iter(sampler) for sampler in samplers]
        for _ in range(12 // replicas):  # a section has about 30 batches
            for batches in passes:
                used += next(batches)
        state = json.loads(json.dumps(samplers[0].state_dict()))
    assert state["section"] >= 2
    planned = []
    plan_part = planner.Planner.plan_part

    def counted(self: Any, left: Any, *args: Any) -> Any:
        planned.append(len(left))
        return plan_part(self, left, *args)

    monkeypatch.setattr(planner.Planner, "plan_part", counted)
    last = SizeBatchSampler(sizes_of(400), **options)
    last.load_state_dict(state)
    rest = iter(last)
    used += next(rest)
    assert len(planned) <= len(state["history"]) + 2
    assert max(planned) <= 100
    used += itertools.chain.from_iterable(rest)
    assert sorted(used) == list(range(400))


@pytest.mark.parametrize("limit", LIMITS, ids=str)
def test_a_plan_needs_the_memory_of_one_section(limit: dict[str, int]) -> None:
    sizes = sizes_of(100_000).astype(np.int32)
    sizes.flags.writeable = False

    def peak(plan_size: int | None) -> int:
        tracemalloc.start()
        try:
            sampler = SizeBatchSampler(sizes, **limit, plan_size=plan_size)  # type: ignore[arg-type]
            for _ in itertools.islice(sampler, 3000):  # of several sections
                pass
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    assert peak(5_000) < peak(None) / 4


def test_read_only_sizes_are_not_copied(tmp_path: Path) -> None:
    sizes = sizes_of(20).astype(np.int32)
    np.save(tmp_path / "sizes.npy", sizes)
    mapped = np.load(tmp_path / "sizes.npy", mmap_mode="r")
    sampler = SizeBatchSampler(mapped, 4)
    assert np.shares_memory(sampler.sizes, mapped)
    assert list(sampler) == list(SizeBatchSampler(sizes.tolist(), 4))
    for other in (sizes, mapped.astype(np.int64)):
        assert not np.shares_memory(SizeBatchSampler(other, 4).sizes, other)


def test_a_position_after_the_last_section_is_an_error() -> None:
    sampler = SizeBatchSampler(sizes_of(30), 4, plan_size=10)
    state = sampler.state_dict()
    sampler.load_state_dict({**state, "section": 3})
    message = (
        "SizeBatchSampler: a loaded position must be in one of 3 sections, but is in "
        "section 3. Load an undamaged state."
    )
    for use in (len, list):
        with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
            use(sampler)
    for other in (None, 11):
        text = (
            "SizeBatchSampler.load_state_dict: the state must be of a sampler with "
            f"plan_size={other} like this one, but is of one with plan_size=10. Make "
            "the sampler with plan_size=10."
        )
        again = SizeBatchSampler(sizes_of(30), 4, plan_size=other)
        with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
            again.load_state_dict(state)
