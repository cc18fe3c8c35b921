"""From what the processes of a profile wrote to files that can be looked at."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ..core.text import percent, time_text
from .advice import advise
from .charts import picture, subtitle
from .page import page
from .record import Record, collect
from .summary import Summary, summarize

NO_MATPLOTLIB = (
    "no PNG: matplotlib is not installed (pip install 'pyparallel-torch[profile]')"
)


@dataclass(frozen=True)
class Written:
    """The report of one process.

    Attributes:
        summary: what it says.
        files: what was written, the page first.
    """

    summary: Summary
    files: tuple[Path, ...]


def gather(folder: Path, exit_code: int | None) -> list[Record]:
    """Return a record of every process of a profile in which anything was seen."""
    records = [replace(each, exit_code=exit_code) for each in collect(folder)]
    return [record for record in records if record.events]


def write(records: Sequence[Record], out: Path) -> list[Written]:
    """Write a page, pictures and the record of every process that made a step.

    Args:
        records: of the processes of one script.
        out: the folder. Files of an earlier profile in it are replaced.

    Returns:
        What was written, in the order of the records.

    Raises:
        OSError: the folder cannot be written.
    """
    summaries = [summary for each in records if (summary := summarize(each))]
    if summaries:
        out.mkdir(parents=True, exist_ok=True)
    return [
        _write(summary, out, _name(i, summary.record, len(summaries)))
        for i, summary in enumerate(summaries)
    ]


def _name(i: int, record: Record, count: int) -> str:
    if count == 1:
        return "profile"
    return f"profile-{i}" if record.rank is None else f"profile-rank{record.rank}"


def _write(summary: Summary, out: Path, name: str) -> Written:
    drawing = picture(summary, summary.verdict)
    files = []
    for suffix, text in (
        ("html", page(summary)),
        ("svg", drawing.to_svg()),
        ("json", summary.record.to_json()),
    ):
        files.append(out / f"{name}.{suffix}")
        files[-1].write_text(text, encoding="utf-8")
    png = out / f"{name}.png"
    try:
        drawing.to_png(png)
        files.append(png)
    except ImportError:
        png.unlink(missing_ok=True)  # it would be of another profile
    return Written(summary, tuple(files))


def text(written: Written) -> str:
    """Return a report for a terminal."""
    summary = written.summary
    lines = [subtitle(summary), f"  {summary.verdict}"]
    for part, ns in summary.mean.items():
        if ns:
            share = percent(ns / summary.step)
            lines.append(f"    {part:<8} {time_text(ns):>9} {share:>6}")
    lines.append("  what to change first")
    for i, (title, why, _) in enumerate(advise(summary), 1):
        lines += [f"    {i}. {title}", f"       {why}"]
    if not any(path.suffix == ".png" for path in written.files):
        lines.append(f"  {NO_MATPLOTLIB}")
    lines.append(f"  {written.files[0]}")
    return "\n".join(lines)
