"""Advice that is followed helps, and is not given again."""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import pyparallel
from pyparallel import DataLoader, LoaderStats, PreDataLoader
from pyparallel.core import errors
from pyparallel.loader import stats
from pyparallel.loader.applied import applied_changes
from pyparallel.loader.findings import MUCH_PADDING

pytestmark = [
    pytest.mark.one_backend,
    pytest.mark.filterwarnings(r"ignore:\[PP2"),
]


class Sleeps(torch.utils.data.Dataset[int]):
    """Each sample takes a time."""

    def __init__(self, length: int, seconds: float, late: int = -1) -> None:
        self.length, self.seconds, self.late = length, seconds, late

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        time.sleep(self.seconds if index != self.late else 20 * self.seconds)
        return index


def run(loader: Any, step: float = 0.0, epochs: int = 1, hold: int = 0) -> LoaderStats:
    """Return the statistics of a loop whose step takes a time, and holds batches."""
    held: list[Any] = []
    for _ in range(epochs):
        for batch in loader:
            held = [*held, batch][-hold:] if hold else []
            time.sleep(step)
        del batch
    found: LoaderStats = loader.stats()
    return found


#: The number of workers that a verdict names.
NUMBER = re.compile(r"num_workers=(\d+)")


def advised(found: LoaderStats) -> int:
    match = NUMBER.search(found.verdict)
    assert match is not None, found.verdict
    return int(match[1])


def test_workers_of_the_advised_number_end_the_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("pyparallel.loader.data_loader.num_cores", lambda: 8)
    slow, step = Sleeps(60, 0.04), 0.04  # on a busy machine, the start takes a second
    before = run(DataLoader(slow), step)
    number = advised(before)
    assert "make batches in workers" in before.verdict and before.waited > 0.4
    few = run(DataLoader(slow, num_workers=1), step / 4, epochs=1)
    assert f"use more workers, num_workers={advised(few)}" in few.verdict
    enough = run(DataLoader(slow, num_workers=advised(few) + 1), step / 4)
    after = run(DataLoader(slow, num_workers=number + 1), step)
    assert after.wait_seconds < before.wait_seconds / 2
    assert enough.wait_seconds < few.wait_seconds / 2
    for found in (enough, after):
        assert "num_workers=" not in found.verdict


def test_epochs_that_begin_with_a_wait_have_two_advices_and_then_none() -> None:
    waits = 0.25

    def begin(_: int) -> None:
        time.sleep(waits)

    def loader(**options: Any) -> DataLoader[Any]:
        given = {"num_workers": 1, "worker_init_fn": begin, **options}
        return DataLoader(Sleeps(3, 0.0), **given)

    first = run(loader())
    assert "measure more batches" in first.verdict
    before = run(loader(), epochs=3)
    assert before.verdict.endswith("set persistent_workers=True")
    kept = loader(persistent_workers=True)
    after = run(kept, epochs=3)
    assert after.first_wait_seconds < before.first_wait_seconds / 2
    assert "set persistent_workers" not in after.verdict
    assert after.verdict.endswith("use PreDataLoader(loader, next_epoch=True)")
    del kept
    with PreDataLoader(loader(persistent_workers=True), next_epoch=True) as ahead:
        last = run(ahead, epochs=3)
    assert not {"persistent_workers", "next_epoch"}.isdisjoint(last.applied)
    assert "next_epoch" not in last.verdict


def keep(samples: list[Any], kept: list[Any] = []) -> Any:  # noqa: B006
    zeros = [torch.zeros(50_000) for _ in samples]
    kept.append(torch.utils.data.default_collate(zeros))
    return kept[-1]


def sparse(samples: list[Any]) -> Any:
    return torch.ones(3).to_sparse()


def dense(samples: list[Any]) -> Any:
    return torch.ones(len(samples), 5000)


