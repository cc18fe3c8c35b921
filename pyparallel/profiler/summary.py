"""The meaning of a record: steps divided into parts, their means, and a verdict."""

from __future__ import annotations

import itertools
import re
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

from ..core.text import percent, plural, time_text
from ..loader.findings import Load, bottleneck
from .record import END, FIRST_ITER, ITER, STOP, WAIT, Event, Record, lane_order

#: The parts of a step in drawing order, with their descriptions.
PARTS = {
    "compute": "everything else: forward, backward, optimizer, Python code",
    "copy": "opening a batch and sending it to its device, transforms included",
    "pack": "writing a batch into shared or pinned memory",
    "collate": "collate_fn",
    "fetch": "getting the samples from the dataset",
    "wait": "starting workers and waiting for a batch of a worker or thread",
}
#: Colours of the parts, after Okabe and Ito: colour-blind readers distinguish them.
COLOURS = {
    "compute": "#0072b2",
    "copy": "#56b4e9",
    "pack": "#cc79a7",
    "collate": "#009e73",
    "fetch": "#e69f00",
    "wait": "#d55e00",
}
#: Ranges that count as a part with another name. Unknown ranges count as compute.
_PART_OF_RANGE = {
    **dict.fromkeys(("scatter", "send", "transform"), "copy"),
    **dict.fromkeys((ITER, FIRST_ITER), "wait"),
}
#: The parts in which the loop waits for its batch or makes it.
INPUT = ("wait", "fetch", "collate")
_LONGEST_SCRIPT_NAME = 48


class Segment(NamedTuple):
    """An interval in which a lane worked on one part."""

    part: str
    start: int
    end: int


class Step(NamedTuple):
    """The interval between two calls of ``next()``, divided into segments.

    The first step of an epoch begins with the call of ``iter()``.
    """

    start: int  # nanoseconds, as in the record
    end: int  # nanoseconds, as in the record
    segments: tuple[Segment, ...]  # in order, without gaps
    is_first: bool  # the step is the first one of its epoch
    mark: Event  # the call of ``next()``; without a loader, the range at its start

    @property
    def parts(self) -> dict[str, int]:
        """The nanoseconds of every part; their sum is the length of the step."""
        found = dict.fromkeys(PARTS, 0)
        for part, start, end in self.segments:
            found[part] += end - start
        return found


class Work(NamedTuple):
    """The work of several workers or threads on the batches of the steps."""

    lanes: tuple[str, ...]  # the names of their lanes
    parts: dict[str, float]  # the mean nanoseconds of each part in a batch
    busy: float  # the fraction of the time in which the lanes worked
    load: Load  # the mean nanoseconds of a batch and of a step


