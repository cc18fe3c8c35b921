"""Write the files of a report, and its text for the terminal."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ..core.text import percent, time_text
from .advice import advise
from .expected import expected
from .numbers import numbers_of
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


def write(
    records: Sequence[Record], out: Path, name: str | None = None
) -> list[Written]:
    """Write the report of every record that contains a step.

    A report consists of a page, the record and a trace; with matplotlib also of an SVG
    and a PNG file.

    Args:
        records: the records of the processes of one script.
        out: the folder. It is created; files of an earlier profile are replaced.
        name: the name of the files of a single record, without a suffix.

    Returns:
        One value for each report, in the order of the records.

    Raises:
        OSError: the folder cannot be written.
    """
    summaries = [summary for each in records if (summary := summarize(each))]
    if summaries:
        out.mkdir(parents=True, exist_ok=True)
    ranks = [summary.record.rank for summary in summaries]
    paths = [out / (name or _name(i, ranks)) for i in range(len(ranks))]
    # Before all charts, whose errors would lose the records.
    for summary, path in zip(summaries, paths, strict=True):
        _path(path, "json").write_text(summary.record.to_json(), encoding="utf-8")
    return [_write(*each) for each in zip(summaries, paths, strict=True)]


def _name(i: int, ranks: list[int | None]) -> str:
    if len(ranks) == 1:
        return "profile"
    # Several programs may have one rank.
    is_unique = ranks[i] is not None and ranks.count(ranks[i]) == 1
    return f"profile-rank{ranks[i]}" if is_unique else f"profile-{i}"


def _path(base: Path, suffix: str) -> Path:
    return base.with_name(f"{base.name}.{suffix}")


def _write(summary: Summary, base: Path) -> Written:
    record = _path(base, "json")
    contents: dict[str, str | bytes | None] = {"svg": None, "png": None}
    charts = None
    try:
        from .charts import draw  # needs matplotlib
    except ImportError:
        pass
    else:
        charts, contents["svg"], contents["png"] = draw(summary)
    contents = {
        "html": page(summary, charts, shlex.quote(str(record))),
        "json": record.read_bytes(),
        "trace.json": summary.record.to_trace(),
        **contents,
    }
    files = []
    for suffix, content in contents.items():
        path = _path(base, suffix)
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
    lines += [f"  {line}" for line in expected(numbers_of(summary))]
    lines.append("  what to change first")
    for i, (title, why, _) in enumerate(advise(summary), 1):
        lines += [f"    {i}. {title}", f"       {why}"]
    if not any(path.suffix == ".svg" for path in written.files):
        lines.append(f"  {NO_MATPLOTLIB}")
    lines.append(f"  {written.files[0]}")
    return "\n".join(lines)
