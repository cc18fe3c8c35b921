"""Rectangles, lines and words, drawn as SVG, or as PNG by matplotlib.

Coordinates are pixels from the upper left corner.
"""

from __future__ import annotations

import html
import re
from pathlib import Path
from typing import Any, NamedTuple

#: Colours of the parts, after Okabe and Ito: told apart without red or green, too.
COLOURS = {
    "compute": "#0072b2",
    "copy": "#56b4e9",
    "pack": "#cc79a7",
    "collate": "#009e73",
    "fetch": "#e69f00",
    "wait": "#d55e00",
}
#: Ink, muted ink, faint lines and the paper, in the light and in the dark.
LIGHT = {"ink": "#1b1f24", "muted": "#57606a", "faint": "#d0d7de", "paper": "#ffffff"}
DARK = {"ink": "#e6edf3", "muted": "#9da7b3", "faint": "#3d444d", "paper": "#15191e"}

_FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif"


class Rect(NamedTuple):
    """A bar, with what is said when one points at it."""

    x: float
    y: float
    width: float
    height: float
    style: str
    title: str


class Line(NamedTuple):
    """A thin line."""

    x: float
    y: float
    to_x: float
    to_y: float


class Text(NamedTuple):
    """Words; ``y`` is their base line."""

    x: float
    y: float
    text: str
    style: str = "ink"
    anchor: str = "start"
    size: float = 12
    bold: bool = False


class Drawing:
    """A picture of a width that grows downwards.

    Args:
        width: in pixels.
        title: what the picture shows, for those who do not see it.
    """

    def __init__(self, width: float, title: str) -> None:
        self.width, self.title = width, title
        self.height = 0.0
        self.shapes: list[Rect | Line | Text] = []

    def add(self, *shapes: Rect | Line | Text) -> None:
        """Draw some shapes over those that are there."""
        self.shapes += shapes

    def legend(self, left: float, top: float, items: dict[str, str]) -> float:
        """Draw a coloured square and words for each part; return where they end."""
        x = left
        for part, text in items.items():
            width = 34 + text_width(text)
            if x > left and x + width > self.width:
                x, top = left, top + 20
            self.add(
                Rect(x, top, 12, 12, part, text),
                Text(x + 18, top + 10.5, text, size=12),
            )
            x += width
        return top + 20

    def to_svg(self, alone: bool = True) -> str:
        """Return an SVG element; ``alone`` with its paper and colours, for a file."""
        size = f"{self.width:g} {self.height:g}"
        parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size}"']
        if alone:
            parts.append(f' width="{self.width:g}" height="{self.height:g}"')
        parts.append(f' role="img"><title>{escape(self.title)}</title>\n')
        if alone:
            parts.append(f"<style>{style()}</style>\n")
            parts.append('<rect class="paper" width="100%" height="100%"/>\n')
        parts += [_svg(shape) + "\n" for shape in self.shapes]
        return "".join(parts) + "</svg>\n"

    def to_png(self, path: Path) -> None:
        """Write a PNG file, in light colours and twice the size.

        Raises:
            ImportError: matplotlib is not installed.
        """
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        figure = Figure((self.width / 72, self.height / 72), dpi=144, facecolor="w")
        FigureCanvasAgg(figure)
        axes = figure.add_axes((0, 0, 1, 1))
        axes.set_axis_off()
        axes.set_xlim(0, self.width)
        axes.set_ylim(self.height, 0)
        for shape in self.shapes:
            _matplotlib(axes, shape)
        figure.savefig(path)


def text_width(text: str, size: float = 12) -> float:
    """Return about how wide words are; rather too much."""
    return 0.62 * size * len(text)


def style() -> str:
    """Return the CSS of all shapes, and of the dark."""
    rules = [f".{part}{{fill:{colour}}}" for part, colour in COLOURS.items()]
    rules.append(f"text{{font-family:{_FONT};font-variant-numeric:tabular-nums}}")
    rules.append(".b{font-weight:600}")
    light = _inks(LIGHT)
    return f"{light}@media (prefers-color-scheme:dark){{{_inks(DARK)}}}{''.join(rules)}"


def _inks(inks: dict[str, str]) -> str:
    return (
        f".ink{{fill:{inks['ink']}}}.muted{{fill:{inks['muted']}}}"
        f".paper{{fill:{inks['paper']}}}line{{stroke:{inks['faint']}}}"
    )


def _svg(shape: Rect | Line | Text) -> str:
    if isinstance(shape, Rect):
        x, y, width, height, style, title = shape
        return (
            f'<rect class="{style}" x="{x:.3f}" y="{y:.3f}" width="{width:.3f}" '
            f'height="{height:.3f}"><title>{escape(title)}</title></rect>'
        )
    if isinstance(shape, Line):
        x, y, to_x, to_y = shape
        return f'<line x1="{x:.2f}" y1="{y:.2f}" x2="{to_x:.2f}" y2="{to_y:.2f}"/>'
    bold = " b" if shape.bold else ""
    return (
        f'<text class="{shape.style}{bold}" x="{shape.x:.2f}" y="{shape.y:.2f}" '
        f'font-size="{shape.size:g}" text-anchor="{shape.anchor}">'
        f"{escape(shape.text)}</text>"
    )


def escape(text: str) -> str:
    """Return text for XML or HTML; what neither can hold becomes a question mark."""
    return html.escape(_printable(text))


def _printable(text: str) -> str:
    """Return text without characters that XML does not have."""
    return re.sub(r"[^\t\n -\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]", "?", text)


def _matplotlib(axes: Any, shape: Rect | Line | Text) -> None:
    from matplotlib.patches import Rectangle

    if isinstance(shape, Rect):
        corner, colour = (shape.x, shape.y), COLOURS[shape.style]
        axes.add_patch(
            Rectangle(corner, shape.width, shape.height, color=colour, lw=0, zorder=1)
        )
    elif isinstance(shape, Line):
        xs, ys = (shape.x, shape.to_x), (shape.y, shape.to_y)
        axes.plot(xs, ys, color=LIGHT["faint"], linewidth=1, zorder=1)
    else:
        axes.text(
            shape.x,
            shape.y,
            # A dollar begins a formula in matplotlib.
            _printable(shape.text).replace("$", r"\$"),
            color=LIGHT.get(shape.style, LIGHT["ink"]),
            size=shape.size,
            weight="bold" if shape.bold else "normal",
            horizontalalignment={"middle": "center", "end": "right"}.get(
                shape.anchor, "left"
            ),
            verticalalignment="baseline",
        )
