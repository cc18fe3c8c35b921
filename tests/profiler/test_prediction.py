"""The prediction follows from its figures, and the figures from the loop."""

from __future__ import annotations

import dataclasses
import heapq
import random
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import Dataset

import pyparallel
from pyparallel import Collate, DataLoader, Pad, SizeBatchSampler
from pyparallel.profiler import trial
from pyparallel.profiler.prediction import (
    Costs,
    Numbers,
    changes,
    expected,
    follows,
    numbers_of,
    paddings,
)
from pyparallel.profiler.record import Record
from tests.support.profiler.profile_records import MS, steady, summary

pytestmark = pytest.mark.one_backend

WAYS = {
    "torch": [4 * MS, 2 * MS, 1 * MS],
    "slabs": [2 * MS, 1 * MS, 0],
    "direct": [0, 1 * MS, 0],
    "ahead": [0, 1 * MS, 0],
    "threads": [0, 0, 0],
}
#: A loop of torch with two workers that limit it: 40 ms a batch, 20 ms for the loop.
LOOP = Costs(28 * MS, 8 * MS, *map(float, WAYS["torch"]), 0.0, 20 * MS, 0, 1, 2, 8)
NUMBERS = Numbers(
    *(LOOP, 1e6, 8, 5.0 * MS),
    **{"padding": 0.5, "padding_by_size": 0.0, "follows": 0.5, "ours": 1.0 * MS},
    **{"held": 0.25, "transports": WAYS},
)


def simulated(costs: Costs, batches: int = 400) -> float:
    """Return the time of a batch in a simulation with a core for each worker."""
    made = costs.fetch + costs.collate + costs.send
    own = costs.receive + costs.copy + (0 if costs.workers else made)
    free = [0.0] * costs.workers
    now = thread = 0.0
    ready = []  # when each batch was received ahead of the step
    for _ in range(batches):
        arrives = 0.0
        if costs.workers:
            arrives = heapq.heappop(free) + made
            heapq.heappush(free, arrives)
        if costs.is_ahead:
            # The queue of the thread has two places.
            begin = max(thread, arrives, ready[-3] if len(ready) > 2 else 0.0)
            thread = begin + own
            now = max(now, thread) + costs.compute + costs.read
            ready.append(now)
        else:
            now = max(now, arrives) + own + costs.compute + costs.read
    return now / batches


@pytest.mark.parametrize("workers", [0, 1, 3])
@pytest.mark.parametrize("is_ahead", [False, True])
def test_the_period_is_that_of_a_simulation(workers: int, is_ahead: bool) -> None:
    draw = random.Random(workers)
    for _ in range(20):
        times = [draw.uniform(0, 9) for _ in range(7)]
        costs = Costs(*times, workers=workers, cores=99, is_ahead=is_ahead)
        assert costs.period == pytest.approx(simulated(costs), rel=0.03)


def test_one_core_takes_the_sum_of_all_cpu_time() -> None:
    costs = Costs(5, 1, 1, 1, 1, 1, 10, idle=3, workers=8, cores=1)
    assert costs.period == 17
    assert costs._replace(threads=2).period == 27
    assert costs._replace(cores=2).period == 13  # the loop
    assert costs._replace(cores=2, gil=15).period == 15


def factors(numbers: Numbers) -> dict[str, float | None]:
    return {each.title.partition(":")[0]: each.factor for each in changes(numbers)}


def test_each_change_replaces_its_costs() -> None:
    # Workers: (28 + 8 + 4) / 2 = 20; the loop: 2 + 1 + 20 = 23 ms.
    found = factors(NUMBERS)
    assert LOOP.period == 23 * MS
    assert found == {
        "slabs": pytest.approx(23 / 21),
        "collate in the extension": pytest.approx(23 / 21),
        "prefetch": pytest.approx(23 / 20),
        # The step takes 15 ms, and the workers (28 + 0.5) / 2.
        "sampler": pytest.approx(23 / 15),
        # A quarter of 28 ms and the step of 15 ms hold the GIL.
        "threads instead of processes": pytest.approx(23 / 22),
    }
    lines = expected(NUMBERS)
    assert lines[0] == "expected with pyparallel: 1.5x; most of it from: sampler"
    assert lines[-1].strip() == (
        "bytes of a batch 1.0 MB, reading a sample 3.50 ms, collate 8.00 ms, "
        "transport 7.00 ms, padding 50 %, step 20.0 ms, wait 5.00 ms, 2 workers"
    )


