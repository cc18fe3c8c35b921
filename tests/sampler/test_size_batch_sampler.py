"""Batches of similar sizes: each sample once, equal ranks, little padding, resume."""

from __future__ import annotations

import itertools
import json
import math
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.data
from hypothesis import given
from hypothesis import strategies as st

from pyparallel import DataLoader, Padding, SizeBatcher, SizeBatchSampler, pad_stack
from tests.support.processes import forkserver
from tests.support.repository.folders import ROOT

pytestmark = pytest.mark.one_backend

#: Few sizes, so that many samples are equal in one dimension.
FEW_SIZES = [2**k - 1 for k in range(11)]


def random_sizes(number: int, num_dims: int, seed: int) -> Any:
    return np.random.default_rng(seed).integers(0, 50, (number, num_dims))


def all_ranks(
    num_replicas: int, sizes: Any, *args: Any, **options: Any
) -> list[SizeBatchSampler]:
    return [
        SizeBatchSampler(sizes, *args, **options, num_replicas=num_replicas, rank=rank)
        for rank in range(num_replicas)
    ]


def steps_of(samplers: list[SizeBatchSampler]) -> list[list[list[int]]]:
    """Return the batches of all ranks, step by step. All ranks have equally many."""
    return [list(step) for step in zip(*samplers, strict=True)]


def take(batches: list[Iterator[Any]], num_steps: int) -> list[list[int]]:
    """Return the batches of the next steps on all ranks, without repeated ones."""
    steps = [[list(next(each)) for each in batches] for _ in range(num_steps)]
    return [list(batch) for step in steps for batch in dict.fromkeys(map(tuple, step))]


def distinct_batches(steps: list[list[list[int]]]) -> list[list[int]]:
    """Return the batches without those that the last step repeats."""
    last = [list(batch) for batch in dict.fromkeys(map(tuple, steps[-1]))]
    return [batch for step in steps[:-1] for batch in step] + last


limits = st.one_of(
    st.builds(lambda n: {"batch_size": n}, st.integers(1, 9)),
    st.builds(lambda n: {"max_padded": n}, st.integers(2500, 30000)),
    st.builds(
        lambda n, most: {"max_padded": n, "max_batch_size": most},
        st.integers(2500, 30000),
        st.integers(1, 9),
    ),
    st.builds(
        lambda n, most: {"max_total": n, "max_batch_size": most},
        st.integers(100, 900),
        st.integers(1, 9) | st.none(),
    ),
)
plans = st.fixed_dictionaries(
    {
        "shuffle": st.booleans(),
        "seed": st.integers(0, 5),
        "window": st.integers(1, 20),
    }
)


@given(
    number=st.integers(0, 150),
    num_dims=st.integers(1, 2),
    parts=st.lists(st.tuples(st.integers(1, 5), st.integers(0, 100)), max_size=3),
    last=st.integers(1, 5),
    epoch=st.integers(0, 3),
    limit=limits,
    plan=plans,
    plan_size=st.none() | st.integers(1, 150),
)
def test_each_sample_is_in_one_batch_with_any_changes_of_ranks(
    number: int,
    num_dims: int,
    parts: list[tuple[int, int]],
    last: int,
    epoch: int,
    limit: dict[str, Any],
    plan: dict[str, Any],
    plan_size: int | None,
) -> None:
    sizes = random_sizes(number, num_dims, number)
    plan = {**plan, "plan_size": plan_size}
    used: list[list[int]] = []
    state: dict[str, Any] = {}
    done = 0
    for replicas, percentage in [*parts, (last, 100)]:
        samplers = all_ranks(replicas, sizes, **limit, **plan)
        for sampler in samplers:
            sampler.set_epoch(epoch)
            if state:
                sampler.load_state_dict(json.loads(json.dumps(state)))
        (length,) = {len(sampler) for sampler in samplers}
        num_steps = (length - done) * percentage // 100
        batches = [iter(sampler) for sampler in samplers]
        used += take(batches, num_steps)
        done += num_steps
        state, *others = [sampler.state_dict() for sampler in samplers]
        assert all(other == state for other in others)
    assert [list(each) for each in batches] == [[]] * last
    assert sorted(i for batch in used for i in batch) == list(range(number))
    if "batch_size" in limit and plan_size is None:
        assert len(used) == math.ceil(number / limit["batch_size"])
    most = limit.get("batch_size") or limit.get("max_batch_size") or number
    assert all(0 < len(batch) <= most for batch in used)
    for batch in used:
        padded = math.prod(sizes[batch].max(axis=0).tolist())
        assert padded * len(batch) <= limit.get("max_padded", math.inf)
        assert sizes[batch].sum() <= limit.get("max_total", math.inf)


