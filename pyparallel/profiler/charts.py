"""Draw a profile with matplotlib: the mean step, every step, and the lanes of a few.

All three charts are in one picture. The length of a bar is proportional to its time.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterable
from typing import NamedTuple
from xml.etree import ElementTree

import matplotlib.style
from matplotlib.axes import Axes
from matplotlib.container import BarContainer
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import EngFormatter, MaxNLocator

from ..core.text import percent, time_text
from .summary import COLOURS, PARTS, Step, Summary, cut, printable

#: Text stays text in the SVG; equal profiles have equal files; "$" is a character.
_STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "pyparallel",
    "text.parse_math": False,
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "axes.axisbelow": True,
    "legend.frameon": False,
    "figure.constrained_layout.h_pad": 0.12,
    "font.size": 11,
    "grid.color": "#8c959f80",
    **{f"axes.spines.{side}": False for side in ("left", "right", "top", "bottom")},
    **{f"{axis}tick.major.size": 0 for axis in "xy"},
}
#: Pixels of the picture: its width, and the heights of charts, a lane and the heading.
_WIDTH, _MEAN, _STEPS, _LANES, _LANE, _HEADING = 960, 130, 270, 120, 28, 60
#: Longer steps are cut off at this multiple of the mean, with their time above them.
_TALLEST = 6
_MOST_STEPS, _MOST_LANES, _LONGEST_LANE = 450, 13, 24
_SVG = "{http://www.w3.org/2000/svg}"
_TOOLTIP = "tooltip:"


class Pictures(NamedTuple):
    """The drawn profile."""

    inline: str  # an SVG element without a heading and background, for the page
    svg: str  # an SVG file
    png: bytes  # a PNG file


def draw(summary: Summary) -> Pictures:
    """Return the pictures of a summary."""
    # A style of the script does not change them, and a missing glyph is no error.
    with matplotlib.style.context(["default", _STYLE]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with_heading, png = figure(summary, heading=True), io.BytesIO()
        with_heading.savefig(png, format="png", dpi=144)
        inline = to_svg(figure(summary), summary.verdict, transparent=True)
        return Pictures(inline, to_svg(with_heading, summary.verdict), png.getvalue())


def figure(summary: Summary, heading: bool = False) -> Figure:
    """Return the figure with the three charts below each other."""
    heights = [_MEAN, _STEPS, _LANES + _LANE * min(len(summary.lanes), _MOST_LANES)]
    size = _WIDTH / 72, (sum(heights) + heading * _HEADING) / 72
    found = Figure(size, dpi=72, layout="constrained")
    mean, steps, lanes = found.subplots(3, 1, height_ratios=heights)
    draw_mean(mean, summary)
    draw_steps(steps, summary)
    draw_lanes(lanes, summary)
    if heading:
        text = printable(f"{summary.verdict}\n{summary.subtitle}")
        found.suptitle(text, x=0.01, ha="left", size=15)
    return found


def to_svg(figure: Figure, title: str, transparent: bool = False) -> str:
    """Return a figure as an SVG element whose bars have tooltips."""
    written = io.StringIO()
    unset = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    figure.savefig(written, format="svg", metadata=unset, transparent=transparent)
    tree = ElementTree.fromstring(written.getvalue())
    _insert_title(tree, printable(title))
    for group in tree.iter(f"{_SVG}g"):
        name = group.get("id", "")
        if name.startswith(_TOOLTIP):
            del group.attrib["id"]
            _insert_title(group, name.removeprefix(_TOOLTIP))
    ElementTree.register_namespace("", _SVG[1:-1])
    return ElementTree.tostring(tree, encoding="unicode") + "\n"


def _insert_title(element: ElementTree.Element, text: str) -> None:
    title = ElementTree.Element(f"{_SVG}title")
    title.text = text
    element.insert(0, title)


def _finish(bars: BarContainer, texts: Iterable[str]) -> None:
    """Name the groups of some bars for `to_svg`, without clip paths around them."""
    for bar, text in zip(bars, texts, strict=True):
        bar.set_clip_on(False)
        bar.set_gid(_TOOLTIP + printable(text))


def draw_mean(axes: Axes, summary: Summary) -> None:
    """Draw the mean step as one bar, with its parts in the legend."""
    left = 0.0
    for part, ns in summary.mean.items():
        if not ns:
            continue
        label = f"{part} {time_text(ns)}, {percent(ns / summary.step)}"
        bars = axes.barh(0, ns, left=left, color=COLOURS[part], label=label)
        _finish(bars, [label])
        left += ns
    axes.set(title="A step on average", xlim=(0, left), xticks=[], yticks=[])
    axes.legend(loc="upper left", bbox_to_anchor=(0, 0), ncols=4, borderpad=0)


def draw_steps(axes: Axes, summary: Summary) -> None:
    """Draw a column for each step, with its parts above each other."""
    parts = [step.parts for step in summary.steps[:_MOST_STEPS]]
    numbers = [summary.number(i) for i in range(len(parts))]
    totals = [sum(each.values()) for each in parts]
    limit = min(float(max(totals)), _TALLEST * summary.step)
    tops = [0.0] * len(parts)
    for part in PARTS:
        heights = [min(parts[i][part], limit - top) for i, top in enumerate(tops)]
        indices = [i for i, height in enumerate(heights) if height > 0]
        bars = axes.bar(
            [numbers[i] for i in indices],
            [heights[i] / 1e9 for i in indices],
            bottom=[tops[i] / 1e9 for i in indices],
            width=0.8 if len(parts) < 200 else 1.0,
            color=COLOURS[part],
        )
        times = {i: time_text(parts[i][part]) for i in indices}
        labels = [f"step {numbers[i]}: {part} {text}" for i, text in times.items()]
        _finish(bars, labels)
        for i in indices:
            tops[i] += heights[i]
    for i, total in enumerate(totals):
        if total > limit:
            text = time_text(total)
            axes.text(numbers[i], limit / 1e9, text, ha="center", va="bottom", size=8)
    right = numbers[0] + max(len(numbers), 20)
    axes.set(title="Every step", xlabel="step", xlim=(numbers[0] - 1, right))
    axes.set_ylim(0, 1.1 * limit / 1e9)
    axes.xaxis.set_major_locator(MaxNLocator("auto", integer=True))
    axes.yaxis.set_major_formatter(EngFormatter("s"))
    axes.grid(axis="y", clip_on=False)


def draw_lanes(axes: Axes, summary: Summary) -> None:
    """Draw the work of the loop, the prefetch thread and workers in a few steps."""
    steps = typical(summary, 8)
    start, end = steps[0].start, steps[-1].end
    lanes = list(summary.lanes.items())[:_MOST_LANES]
    names, used = [], set()
    for row, (lane, segments) in enumerate(lanes):
        names.append(lane_name(lane, summary.lane))
        shown = cut(segments, start, end)
        bars = axes.barh(
            [row] * len(shown),
            [(segment.end - segment.start) / 1e9 for segment in shown],
            left=[(segment.start - start) / 1e9 for segment in shown],
            height=0.7,
            color=[COLOURS[segment.part] for segment in shown],
        )
        times = (f"{part} {time_text(last - first)}" for part, first, last in shown)
        _finish(bars, (f"{names[-1]}: {text}" for text in times))
        used |= {segment.part for segment in segments}
    for step in steps:
        number = summary.number(summary.steps.index(step))
        left = (step.start - start) / 1e9
        axes.axvline(left, color="#8c959f80", lw=1, clip_on=False)
        label = f"step {number}" if step is steps[0] else str(number)
        if (step.end - step.start) / (end - start) * _WIDTH > 10 * len(label):
            axes.annotate(
                label,
                (left, -0.55),
                xytext=(4, 0),
                textcoords="offset points",
                va="bottom",
                size=9,
            )
    axes.set(title="A few steps, side by side", xlim=(0, (end - start) / 1e9))
    axes.set(ylim=(len(lanes) - 0.5, -1.2), yticks=range(len(names)))
    axes.set_yticklabels([printable(name[:_LONGEST_LANE]) for name in names])
    axes.xaxis.set_major_formatter(EngFormatter("s"))
    if len(summary.lanes) > len(lanes):
        hidden = f"and {len(summary.lanes) - len(lanes)} more lanes"
        axes.set_xlabel(hidden, loc="left")
    handles = [Patch(color=COLOURS[part], label=part) for part in PARTS if part in used]
    axes.legend(
        handles=handles, loc="lower right", bbox_to_anchor=(1, 1), ncols=6, borderpad=0
    )


def lane_name(lane: str, loop: str) -> str:
    """Return the label of a lane."""
    return "the loop" if lane == loop else lane.replace("prefetch", "prefetch thread")


def typical(summary: Summary, count: int) -> tuple[Step, ...]:
    """Return consecutive steps whose total time is closest to the average."""
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
    average = longest * summary.step

    def distance(row: tuple[Step, ...]) -> float:
        return abs(row[-1].end - row[0].start - average)

    return min((row for row in rows if len(row) == longest), key=distance)
