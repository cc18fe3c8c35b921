"""The charts: the mean step as one bar, every step as a column, lanes on a time line.

Each takes a drawing and where to begin, and returns where it ends. The length of a bar
is its time multiplied by one scale.
"""

from __future__ import annotations

import math

from ..core.text import percent, plural, time_text
from ._svg import Drawing, Line, Rect, Text, text_width
from .cut import PARTS, Segment, cut
from .summary import Step, Summary

#: Characters of a script's name in a heading.
_LONGEST_NAME = 48
#: A step that is longer than so many means is cut off, and its time written above it.
_TALLEST = 6
_BAR, _LANE, _GAP, _LABEL = 34, 18, 8, 19


def draw_mean(drawing: Drawing, summary: Summary, top: float) -> float:
    """Draw the mean step as one bar, and what its parts are."""
    scale = drawing.width / summary.step
    x = 0.0
    labels = {}
    for part, ns in summary.mean.items():
        if not ns:
            continue
        share = ns / summary.step
        text = f"{part} {time_text(ns)}, {percent(share)}"
        labels[part] = text
        drawing.add(Rect(x, top, ns * scale, _BAR, part, text))
        x += ns * scale
    return drawing.legend(0, top + _BAR + 12, labels)


def draw_steps(
    drawing: Drawing, summary: Summary, top: float, height: float = 180
) -> float:
    """Draw a column for each step: its parts above each other, by the time."""
    left, plot = 58.0, drawing.width - 58
    steps = summary.steps[: max(1, int(plot // 2))]
    longest = max(step.end - step.start for step in steps)
    limit = min(longest, _TALLEST * summary.step)
    base, scale = top + 14 + height, height / limit
    for ns in ticks(limit, 4):
        y = base - ns * scale
        drawing.add(Line(left, y, drawing.width, y))
        drawing.add(Text(left - 8, y + 4, _tick(ns), "muted", "end"))
    pitch = min(plot / len(steps), 48)
    width = pitch * 0.8 if pitch >= 4 else pitch
    for i, step in enumerate(steps):
        x, done = left + i * pitch, 0
        for part, ns in step.parts.items():
            shown = min(ns, limit - done)
            if shown > 0:
                y = base - (done + shown) * scale
                title = f"step {_number(summary, i)}: {part} {time_text(ns)}"
                drawing.add(Rect(x, y, width, shown * scale, part, title))
            done += ns
        if done > limit:
            text = time_text(done)
            middle = max(left, min(x + width / 2, drawing.width - text_width(text) / 2))
            drawing.add(Text(middle, top + 10, text, "muted", "middle", 11))
    for i in _numbered(len(steps), plot):
        x = left + i * pitch + width / 2
        name = str(_number(summary, i))
        drawing.add(Text(x, base + 16, name, "muted", "middle"))
    drawing.add(Text(left, base + 34, "step", "muted"))
    return base + 40


def _number(summary: Summary, i: int) -> int:
    """Return which step since the beginning one of the summary is, from 1."""
    return summary.left_out + i + 1


def _numbered(count: int, plot: float) -> range:
    """Return which of so many columns get their number written below."""
    return range(0, count, max(1, math.ceil(count / (plot / 36))))


def draw_lanes(drawing: Drawing, summary: Summary, top: float) -> float:
    """Draw what the loop, the prefetcher and the workers did in a few steps."""
    beside = drawing.width >= 600
    steps = typical(summary, 8 if beside else 4)
    start, end = steps[0].start, steps[-1].end
    names = {lane: _lane_name(lane, summary.lane) for lane in summary.lanes}
    left = 12 + max(map(text_width, names.values())) if beside else 0.0
    scale = (drawing.width - left) / (end - start)
    shown = list(summary.lanes.items())[:13]
    top = draw_legend(drawing, [did for _, did in shown], top + 4)
    y = top + 18
    pitch = _LANE + _GAP + (0 if beside else _LABEL)
    bottom = y + pitch * len(shown)
    for i, step in enumerate(steps):
        x = left + (step.start - start) * scale
        drawing.add(Line(x, top + 4, x, bottom))
        number = _number(summary, summary.steps.index(step))
        name = str(number) if i else f"step {number}"
        if (step.end - step.start) * scale > text_width(name, 11):
            drawing.add(Text(x + 4, top + 13, name, "muted", size=11))
    for lane, did in shown:
        label = y + 13.5
        if not beside:
            y += _LABEL
        drawing.add(Text(0, label, names[lane]))
        for part, begin, finish in cut(did, start, end):
            x, width = left + (begin - start) * scale, (finish - begin) * scale
            title = f"{names[lane]}: {part} {time_text(finish - begin)}"
            drawing.add(Rect(x, y, width, _LANE, part, title))
        y += _LANE + _GAP
    for ns in ticks(end - start, 6 if beside else 3):
        x = left + ns * scale
        text = _tick(ns)
        anchor = "end" if x + text_width(text) / 2 > drawing.width else "middle"
        drawing.add(Text(x, bottom + 12, text, "muted", anchor if ns else "start", 11))
    hidden = len(summary.lanes) - len(shown)
    if hidden:
        drawing.add(Text(0, bottom + 32, f"and {hidden} more lanes", "muted"))
    return bottom + (40 if hidden else 20)


def draw_legend(drawing: Drawing, lanes: list[list[Segment]], top: float) -> float:
    """Draw what the colours of the parts in some lanes mean."""
    used = {segment.part for lane in lanes for segment in lane}
    return drawing.legend(0, top, {part: part for part in PARTS if part in used}) + 6


def _lane_name(lane: str, loop: str) -> str:
    if lane == loop:
        return "the loop"
    return lane.replace("prefetch", "prefetch thread")


def typical(summary: Summary, count: int) -> tuple[Step, ...]:
    """Return some steps in a row that took as long as such a row does on average."""
    steps = summary.steps
    rows = []
    for i in range(max(1, len(steps) - count + 1)):
        row = [steps[i]]
        for step in steps[i + 1 : i + count]:
            if step.start != row[-1].end:
                break
            row.append(step)
        rows.append(tuple(row))
    longest = max(map(len, rows))
    usual = longest * summary.step

    def distance(row: tuple[Step, ...]) -> float:
        return abs(row[-1].end - row[0].start - usual)

    return min((row for row in rows if len(row) == longest), key=distance)


def ticks(limit: float, count: int) -> list[float]:
    """Return about so many round numbers from 0 to a limit."""
    rough = limit / count
    unit = 10.0 ** math.floor(math.log10(rough))
    step = next(unit * n for n in (1, 2, 5, 10) if unit * n >= rough)
    return [step * i for i in range(int(limit / step) + 1)]


def _tick(ns: float) -> str:
    """Return a round number with its unit."""
    for size, unit in ((1e9, "s"), (1e6, "ms"), (1e3, "us")):
        if ns >= size:
            return f"{ns / size:g} {unit}"
    return "0"


def picture(summary: Summary, headline: str, width: float = 960) -> Drawing:
    """Return all charts in one drawing, with what they say written above them."""
    drawing = Drawing(width + 48, headline)
    inner = Drawing(width, headline)
    inner.add(Text(0, 40, headline, size=20, bold=True))
    inner.add(Text(0, 64, subtitle(summary), "muted", size=13))
    y = draw_mean(inner, summary, 84)
    inner.add(Text(0, y + 26, "Every step", size=15, bold=True))
    y = draw_steps(inner, summary, y + 34)
    inner.add(Text(0, y + 28, "A few steps, side by side", size=15, bold=True))
    y = draw_lanes(inner, summary, y + 38)
    for shape in inner.shapes:
        moved = shape._replace(x=shape.x + 24)
        if isinstance(moved, Line):
            moved = moved._replace(to_x=moved.to_x + 24)
        drawing.add(moved)
    drawing.height = y + 24
    return drawing


def subtitle(summary: Summary) -> str:
    """Return what the steps are of and how many there are."""
    record, count = summary.record, len(summary.steps)
    ranks = record.world_size or 1
    rank = f", rank {record.rank} of {ranks}" if ranks > 1 else ""
    warm = f" after {summary.left_out} to warm up" if summary.left_out else ""
    steps, name = plural(count, "step"), record.script
    if len(name) > _LONGEST_NAME:
        name = f"{name[: _LONGEST_NAME - 3]}..."
    return f"{name}{rank}: {steps}{warm}, {time_text(summary.step)} each"