def test_a_step_without_known_sizes_has_a_condition() -> None:
    (found,) = (e for e in changes(NUMBERS._replace(follows=None)) if "sampler" in e[0])
    assert found.factor == pytest.approx(23 / (28.5 / 2))  # the workers limit it
    assert found.reason == "if the step's time follows the size of its batch"


APPLIED = frozenset(["slabs", "collate_fn", "PreDataLoader", "by size", "thread"])


@pytest.mark.parametrize(
    ("now", "others", "text"),
    [
        # The step limits the loop.
        (
            LOOP._replace(compute=400 * MS),
            {"padding": 0.0},
            "no gain (1.01x), because the step takes 99 % of the time",
        ),
        # The dataset limits the loop.
        (
            LOOP._replace(fetch=1000 * MS),
            {},
            "no gain (1.01x), because reading samples takes 99 % of the time",
        ),
        (
            # 41 ms in the loop; with eight workers, the step of 5 ms limits it.
            LOOP._replace(workers=0, compute=5 * MS, send=0, receive=0, read=0),
            {"padding": None},
            "8.2x; most of it from: workers",
        ),
        (
            LOOP,
            {"transports": None, "ours": None, "padding": None},
            "not known, because the transport of a batch was not measured",
        ),
        (LOOP, {"applied": APPLIED}, "not known, because the loop has all parts"),
    ],
)
def test_the_first_line_is_the_sum(
    now: Costs, others: dict[str, Any], text: str
) -> None:
    lines = expected(NUMBERS._replace(now=now, **others))
    assert lines[0] == f"expected with pyparallel: {text}"


@pytest.mark.parametrize(
    ("missing", "title", "reason"),
    [
        ("transports", "slabs", "the transport of a batch was not measured"),
        ("transports", "prefetch", "the transport of a batch was not measured"),
        ("ours", "collate", "collate_fn does more than to pad and to stack"),
        ("padding", "sampler", "the padding of the batches is not known"),
        ("padding_by_size", "sampler", "the padding of the batches is not known"),
        ("held", "threads", "their waits for the GIL were not measured"),
    ],
)
def test_a_missing_figure_is_named(missing: str, title: str, reason: str) -> None:
    numbers = NUMBERS._replace(**{missing: None})
    (found,) = (each for each in changes(numbers) if each.title.startswith(title))
    assert (found.factor, found.reason) == (None, reason)
    lines = [line for line in expected(numbers) if line.strip().startswith(title)]
    assert not lines or lines[0].endswith(f"not known: {reason}")


def test_parts_that_a_loop_has_are_not_predicted() -> None:
    for part, title in (
        *(("slabs", "slabs"), ("collate_fn", "collate"), ("PreDataLoader", "prefetch")),
        *(("by size", "sampler"), ("thread", "threads")),
    ):
        left = changes(NUMBERS._replace(applied=frozenset([part])))
        assert len(left) == 4 and not [e for e in left if e.title.startswith(title)]


class Ragged(Dataset[Any]):
    def __init__(self, shapes: list[tuple[int, ...]]) -> None:
        self.shapes = shapes

    def __len__(self) -> int:
        return len(self.shapes)

    def __getitem__(self, i: int) -> Any:
        return {"x": torch.ones(self.shapes[i]), "label": i}


@pytest.mark.parametrize("dims", [1, 2])
def test_the_padding_is_that_of_a_loader(dims: int) -> None:
    draw = random.Random(dims)
    shapes = [tuple(draw.randint(1, 99) for _ in range(dims)) for _ in range(64)]
    rules = Collate(x=Pad(), label=lambda labels: labels)

    def measured(**options: Any) -> float:
        loader = DataLoader(Ragged(shapes), collate_fn=rules, **options)
        list(loader)
        return loader.stats().padding_fraction

    batches = [shapes[i : i + 8] for i in range(0, 64, 8)]
    before, after = paddings(batches)
    assert before == pytest.approx(measured(batch_size=8))
    sampler = SizeBatchSampler(shapes, 8)
    assert after == pytest.approx(measured(batch_sampler=sampler))
    assert paddings([[(3,), (3,)]]) == (0, 0) == paddings([[(), ()]])
    assert paddings([]) == (None, None) == paddings([[(3,), (3, 3)]])


@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
def test_the_slope_is_found_among_outliers(share: float) -> None:
    nbytes = [100.0 + 7 * i for i in range(31)]
    mean = sum(nbytes) / 31
    times = [1 - share + share * n / mean for n in nbytes]
    times[::6] = [90.0] * 6
    assert follows(nbytes, times) == pytest.approx(share / (sum(times) / 31), abs=0.05)
    assert follows(nbytes[:7], times[:7]) is None
    assert follows([100.0] * 31, times) is None


