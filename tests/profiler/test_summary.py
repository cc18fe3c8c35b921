"""Steps are separated correctly, and every nanosecond is counted once."""

from __future__ import annotations

import dataclasses
import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pyparallel.profiler.advice import advise
from pyparallel.profiler.record import Event, Record, collect
from pyparallel.profiler.summary import PARTS, segments, summarize
from tests.support.profiler.profile_records import MS, steady, summary

pytestmark = pytest.mark.one_backend


def test_the_parts_of_a_known_step_are_known():
    found = summary(steady(stacked=1000, padding=410))
    assert len(found.steps) == 10
    parts = {"compute": 6, "copy": 1, "pack": 0, "collate": 0, "fetch": 0, "wait": 3}
    assert found.mean == {part: ms * MS for part, ms in parts.items()}
    assert [step.parts for step in found.steps] == [found.mean] * 10
    assert (found.step, found.input, found.waited) == (10 * MS, 3 * MS, 0.3)
    assert found.window == (0, 100 * MS)
    assert found.verdict == "input-bound: 30 % of a step went into getting its batch"
    # A stack within a stack counts once.
    assert (found.stacked, found.padding_fraction) == ((10_000, 4_100), 0.41)
    work = found.work("worker")
    assert work is not None
    assert work.lanes == ("worker 0", "worker 1")
    assert work.parts == {"pack": 1 * MS, "collate": 2 * MS, "fetch": 6 * MS}
    assert (work.load.work, work.busy) == (9 * MS, 0.45)  # 90 of 2 x 100 ms


@pytest.mark.parametrize(
    ("wait", "kind"), [(10, "compute-bound"), (11, "input-bound"), (0, "compute-bound")]
)
def test_more_than_ten_percent_are_input_bound(wait, kind):
    assert summary(steady(wait=wait, copy=0, compute=100 - wait)).bottleneck == kind


def test_warm_up_is_left_out_but_never_all():
    first = summary(steady(warmup=3))
    assert (first.left_out, len(first.steps), first.window[0]) == (3, 7, 30 * MS)
    assert len(summary(steady(warmup=10)).steps) == 1


def test_epochs_and_the_time_between_them_are_no_steps():
    marks = [("wait", 0, 1), ("wait", 10, 1), ("end", 20, 1), ("wait", 500, 2)]
    marks += [("wait", 510, 2), ("wait", 900, 3)]  # it was left before its end
    events = [Event("loop", kind, at, at + 2, 1, epoch) for kind, at, epoch in marks]
    found = summary(Record("x.py", tuple(events)))
    assert [(s.start, s.end) for s in found.steps] == [(0, 10), (10, 20), (500, 510)]
    assert [step.is_first for step in found.steps] == [True, False, True]


def test_steps_with_another_loader_in_them_are_left_out():
    marks = [(0, 1), (10, 1), (12, 2), (14, 2), (90, 1), (100, 1)]
    events = [Event("loop", "wait", at, at + 1, n, n) for at, n in marks]
    found = summary(Record("x.py", tuple(events)))
    assert [(s.start, s.end) for s in found.steps] == [(0, 10), (90, 100)]
    assert (found.interrupted, found.loader) == (1, 1)


def test_a_loop_over_two_loaders_has_steps():
    marks = [(0, 1), (2, 2), (10, 1), (12, 2), (20, 1), (22, 2)]
    events = [Event("loop", "wait", at, at + 1, n, n) for at, n in marks]
    found = summary(Record("x.py", tuple(events)))
    assert [(s.start, s.end) for s in found.steps] == [(0, 10), (10, 20)]
    assert (found.interrupted, found.loader) == (0, 1)


def test_a_prefetcher_that_waits_is_not_the_loop():
    ahead = [Event("prefetch", "wait", 10 * i, 10 * i + 1) for i in range(9)]
    mine = [Event("loop", "wait", 20 * i, 20 * i + 1, 1, 1) for i in range(3)]
    found = summary(Record("x.py", (*ahead, *mine)))
    assert (found.lane, len(found.steps)) == ("loop", 2)
    assert list(found.lanes) == ["loop", "prefetch"]


