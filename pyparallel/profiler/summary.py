"""What a record means: steps cut into parts, their means, and a verdict."""

from __future__ import annotations

import itertools
import statistics
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from ..loader.stats import INPUT_BOUND
from .cut import PARTS, Segment, cut, gaps_filled, lane_order, outermost, segments
from .record import END, STOP, WAIT, Event, Record

#: What keeps the loop from its step.
INPUT = ("wait", "fetch", "collate")


class Step(NamedTuple):
    """From one ``next()`` to another, and what was done in between, in order."""

    start: int
    end: int
    segments: tuple[Segment, ...]
    #: The first of its pass over the loader.
    is_first: bool

    @property
    def parts(self) -> dict[str, int]:
        """The nanoseconds of every part; they sum up to the step."""
        found = dict.fromkeys(PARTS, 0)
        for part, start, end in self.segments:
            found[part] += end - start
        return found


class Work(NamedTuple):
    """What several threads or processes did to make batches, as the steps went on."""

    lanes: tuple[str, ...]
    #: How many batches, and the nanoseconds of each part for one of them, as a mean.
    batches: int
    parts: dict[str, float]
    #: The part of their time in which they worked.
    busy: float
    #: The CPU time of a batch, as a mean; 0: not measured.
    cpu: float = 0.0
    #: The time of a batch for which its worker could run, but had no core, as a mean.
    core_wait: float = 0.0

    @property
    def per_batch(self) -> float:
        """The nanoseconds of work in a batch."""
        return sum(self.parts.values())


@dataclass(frozen=True)
class Summary:
    """Steps of one loop, and what others did meanwhile.

    Attributes:
        record: what it is made of.
        steps: those that count.
        left_out: how many came before them, for warm-up.
        interrupted: how many are not counted since another loader was used in them.
        loader: the number of the loader that the steps are of; 0: of none.
        others: how many batches every other loader gave, by its number.
    """

    record: Record
    steps: tuple[Step, ...]
    left_out: int = 0
    interrupted: int = 0
    loader: int = 0
    others: tuple[tuple[int, int], ...] = ()
    lane: str = "loop"

    @cached_property
    def mean(self) -> dict[str, float]:
        """The mean nanoseconds of each part in a step."""
        of_steps = [step.parts for step in self.steps]
        return {
            part: statistics.fmean(parts[part] for parts in of_steps) for part in PARTS
        }

    @property
    def step(self) -> float:
        """The mean nanoseconds of a step."""
        return sum(self.mean.values())

    @property
    def input(self) -> float:
        """The mean nanoseconds in which a step could not begin for want of a batch."""
        return sum(self.mean[part] for part in INPUT)

    @property
    def waited(self) -> float:
        """The fraction of the time that went into input."""
        return self.input / self.step if self.step else 0.0

    @property
    def is_input_bound(self) -> bool | None:
        """Whether input is more than 10 % of the time; None: no loader was seen."""
        return self.waited > INPUT_BOUND if self.loader else None

    @property
    def kind(self) -> str:
        """The verdict in a word."""
        words = {True: "input-bound", False: "compute-bound", None: "not known"}
        return words[self.is_input_bound]

    @property
    def verdict(self) -> str:
        """The verdict in a line."""
        if self.is_input_bound is None:
            return "input or compute: not known, since no loader was seen in the loop"
        percent = f"{100 * self.waited:.0f} %"
        return f"{self.kind}: {percent} of a step went into getting its batch"

    @cached_property
    def window(self) -> tuple[int, int]:
        """From the first of these steps to the end of the last one."""
        return self.steps[0].start, self.steps[-1].end

    @cached_property
    def lanes(self) -> dict[str, list[Segment]]:
        """What every lane did, the loop first, cut off where the steps end."""
        start, end = self.window
        found: dict[str, list[Segment]] = {self.lane: []}
        for step in self.steps:
            found[self.lane] += step.segments
        others = {event.lane for event in self.record.events} - {self.lane}
        for lane in sorted(others, key=lane_order):
            if lane.startswith(("prefetch", "worker")):
                did = cut(segments(_of_lane(self.record, lane)), start, end)
                if did:
                    found[lane] = did
        return found

    def work(self, prefix: str) -> Work | None:
        """Return what the lanes did whose names begin so; None if there are none."""
        start, end = self.window
        lanes = tuple(lane for lane in self.lanes if lane.startswith(prefix))
        batches = self._ended("collate", lanes) or self._ended("fetch", lanes)
        if not batches:
            return None
        # Batches that were begun before or ended behind the steps would be half ones.
        parts: Counter[str] = Counter()
        for lane in lanes:
            did = segments(_of_lane(self.record, lane))
            for whole in self._ended(None, [lane]):
                for part, begin, finish in cut(did, whole.start, whole.end):
                    parts[part] += finish - begin
        del parts["wait"]
        cuts = itertools.chain.from_iterable(self.lanes[lane] for lane in lanes)
        busy = sum(e - b for part, b, e in cuts if part != "wait")
        return Work(
            lanes,
            len(batches),
            {part: parts[part] / len(batches) for part in PARTS if parts[part]},
            busy / ((end - start) * len(lanes)),
            *self.cpu(lanes, len(batches)),
        )

    def cpu(self, lanes: Iterable[str], count: int) -> tuple[float, float]:
        """Return CPU time and time without a core in the fetches of some lanes.

        Args:
            lanes: whose.
            count: the number of batches: both are for one of them.
        """
        found = [event for event in self._ended("fetch", lanes) if event.cpu >= 0]
        cpu, core_wait = (sum(e.cpu for e in found), sum(e.core_wait for e in found))
        return cpu / count, core_wait / count

    @cached_property
    def lateness(self) -> tuple[int, ...] | None:
        """For each step the nanoseconds from asking for its batch until it was ready.

        0: it was ready before. None: it is not known when batches were ready.
        """
        ready: dict[int, list[int]] = {}
        asked: dict[int, Event] = {}
        for event in self.record.events:
            if event.batch < 0:
                continue
            if event.kind == "fetch":
                ready.setdefault(event.batch, []).append(event.end)
            elif event.kind == WAIT and (event.lane, event.loader) == self._loop:
                asked[event.start] = event
        found = []
        for step in self.steps:
            wait = asked.get(step.start)
            # An earlier pass over the loader had a batch of this number, too.
            if wait is None:
                return None
            ends = [end for end in ready.get(wait.batch, ()) if end <= wait.end]
            if not ends:
                return None
            found.append(max(0, max(ends) - step.start))
        return tuple(found)

    @property
    def _loop(self) -> tuple[str, int]:
        return self.lane, self.loader

    def _ended(self, kind: str | None, lanes: Iterable[str]) -> list[Event]:
        """Return what ended in some lanes while the steps went on."""
        start, end = self.window
        return [
            event
            for lane in lanes
            for event in outermost(_of_lane(self.record, lane), kind)
            if start < event.end <= end
        ]

    @cached_property
    def stacked(self) -> tuple[int, int]:
        """The bytes that were stacked as the steps went on, and those of padding."""
        stacks = self._ended("collate", {event.lane for event in self.record.events})
        return (
            sum(event.stacked_nbytes for event in stacks),
            sum(event.padding_nbytes for event in stacks),
        )

    @property
    def padding_fraction(self) -> float:
        """The fraction of the stacked bytes that is padding; 0 without any."""
        stacked, padding = self.stacked
        return padding / stacked if stacked else 0.0


