"""Samples that share places of a plan: the guarantees of one plan, in less work."""

from __future__ import annotations

import itertools
import json
import tracemalloc
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pyparallel import SizeBatchSampler
from pyparallel.sampler import places, planner

pytestmark = pytest.mark.one_backend

#: Budgets of about four samples of `sizes_of`.
LIMITS: list[dict[str, Any]] = [
    {"batch_size": 4},
    {"max_padded": 12_000},
    {"max_padded": 12_000, "max_batch_size": 3},
    {"max_total": 400},
]
limits = st.sampled_from(LIMITS)


def sizes_of(number: int, num_dims: int = 2) -> Any:
    return np.random.default_rng(number).integers(30, 60, (number, num_dims))


def ranks(num_replicas: int, *args: Any, **options: Any) -> list[SizeBatchSampler]:
    return [
        SizeBatchSampler(*args, **options, num_replicas=num_replicas, rank=rank)
        for rank in range(num_replicas)
    ]


def batches_of(samplers: list[Any]) -> list[list[int]]:
    """Return the batches of all ranks, without those that the last step repeats."""
    steps = [list(map(tuple, step)) for step in zip(*samplers, strict=True)]
    return [list(batch) for step in steps for batch in dict.fromkeys(step)]


def in_any_order(batches: list[list[int]]) -> list[list[int]]:
    return sorted(sorted(batch) for batch in batches)


