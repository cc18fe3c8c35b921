"""Meter and LoaderStats: exact figures with a fake clock, fractions, verdicts."""

from __future__ import annotations

import dataclasses
import os
import threading
from typing import Any

import pytest
import torch

from pyparallel import DataContainer, DataLoader, LoaderStats, Ragged
from pyparallel.loader.findings import Load
from pyparallel.loader.stats import Figures, Meter

pytestmark = pytest.mark.one_backend

SECOND = 1_000_000_000


class Clock:
    """A clock in nanoseconds that only advances on request."""

    def __init__(self):
        self.now = 0

    def __call__(self):
        return self.now

    def passes(self, seconds):
        self.now += round(seconds * SECOND)


def epoch(meter, clock, waits_and_steps):
    meter.pause()
    for wait, step in waits_and_steps:
        start = meter.clock()
        clock.passes(wait)
        meter.count_wait(start)
        clock.passes(step)


def test_time_in_next_is_wait_and_between_two_is_busy():
    clock = Clock()
    meter = Meter(clock)
    clock.passes(50)  # before the first wait nothing is a step
    epoch(meter, clock, [(2, 3), (1, 5)])
    epoch(meter, clock, [(2, 4), (1, 4)])  # the time between two is no step
    start = meter.clock()
    clock.passes(0.5)
    meter.count_wait(start)
    stats = meter.snapshot()
    assert (stats.wait_seconds, stats.busy_seconds) == (6.5, 11.0)
    assert stats.waited == 6.5 / 17.5
    assert stats.first_wait_seconds == 4.0


def cycle():
    found = []
    found += [found, found]
    return found


SPARSE = torch.eye(5).to_sparse()
BATCHES = {
    "tensor": (torch.zeros(3, 4), 48),
    "nested": ({"a": [torch.zeros(2), ("x", torch.zeros(3, dtype=torch.int8))]}, 11),
    "no tensor": ([1, "x", None, 2.5], 0),
    "ragged": (Ragged(torch.zeros(3, 2), torch.tensor([0, 1, 3])), 24 + 24),
    "container": ({"a": DataContainer([torch.zeros(2), [torch.zeros(1)]])}, 12),
    "sparse": ([SPARSE, torch.zeros(1)], 104),
    "cycle": (cycle(), 0),
    "error": ([torch.nn.UninitializedParameter()], 0),
}


@pytest.mark.parametrize("name", BATCHES)
def test_the_bytes_of_a_batch_of_any_kind_are_counted(name):
    batch, nbytes = BATCHES[name]
    loader = DataLoader(range(6), 2, collate_fn=lambda _: batch)
    assert all(found is batch for found in loader)
    stats = loader.stats()
    assert (stats.batches, stats.nbytes) == (3, 3 * nbytes)