@dataclass(frozen=True)
class Summary:
    """The steps of one loop, and the work of other lanes at the same time."""

    record: Record  # the source of the summary
    steps: tuple[Step, ...]  # the steps after the warm-up
    left_out: int = 0  # the number of warm-up steps before them
    #: The number of skipped steps in which another loader was used. No step is skipped
    #: if another loader was used in all of them.
    interrupted: int = 0
    #: The number of the loader of the steps; 0 if no loader was recorded.
    loader: int = 0
    lane: str = "loop"  # the lane of the loop
    #: The number of steps after which the loop left its iterator for a new one. They
    #: end at the next ``iter()``, and are left out unless they are a third of all steps
    #: or more.
    restarts: int = 0

    @cached_property
    def begins(self) -> list[Event]:
        """The calls of ``iter()`` of the loader within the window."""
        return [
            event
            for kind in (ITER, FIRST_ITER)
            for event in self._ended(kind, [self.lane])
            if event.loader == self.loader
        ]

    @cached_property
    def mean(self) -> dict[str, float]:
        """The mean nanoseconds of each part in a step."""
        steps = [step.parts for step in self.steps]
        return {
            part: statistics.fmean(parts[part] for parts in steps) for part in PARTS
        }

    @property
    def step(self) -> float:
        """The mean nanoseconds of a step."""
        return sum(self.mean.values())

    @property
    def input(self) -> float:
        """The mean nanoseconds of a step before it has its batch."""
        return sum(self.mean[part] for part in INPUT)

    @property
    def busy(self) -> float:
        """The mean nanoseconds of a step without its input."""
        return self.step - self.input

    @property
    def waited(self) -> float:
        """The fraction of the time that the loop spent on input."""
        return self.input / self.step if self.step else 0.0

    @property
    def is_input_bound(self) -> bool | None:
        """True if input takes more than 10 % of the time; None without a loader."""
        return self.bottleneck == "input-bound" if self.loader else None

    @property
    def options(self) -> dict[str, Any]:
        """The fields of the loader in the record; empty if it is not known."""
        loaders = self.record.loaders
        known = 0 < self.loader <= len(loaders)
        return loaders[self.loader - 1] if known else {}

    @property
    def applied(self) -> frozenset[str]:
        """The changes that advice must not recommend, see `applied_changes`."""
        ahead = any(lane.startswith("prefetch") for lane in self.lanes)
        return frozenset([*self.options.get("applied", ()), *["PreDataLoader"] * ahead])

    @property
    def cores(self) -> int:
        """The number of cores; 1 if it is not known."""
        cores = self.record.environment.get("cores", "1")
        return int(cores) if cores.isdecimal() else 1

    @property
    def bottleneck(self) -> str:
        """The verdict in a word."""
        return bottleneck(self.waited) if self.loader else "not known"

    @property
    def verdict(self) -> str:
        """The verdict in a line."""
        if self.is_input_bound is None:
            return "input or compute: not known, since no loader was recorded"
        share = percent(self.waited)
        return f"{self.bottleneck}: {share} of a step went into getting its batch"

    @property
    def subtitle(self) -> str:
        """The script, the number of steps, and their mean time, in a line."""
        record, name = self.record, self.record.script
        ranks = record.world_size or 1
        rank = f", rank {record.rank} of {ranks}" if ranks > 1 else ""
        warmup = f" after {self.left_out} to warm up" if self.left_out else ""
        if len(name) > _LONGEST_SCRIPT_NAME:
            name = f"{name[: _LONGEST_SCRIPT_NAME - 3]}..."
        steps = plural(len(self.steps), "step")
        return f"{name}{rank}: {steps}{warmup}, {time_text(self.step)} each"

    def number(self, index: int) -> int:
        """Return the number of a step, counted from 1 and including the warm-up."""
        return self.left_out + index + 1

    @cached_property
    def window(self) -> tuple[int, int]:
        """The start of the first step and the end of the last one."""
        return self.steps[0].start, self.steps[-1].end

    @cached_property
    def lanes(self) -> dict[str, list[Segment]]:
        """The segments of every lane within the window, with the loop first."""
        start, end = self.window
        found: dict[str, list[Segment]] = {self.lane: []}
        for step in self.steps:
            found[self.lane] += step.segments
        others = {event.lane for event in self.record.events} - {self.lane}
        for lane in sorted(others, key=lane_order):
            if lane.startswith(("prefetch", "worker")):
                worked = cut(segments(_lane_events(self.record, lane)), start, end)
                if worked:
                    found[lane] = worked
        return found

    def work(self, prefix: str) -> Work | None:
        """Return the work of the lanes with this prefix; None if they made no batch."""
        start, end = self.window
        lanes = tuple(lane for lane in self.lanes if lane.startswith(prefix))
        batches = self._ended("collate", lanes) or self._ended("fetch", lanes)
        if not batches:
            return None
        # Whole events only: the window may cut the first and the last batch.
        parts: Counter[str] = Counter()
        for lane in lanes:
            worked = segments(_lane_events(self.record, lane))
            for whole in self._ended(None, [lane]):
                for part, first, last in cut(worked, whole.start, whole.end):
                    parts[part] += last - first
        del parts["wait"]
        inside = itertools.chain.from_iterable(self.lanes[lane] for lane in lanes)
        busy = sum(last - first for part, first, last in inside if part != "wait")
        mean = {part: parts[part] / len(batches) for part in PARTS if parts[part]}
        load = Load(
            sum(mean.values()),
            self.busy,
            *self.cpu(lanes, len(batches)),
            workers=len(lanes),
            cores=self.cores,
            applied=self.applied,
        )
        return Work(lanes, mean, busy / ((end - start) * len(lanes)), load)

    def cpu(self, lanes: Iterable[str], count: int) -> tuple[float, float, float]:
        """Return the CPU time of the fetches of a batch, and the waits in them.

        Args:
            lanes: the lanes whose fetches count.
            count: the number of batches to divide by.

        Returns:
            The CPU time, the wait for a core and that for the GIL, in nanoseconds for
            one batch.
        """
        found = [event for event in self._ended("fetch", lanes) if event.cpu >= 0]
        return (
            sum(event.cpu for event in found) / count,
            sum(event.core_wait for event in found) / count,
            sum(event.gil_wait for event in found) / count,
        )

    @cached_property
    def lateness(self) -> tuple[int, ...] | None:
        """The nanoseconds from the request for a batch until it was ready, by step.

        0: the batch was ready before the request. The value is None if the record does
        not contain the times at which batches were ready.
        """
        ready: dict[int, list[int]] = {}
        for event in self.record.events:
            if event.kind == "fetch" and event.batch >= 0:
                ready.setdefault(event.batch, []).append(event.end)
        found = []
        for wait in (step.mark for step in self.steps):
            # Every epoch has a batch of this number: the latest one counts.
            ends = [end for end in ready.get(wait.batch, ()) if end <= wait.end]
            if wait.kind != WAIT or not ends:
                return None
            found.append(max(0, max(ends) - wait.start))
        return tuple(found)

    def _ended(self, kind: str | None, lanes: Iterable[str]) -> list[Event]:
        """Return the outermost events of some lanes that ended within the window."""
        start, end = self.window
        return [
            event
            for lane in lanes
            for event in outermost(_lane_events(self.record, lane), kind)
            if start < event.end <= end
        ]

    @cached_property
    def stacked(self) -> tuple[int, int]:
        """The bytes that were stacked within the window, and the bytes of padding."""
        stacks = self._ended("collate", {event.lane for event in self.record.events})
        return (
            sum(event.stacked_nbytes for event in stacks),
            sum(event.padding_nbytes for event in stacks),
        )

    @property
    def padding_fraction(self) -> float:
        """The fraction of the stacked bytes that is padding; 0 if none were stacked."""
        stacked, padding = self.stacked
        return padding / stacked if stacked else 0.0