def summarize(record: Record) -> Summary | None:
    """Return the summary of the loop that has most steps; None if there is no step."""
    marks = [event for event in record.events if event.kind in (WAIT, END, STOP)]
    counts = Counter((e.lane, e.loader) for e in marks if e.kind == WAIT and e.loader)
    if not counts:
        return _without_loader(record)
    # Of equal ones the first.
    (lane, loader), _ = max(counts.items(), key=lambda item: item[1])
    of_lane = sorted(_of_lane(record, lane), key=lambda event: event.start)
    steps, interrupted = [], 0
    mine = [e for e in of_lane if e.loader == loader and e.kind in (WAIT, END, STOP)]
    foreign = [e.start for e in of_lane if e.loader not in (0, loader)]
    firsts = {e.epoch: e for e in reversed(mine)}
    for mark, following in itertools.pairwise(mine):
        if mark.kind != WAIT or mark.epoch != following.epoch:
            continue
        if any(mark.start <= at < following.start for at in foreign):
            interrupted += 1
            continue
        is_first = firsts[mark.epoch] is mark
        steps.append(_step(of_lane, mark.start, following.start, is_first))
    if not steps:
        return None
    left_out = min(record.warmup, len(steps) - 1)
    others = {number: n for (_, number), n in counts.items() if number != loader}
    return Summary(
        record,
        tuple(steps[left_out:]),
        left_out,
        interrupted,
        loader,
        tuple(sorted(others.items())),
        lane,
    )


def _without_loader(record: Record) -> Summary | None:
    """Return what can be said of a loop of its own making: from range to same range."""
    of_loop = _of_lane(record, "loop")
    stops = [event for event in of_loop if event.kind == STOP]
    ranges = outermost([e for e in of_loop if e.kind not in (WAIT, END, STOP)])
    if not ranges:
        return None
    marks = [event for event in ranges if event.kind == ranges[0].kind] + stops
    steps = [
        _step(of_loop, mark.start, following.start, False)
        for mark, following in itertools.pairwise(marks)
    ]
    if not steps:
        return None
    left_out = min(record.warmup, len(steps) - 1)
    return Summary(record, tuple(steps[left_out:]), left_out)


def _step(events: Iterable[Event], start: int, end: int, is_first: bool) -> Step:
    """Return a step whose gaps are compute."""
    inside = [e for e in events if e.start < end and e.end > start]
    found = cut(segments(inside), start, end)
    return Step(start, end, tuple(gaps_filled(found, start, end)), is_first)


def _of_lane(record: Record, lane: str) -> list[Event]:
    return [event for event in record.events if event.lane == lane]
