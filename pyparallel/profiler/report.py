"""Write the files of a report, and its text for the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ..core.text import percent, time_text
from .advice import advise
from .page import INSTALL_MATPLOTLIB, page
from .record import Record, collect
from .summary import Summary, summarize

NO_MATPLOTLIB = f"no charts: matplotlib is not installed ({INSTALL_MATPLOTLIB})"


@dataclass(frozen=True)
class Written:
    """The report of one process.

    Attributes:
        summary: the figures of the report.
        files: the written files, with the page first.
    """

    summary: Summary
    files: tuple[Path, ...]


def gather(folder: Path, exit_code: int | None) -> list[Record]:
    """Return the records of all processes of a profile that contain events."""
    records = [replace(each, exit_code=exit_code) for each in collect(folder)]
    return [record for record in records if record.events]


def write(records: Sequence[Record], out: Path) -> list[Written]:
    """Write the report of every record that contains a step.

    A report consists of a page, the record and a trace; with matplotlib also of an SVG
    and a PNG file.

    Args:
        records: the records of the processes of one script.
        out: the folder. It is created; files of an earlier profile are replaced.

    Returns:
        One value for each report, in the order of the records.

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
    contents: dict[str, str | bytes | None] = {"svg": None, "png": None}
    charts = None
    try:
        from .charts import draw  # needs matplotlib
    except ImportError:
        pass
    else:
        charts, contents["svg"], contents["png"] = draw(summary)
    contents = {
        "html": page(summary, charts, f"{name}.json"),
        "json": summary.record.to_json(),
        "trace.json": summary.record.to_trace(),
        **contents,
    }
    files = []
    for suffix, content in contents.items():
        path = out / f"{name}.{suffix}"
        if content is None:
            path.unlink(missing_ok=True)  # of an earlier profile
            continue
        files.append(path)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    return Written(summary, tuple(files))


def text(written: Written) -> str:
    """Return a report for a terminal."""
    summary = written.summary
    lines = [summary.subtitle, f"  {summary.verdict}"]
    for part, ns in summary.mean.items():
        if ns:
            share = percent(ns / summary.step)
            lines.append(f"    {part:<8} {time_text(ns):>9} {share:>6}")
    lines.append("  what to change first")
    for i, (title, why, _) in enumerate(advise(summary), 1):
        lines += [f"    {i}. {title}", f"       {why}"]
    if not any(path.suffix == ".svg" for path in written.files):
        lines.append(f"  {NO_MATPLOTLIB}")
    lines.append(f"  {written.files[0]}")
    return "\n".join(lines)