def test_without_a_loader_a_loop_is_cut_at_its_first_range():
    events = []
    for at in (0, 100, 200):
        events.append(Event("loop", "collate", at, at + 10))
        events.append(Event("loop", "scatter", at + 22, at + 27))
        events.append(Event("loop", "step", at + 20, at + 90))
    found = summary(Record("x.py", tuple(events)))
    assert [step.start for step in found.steps] == [0, 100]
    assert found.mean["collate"] == 10 and found.mean["copy"] == 5
    assert found.is_input_bound is None
    (advice,) = advise(found)
    assert advice.title == "Use a loader of torch or pyparallel"


def test_a_record_without_steps_has_no_summary():
    assert summarize(Record("x.py", ())) is None
    one = Event("loop", "wait", 0, 1, 1, 1)
    assert summarize(Record("x.py", (one,))) is None


@st.composite
def nests(draw: st.DrawFn) -> list[Event]:
    """Draw events of one lane, one after the other or one inside the other."""
    events: list[Event] = []

    def fill(start: int, end: int, depth: int) -> None:
        at = start
        while at < end and depth < 4 and draw(st.booleans()):
            first = draw(st.integers(at, end - 1))
            last = draw(st.integers(first + 1, end))
            fill(first, last, depth + 1)
            events.append(Event("loop", draw(st.sampled_from([*PARTS])), first, last))
            at = last

    fill(0, draw(st.integers(1, 40)), 0)
    return events


@settings(deadline=None)
@given(nests())
def test_at_every_time_the_innermost_event_counts(events):
    found = {
        at: part for part, start, end in segments(events) for at in range(start, end)
    }
    expected = {}
    for at in range(40):
        # Inner events were appended before those around them.
        inside = [e.kind for e in events if e.start <= at < e.end]
        if inside:
            expected[at] = inside[0]
    assert found == expected


# Advice.


#: A batch takes 9 ms of a worker, and the rest of a step 2 ms: two workers are too few.
SLOW = {"wait": 3 * MS, "copy": 0, "compute": 2 * MS}


def asked_and_ready(*steps: tuple[int, int, int], pack: bool = False) -> Record:
    """Return a record of steps of 100 ms: wait, when the batch is ready, and its work.

    Times are ms; a batch may be ready before it is requested. Another pass before it
    had the same batches.
    """
    marks = [Event("loop", "wait", -1000 * MS, -999 * MS, 1, 1, batch=0)]
    work = [Event("worker 0", "fetch", -1500 * MS, -1400 * MS, batch=0)]
    for i, (wait, ready, took) in enumerate(steps):
        asked = 100 * i
        marks.append(
            Event("loop", "wait", asked * MS, (asked + wait) * MS, 1, 2, batch=i)
        )
        end = asked + ready
        made = Event("worker 0", "fetch", (end - took) * MS, end * MS, batch=i)
        if pack:
            work.append(Event("worker 0", "pack", made.end - MS, made.end))
        work.append(made)
    end = 100 * len(steps) * MS
    marks.append(Event("loop", "stop", end, end, 1, 2))
    return Record("x.py", (*work, *marks), environment={"cores": "8"})


def fetched_in_the_loop(fetch: int, step: int) -> Record:
    events: list[Event] = []
    for at in range(0, 4 * step, step):
        events.append(Event("loop", "fetch", at, at + fetch, cpu=9))
        events.append(Event("loop", "wait", at, at + fetch, 1, 1))
    return Record("x.py", tuple(events), environment={"cores": "8"})


def late_first_batches() -> Record:
    waits = [
        Event("loop", "wait", at * MS, (at + (1 if i else 90)) * MS, 1, epoch)
        for epoch in (1, 2, 3)
        for i, at in enumerate(range(500 * epoch, 500 * epoch + 300, 100))
    ]
    return Record("x.py", tuple(waits))


WAIT_IS_TRANSFER = (
    "A step waits 40.0 ms for its batch, but the batch was ready before the request in "
    "every step. The rest of the wait is its transfer to the loop."
)