#: Options of a loader, the advice, and the options that follow it.
MISSES: dict[str, tuple[dict[str, Any], str, dict[str, Any]]] = {
    "full": ({"ring_slabs": 1}, "increase ring_slabs", {"ring_slabs": 30}),
    "large": (
        {"max_ring_bytes": 1 << 17},
        "increase max_ring_bytes",
        {"max_ring_bytes": 1 << 24},
    ),
    "off": ({"ring_slabs": 0}, "set ring_slabs and max", {"ring_slabs": None}),
    "kept": ({"collate_fn": keep}, "clone the tensors", {"collate_fn": dense}),
    "unsupported": (
        {"collate_fn": sparse},
        "convert sparse, nested and device tensors",
        {"collate_fn": dense},
    ),
}


@pytest.mark.parametrize("reason", MISSES)
def test_misses_of_the_ring_end_with_the_advice_for_their_reason(reason: str) -> None:
    options, advice, more = MISSES[reason]
    given = {"collate_fn": dense, "num_workers": 1, **options}

    def shown(**options: Any) -> LoaderStats:
        found = run(DataLoader(range(8), 2, **options), hold=3)
        # As where the loop waits, and collate is most of the work.
        return dataclasses.replace(
            found, wait_seconds=9.0, collate_seconds=9.0, first_wait_seconds=0.0
        )

    before, after = shown(**given), shown(**{**given, **more})
    assert before.miss_reason == reason and advice in before.verdict
    assert after.ring_misses == 0 and "missed the ring" not in after.verdict