def test_counters_add_up_from_many_threads():
    meter = Meter()

    def count():
        for _ in range(2000):
            meter.add(nbytes=3, collate_seconds=0.5)
            meter.count_wait(meter.clock(), batches=1)

    threads = [threading.Thread(target=count) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    stats = meter.snapshot()
    found = (stats.batches, stats.nbytes, stats.collate_seconds)
    assert found == (16000, 48000, 8000.0)


def test_a_wait_that_another_thread_counts_meanwhile_is_kept():
    class Waits(list[Any]):
        def __getitem__(self, key: Any) -> Any:
            found = super().__getitem__(key)
            if len(self) == 1:
                self.extend(found)  # as another thread may do
            return found

    meter = Meter()
    meter._waits = Waits()
    meter.count_wait(meter.clock(), batches=1)
    assert [meter.snapshot().batches for _ in range(2)] == [1, 2]


def test_an_unknown_counter_is_named_and_nothing_is_added():
    meter = Meter()
    with pytest.raises(TypeError) as caught:
        meter.add(batches=1, bytes=2)
    assert str(caught.value) == (
        "Meter.add: the names must be counters of LoaderStats, but one is 'bytes'."
    )
    assert meter.snapshot() == LoaderStats()


def test_counts_of_the_inner_loader_are_taken_from_it():
    count = len(dataclasses.fields(LoaderStats))
    below = LoaderStats(*range(1, 2 * count, 2))
    before = LoaderStats(*range(count))
    meter = Meter()
    meter.add(batches=100, load_seconds=20, copy_seconds=30, collate_seconds=40)
    mine = {"batches": 100, "load_seconds": 20, "copy_seconds": 30}
    mine |= {"wait_seconds": 0, "busy_seconds": 0, "first_wait_seconds": 0}
    mine |= {"num_workers": below.num_workers, "cores": below.cores, "first_waits": 0}
    mine |= {"miss_reason": below.miss_reason, "applied": {"a", "b"}}
    below = dataclasses.replace(below, applied=frozenset("a"))
    meter.applied = frozenset("b")
    # Every other one is an odd number less the number of the field.
    expected = LoaderStats(*range(1, count + 1))
    assert meter.snapshot(below, before) == dataclasses.replace(expected, **mine)


def test_a_child_counts_although_its_parent_forked_in_the_middle():
    meter = Meter()
    with meter._lock:  # as another thread may hold it
        child = os.fork()
        if child == 0:
            threading.Timer(60, os._exit, (9,)).start()
            meter.add(batches=1)
            os._exit(0 if meter.snapshot().batches == 1 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


PROFILE = "run pyparallel profile to see where the time goes"
PADDING = (
    "41 % of the stacked bytes are padding: use SizeBatchSampler(sizes, batch_size)"
)


#: A step of 10 ms waits 30 ms for a batch; a worker needs 40 ms for one. For each row
#: of the table in docs/performance.md: other figures, and the end of the verdict.
WAITS = LoaderStats(
    batches=100,
    wait_seconds=3.0,
    busy_seconds=1.0,
    fetch_seconds=3.6,
    fetch_cpu_seconds=3.6,
    collate_seconds=0.3,
    collate_cpu_seconds=0.3,
    pack_seconds=0.1,
    pack_cpu_seconds=0.1,
    ring_hits=100,
    num_workers=1,
    cores=8,
)
COLLATE = {"fetch_seconds": 0.3, "fetch_cpu_seconds": 0.3}
COLLATE |= {"collate_seconds": 3.6, "collate_cpu_seconds": 3.6}
SLEEPS = {"fetch_cpu_seconds": 0.4, "cores": 2}
NOT_MADE = {"fetch_seconds": 0, "collate_seconds": 0, "pack_seconds": 0}
ROWS = {
    "compute": (
        {"wait_seconds": 0.05},
        "compute-bound: the step waited 5 % of the time; make the step itself faster",
    ),
    "in the process": (
        {"num_workers": 0},
        "fetch is 90 % of the work on a batch: make batches in workers, num_workers=4",
    ),
    "small batches": (
        {"num_workers": 0, "batches": 10_000},
        "a batch takes 400 us, less than a worker needs to send one: use larger "
        "batches",
    ),
    "computes, with free cores": (
        {},
        "fetch is 90 % of the work on a batch: use more workers, num_workers=4",
    ),
    "computes, without": (
        {"cores": 1},
        "fetch is 90 % of the work on a batch, and there are no cores for more "
        "workers: make samples cheaper",
    ),
    "sleeps, without free cores": (  # 8 ms of CPU time in 40 ms: ten share two cores
        {**SLEEPS, "num_workers": 2},
        "fetch is 90 % of the work on a batch: use more workers, num_workers=4",
    ),
    "no core": (
        {"core_wait_seconds": 2.2},
        "workers waited for a core 55 % of their time: free some cores",
    ),
    "no GIL": (
        {"gil_wait_seconds": 1.2},
        "worker threads waited for the GIL 30 % of their time: use "
        "worker_method='multiprocessing'",
    ),
    "no GIL, and rarely a core": (  # 0.6 of the 2 seconds with a core
        {"gil_wait_seconds": 0.6, "core_wait_seconds": 2.0},
        "worker threads waited for the GIL 15 % of their time: use "
        "worker_method='multiprocessing'",
    ),
    "no core, and rarely the GIL": (
        {"gil_wait_seconds": 1.2, "core_wait_seconds": 2.2},
        "workers waited for a core 55 % of their time: free some cores",
    ),
    "waits for the GIL are no room on a core": (  # else 4 workers for 2 cores
        {"gil_wait_seconds": 0.9, "fetch_cpu_seconds": 2.7, "cores": 2}
        | {"num_workers": 2},
        "fetch is 90 % of the work on a batch, and there are no cores for more "
        "workers: make samples cheaper",
    ),
    "too many workers": (
        {"core_wait_seconds": 2.2, "num_workers": 9},
        "workers waited for a core 55 % of their time: use fewer workers",
    ),
    "first batches": (
        {"first_wait_seconds": 2.4},
        "80 % of that was for the first batches of epochs: set persistent_workers=True",
    ),
    "late at times": (
        {"num_workers": 4},
        "workers are fast enough on average, but some batches come late: set "
        "prefetch_factor=8",
    ),
    "collate": (
        {**COLLATE, "cores": 1},
        "collate is 90 % of the work on a batch, and there are no cores for more "
        "workers: make batches smaller, as with images in uint8",
    ),
    "pack": (
        {"fetch_seconds": 0.1, "pack_seconds": 3.6, "cores": 1},
        "pack is 90 % of the work on a batch, and there are no cores for more "
        "workers: use pyparallel.Collate or pyparallel.collate, which write batches "
        "into the ring",
    ),
    "misses": (
        {**COLLATE, "ring_hits": 98, "ring_misses": 2, "padding_nbytes": 41}
        | {"stacked_nbytes": 100},
        "2 of 100 batches missed the ring: increase ring_slabs or max_ring_bytes",
    ),
    "misses beside a slow dataset": (
        {"ring_hits": 98, "ring_misses": 2},
        "fetch is 90 % of the work on a batch: use more workers, num_workers=4",
    ),
    "padding": (
        {**COLLATE, "padding_nbytes": 41, "stacked_nbytes": 100},
        PADDING,
    ),
    "padding in the step": (
        {"wait_seconds": 0.05, "padding_nbytes": 41, "stacked_nbytes": 100},
        f"compute-bound: the step waited 5 % of the time; {PADDING}",
    ),
    "copy": (
        {"copy_seconds": 4.1, "load_seconds": 0.1},
        "most of the thread's time goes into copies and the transform: set "
        "pin_memory=True of the loader, or make the transform cheaper",
    ),
    "a loader without stats": (
        {**NOT_MADE, "load_seconds": 4.0, "num_workers": 0},
        "its thread waits for the wrapped loader, which has no statistics: use "
        "pyparallel.DataLoader there, or run pyparallel profile",
    ),
    "no figure of the input": ({**NOT_MADE, "num_workers": 0}, PROFILE),
}


@pytest.mark.parametrize("row", ROWS)
def test_every_row_of_the_table_is_reached_by_its_figures(row):
    figures, verdict = ROWS[row]
    if not verdict.startswith("compute-bound"):
        verdict = f"input-bound: the step waited 75 % of the time; {verdict}"
    assert dataclasses.replace(WAITS, **figures).verdict == verdict


@pytest.mark.parametrize(
    ("work", "busy", "cpu", "core_wait", "cores", "number"),
    [
        (40, 10, 40, 0, 8, 4),  # one is ready every 10
        (40, 10, 40, 0, 2, 2),  # all cores compute
        (40, 10, 4, 0, 2, 4),  # each core has room for ten that sleep
        (400, 10, 40, 0, 2, 16),  # but for no more than eight
        (40, 10, 4, 36, 2, 2),  # waiting for a core is no sleep
        (40, 0, 40, 0, 2, 2),
        (40, 10, 0, 0, 2, 2),  # nothing is known of its CPU time
        (40, 10, 40, 0, 0, 1),
        (40, 0, 5e-324, 50, 1, 1),
        (40, 5e-324, 5e-324, 0, 1, 8),
        (1, 10, 1, 0, 8, 1),
    ],
)
def test_the_advised_workers_suffice_for_a_step_within_the_cores(
    work, busy, cpu, core_wait, cores, number
):
    load = Load(work, busy, cpu, core_wait, cores=cores)
    assert load.num_needed == number


def test_hidden_is_the_share_that_the_step_did_not_wait_for():
    assert LoaderStats(wait_seconds=1, fetch_seconds=6, copy_seconds=2).hidden == 0.875
    assert LoaderStats(wait_seconds=9, fetch_seconds=6, copy_seconds=2).hidden == 0.0
    assert LoaderStats(wait_seconds=1, copy_seconds=2).hidden is None
    ahead = LoaderStats(wait_seconds=2, load_seconds=8, fetch_seconds=99)
    assert ahead.hidden == 0.75


def test_each_figure_of_a_batch_is_counted_once():
    figures = Figures(*range(1, 1 + len(Figures._fields)))
    for count in (1, 2, 1000):  # the last one: some are added up before
        meter = Meter()
        for _ in range(count):
            meter.count_wait(meter.clock(), 1, figures)
        for stats in (meter.snapshot(), meter.snapshot()):
            assert stats.batches == count
            for name, value in figures._asdict().items():
                assert getattr(stats, name) == count * value, name


def test_text_has_every_figure_with_its_unit():
    stats = LoaderStats(
        batches=1200,
        wait_seconds=4.1,
        busy_seconds=5.9,
        fetch_seconds=8.0,
        fetch_cpu_seconds=2.0,
        collate_seconds=6.0,
        collate_cpu_seconds=5.5,
        pack_seconds=0.25,
        core_wait_seconds=0.5,
        first_wait_seconds=1.5,
        num_workers=3,
        cores=4,
        copy_seconds=0.2,
        nbytes=48_000_000_000,
        padding_nbytes=300,
        stacked_nbytes=1200,
        ring_hits=1200,
    )
    assert (
        str(stats)
        == """\
input-bound: the step waited 41 % of the time; workers are fast enough on average, but \
some batches come late: set prefetch_factor=8
  batches  1200, 48.0 GB
  wait     4.100 s, 41 % of the time; 1.500 s for first batches
  step     5.900 s
  load     0.000 s
  fetch    8.000 s, 2.000 s of it CPU time
  collate  6.000 s, 5.500 s of it CPU time
  pack     0.250 s
  copy     0.200 s
  hidden   72 % of the work
  padding  25 % of 1.2 KB stacked
  ring     1200 hits, 0 misses
  workers  3, 0.500 s without a core; 4 cores"""
    )


def test_text_without_figures():
    text = str(LoaderStats())
    assert text.startswith("no batch yet: iterate over the loader\n  batches  0, 0 ")
    assert "\n  hidden   not measured\n" in text
    of_others = str(LoaderStats(1, load_seconds=1.0))
    assert "\n  fetch    not measured\n  collate  not measured\n" in of_others