@pytest.mark.parametrize(
    ("record", "title", "text"),
    [
        (
            steady(wait=0, copy=0, compute=10 * MS),
            "No change of the input",
            "Compute is 10.0 ms of a step, 100 %. Faster input would save 0 us at ",
        ),
        (
            steady(**SLOW),
            "Use more workers: num_workers=5",
            "A batch takes 9.00 ms of a worker's time: one is ready every 4.50 ms with "
            "2 workers. The rest of a step takes 2.00 ms. 5 workers would make one "
            "every 1.80 ms.",
        ),
        # A core has room for ten workers that sleep nine tenths of their time.
        (
            steady(**SLOW, cores=1, cpu=9 * MS // 10),
            "Use more workers: num_workers=5",
            "A batch takes 9.00 ms of a worker's time, 10 % of it CPU time: one is",
        ),
        (
            steady(**SLOW, cores=2),
            "Reduce the work on a batch: fetch first",
            "More workers on 2 cores would not help. Most of the work is fetch, 6.00 "
            "ms a batch.",
        ),
        (
            steady(**SLOW, cores=1, cpu=3 * MS, core_wait=5 * MS),
            "Use fewer workers: workers wait for a core",
            "For 5.00 ms of a batch its worker was runnable, but had ",
        ),
        (
            steady(**SLOW, cores=2, cpu=3 * MS, core_wait=5 * MS),
            "Free some cores: workers wait for a core",
            "For 5.00 ms of a batch its worker was runnable, but had ",
        ),
        (
            steady(**SLOW, cpu=3 * MS, core_wait=1 * MS, gil_wait=3 * MS),
            "Use processes as workers: worker_method='multiprocessing'",
            "A batch takes 9.00 ms of a worker thread's time. For 3.00 ms of it, 33 %, "
            "the thread waited for the GIL, which Python code of other threads held. ",
        ),
        (
            steady(**SLOW, cores=2, cpu=1 * MS, core_wait=5 * MS, gil_wait=3 * MS),
            "Free some cores: workers wait for a core",
            "For 5.00 ms of a batch its worker was runnable, but had ",
        ),
        (  # 6 ms of CPU time in 7 ms without the waits
            steady(**SLOW, cores=2, cpu=6 * MS, gil_wait=2 * MS),
            "Reduce the work on a batch: fetch first",
            "More workers on 2 cores would not help.",
        ),
        (
            asked_and_ready((5, 4, 20), (40, 30, 20), (5, -10, 20)),
            "Let workers run further ahead: prefetch_factor=8",
            "but the batch was ready after the request in 2 of 3 steps, by 30.0 ms at "
            "most. The longest wait is 40.0 ms.",
        ),
        # With 95 ms of work in a batch, and 60 ms in the rest of a step.
        (
            asked_and_ready(*[(40, -2, 95)] * 3),
            "Send batches through shared memory: pyparallel.DataLoader",
            WAIT_IS_TRANSFER,
        ),
        (
            asked_and_ready(*[(40, -2, 95)] * 3, pack=True),
            "Receive batches in a thread: PreDataLoader(loader)",
            WAIT_IS_TRANSFER,
        ),
        (
            fetched_in_the_loop(900_000, 1_000_000),
            "Use larger batches",
            "Sending a batch from a worker would take as long.",
        ),
        (
            fetched_in_the_loop(600 * MS, 1000 * MS),
            "Make batches in workers: num_workers=2",
            " in the loop itself, 0 % of it CPU time, and the rest of a step 400 ms. 2 "
            "workers would make a batch every 300 ms.",
        ),
        (
            late_first_batches(),
            "Keep workers from epoch to epoch: persistent_workers=True",
            "A step waits 90.0 ms for the first batch of an epoch, and ",
        ),
    ],
)
def test_advice_has_its_figures(record, title, text):
    (found,) = advise(summary(record))
    assert found.title == title
    assert text in found.text


def with_loader(record: Record, *applied: str, workers: int = 1) -> Record:
    loader = {"name": "DataLoader", "num_workers": workers, "batch_size": 4}
    return dataclasses.replace(record, loaders=({**loader, "applied": [*applied]},))


@pytest.mark.parametrize(
    ("applied", "cpu", "title"),
    [
        (["thread"], 8, "Use processes as workers: worker_method='multiprocessing'"),
        (["thread"], 1, "Use more workers: num_workers=5"),
        ([], 8, "Use more workers: num_workers=5"),
    ],
)
def test_one_thread_that_computes_may_hold_the_gil(applied, cpu, title):
    record = with_loader(steady(**SLOW, cpu=cpu * MS), *applied)
    events = tuple(event for event in record.events if event.lane != "worker 1")
    (found,) = advise(summary(dataclasses.replace(record, events=events)))
    assert found.title == title
    assert ("use num_workers=5" in found.text) == ("processes" in title)


def ahead(record: Record) -> Record:
    """Return the same record with a prefetch thread over workers."""
    send = Event("prefetch", "scatter", 10 * MS, 11 * MS)
    return dataclasses.replace(record, events=(*record.events, send))


LATE_AT_TIMES = asked_and_ready((5, 4, 20), (40, 30, 20), (5, -10, 20))
READY = asked_and_ready(*[(40, -2, 95)] * 3, pack=True)
COPIES = steady(wait=0, copy=4 * MS)
PADDED = steady(wait=0, copy=0, padding=900)
#: A record, the change of its first advice, and the record with the change.
FOLLOWED: list[tuple[Record, str, Record]] = [
    (
        with_loader(late_first_batches()),
        "persistent_workers=True",
        with_loader(late_first_batches(), "persistent_workers"),
    ),
    (
        with_loader(late_first_batches(), "persistent_workers"),
        "PreDataLoader(loader, next_epoch=True)",
        with_loader(late_first_batches(), "persistent_workers", "next_epoch"),
    ),
    (
        with_loader(late_first_batches(), workers=0),  # none to keep
        "PreDataLoader(loader, next_epoch=True)",
        with_loader(late_first_batches(), "next_epoch", workers=0),
    ),
    (LATE_AT_TIMES, "prefetch_factor=8", with_loader(LATE_AT_TIMES, "prefetch_factor")),
    (READY, "PreDataLoader(loader)", ahead(READY)),
    (COPIES, "PreDataLoader(loader, device)", ahead(COPIES)),
    (PADDED, "use SizeBatchSampler(", with_loader(PADDED, "by size")),
    (
        with_loader(PADDED, "stream"),
        "use SizeBatcher(stream",
        with_loader(PADDED, "stream", "by size"),
    ),
]


@pytest.mark.parametrize(("before", "change", "after"), FOLLOWED)
def test_a_change_that_was_made_is_not_recommended_again(before, change, after):
    assert change in advise(summary(before))[0].title
    assert not [each for each in advise(summary(after)) if change in each.title]
    read = Record.from_json(after.to_json())
    assert advise(summary(read)) == advise(summary(after))


@pytest.mark.parametrize(("padding", "says"), [(400, False), (401, True)])
def test_more_than_forty_percent_of_padding_is_much(padding, says):
    record = steady(wait=0, copy=0, compute=10 * MS, padding=padding)
    titles = [advice.title for advice in advise(summary(record))]
    title = "Reduce padding: use SizeBatchSampler(sizes, batch_size)"
    assert (title in titles) is says


def test_the_advice_that_saves_most_comes_first():
    record = steady(wait=3 * MS, copy=1 * MS, compute=2 * MS, padding=900)
    gains = [advice.gain for advice in advise(summary(record))]
    assert gains == pytest.approx([3 * MS, 2.7 * MS, 1 * MS])


# The record.


def test_a_trace_has_a_thread_for_each_lane_and_a_slice_for_each_event():
    record = dataclasses.replace(steady(steps=2), rank=3)
    rows = json.loads(record.to_trace())["traceEvents"]
    assert {row["pid"] for row in rows} == {3}
    threads = {
        row["tid"]: row["args"]["name"] for row in rows if row["name"] == "thread_name"
    }
    assert list(threads.values()) == ["loop", "worker 0", "worker 1"]
    slices = [row for row in rows if row["ph"] == "X"]
    found = [(threads[s["tid"]], s["name"], s["ts"], s["dur"]) for s in slices]
    assert found == [
        (e.lane, e.kind, e.start / 1000, (e.end - e.start) / 1000)
        for e in record.events
    ]
    assert slices[0]["args"] == {"loader": 1, "epoch": 1}
    stacked = {"stacked_nbytes": 1000, "padding_nbytes": 100}
    assert stacked in [row["args"] for row in slices]


def changed(**fields: object) -> str:
    return json.dumps({**json.loads(steady(steps=1).to_json()), **fields})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "x.json must be JSON of a profile, but is not: Expecting property name"),
        ("[1]", "x.json must be JSON of a profile, but is not: not an object."),
        (
            changed(version=2),
            "x.json must have the format 'pyparallel-profile' and the version 1, but "
            "has 'pyparallel-profile' and 2. Use the version of pyparallel that wrote "
            "it.",
        ),
        (
            changed(events=[["loop", "wait", 5, 1, *[0] * 9]]),
            "x.json must have the fields of a profile, but does not: an event is "
            "['loop', 'wait', 5, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0].",
        ),
        (changed(events=[[1]]), "x.json must have the fields of a profile, but does"),
        (changed(loaders=[{}]), "x.json must have the fields of a profile, but does "),
        (
            changed(rank="x"),
            "x.json must have the fields of a profile, but does not: rank is 'x'.",
        ),
        (
            changed(environment={"cores": 4}),
            "x.json must have the fields of a profile, but does not: cores of "
            "environment is 4.",
        ),
        (
            changed(batches=[{"sizes": [["wide"]]}]),
            "x.json must have the fields of a profile, but does not: invalid literal",
        ),
        (changed(transports=[1]), "x.json must have the fields of a profile, but does"),
        (changed(more=1), "x.json must have the fields of a profile, but does not: "),
    ],
)
def test_an_invalid_record_is_refused(text, message):
    with pytest.raises(ValueError, match="^" + re.escape(message)):
        Record.from_json(text, "x.json")


