"""Meter and LoaderStats: exact figures by a clock of our own, fractions, verdicts."""

from __future__ import annotations

import copy
import dataclasses
import os
import pickle
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyparallel import LoaderStats
from pyparallel._stacked import recording
from pyparallel._stats import Meter

SECOND = 1_000_000_000


class Clock:
    """Nanoseconds that pass when told to."""

    def __init__(self):
        self.now = 0

    def __call__(self):
        return self.now

    def passes(self, seconds):
        self.now += round(seconds * SECOND)


def epoch(meter, clock, waits_and_steps):
    meter.pause()
    for wait, step in waits_and_steps:
        with meter.waiting():
            clock.passes(wait)
        clock.passes(step)


def test_time_in_next_is_wait_and_between_two_is_busy():
    clock = Clock()
    meter = Meter(clock)
    clock.passes(50)  # before the first wait nothing is a step
    epoch(meter, clock, [(2, 3), (1, 4)])
    with pytest.raises(StopIteration), meter.waiting():
        clock.passes(0.5)
        raise StopIteration
    stats = meter.snapshot()
    assert (stats.wait_seconds, stats.busy_seconds) == (3.5, 7.0)
    assert stats.waited == 3.5 / 10.5


def test_time_between_epochs_is_neither():
    clock = Clock()
    meter = Meter(clock)
    epoch(meter, clock, [(1, 1), (1, 0)])
    meter.pause()
    clock.passes(100)  # validation
    epoch(meter, clock, [(1, 1), (1, 0)])
    stats = meter.snapshot()
    assert (stats.wait_seconds, stats.busy_seconds) == (4.0, 2.0)


def test_each_thread_has_steps_of_its_own():
    clock = Clock()
    meter = Meter(clock)
    with meter.waiting():
        clock.passes(1)
    clock.passes(10)
    thread = threading.Thread(target=epoch, args=(meter, clock, [(2, 3), (2, 0)]))
    thread.start()
    thread.join()
    with meter.waiting():
        pass
    stats = meter.snapshot()
    # 10 before the thread, 7 while it ran; and 3 between its own two waits.
    assert (stats.wait_seconds, stats.busy_seconds) == (5.0, 20.0)


def test_a_pause_in_one_thread_leaves_the_others_alone():
    clock = Clock()
    meter = Meter(clock)
    with meter.waiting():
        clock.passes(1)
    thread = threading.Thread(target=meter.pause)
    thread.start()
    thread.join()
    clock.passes(2)
    with meter.waiting():
        pass
    assert meter.snapshot().busy_seconds == 2.0


def test_counters_add_up_from_many_threads():
    meter = Meter()

    def count():
        for _ in range(2000):
            meter.add(batches=1, nbytes=3, collate_seconds=0.5)
            with meter.waiting():
                pass

    threads = [threading.Thread(target=count) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    stats = meter.snapshot()
    found = (stats.batches, stats.nbytes, stats.collate_seconds)
    assert found == (16000, 48000, 8000.0)


def test_an_unknown_counter_is_named_and_nothing_is_added():
    meter = Meter()
    with pytest.raises(TypeError) as caught:
        meter.add(batches=1, bytes=2)
    assert str(caught.value) == (
        "Meter.add must be given counters of LoaderStats, but is given 'bytes'."
    )
    assert meter.snapshot() == LoaderStats()


def test_counters_keep_their_kind():
    meter = Meter()
    meter.add(batches=1)
    for field in dataclasses.fields(LoaderStats):
        value = getattr(meter.snapshot(), field.name)
        assert type(value) is (float if field.name.endswith("_seconds") else int)


def test_what_only_the_loader_below_counts_is_taken_from_it():
    below = LoaderStats(*range(1, 13))
    meter = Meter()
    meter.add(batches=100, fetch_seconds=20, copy_seconds=30, collate_seconds=40)
    expected = LoaderStats(
        batches=100,
        fetch_seconds=20,
        copy_seconds=30,
        collate_seconds=below.collate_seconds,
        pack_seconds=below.pack_seconds,
        nbytes=below.nbytes,
        padding_nbytes=below.padding_nbytes,
        stacked_nbytes=below.stacked_nbytes,
        ring_hits=below.ring_hits,
        ring_misses=below.ring_misses,
    )
    assert meter.snapshot(below) == expected


def test_a_snapshot_stays_as_it_was():
    meter = Meter()
    meter.add(batches=1)
    before = meter.snapshot()
    meter.add(batches=1)
    assert (before.batches, meter.snapshot().batches) == (1, 2)
    with pytest.raises(dataclasses.FrozenInstanceError):
        before.batches = 3


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(_pickled(m))])
def test_a_copy_of_a_meter_counts_for_itself(copied):
    meter = Meter()
    meter.add(batches=1)
    other = copied(meter)
    other.add(batches=5)
    assert (meter.snapshot().batches, other.snapshot().batches) == (1, 5)


def _pickled(meter):
    return pickle.dumps(meter)


