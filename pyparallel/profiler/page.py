"""Fill the HTML page of a profile: one file without scripts, links or images."""

from __future__ import annotations

import html
import re
import statistics
from collections.abc import Iterable, Mapping
from importlib import resources
from string import Template

from ..core.text import nbytes_text, percent, plural, time_text
from .advice import advise
from .expected import expected
from .numbers import numbers_of
from .summary import PARTS, Summary, Work

#: Colours of the parts, after Okabe and Ito: colour-blind readers distinguish them.
COLOURS = {
    "compute": "#0072b2",
    "copy": "#56b4e9",
    "pack": "#cc79a7",
    "collate": "#009e73",
    "fetch": "#e69f00",
    "wait": "#d55e00",
}
INSTALL_MATPLOTLIB = "pip install 'pyparallel-torch[profile]'"
_NO_CHARTS = (
    "<p>This page has no charts: matplotlib is not installed. Install it with "
    "<code>$install</code>, then run "
    "<code>pyparallel profile --from $record</code>.</p>"
)
_TILE = "<div><b>$value</b>$name</div>\n"
_ADVICE = "<li><b>$title</b><p>$text</p></li>\n"
_PART = (
    '<tr><td><i style="background:$colour"></i>$part '
    '<span class="muted">$meaning</span></td>'
    "<td>$mean</td><td>$median</td><td>$max</td><td>$share</td></tr>\n"
)
_FACT = "<dt>$name</dt><dd>$value</dd>\n"


def page(summary: Summary, charts: str | None, record: str = "profile.json") -> str:
    """Return the page of a summary. Texts from the record are escaped.

    Args:
        summary: the figures.
        charts: an SVG element; None if matplotlib is not installed.
        record: the path of the record file, for the hint without matplotlib.
    """
    if charts is None:
        shown = _fill(_NO_CHARTS, install=INSTALL_MATPLOTLIB, record=record)
    else:
        shown = Template(_read("charts.html")).substitute(svg=charts)
    verdict, (first, *rest) = summary.verdict, expected(numbers_of(summary))
    return Template(_read("page.html")).substitute(
        title=escape(f"{summary.record.script}: {summary.bottleneck}"),
        css=_read("page.css"),
        headline=escape(verdict[:1].upper() + verdict[1:]),
        subtitle=escape(summary.subtitle),
        tiles=_fill_each(_TILE, "name", "value", _tiles(summary)),
        expected=escape(first[:1].upper() + first[1:]),
        changes="".join(_fill("<li>$text</li>\n", text=line) for line in rest),
        advice="".join(
            _fill(_ADVICE, title=each.title, text=each.text + _gain(each.gain))
            for each in advise(summary)
        ),
        charts=shown,
        parts="".join(_fill(_PART, **row) for row in _parts(summary)),
        work="".join(_fill("<p>$text</p>\n", text=text) for text in _works(summary)),
        facts=_fill_each(_FACT, "name", "value", _facts(summary)),
    )


def _read(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def _fill(template: str, **values: str) -> str:
    """Return a template with escaped values."""
    escaped = {name: escape(value) for name, value in values.items()}
    return Template(template).substitute(escaped)


def _fill_each(template: str, key: str, value: str, rows: Mapping[str, str]) -> str:
    return "".join(_fill(template, **{key: k, value: v}) for k, v in rows.items())


def escape(text: str) -> str:
    """Escape text for HTML; characters that XML cannot contain become "?"."""
    return html.escape(printable(text))


def printable(text: str) -> str:
    """Replace characters that XML cannot contain by question marks."""
    return re.sub(r"[^\t\n -\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]", "?", text)


def _tiles(summary: Summary) -> dict[str, str]:
    tiles = {"a step takes": time_text(summary.step)}
    if summary.loader:
        tiles["of it for input"] = percent(summary.waited)
    tiles["steps a second"] = f"{1e9 / summary.step:.3g}"
    if summary.stacked[0]:
        tiles["of stacked bytes are padding"] = percent(summary.padding_fraction)
    return tiles


def _gain(gain: float | None) -> str:
    return f" Saves up to {time_text(gain)} of a step." if gain else ""


def _parts(summary: Summary) -> Iterable[dict[str, str]]:
    """Yield the table row of each part that takes time."""
    steps = [step.parts for step in summary.steps]
    for part, meaning in PARTS.items():
        times = [parts[part] for parts in steps]
        if any(times):
            yield {
                "part": part,
                "colour": COLOURS[part],
                "meaning": meaning,
                "mean": time_text(summary.mean[part]),
                "median": time_text(statistics.median(times)),
                "max": time_text(max(times)),
                "share": percent(summary.mean[part] / summary.step),
            }


def _works(summary: Summary) -> Iterable[str]:
    """Yield a paragraph about the workers and one about the prefetch thread."""
    for prefix, name in (("worker", "worker"), ("prefetch", "prefetch thread")):
        work = summary.work(prefix)
        if work is not None:
            yield _work(work, name)


def _work(work: Work, name: str) -> str:
    lanes = plural(len(work.lanes), name)
    verb = "was" if len(work.lanes) == 1 else "were"
    parts = ", ".join(f"{part} {time_text(ns)}" for part, ns in work.parts.items())
    cpu = f" {time_text(work.cpu)} of it are CPU time." if work.cpu else ""
    return (
        f"Meanwhile {lanes} {verb} busy {percent(work.busy)} of the time. A batch took "
        f"{time_text(work.per_batch)}: {parts}.{cpu}"
    )


def _facts(summary: Summary) -> dict[str, str]:
    record, (stacked, padding) = summary.record, summary.stacked
    facts = {"script": record.script}
    for i, loader in enumerate(record.loaders, 1):
        role = "steps shown here" if i == summary.loader else "not shown"
        workers = plural(loader["num_workers"] or 0, "worker")
        size = loader["batch_size"]
        batches = "" if size is None else f", batches of {size}"
        facts[f"loader {i}"] = f"{loader['name']}, {workers}{batches}: {role}"
    if stacked:
        facts["padding"] = f"{nbytes_text(padding)} of {nbytes_text(stacked)} stacked"
    if summary.interrupted:
        facts["left out"] = (
            f"{summary.interrupted} steps in which another loader was used"
        )
    if record.environment.get("device", "CPU") != "CPU":
        facts["a step ends"] = (
            "when its device has finished" if record.synchronized else "on the host"
        )
    if record.exit_code:
        facts["the script"] = f"ended with exit code {record.exit_code}"
    return facts | {str(k): str(v) for k, v in record.environment.items()}