def written(folder, pid, rows, parent=None, rank=None):
    record = {"script": "x.py", "rank": rank, "world_size": 2, "environment": {}}
    record |= {"steps": 1, "warmup": 0, "synchronized": True}
    head = {"pid": pid, "parent": parent, "record": record, "folder": "/home/alice"}
    lines = [json.dumps(row) for row in [head, *rows]]
    (folder / f"{pid}-0.jsonl").write_text("\n".join(lines) + "\n")


def row(lane, start, end, kind="fetch"):
    return {"lane": lane, "kind": kind, "start": start, "end": end, "thread": 1}


def test_processes_are_put_together_with_their_workers(tmp_path):
    written(tmp_path, 10, [row("loop", 1000, 1010, "wait")], rank=1)
    # Of two epochs, and then of two loaders at a time.
    written(tmp_path, 11, [row("worker 0", 1001, 1005)], parent=10)
    written(tmp_path, 12, [row("worker 0", 1005, 1009)], parent=10)
    written(tmp_path, 13, [row("worker 0", 1004, 1006)], parent=10)
    written(tmp_path, 20, [row("loop", 900, 910, "wait")], rank=0)
    first, second = collect(tmp_path)
    assert (first.rank, second.rank) == (0, 1)
    assert first.events == (Event("loop", "wait", 0, 10),)
    assert [event[:4] for event in second.events] == [
        ("worker 0", "fetch", 1, 5),
        ("worker 0 (2)", "fetch", 4, 6),
        ("worker 0", "fetch", 5, 9),
        ("loop", "wait", 0, 10),
    ]
    assert "alice" not in second.to_json()


def test_the_last_line_of_a_killed_process_may_be_cut_off(tmp_path):
    written(tmp_path, 10, [row("loop", 0, 5, "wait"), row("loop", 5, 9, "wait")])
    path = tmp_path / "10-0.jsonl"
    path.write_text(path.read_text()[:-7])
    (record,) = collect(tmp_path)
    assert [event.end for event in record.events] == [5]