def test_a_child_counts_although_its_parent_forked_in_the_middle():
    meter = Meter()
    with meter._lock:  # as another thread may hold it
        child = os.fork()
        if child == 0:
            threading.Timer(60, os._exit, (9,)).start()
            meter.add(batches=1)
            os._exit(0 if meter.snapshot().batches == 1 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.parametrize(
    ("counts", "verdict"),
    [
        ({}, "no batch yet"),
        ({"wait_seconds": 2.0}, "no batch yet"),
        (
            {"batches": 9, "wait_seconds": 41.0, "busy_seconds": 59.0},
            "input-bound: the step waited 41 % of the time",
        ),
        (
            {"batches": 9, "wait_seconds": 2.0, "busy_seconds": 98.0},
            "compute-bound: the step waited 2 % of the time",
        ),
        (
            {"batches": 9, "wait_seconds": 5.0, "busy_seconds": 95.0},
            "compute-bound: the step waited 5 % of the time",
        ),
        (
            {"batches": 9, "wait_seconds": 51.0, "busy_seconds": 949.0},
            "input-bound: the step waited 5 % of the time",
        ),
    ],
)
def test_the_verdict_has_three_kinds(counts, verdict):
    assert LoaderStats(**counts).verdict == verdict


MISSES = "; 2 of 20 batches found no place in the ring: raise ring_slabs or "
MISSES += "max_ring_bytes"
PADDING = "; 41 % of the stacked bytes are padding: batch samples of like sizes "
PADDING += "together"


@pytest.mark.parametrize(
    ("wait", "misses", "padding", "advice"),
    [
        (50, 2, 41, MISSES),
        (50, 0, 41, PADDING),
        (50, 0, 40, ""),
        (1, 2, 0, ""),  # who does not wait need not care
        (1, 2, 41, PADDING),  # padding costs the step, too
    ],
)
def test_advice_is_given_only_where_the_numbers_support_it(
    wait, misses, padding, advice
):
    stats = LoaderStats(
        batches=20,
        wait_seconds=wait,
        busy_seconds=100 - wait,
        stacked_nbytes=100,
        padding_nbytes=padding,
        ring_hits=20 - misses,
        ring_misses=misses,
    )
    assert stats.verdict.partition(" of the time")[2] == advice


def test_one_miss_in_many_is_no_reason_for_advice():
    few = LoaderStats(9, 50, 50, ring_hits=990, ring_misses=10)
    many = LoaderStats(9, 50, 50, ring_hits=989, ring_misses=11)
    assert "ring" not in few.verdict
    assert "11 of 1000 batches" in many.verdict


def test_hidden_is_what_the_step_did_not_wait_for():
    assert LoaderStats(wait_seconds=1, fetch_seconds=6, copy_seconds=2).hidden == 0.875
    assert LoaderStats(wait_seconds=9, fetch_seconds=6, copy_seconds=2).hidden == 0.0
    assert LoaderStats(wait_seconds=1, copy_seconds=2).hidden is None


def test_text_has_every_figure_with_its_unit():
    stats = LoaderStats(
        batches=1200,
        wait_seconds=4.1,
        busy_seconds=5.9,
        fetch_seconds=8.0,
        collate_seconds=6.0,
        pack_seconds=0.25,
        copy_seconds=0.2,
        nbytes=48_000_000_000,
        padding_nbytes=300,
        stacked_nbytes=1200,
        ring_hits=1200,
    )
    assert (
        str(stats)
        == """\
input-bound: the step waited 41 % of the time
  batches  1200, 48.0 GB
  wait     4.100 s, 41 % of the time
  step     5.900 s
  fetch    8.000 s
  collate  6.000 s
  pack     0.250 s
  copy     0.200 s
  hidden   50 % of fetch and copy
  padding  25 % of 1.2 KB stacked
  ring     1200 hits, 0 misses"""
    )


def test_text_without_figures():
    text = str(LoaderStats())
    assert text.startswith("no batch yet\n  batches  0, 0 bytes\n")
    assert "\n  hidden   not measured\n" in text


counters = st.builds(
    LoaderStats,
    batches=st.integers(0, 10**6),
    wait_seconds=st.floats(0, 1e6),
    busy_seconds=st.floats(0, 1e6),
    fetch_seconds=st.floats(0, 1e6),
    copy_seconds=st.floats(0, 1e6),
    nbytes=st.integers(0, 10**18),
    ring_hits=st.integers(0, 10**6),
    ring_misses=st.integers(0, 10**6),
)


@given(counters, st.integers(0, 10**15), st.floats(0, 1))
def test_fractions_lie_between_0_and_1_and_the_verdict_follows(stats, stacked, part):
    padding = min(stacked, int(stacked * part))
    stats = dataclasses.replace(stats, stacked_nbytes=stacked, padding_nbytes=padding)
    hidden = 0.0 if stats.hidden is None else stats.hidden
    for fraction in (stats.waited, stats.padding_fraction, hidden):
        assert 0 <= fraction <= 1
    kind = stats.verdict.partition(":")[0]
    assert (kind == "no batch yet") == (stats.batches == 0)
    assert (kind == "input-bound") == (stats.batches > 0 and stats.waited > 0.05)
    assert "\n" not in stats.verdict
    assert len(str(stats).splitlines()) == 11


times = st.lists(st.tuples(st.integers(0, 10**9), st.integers(0, 10**9)), max_size=9)


@given(st.lists(times, max_size=4))
def test_wait_and_busy_cover_an_epoch_but_for_its_last_step(epochs):
    clock = Clock()
    meter = Meter(clock)
    for each in epochs:
        epoch(meter, clock, [(wait / SECOND, step / SECOND) for wait, step in each])
    wait = sum(wait for each in epochs for wait, _ in each)
    busy = sum(step for each in epochs for _, step in each[:-1])
    stats = meter.snapshot()
    assert (stats.wait_seconds, stats.busy_seconds) == (wait / 1e9, busy / 1e9)


def test_nested_recordings_count_for_both():
    with recording() as outer:
        with recording() as inner:
            inner.stacked_nbytes += 8
            inner.padding_nbytes += 2
        outer.stacked_nbytes += 1
    assert (outer.stacked_nbytes, outer.padding_nbytes) == (9, 2)
    assert (inner.stacked_nbytes, inner.padding_nbytes) == (8, 2)