def summarize(record: Record) -> Summary | None:
    """Return the summary of the loop with the most steps; None if there is no step."""
    counts = Counter(
        (event.lane, event.loader)
        for event in record.events
        if event.kind == WAIT and event.loader
    )
    if len(counts) > max(counts.values(), default=0):  # the loop makes its loader anew
        merged = tuple(e._replace(loader=min(e.loader, 1)) for e in record.events)
        return summarize(replace(record, events=merged))
    # The first one, if several have the same count.
    lane, loader = max(counts, key=counts.__getitem__, default=("loop", 0))
    events = sorted(_lane_events(record, lane), key=lambda event: event.start)
    steps, restarts = _steps(events, loader) if loader else (_ranges(events), [])
    restarts = restarts if 2 * len(restarts) >= len(steps) else []
    steps = sorted(steps + restarts)
    others = [e.start for e in events if loader and e.loader not in (0, loader)]
    mixed = [s for s in steps if any(s.start <= t < s.end for t in others)]
    if len(mixed) == len(steps):  # each step of the loop uses several loaders
        mixed = []
    steps = [step for step in steps if step not in mixed]
    if not steps:
        return None
    left_out = min(record.warmup, len(steps) - 1)
    num_restarts = sum(step.start >= steps[left_out].start for step in restarts)
    shown = tuple(steps[left_out:])
    return Summary(record, shown, left_out, len(mixed), loader, lane, num_restarts)