@given(
    number=st.integers(0, 150),
    replicas=st.integers(1, 5),
    limit=limits,
    plan=plans,
)
def test_drop_last_drops_less_than_one_step(
    number: int, replicas: int, limit: dict[str, Any], plan: dict[str, Any]
) -> None:
    sizes = random_sizes(number, 2, number)
    steps = steps_of(all_ranks(replicas, sizes, **limit, **plan, drop_last=True))
    used = Counter(i for step in steps for batch in step for i in batch)
    assert set(used.values()) <= {1}
    if "batch_size" in limit:
        size = limit["batch_size"]
        assert {len(b) for step in steps for b in step} <= {size}
        assert len(steps) == number // (size * replicas)
    else:
        dropped = set(range(number)) - set(used)
        complete = steps_of(all_ranks(replicas, sizes, **limit, **plan))
        last = {i for batch in complete[-1] for i in batch} if complete else set()
        assert len(complete) - len(steps) == bool(dropped)
        assert dropped in (set(), last)


def padded_size(samples: list[int], sizes: Any) -> int:
    return int(sizes[samples].max(axis=0).prod()) * len(samples)


def divided(samples: list[int], sizes: Any, batch_size: int) -> list[list[int]]:
    """Divide samples as a k-d tree does: the definition, one window at a time."""
    if len(samples) <= batch_size:
        return [samples]
    middle = math.ceil(len(samples) / batch_size) // 2 * batch_size
    ways = []
    for dim in range(sizes.shape[1]):
        ordered = sorted(samples, key=lambda i: sizes[i, dim])
        ways.append((ordered[:middle], ordered[middle:]))
    best = min(ways, key=lambda halves: sum(padded_size(h, sizes) for h in halves))
    return [batch for half in best for batch in divided(half, sizes, batch_size)]


def in_order(batches: Iterable[list[int]]) -> list[list[int]]:
    """Return the batches with their samples in the order of the data set."""
    return [sorted(batch) for batch in batches]