def test_sizes_are_those_of_the_largest_array() -> None:
    sample = {"a": torch.ones(2, 3), "b": [torch.ones(9), 5], "c": "text"}
    assert trial.size_of(sample) == [9]
    assert trial.size_of(([1, 2, 3], 7)) == [3]
    assert trial.size_of(pyparallel.DataContainer(torch.ones(4, 1))) == [4, 1]
    assert trial.size_of("text") == []


def test_our_time_is_known_for_equal_batches_only() -> None:
    samples = [{"x": torch.ones(n), "y": n} for n in (3, 5)]
    padded = {"x": torch.ones(2, 5), "y": torch.ones(2, dtype=torch.int64)}
    found = trial.ours(samples, padded)
    assert found["layout"][0] == [[2, 5], "float32", False] and found["ours"] > 0
    assert trial.ours(samples, {**padded, "more": torch.ones(9)})["ours"] is None
    assert trial.ours([object(), 1], padded)["ours"] is None


def test_transports_are_measured_for_every_way() -> None:
    layout = [[[2, 3], "float32", True], [[2, 0], "int64", False]]
    found = trial.transports(layout)
    assert list(found) == list(WAYS) and found["threads"][0] == 0
    assert all(len(times) == 3 and min(times) >= 0 for times in found.values())


class Computed(Ragged):
    """Samples that take longer than a wait for a core between two clocks."""

    def __getitem__(self, i: int) -> Any:
        sum(range(50_000))
        return super().__getitem__(i)


def padded(samples: list[Any]) -> dict[str, torch.Tensor]:
    x = torch.nn.utils.rnn.pad_sequence([each["x"] for each in samples], True)
    return {"label": torch.tensor([each["label"] for each in samples]), "x": x}


@pytest.mark.parametrize("workers", [0, 1])
def test_a_loop_of_torch_has_all_figures(tmp_path: Any, workers: int) -> None:
    shapes = [(1 + 2 * (i % 2),) for i in range(40)]
    loader = TorchLoader(Computed(shapes), 2, num_workers=workers, collate_fn=padded)
    with pyparallel.profile(tmp_path, steps=12, warmup=4):
        assert sum(1 for _ in loader) == 20
    record = Record.from_json((tmp_path / "profile.json").read_text())
    layouts = [row["layout"] for row in record.batches if "layout" in row]
    layout = [([2], "int64", False), ([2, 3], "float32", False)]
    assert layouts == [layout] * len(trial.BATCHES)
    found = numbers_of(summary(dataclasses.replace(record, transports=WAYS)))
    assert (found.nbytes, found.batch_size, found.now.workers) == (40, 2, workers)
    assert found.padding == pytest.approx(1 / 3)
    # With an odd number of batches, one batch by size has both sizes.
    num = len(record.batches)
    assert found.padding_by_size == pytest.approx(num % 2 * 2 / (4 * num + 2))
    assert found.ours and found.held is not None and found.now.fetch > 0
    assert found.now[2:5] == (tuple(WAYS["torch"]) if workers else (0, 0, 0))
    titles = [each.title for each in changes(found) if each.factor is not None]
    assert len(titles) == 5


def test_trials_are_no_part_of_the_steps_and_of_the_statistics(tmp_path: Any) -> None:
    rules = Collate(x=Pad())
    loader = DataLoader(Ragged([(1,), (3,)] * 8), 2, num_workers=1, collate_fn=rules)
    with pyparallel.profile(tmp_path, steps=7, warmup=0):
        assert sum(1 for _ in loader) == 8
    assert loader.stats().stacked_nbytes == 8 * 24
    record = Record.from_json((tmp_path / "profile.json").read_text())
    lanes = [event.lane for event in record.events if event.kind == "collate"]
    fetches = [event for event in record.events if event.kind == "fetch"]
    assert lanes.count("worker 0") <= 2 * len(fetches)
    assert sum("layout" in row for row in record.batches) == len(trial.BATCHES)


@pytest.mark.parametrize(
    ("core_wait", "cpu", "made"),
    [
        (0, 2, 8),  # the rest of the time is a wait, for example for a disk
        (0.5, 9, 7.5),
        (4, 9, 4),
    ],
)
def test_the_time_of_other_programs_does_not_count(
    core_wait: float, cpu: int, made: float
) -> None:
    record = steady(core_wait=round(core_wait * MS), cpu=cpu * MS)
    now = numbers_of(summary(record)).now
    assert now.fetch + now.collate == pytest.approx(made * MS)
