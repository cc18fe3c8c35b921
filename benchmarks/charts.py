"""Charts, made from records alone: equal records give equal files."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from ._harness import Record
from .report import installed, run_label

#: Colour (Okabe and Ito, safe for colour blindness), marker and line by contender.
_STYLES = {
    "ours, native": ("#0072B2", "o", "-"),
    "ours, Python": ("#56B4E9", "o", "--"),
    "mmcv": ("#D55E00", "s", "-"),
    "new_full": ("#E69F00", "^", "-"),
    "F.pad": ("#009E73", "v", "-"),
    "mmengine": ("#CC79A7", "D", "-"),
    "tensordict": ("#882255", "*", "-"),
    "torch.nested": ("#7F7F7F", "P", "-"),
    "memcpy": ("#000000", "", ":"),
    "non-temporal": ("#000000", "", "-."),
}
_OTHER = ("#555555", "x", "-")

_RC = {
    "svg.hashsalt": "pyparallel",
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 9.5,
    "axes.titlelocation": "left",
    "grid.color": "#DDDDDD",
    "legend.frameon": False,
    "lines.linewidth": 1.6,
    "lines.markersize": 4.5,
}


def draw(question: str, results: Record, folder: Path) -> list[str]:
    """Draw all charts that the records have data for, as SVG and PNG.

    Returns:
        The names of the SVG files.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context(_RC):
        figures = dict(_figures(question, results["runs"]))
        for name, figure in figures.items():
            figure.savefig(folder / f"{name}.svg", metadata={"Date": None})
            png = {"Software": None}
            figure.savefig(folder / f"{name}.png", dpi=110, metadata=png)
    return [f"{name}.svg" for name in figures]


def _figures(question: str, runs: Sequence[Record]) -> Iterator[tuple[str, Figure]]:
    if question == "collate" and any(run["cases"] for run in runs):
        yield "ratio_by_case", ratio_by_case(runs)
    if question == "training" and any(run["cases"] for run in runs):
        yield "training", epochs(runs[0]["cases"])
    for run in runs:
        if "growth" in run:
            yield "growth_of_cost", growth_of_cost(run["growth"])
        if "window" in run:
            yield "padding_by_window", padding_by_window(run["window"])


def epochs(cases: Sequence[Record]) -> Figure:
    """Return a bar for each loader: its speed beside the first one, for each case."""
    rows = max((case["rows"] for case in cases), key=len)
    names = [row["name"] for row in rows]
    figure, panels = _panels(len(cases), len(cases), 2.6, 0.9 + 0.28 * len(names))
    for i, (axes, case) in enumerate(zip(panels, cases, strict=True)):
        (first, *_), speeds = case["rows"], []
        for row in case["rows"]:
            y, over = names.index(row["name"]), row["seconds"]
            speed = first["median"] / row["median"]
            each = [a / b for a, b in zip(first["seconds"], over, strict=True)]
            low, high = statistics.quantiles(each, n=4, method="inclusive")[::2]
            spread = [[max(0, speed - low)], [max(0, high - speed)]]
            colour = "#0072B2" if row["kind"] == "ours" else "#BBBBBB"
            axes.barh(y, speed, color=colour, xerr=spread, ecolor="#555555")
            axes.text(max(speed, high), y, f" {speed:.2f}", va="center", fontsize=8)
            speeds.append(max(speed, high))
        axes.axvline(1, color="black", linewidth=1)
        axes.set_xlim(0, max(speeds) * 1.25)
        axes.set_ylim(len(names) - 0.5, -0.5)
        axes.set_yticks(range(len(names)), names if i == 0 else [""] * len(names))
        axes.set_title(case["title"])
    figure.suptitle("Speed of an epoch beside torch's loader: right of 1 it is faster")
    return figure


def ratio_by_case(runs: Sequence[Record]) -> Figure:
    """Return a dot for the relative time of every peer in every case."""
    runs = [run for run in runs if run["cases"]]
    tallest = max(len(run["cases"]) for run in runs)
    figure, panels = _panels(
        len(runs), len(runs), 3.2, 1.4 + 0.27 * tallest, sharex=True
    )
    for i, (axes, run) in enumerate(zip(panels, runs, strict=True)):
        titles = [case["title"] for case in runs[0]["cases"]]
        for case in run["cases"]:
            if case["title"] not in titles:
                titles.append(case["title"])
            y = titles.index(case["title"])
            for name, row in installed(case, "peer").items():
                colour, marker, _ = _style(name)
                x, label = row["over"][_first(case)]["of_medians"], _family(name)
                axes.plot(x, y, marker, color=colour, label=label, alpha=0.85)
        axes.set_ylim(len(titles) - 0.5, -0.5)
        axes.set_yticks(range(len(titles)), titles if i == 0 else [""] * len(titles))
        axes.set_title(run_label(run))
        axes.set_xscale("log")
        _plain_axis(axes.xaxis, (1, 2, 5))
        axes.axvline(1, color="black", linewidth=1)
        axes.grid(True)
        axes.set_xlabel("time relative to pyparallel")
    figure.suptitle(
        f"Peers against {_first(runs[0]['cases'][0])}: right of 1 the peer is slower"
    )
    return _with_legend(figure, panels)