def _steps(events: list[Event], loader: int) -> tuple[list[Step], list[Step]]:
    """Return the steps of a loader, and those that end at another ``iter()``."""
    own = [e for e in events if e.loader == loader and e.kind in (WAIT, END, STOP)]
    begins = [e for e in events if e.loader == loader and e.kind in (ITER, FIRST_ITER)]
    starts, filled = _starts(own, begins), _filled(events)
    steps: list[Step] = []
    restarts: list[Step] = []
    for i, (mark, following) in enumerate(itertools.pairwise(own)):
        is_first = i == 0 or own[i - 1].epoch != mark.epoch
        is_within = mark.epoch == following.epoch
        if mark.kind == WAIT and (is_within or following.kind != END):
            step = _step(filled, starts[i], starts[i + 1], mark, is_first)
            (steps if is_within else restarts).append(step)
    return steps, restarts


def _ranges(events: list[Event]) -> list[Step]:
    """Return the steps of a loop without a known loader.

    A step begins at every occurrence of the first range.
    """
    ranges = outermost([e for e in events if e.kind not in (WAIT, END, STOP)])
    if not ranges:
        return []
    marks = [event for event in ranges if event.kind == ranges[0].kind]
    marks += [event for event in events if event.kind == STOP]
    filled, pairs = _filled(events), itertools.pairwise(marks)
    return [_step(filled, mark.start, after.start, mark) for mark, after in pairs]


def _starts(marks: Sequence[Event], begins: Sequence[Event]) -> list[int]:
    """Return the start of the step of each mark: a call of ``next()`` or ``iter()``."""
    found, last = [], 0
    for mark in marks:
        called = [e.start for e in begins if last <= e.start and e.end <= mark.start]
        found.append(max(called, default=mark.start))
        last = mark.end
    return found


def _step(
    lane: list[Segment], start: int, end: int, mark: Event, is_first: bool = False
) -> Step:
    return Step(start, end, tuple(cut(lane, start, end)), is_first, mark)


def _filled(events: Sequence[Event]) -> list[Segment]:
    """Return the segments of a lane; the time between its events is compute."""
    first = min(event.start for event in events)
    last = max(event.end for event in events)
    return segments([*events, Event("", "compute", first, last)])


def _lane_events(record: Record, lane: str) -> list[Event]:
    return [event for event in record.events if event.lane == lane]


def segments(events: Iterable[Event]) -> list[Segment]:
    """Return the segments of a lane: of nested events the innermost one counts."""
    found: list[Segment] = []
    stack: list[Event] = []
    position = 0

    def advance(time: int) -> None:
        nonlocal position
        if stack and time > position:
            part = part_of_range(stack[-1].kind)
            if found and (found[-1].part, found[-1].end) == (part, position):
                found[-1] = found[-1]._replace(end=time)
            else:
                found.append(Segment(part, position, time))
        position = max(position, time)

    for event in _outer_first(events):
        while stack and stack[-1].end <= event.start:
            advance(stack[-1].end)
            stack.pop()
        advance(event.start)
        stack.append(event)
    while stack:
        advance(stack[-1].end)
        stack.pop()
    return found


def _outer_first(events: Iterable[Event]) -> list[Event]:
    """Sort events by their start; of equal ones the last written one is the outer."""
    return sorted(reversed([*events]), key=lambda event: (event.start, -event.end))


def part_of_range(kind: str) -> str:
    """Return the part of a step to which a range belongs."""
    part = _PART_OF_RANGE.get(kind, kind)
    return part if part in PARTS else "compute"


def outermost(events: Iterable[Event], kind: str | None = None) -> list[Event]:
    """Return the events that are inside no other event, of one kind or of any."""
    found: list[Event] = []
    for event in _outer_first(events):
        if kind in (None, event.kind) and (not found or event.start >= found[-1].end):
            found.append(event)
    return found


def cut(lane: Iterable[Segment], start: int, end: int) -> list[Segment]:
    """Return the segments between two times; those at the borders are shortened."""
    found = []
    for part, first, last in lane:
        if max(first, start) < min(last, end):
            found.append(Segment(part, max(first, start), min(last, end)))
    return found


def printable(text: str) -> str:
    """Replace characters that XML cannot contain by question marks."""
    return re.sub(r"[^\t\n -\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]", "?", text)
