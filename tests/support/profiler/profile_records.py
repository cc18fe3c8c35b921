"""Synthetic records in which every nanosecond is known."""

from __future__ import annotations

from pyparallel.profiler.record import Event, Record
from pyparallel.profiler.summary import Summary, summarize

MS = 1_000_000
#: Two parts of every step are equal in all of `steady`'s records.
WORKER = {"fetch": 6 * MS, "collate": 2 * MS, "pack": 1 * MS}


def steady(
    *,
    wait: int = 3 * MS,
    copy: int = 1 * MS,
    compute: int = 6 * MS,
    steps: int = 10,
    warmup: int = 0,
    workers: int = 2,
    stacked: int = 1000,
    padding: int = 100,
    cores: int = 8,
    device: str = "CPU",
    cpu: int = -1,
    core_wait: int = 0,
    gil_wait: int = 0,
) -> Record:
    """Return a record of equal steps, with workers that make a batch in 9 ms."""
    step = wait + copy + compute
    events = []
    for i in range(steps):
        start = i * step
        events.append(Event("loop", "wait", start, start + wait, 1, 1))
        events.append(Event("loop", "scatter", start + wait, start + wait + copy))
        # The step of a wrapper is compute, except for the parts inside it.
        events.append(Event("loop", "step", start + wait + copy, start + step))
        if workers:
            *inner, fetch = made(f"worker {i % workers}", start, stacked, padding)
            waits = {"core_wait": core_wait, "gil_wait": gil_wait}
            events += [*inner, fetch._replace(cpu=cpu, **waits)]
    end = steps * step
    events.append(Event("loop", "stop", end, end, 1, 1))
    return Record(
        "train.py",
        tuple(events),
        exit_code=0,
        steps=steps,
        warmup=warmup,
        environment={"cores": str(cores), "torch": "2.13.0", "device": device},
        loaders=({"name": "DataLoader", "num_workers": workers, "batch_size": 4},),
    )


def summary(record: Record) -> Summary:
    found = summarize(record)
    assert found is not None
    return found


def made(lane: str, start: int, stacked: int = 1000, padding: int = 100) -> list[Event]:
    """Return the spans of a worker for a batch: pack in collate, collate in fetch."""
    collate = start + WORKER["fetch"]
    pack = collate + WORKER["collate"]
    end = pack + WORKER["pack"]
    return [
        Event(lane, "pack", pack, end),
        Event(lane, "collate", collate, pack, 0, 0, stacked, padding),
        Event(lane, "collate", collate, end, 0, 0, stacked, padding),
        Event(lane, "fetch", start, end),
    ]