@given(data=st.data(), batch_size=st.integers(1, 5), window=st.integers(1, 40))
def test_windows_are_divided_where_halves_need_the_least_padding(
    data: Any, batch_size: int, window: int
) -> None:
    num_dims = data.draw(st.integers(1, 3))
    row = st.lists(st.sampled_from(FEW_SIZES), min_size=num_dims, max_size=num_dims)
    sizes = np.array(data.draw(st.lists(row, min_size=1, max_size=80)))
    num_batches = math.ceil(len(sizes) / batch_size)
    windows = math.ceil(num_batches / window)
    edges = [k * num_batches // windows * batch_size for k in range(windows)]
    expected = []
    for begin, end in zip(edges, [*edges[1:], len(sizes)], strict=True):
        expected += divided(list(range(begin, end)), sizes, batch_size)
    sampler = SizeBatchSampler(sizes, batch_size, window=window, shuffle=False)
    assert in_order(sampler) == in_order(expected)


def test_a_plan_is_the_same_in_every_version() -> None:
    # Runs that are resumed after an upgrade rely on it.
    sizes = [9, 1, 8, 2, 7, 3, 6, 4, 5, 10]
    sampler = SizeBatchSampler(sizes, 3, seed=1, window=2)
    for _ in range(2):
        sampler.set_epoch(0)
        assert list(sampler) == [[4, 2, 0], [1, 7, 8], [3, 5, 6], [9]]
        sampler.set_epoch(1)
        assert list(sampler) == [[9], [4, 2, 0], [3, 5, 8], [1, 7, 6]]
    other = SizeBatchSampler(sizes, 3, seed=2, window=2)
    assert list(other) == [[1, 3, 8], [4], [2, 0, 9], [5, 7, 6]]


@pytest.mark.parametrize(
    "padding",
    [
        None,
        Padding(size_divisor=16),
        Padding(size_divisor=(8, 32)),
        Padding(shape=(50, 60)),
        Padding(buckets=[(60, 60), (20, 40), (40, 20), (30, 30)]),
    ],
    ids=repr,
)
@pytest.mark.parametrize("limit", [{"batch_size": 4}, {"max_padded": 14400}], ids=str)
def test_the_report_agrees_with_padded_batches(
    padding: Padding | None, limit: dict[str, int]
) -> None:
    sizes = random_sizes(203, 2, 5)
    options = {"padding": padding} if padding else {}
    samplers = all_ranks(3, sizes, **limit, **options)
    shapes, ratios, total = set(), [], 0
    steps = steps_of(samplers)
    for step in steps:
        stacked = [
            pad_stack([torch.empty(*sizes[i].tolist()) for i in batch], **options)
            for batch in step
        ]
        shapes |= {tuple(each.shape) for each in stacked}
        costs = [each.numel() for each in stacked]
        assert max(costs) <= limit.get("max_padded", math.inf)
        if len(set(map(tuple, step))) == 3:
            ratios.append(3 * max(costs) / sum(costs))
    batches = distinct_batches(steps)
    for batch in batches:
        tensors = [torch.empty(*sizes[i].tolist()) for i in batch]
        total += pad_stack(tensors, **options).numel()
    planned = samplers[0].report().planned
    assert planned.num_shapes == len(shapes)
    assert planned.padding == pytest.approx(1 - sizes.prod(axis=1).sum() / total)
    assert planned.balance_mean == pytest.approx(np.mean(ratios))
    assert planned.balance_p99 == pytest.approx(np.quantile(ratios, 0.99))
    assert planned.num_steps == len(steps)
    assert planned.batch_size_mean == pytest.approx(203 / len(batches))


@pytest.mark.parametrize("most", [None, 3])
@pytest.mark.parametrize("shuffle", [True, False])
def test_batches_of_a_total_are_as_long_as_it_permits(
    shuffle: bool, most: int | None
) -> None:
    sizes = random_sizes(203, 2, 5)
    options: dict[str, Any] = {"max_batch_size": most, "shuffle": shuffle}
    samplers = all_ranks(3, sizes, max_total=400, **options)
    steps = steps_of(samplers)
    totals = [[int(sizes[batch].sum()) for batch in step] for step in steps]
    report = samplers[0].report().planned
    assert (report.padding, report.num_steps) == (pytest.approx(0), len(steps))
    complete = totals[: -1 if len(set(map(tuple, steps[-1]))) < 3 else None]
    ratios = [3 * max(each) / sum(each) for each in complete]
    assert report.balance_mean == pytest.approx(np.mean(ratios))
    batches = list(SizeBatchSampler(sizes, max_total=400, window=203, **options))
    if not shuffle:
        assert [i for batch in batches for i in batch] == list(range(203))
        for batch, after in itertools.pairwise(batches):
            longer = sizes[[*batch, after[0]]].sum()
            assert longer > 400 or len(batch) == most


def test_the_report_is_a_table() -> None:
    report = SizeBatchSampler([1, 4, 1, 4], 2, window=2, seed=2).report()
    assert str(report).splitlines() == [
        "                           planned    random",
        "padding                      0.0 %    37.5 %",
        "shapes                           2         1",
        "balance, mean                1.000     1.000",
        "balance, 99 % of steps       1.000     1.000",
        "steps                            2         2",
        "samples in a batch             2.0       2.0",
    ]
    assert report.as_dict()["planned"]["num_steps"] == 2
    planned = SizeBatchSampler([], 2).report().planned
    assert (planned.padding, planned.num_shapes, planned.num_steps) == (0.0, 0, 0)


@pytest.mark.parametrize("progress", [True, False])
def test_a_function_is_called_once_for_each_sample(progress: bool) -> None:
    calls = []

    def size_of(index: int) -> Any:
        calls.append(index)
        return torch.Size([index + 1, 10 - index])

    sampler = SizeBatchSampler(size_of, 2, num_samples=5, progress=progress)
    assert calls == [0, 1, 2, 3, 4]
    assert sampler.sizes.tolist() == [[1, 10], [2, 9], [3, 8], [4, 7], [5, 6]]
    for wrong in ({"seed": -1}, {"window": 0}, {"progress": 1}):
        calls.clear()
        with pytest.raises(
            (TypeError, ValueError), match=f" {next(iter(wrong))} must be "
        ):
            SizeBatchSampler(size_of, 2, num_samples=5, **wrong)
        assert calls == []  # before the arguments are checked


def test_oversized_samples_are_left_out_on_request() -> None:
    for limit in ("max_padded", "max_total"):
        options: dict[str, Any] = {limit: 20, "skip_oversized": True}
        sampler = SizeBatchSampler([5, 50, 6, 70], **options)
        assert sorted(i for batch in sampler for i in batch) == [0, 2]
        assert sampler.num_skipped == 2


#: Arguments by the message of their error; the others are sizes=[1] and batch_size=1.
VALUE_ERRORS: dict[str, dict[str, Any]] = {
    "one of batch_size, max_padded and max_total must be set, but they are None, None "
    "and None. Set one of them.": {"batch_size": None},
    "one of batch_size, max_padded and max_total must be set, but they are 1, 3 and "
    "None. Set one of them.": {"max_padded": 3},
    "one of batch_size, max_padded and max_total must be set, but they are None, 3 and "
    "4. Set one of them.": {"batch_size": None, "max_padded": 3, "max_total": 4},
    "max_batch_size must be None with batch_size, but is 3. Remove it, as batch_size "
    "sets the number of samples.": {"max_batch_size": 3},
    "padding must be None with max_total, but is Padding(size_divisor=8). Remove it, "
    "or set max_padded.": {
        "batch_size": None,
        "max_total": 3,
        "padding": Padding(size_divisor=8),
    },
    f"max_total must be at most {2**50}, but is {2**60}.": {
        "batch_size": None,
        "max_total": 2**60,
    },
    "every sample must fit in max_total=60, but sample 1 has 70 elements (sizes "
    "[30, 40]). Increase max_total, remove the sample, or set skip_oversized=True.": {
        "sizes": [[1, 2], [30, 40]],
        "batch_size": None,
        "max_total": 60,
    },
    "batch_size must be an integer of 1 or more, but is 0.": {"batch_size": 0},
    f"max_padded must be at most {2**50}, but is {2**60}.": {
        "batch_size": None,
        "max_padded": 2**60,
    },
    "padding must be for 1 dimensions like sizes, but is Padding(shape=(3, 4)). Give "
    "sizes of 2 dimensions.": {"padding": Padding(shape=(3, 4))},
    "one shape of Padding(buckets=((4, 9), (9, 4))) must hold the largest sizes "
    "[9, 9], but none does. sizes[0] is [2, 9]. Add a larger shape.": {
        "sizes": [(2, 9), (9, 2)],
        "padding": Padding(buckets=[(4, 9), (9, 4)]),
    },
    "one shape of Padding(buckets=((4,), (8,))) must hold the largest sizes [9], but "
    "none does. sizes[1] is [9]. Add a larger shape.": {
        "sizes": [1, 9, 5],
        "padding": Padding(buckets=[(4,), (8,)]),
    },
    "rank must be less than num_replicas=2, but is 2. Ranks count from 0.": {
        "num_replicas": 2,
        "rank": 2,
    },
    "sizes must have the shape (n,) or (n, d), but have the shape (1, 1, 1). Give the "
    "sizes of one sample in each row.": {"sizes": [[[1]]]},
    "sizes must have the same number of dimensions for each sample, but the numbers "
    "differ. Give the same dimensions for all samples.": {"sizes": [[1], [2, 3]]},
    "sizes[1] must be from 0 to 2147483647, but is [3, -1]. Correct the size of sample "
    "1.": {"sizes": [[1, 2], [3, -1]]},
    "sizes[1] must be from 0 to 2147483647, but is 2147483648. Correct the size of "
    "sample 1.": {"sizes": [1, 2**31]},
    "every sample must fit in max_padded=1000, but sample 1 has 1200 padded elements "
    "(sizes [30, 40]). Increase max_padded, remove the sample, or set "
    "skip_oversized=True.": {
        "sizes": [[1, 2], [30, 40]],
        "batch_size": None,
        "max_padded": 1000,
    },
    "sizes must have no masked size, but 1 of 3 are masked. Leave out these samples, "
    "or call filled() with their sizes.": {
        "sizes": np.ma.array([1, 2, 3], mask=[0, 1, 0])
    },
    "sizes(0) must have no masked size, but 1 of 1 are masked. Leave out these "
    "samples, or call filled() with their sizes.": {
        "sizes": lambda i: np.ma.array(3, mask=True),
        "num_samples": 1,
    },
    "num_samples must be None if sizes is not a function, but is 1. Remove "
    "num_samples.": {"num_samples": 1},
    "cache must be None if sizes is not a function, but is 'f'. Remove cache.": {
        "cache": "f"
    },
}


class NeverRead(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        raise AssertionError("a sample was read")


TYPE_ERRORS: dict[str, dict[str, Any]] = {
    "shuffle must be True or False, but is 1 (int).": {"shuffle": 1},
    "padding must be a Padding or None, but is 32 (int). Use pyparallel.Padding.": {
        "padding": 32
    },
    "sizes must be the sizes of the samples, but is a sampler "
    "(torch.utils.data.sampler.SequentialSampler). If Lightning has replaced the "
    "sampler, set use_distributed_sampler=False of its Trainer.": {
        "sizes": torch.utils.data.SequentialSampler([1])
    },
    "sizes must be the sizes of the samples, but is generator. Use list(...) of it.": {
        "sizes": (size for size in [1])
    },
    f"sizes must be the sizes of the samples, but is {__name__}.NeverRead. Pass one "
    "size for each sample, for example [len(text) for text in texts], or a function "
    "with num_samples=len(dataset).": {"sizes": NeverRead()},
    "sizes must be integers, but are of dtype float64 (list). Convert them to "
    "integers.": {"sizes": [1.5]},
    "num_samples must be an integer, as sizes is a function, of 0 or more, but is "
    "None (None).": {"sizes": len},
    "sizes(0) must be an integer or a sequence of integers, but is 2.5 (float). "
    "Return the sizes that differ between samples.": {
        "sizes": lambda i: 2.5,
        "num_samples": 1,
    },
    "cache must be the path of a file or None, but is 3 (int).": {
        "sizes": len,
        "num_samples": 1,
        "cache": 3,
    },
}


def test_errors_name_the_argument_or_the_sample() -> None:
    for error, cases in ((ValueError, VALUE_ERRORS), (TypeError, TYPE_ERRORS)):
        for message, arguments in cases.items():
            text = f"^SizeBatchSampler: {re.escape(message)}$"
            with pytest.raises(error, match=text):
                SizeBatchSampler(**{"sizes": [1], "batch_size": 1, **arguments})


def test_any_integer_is_a_batch_size() -> None:
    for limit in (sys.maxsize, 2**64):
        sampler = SizeBatchSampler([4, 2, 3], limit, shuffle=False)
        assert list(sampler) == [[0, 1, 2]]
        assert sampler.report().planned.num_steps == 1
        batcher = SizeBatcher([4, 2, 3], lambda size: size, limit, shuffle=False)
        assert list(batcher) == [[4, 2, 3]]


@pytest.mark.slow
def test_the_package_needs_numpy_for_the_sampler_alone() -> None:
    code = """
import sys
sys.modules["numpy"] = None
import pyparallel
try:
    pyparallel.SizeBatchSampler([1, 2], 1)
except ImportError as error:
    print(error)
"""
    message = "SizeBatchSampler: NumPy is not installed. Install it: pip install numpy."
    assert forkserver.run(code, [str(ROOT)]) == (0, f"{message}\n")


# ----------------------------------------------------------------------------- states
PAIRS = [(17 * i % 50, 29 * i % 40) for i in range(101)]


def sampler_of(num_replicas: int = 1, **options: Any) -> SizeBatchSampler:
    """Return the sampler of rank 0."""
    options = {"sizes": PAIRS, "batch_size": 4, "window": 5, **options}
    return SizeBatchSampler(**options, num_replicas=num_replicas, rank=0)


def test_a_position_belongs_to_its_epoch() -> None:
    sampler, again = sampler_of(), sampler_of()
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
    sampler = sampler_of()
    state = sampler_of(2).state_dict()
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
    return DataLoader(range(len(PAIRS)), batch_sampler=sampler, num_workers=num_workers)


def rest_of(loader: DataLoader[Any]) -> list[list[int]]:
    return [batch.tolist() for batch in loader]


@pytest.mark.parametrize(("delivered", "num_workers"), [("none", 2), ("all", 0)])
def test_set_epoch_after_a_state_between_epochs_counts(
    delivered: str, num_workers: int
) -> None:
    loader = loader_of(sampler_of(), num_workers)
    if delivered == "all":
        rest_of(loader)
    again = loader_of(sampler_of(), num_workers)
    again.load_state_dict(loader.state_dict())
    expected = sampler_of()
    for sampler in (again.batch_sampler, expected):
        sampler.set_epoch(1)
    assert sorted(map(tuple, rest_of(again))) == sorted(map(tuple, expected))


def test_a_state_of_a_resumed_loader_with_other_ranks_is_exact() -> None:
    loader = loader_of(sampler_of(2), 0)
    loader.batch_sampler.set_epoch(2)
    next(iter(loader))
    middle = loader_of(sampler_of(), 2)
    middle.load_state_dict(loader.state_dict())
    batches = iter(middle)
    for _ in range(3):
        next(batches)
    again = loader_of(sampler_of(), 2)
    again.load_state_dict(json.loads(json.dumps(middle.state_dict())))
    assert rest_of(again) == [batch.tolist() for batch in batches]
    for each in (middle, again):
        each.batch_sampler.set_epoch(3)
    assert rest_of(again) == rest_of(middle)


def test_torch_loaders_continue_from_the_state_of_the_sampler() -> None:
    sampler, again = sampler_of(), sampler_of()
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


#: States by the problem.
STATE_ERRORS: dict[str, Any] = {
    "come from SizeBatchSampler.state_dict(), but is ['a']. States of other samplers "
    "are not supported.": {"a": 1},
    "come from SizeBatchSampler.state_dict(), but is list. States of other samplers "
    "are not supported.": [1],
    "be of version 1, but is of version 9. Load it with the version of pyparallel that "
    "saved it.": {**sampler_of().state_dict(), "version": 9},
    "be of a sampler with batch_size=4 like this one, but is of one with batch_size=3. "
    "Make the sampler with batch_size=3.": sampler_of(batch_size=3).state_dict(),
    "be of a sampler with num_samples=101 like this one, but is of one with "
    "num_samples=99. Make the sampler with num_samples=99.": sampler_of(
        sizes=PAIRS[:99]
    ).state_dict(),
    "be of a sampler with the same sizes, but the checksums of the sizes differ. Use "
    "the data set of the saved run.": sampler_of(sizes=[(1, 1)] * 101).state_dict(),
}


#: Damaged entries of a state, with the rule that they break.
DAMAGES: list[tuple[str, Any, str]] = [
    *(
        (name, value, f"must be an integer of {least} or more, but is {value!r}")
        for name, least in {
            "epoch": 0,
            "next_epoch": 0,
            "step": 0,
            "num_replicas": 1,
        }.items()
        for value in (None, -1, 1.5, "3", True, [])
    ),
    *(
        (
            "history",
            value,
            f"must be a list of pairs of positive integers, but is {value!r}",
        )
        for value in (None, {}, [1], [[1]], [[1, 0]], [[2, "1"]], [[1, 2, 3]])
    ),
]


def test_damaged_states_are_errors() -> None:
    sampler = sampler_of()
    batches = iter(sampler)
    next(batches)
    state = sampler.state_dict()
    where = "SizeBatchSampler.load_state_dict: the entry"
    for name, value, rule in DAMAGES:
        text = f"{where} {name!r} of the state {rule}. Load an undamaged state."
        with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
            sampler.load_state_dict({**state, name: value})
        assert sampler.state_dict() == state
    for name in state:
        without = {key: value for key, value in state.items() if key != name}
        with pytest.raises(
            ValueError, match=r"^SizeBatchSampler\.load_state_dict: the "
        ):
            sampler.load_state_dict(without)
        assert sampler.state_dict() == state
    again = sampler_of()
    again.load_state_dict({**state, "step": 27})
    text = (
        "SizeBatchSampler: a loaded position must be in its epoch of 26 batches, but "
        "is after batch 27. Load an undamaged state."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        next(iter(again))


def test_states_of_other_samplers_are_errors() -> None:
    sampler = sampler_of()
    expected = list(sampler)
    for message, state in STATE_ERRORS.items():
        text = f"SizeBatchSampler.load_state_dict: the state must {message}"
        with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
            sampler.load_state_dict(state)
        sampler.set_epoch(0)
        assert list(sampler) == expected