@given(
    number=st.integers(1, 300),
    num_dims=st.integers(1, 3),
    plan_size=st.integers(1, 300),
    left_out=st.integers(0, 3),
)
def test_each_sample_has_one_place_that_is_as_large(
    number: int, num_dims: int, plan_size: int, left_out: int
) -> None:
    sizes = sizes_of(number, num_dims).astype(np.int32)
    candidates = np.arange(min(left_out, number - 1), number, dtype=np.int32)
    places = planner.Places.of(sizes, candidates, plan_size)
    assert len(places.sizes) <= plan_size
    assert places.depth == -(-len(candidates) // plan_size)
    turns = places.turns(np.random.default_rng(number))
    everywhere = np.arange(len(places.sizes), dtype=np.int32)
    found = [places.samples(everywhere, copy, turns) for copy in range(places.depth)]
    assert sorted(itertools.chain.from_iterable(found)) == candidates.tolist()
    for copy, place in itertools.product(range(places.depth), everywhere):
        samples = places.samples(everywhere[place : place + 1], copy, turns)
        assert len(samples) == 1 or place == len(everywhere) - 1
        assert (sizes[samples] <= places.sizes[place]).all()


@given(
    number=st.integers(1, 300),
    num_dims=st.integers(1, 2),
    plan_size=st.integers(1, 300),
    parts=st.lists(st.tuples(st.integers(1, 6), st.integers(1, 9)), max_size=4),
    limit=limits,
    shuffle=st.booleans(),
    epoch=st.integers(0, 2),
)
# Two of three batches of the fifth place have no sample.
@example(13, 1, 5, [(3, 2)], {"batch_size": 4}, False, 0)
def test_the_batches_are_those_of_one_plan_with_any_numbers_of_ranks(
    number: int,
    num_dims: int,
    plan_size: int,
    parts: list[tuple[int, int]],
    limit: dict[str, Any],
    shuffle: bool,
    epoch: int,
) -> None:
    sizes = sizes_of(number, num_dims)
    options: dict[str, Any] = {**limit, "shuffle": shuffle, "plan_size": plan_size}
    sampler = SizeBatchSampler(sizes, **options)
    places = sampler._planner.places
    # The plan of a data set of one sample for each place.
    whole = replace(sampler._planner, places=planner.Places.of(places.sizes))
    plan = whole.plan((epoch,), 1)
    expected = Counter(
        tuple(sorted(plan.batch(step, 0))) for step in range(len(plan.steps))
    )
    place_of = np.empty(number, dtype=np.int64)
    order = np.arange(number) if places.order is None else places.order
    place_of[order] = np.arange(number) // places.depth

    sampler.set_epoch(epoch)
    state, used, done = sampler.state_dict(), [], 0
    for num_replicas, most_steps in [*parts, (2, 10**9)]:
        samplers = ranks(num_replicas, sizes, **options)
        for each in samplers:
            each.load_state_dict(json.loads(json.dumps(state)))
        num_steps = min(most_steps, len(samplers[0]) - done)
        passes = [itertools.islice(each, num_steps) for each in samplers]
        used += batches_of(passes)
        done += num_steps
        state, *others = [each.state_dict() for each in samplers]
        assert all(other == state for other in others)
    assert sorted(itertools.chain.from_iterable(used)) == list(range(number))
    found = Counter(tuple(sorted(place_of[batch].tolist())) for batch in used)
    # The last place has fewer samples, so some copies of its batch are without it.
    last, missing = len(places.sizes) - 1, -number % places.depth
    for batch in [batch for batch in expected if last in batch]:
        rest = tuple(place for place in batch if place != last)
        found[batch] += missing
        found[rest] -= missing if rest else 0
    assert +found == Counter({batch: places.depth for batch in expected})


@given(
    number=st.integers(1, 300),
    plan_size=st.integers(1, 300),
    replicas=st.integers(1, 5),
    limit=limits,
    shuffle=st.booleans(),
)
def test_drop_last_drops_less_than_one_step_and_one_batch_of_places(
    number: int, plan_size: int, replicas: int, limit: dict[str, Any], shuffle: bool
) -> None:
    options: dict[str, Any] = {**limit, "shuffle": shuffle, "plan_size": plan_size}
    samplers = ranks(replicas, sizes_of(number), **options, drop_last=True)
    num_steps = len(samplers[0])
    batches = [batch for step in zip(*samplers, strict=True) for batch in step]
    used = list(itertools.chain.from_iterable(batches))
    assert len(set(used)) == len(used)
    assert len(batches) == num_steps * replicas
    complete = batches_of(ranks(replicas, sizes_of(number), **options))
    if size := limit.get("batch_size"):
        assert {len(batch) for batch in batches} <= {size}
        depth = -(-number // plan_size)
        assert number - len(used) < size * replicas + size * depth
    else:
        assert 0 <= len(complete) - len(batches) < replicas


def test_ranks_have_equal_steps_while_their_number_changes() -> None:
    number = 20_000
    sizes = np.random.default_rng(0).integers(30, 60, (number, 2))
    counts = np.zeros(number, dtype=np.int64)
    state: dict[str, Any] = {}
    for num_replicas, num_steps in ((50, 40), (47, 9), (53, 17), (25, 3), (50, None)):
        samplers = ranks(num_replicas, sizes, max_padded=12_000, plan_size=1_000)
        for sampler in samplers:
            sampler.load_state_dict(json.loads(json.dumps(state))) if state else None
        passes = [itertools.islice(sampler, num_steps) for sampler in samplers]
        for step in zip(*passes, strict=True):
            for batch in {tuple(batch) for batch in step}:
                counts[list(batch)] += 1
                largest = sizes[list(batch)].max(axis=0).prod()
                assert largest * len(batch) <= 12_000
        state, *others = [sampler.state_dict() for sampler in samplers]
        assert all(other == state for other in others)
    assert set(counts) == {1}


@pytest.mark.parametrize("limit", LIMITS, ids=str)
def test_a_rank_divides_the_places_alone(
    limit: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    number, plan_size = 400_000, 5_000
    sizes = sizes_of(number).astype(np.int32)
    sizes.flags.writeable = False
    divided = []
    divide = planner.Planner._divide

    def counted(self: Any, order: Any) -> Any:
        divided.append(len(order))
        return divide(self, order)

    monkeypatch.setattr(planner.Planner, "_divide", counted)
    tracemalloc.start()
    try:
        sampler = SizeBatchSampler(sizes, **limit, plan_size=plan_size)
        state = {**sampler.state_dict(), "history": [[2, 50], [7, 30], [1, 9]]}
        sampler.load_state_dict({**state, "num_replicas": 3, "step": 8})
        next(iter(sampler))
        kept = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert divided == [plan_size]
    # The order of the samples, the numbers of the cells, and the plan of the places.
    assert kept < 4 * number + 4 * number // 2 + 100 * plan_size + 200_000


#: The lowest and highest sizes of dimensions. Short ranges have a table of levels.
RANGES = {
    "short": [(200, 1400), (1, 4096)],
    "as long as a table": [(5, 5 + 2**16)],
    "longer than a table": [(0, 2**16 + 1), (3, 40)],
    "equal sizes": [(7, 8), (30, 60)],
    "the largest sizes": [(2**31 - 2**15, 2**31), (0, 2**31), (0, 9)],
}


@pytest.mark.parametrize("ranges", RANGES.values(), ids=RANGES)
def test_a_table_of_levels_gives_the_calculated_order(
    ranges: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = np.random.default_rng(0)
    columns = [generator.integers(*each, 2**17) for each in ranges]
    sizes = np.stack(columns, axis=1).astype(np.int32)
    sizes[:2] = np.transpose([(low, high - 1) for low, high in ranges])
    found = places.Places.of(sizes, plan_size=10_000)
    monkeypatch.setattr(places, "_MAX_TABLE", 0)
    expected = places.Places.of(sizes, plan_size=10_000)
    assert found.order is not None and expected.order is not None
    assert np.array_equal(found.order, expected.order)
    assert np.array_equal(found.sizes, expected.sizes)


@pytest.mark.parametrize("num_dims", [1, 2, 3])
def test_places_cost_few_batches_more(num_dims: int) -> None:
    generator = np.random.default_rng(0)
    sizes = generator.lognormal(4, 0.5, (20_000, num_dims)).astype(np.int64)
    limit = int(16 * sizes.prod(axis=1).mean())
    options: dict[str, Any] = {"max_padded": limit, "skip_oversized": True}
    least = len(SizeBatchSampler(sizes, **options))
    # In three dimensions, neighbours differ by about a tenth.
    most = {1: 1.01, 2: 1.1, 3: 1.3}[num_dims]
    assert len(SizeBatchSampler(sizes, **options, plan_size=5_000)) < most * least


def test_samples_of_a_place_that_is_too_large_are_batches_of_one() -> None:
    sizes = [(100, 1), (100, 1), (10, 10), (10, 10), (1, 100), (1, 100)]
    for limit in ({"max_padded": 100}, {"max_total": 101}):
        options: dict[str, Any] = {**limit, "plan_size": 2}
        places = SizeBatchSampler(sizes, **options)._planner.places
        assert places.sizes.tolist() == [[100, 10], [10, 100]]
        sampler = SizeBatchSampler(sizes, **options)
        assert sorted(sampler) == [[i] for i in range(6)]


def test_samples_meet_others_in_each_epoch() -> None:
    met = []
    for plan_size in (None, 400):
        sampler = SizeBatchSampler(sizes_of(4000), 4, plan_size=plan_size)
        batches = [next(b for b in sampler if 7 in b) for _ in range(50)]
        met.append(len(set(itertools.chain.from_iterable(batches))))
    whole, shared = met
    assert shared > 0.7 * whole


def test_read_only_sizes_are_not_copied(tmp_path: Path) -> None:
    sizes = sizes_of(20).astype(np.int32)
    np.save(tmp_path / "sizes.npy", sizes)
    mapped = np.load(tmp_path / "sizes.npy", mmap_mode="r")
    sampler = SizeBatchSampler(mapped, 4)
    assert np.shares_memory(sampler.sizes, mapped)
    assert np.shares_memory(sampler._planner.places.sizes, mapped)
    assert list(sampler) == list(SizeBatchSampler(sizes.tolist(), 4))
    for other in (sizes, mapped.astype(np.int64)):
        assert not np.shares_memory(SizeBatchSampler(other, 4).sizes, other)


@pytest.mark.parametrize("other", [None, 11])
def test_a_state_belongs_to_a_size_of_plans(other: int | None) -> None:
    state = SizeBatchSampler(sizes_of(30), 4, plan_size=10).state_dict()
    text = f"with plan_size={other} like this one, but is of one with plan_size=10"
    with pytest.raises(ValueError, match=text):
        SizeBatchSampler(sizes_of(30), 4, plan_size=other).load_state_dict(state)