class Words(torch.utils.data.IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(SAMPLES)

    def __len__(self) -> int:
        return len(SAMPLES)


#: Short and long samples alternate.
SAMPLES = [torch.ones(1 if i % 2 else 20_000) for i in range(80)]
PADS = pyparallel.Collate(default=pyparallel.Pad())
PADDED: dict[str, tuple[Callable[[], Any], Callable[[], Any], str, str]] = {
    "map-style": (
        lambda: DataLoader(SAMPLES, 4, collate_fn=PADS),
        lambda: DataLoader(
            SAMPLES,
            batch_sampler=pyparallel.SizeBatchSampler([len(s) for s in SAMPLES], 4),
            collate_fn=PADS,
        ),
        "use SizeBatchSampler(sizes, batch_size)",
        "batch_sampler=SizeBatchSampler(sizes, batch_size)",
    ),
    "stream": (
        lambda: DataLoader(Words(), 4, collate_fn=PADS),
        lambda: DataLoader(
            pyparallel.SizeBatcher(Words(), len, batch_size=4),
            batch_size=None,
            collate_fn=PADS,
        ),
        "use SizeBatcher(stream, size_of, batch_size)",
        "together: SizeBatcher(stream, size_of, batch_size)",
    ),
}


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("kind", PADDED)
def test_batches_by_size_end_the_padding(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, followed, advice, warned = PADDED[kind]
    monkeypatch.setattr(stats, "_MIN_NBYTES", 1)
    monkeypatch.setattr(errors, "_warned", set())
    with pytest.warns(pyparallel.LoaderWarning, match=r"\[PP211\]") as caught:
        before = run(made())
    assert warned in str(caught[0].message)
    assert before.padding_fraction > MUCH_PADDING
    assert advice in dataclasses.replace(before, wait_seconds=0.0).verdict
    loader = followed()
    after = run(loader)
    assert after.padding_fraction < before.padding_fraction / 2
    # Where sizes cannot be batched better, other advice follows.
    much = dataclasses.replace(after, padding_nbytes=60, stacked_nbytes=100)
    much = dataclasses.replace(much, wait_seconds=0.0)
    assert much.verdict.endswith("with Concat(), or use smaller batches")
    monkeypatch.setattr(errors, "_warned", set())
    with pytest.warns(pyparallel.LoaderWarning) as caught:
        meter = loader._receiver.meter
        meter.add(batches=99, stacked_nbytes=10**9, padding_nbytes=10**9)
        stats.warn_about_padding(meter, 100, 60)
    text = str(caught[0].message)
    assert text.endswith(
        "Leave the samples ragged, with Concat(), or use smaller batches."
    )


#: Figures of an input-bound loop with one worker, and the advice. A batch takes 90 ms
#: of the worker, and a step 30 ms.
ONE: dict[str, Any] = {
    "batches": 100,
    "wait_seconds": 6.0,
    "busy_seconds": 3.0,
    "num_workers": 1,
}
ONE |= {"fetch_seconds": 9.0, "cores": 8}
PROCESSES = (
    "one thread computes it: use worker_method='multiprocessing', or num_workers="
)
KINDS: dict[str, tuple[str, dict[str, Any], str]] = {
    "a thread that computes": (
        "thread",
        {"fetch_cpu_seconds": 8.5},
        f"{PROCESSES}3 if",
    ),
    "a thread that has no core at times": (
        "thread",
        {"fetch_cpu_seconds": 4.0, "core_wait_seconds": 4.0},
        f"{PROCESSES}3 if",
    ),
    "a thread that waits for a disk": (
        "thread",
        {"fetch_cpu_seconds": 1.0},
        "the work on a batch: use more workers, num_workers=3",
    ),
    "a process that computes": (
        "multiprocessing",
        {"fetch_cpu_seconds": 8.5},
        "the work on a batch: use more workers, num_workers=3",
    ),
    "two threads that wait for the GIL": (
        "thread",
        {"num_workers": 2, "fetch_cpu_seconds": 4.5, "gil_wait_seconds": 4.0},
        "threads waited for the GIL 44 % of their time: use worker_method='multi",
    ),
    "two threads that do not": (
        "thread",
        {"num_workers": 2, "fetch_cpu_seconds": 8.5},
        "the work on a batch: use more workers, num_workers=3",
    ),
    "a thread on one core": (
        "thread",
        {"cores": 1, "fetch_cpu_seconds": 8.5},
        "there are no cores for more workers: make samples cheaper",
    ),
}


@pytest.mark.parametrize("name", KINDS)
def test_more_threads_are_advised_only_if_they_help(name: str) -> None:
    method, figures, advice = KINDS[name]
    options: Any = {"num_workers": 1, "worker_method": method}
    loader = DataLoader([1], **options)
    for each in (loader, iter(loader)):
        found = LoaderStats(**{**ONE, **figures}, applied=applied_changes(each))
        assert advice in found.verdict


#: An argument, and figures in which the verdict recommends it.
WORK = {"batches": 100, "busy_seconds": 1.0, "num_workers": 4, "cores": 4}
WORK |= {"fetch_seconds": 3.0, "wait_seconds": 1.0, "fetch_cpu_seconds": 3.0}
ARGUMENTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "persistent_workers": (
        {"num_workers": 1, "persistent_workers": True},
        {**WORK, "first_wait_seconds": 0.9, "first_waits": 2},
    ),
    "pin_memory": ({"pin_memory": True}, {**WORK, "copy_seconds": 9.0}),
    "prefetch_factor": ({"num_workers": 1, "prefetch_factor": 8}, WORK),
    "pyparallel.Collate": (
        {"collate_fn": PADS},
        {**WORK, "cores": 1, "pack_seconds": 8.0, "pack_cpu_seconds": 8.0},
    ),
}


@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set")
@pytest.mark.parametrize("argument", ARGUMENTS)
@pytest.mark.parametrize("kind", [DataLoader, torch.utils.data.DataLoader])
def test_an_argument_that_is_set_is_not_recommended(argument: str, kind: Any) -> None:
    options, figures = ARGUMENTS[argument]
    default = {"num_workers": options.get("num_workers", 0), "collate_fn": dense}
    found = LoaderStats(**figures, applied=applied_changes(kind([1], **default)))
    assert argument in found.verdict
    loader = kind([1], **{**default, **options})
    applied = applied_changes(loader)
    assert argument not in dataclasses.replace(found, applied=applied).verdict
    if argument != "pin_memory":  # it needs a device
        assert applied_changes(iter(loader)) >= applied - {"collate_fn"}