def growth_of_cost(growths: Sequence[Record]) -> Figure:
    """Return the cost over samples and leaves."""
    figure, panels = _panels(len(growths), 3, 3.1, 2.7)
    for axes, growth in zip(panels, growths, strict=True):
        sizes, rows = growth["sizes"], [r for r in growth["series"] if r["installed"]]
        for row in rows:
            ys = [seconds * 1e6 for seconds in row["seconds"]]
            colour, marker, line = _style(row["name"])
            label = _family(row["name"])
            axes.plot(sizes, ys, line, marker=marker, color=colour, label=label)
        last = rows[0]["seconds"][-1] * 1e6
        guide = [last * size / sizes[-1] for size in sizes]
        axes.plot(sizes, guide, color="#999999", linewidth=0.9, zorder=0)
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set(xlabel=growth["x"], ylabel="microseconds (minimum)")
        axes.set_title(growth["title"])
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.grid(True)
    figure.suptitle("Growth of cost; the thin grey line is exactly proportional")
    return _with_legend(figure, panels)


def padding_by_window(found: Record) -> Figure:
    """Return the share of padding over the window of a `SizeBatchSampler`."""
    figure, (axes,) = _panels(1, 1, 6.0, 3.6)
    colours = ("#0072B2", "#D55E00", "#009E73", "#CC79A7")
    for each, colour, marker in zip(found["series"], colours, "os^D", strict=True):
        shares = [100 * share for share in each["padding"]]
        label = each["name"]
        axes.plot(found["windows"], shares, marker=marker, color=colour, label=label)
    axes.set_xscale("log")
    axes.set_yscale("log")
    _plain_axis(axes.xaxis, (1, 2, 5))
    _plain_axis(axes.yaxis, (1, 2, 5))
    axes.set(xlabel="window, in batches (1: random batches)", ylabel="% padding")
    axes.set_title(f"{found['number']:,} samples in batches of 16")
    axes.grid(True)
    axes.legend()
    return figure


def _panels(
    num: int, columns: int, width: float, height: float, sharex: bool = False
) -> tuple[Figure, list[Axes]]:
    columns = min(num, columns)
    rows = -(-num // columns)
    size = (max(5.5, width * columns + 0.6), height * rows + 1.1)
    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(rows, columns, squeeze=False, sharex=sharex)
    panels = list(grid.flat)
    for unused in panels[num:]:
        unused.set_visible(False)
    return figure, panels[:num]


def _with_legend(figure: Figure, panels: Sequence[Axes]) -> Figure:
    """Put one legend under all panels."""
    entries: dict[str, Any] = {}
    for axes in panels:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            entries.setdefault(label, handle)
    labels = sorted(entries, key=_place)
    rows = -(-len(labels) // max(3, int(figure.get_figwidth() / 1.95)))
    columns = -(-len(labels) // rows)
    figure.legend(
        [entries[label] for label in labels],
        labels,
        loc="outside lower center",
        ncols=columns,
    )
    return figure


def _plain_axis(axis: Any, steps: Sequence[int] = (1, 2, 3, 5)) -> None:
    """Write 1, 2, 3, 5, 10 where a logarithmic axis would write powers."""
    axis.set_major_locator(LogLocator(subs=steps))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def _style(name: str) -> tuple[str, str, str]:
    return next((_STYLES[key] for key in _STYLES if name.startswith(key)), _OTHER)


def _family(name: str) -> str:
    """Return the name of a contender in the legend; one style has one name."""
    if name.startswith("by hand") or _style(name) == _OTHER:
        return "others"
    return "mmcv 1.x" if name.startswith("mmcv") else name


def _place(label: str) -> int:
    """Return the position of a label in the legend, in the order of ``_STYLES``."""
    places = [i for i, start in enumerate(_STYLES) if label.startswith(start)]
    return places[0] if places else len(_STYLES)


def _first(case: Record) -> str:
    return next(iter(installed(case, "ours")))
