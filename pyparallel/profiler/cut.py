"""Events of one lane, cut into times in which it did one thing."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

from .record import Event

#: What a step is made of, in the order in which it is drawn, and what that is.
PARTS = {
    "compute": "the step itself: all that is none of the others",
    "copy": "opening a batch and sending it to its device, transforms included",
    "pack": "writing a batch into shared or page-locked memory",
    "collate": "collate_fn",
    "fetch": "getting the samples from the dataset",
    "wait": "waiting for a batch that others make",
}
#: The part that a range counts as; what is not here is a part itself, or compute.
_PART_OF = {"scatter": "copy", "send": "copy", "transform": "copy"}


class Segment(NamedTuple):
    """A time in which a lane did one thing."""

    part: str
    start: int
    end: int


def segments(events: Iterable[Event]) -> list[Segment]:
    """Return what a lane did when: of events inside each other the innermost counts."""
    found: list[Segment] = []
    stack: list[Event] = []
    at = 0

    def until(time: int) -> None:
        nonlocal at
        if stack and time > at:
            found.append(Segment(part_of(stack[-1].kind), at, time))
        at = max(at, time)

    for event in _outer_first(events):
        while stack and stack[-1].end <= event.start:
            until(stack[-1].end)
            stack.pop()
        until(event.start)
        stack.append(event)
    while stack:
        until(stack[-1].end)
        stack.pop()
    return joined(found)


def _outer_first(events: Iterable[Event]) -> list[Event]:
    """Return events by their start; of equal ones the one that was written last."""
    return sorted(reversed([*events]), key=lambda event: (event.start, -event.end))


def part_of(kind: str) -> str:
    """Return the part of a step that an event counts as."""
    part = _PART_OF.get(kind, kind)
    return part if part in PARTS else "compute"


def outermost(events: Iterable[Event], kind: str | None = None) -> list[Event]:
    """Return the events that are not inside another one, of a kind or of any."""
    found: list[Event] = []
    for event in _outer_first(events):
        if kind in (None, event.kind) and (not found or event.start >= found[-1].end):
            found.append(event)
    return found


def cut(lane: Iterable[Segment], start: int, end: int) -> list[Segment]:
    """Return what of some segments lies between two times."""
    found = []
    for part, begin, finish in lane:
        if max(begin, start) < min(finish, end):
            found.append(Segment(part, max(begin, start), min(finish, end)))
    return found


def gaps_filled(lane: Iterable[Segment], start: int, end: int) -> list[Segment]:
    """Return segments with compute wherever there is nothing."""
    found: list[Segment] = []
    at = start
    for segment in lane:
        if segment.start > at:
            found.append(Segment("compute", at, segment.start))
        found.append(segment)
        at = segment.end
    if at < end:
        found.append(Segment("compute", at, end))
    return joined(found)


def joined(lane: Iterable[Segment]) -> list[Segment]:
    """Return segments with neighbours of one part made one."""
    found: list[Segment] = []
    for segment in lane:
        if found and (found[-1].part, found[-1].end) == (segment.part, segment.start):
            found[-1] = found[-1]._replace(end=segment.end)
        else:
            found.append(segment)
    return found


def lane_order(lane: str) -> tuple[list[object], ...]:
    """Sort key of a lane's name: numbers in it count as numbers."""
    return tuple([int(t) if t.isdigit() else t] for t in re.split(r"(\d+)", lane))
