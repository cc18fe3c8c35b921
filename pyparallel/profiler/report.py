"""Write the files of a report, and its text for the terminal.

The page is one file without scripts, links or images. ``page.html`` has its blocks.
"""

from __future__ import annotations

import html
import re
import shlex
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from string import Template

from ..core.text import nbytes_text, percent, plural, time_text
from .advice import advise
from .prediction import expected, numbers_of
from .record import Record, collect
from .summary import COLOURS, PARTS, Summary, printable, summarize

INSTALL_MATPLOTLIB = "pip install 'pyparallel-torch[profile]'"
#: A block of the template: its name, and the text until the next one.
_BLOCK = re.compile(r"<!-- (\w+) -->\n(.*?\n)(?=<!-- |\Z)", re.DOTALL)
NO_MATPLOTLIB = f"no charts: matplotlib is not installed ({INSTALL_MATPLOTLIB})"


@dataclass(frozen=True)
class Written:
    """The report of one process."""

    summary: Summary  # the figures of the report
    files: tuple[Path, ...]  # the written files, with the page first


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
    for row in _parts(summary):
        lines.append(f"    {row['part']:<8} {row['mean']:>9} {row['share']:>6}")
    lines += [f"  {line}" for line in expected(numbers_of(summary))]
    lines.append("  what to change first")
    for i, (title, why, _) in enumerate(advise(summary), 1):
        lines += [f"    {i}. {title}", f"       {why}"]
    if not any(path.suffix == ".svg" for path in written.files):
        lines.append(f"  {NO_MATPLOTLIB}")
    lines.append(f"  {written.files[0]}")
    return "\n".join(lines)


def page(summary: Summary, charts: str | None, record: str = "profile.json") -> str:
    """Return the page of a summary. Texts from the record are escaped.

    Args:
        summary: the figures.
        charts: an SVG element; None if matplotlib is not installed.
        record: the path of the record file, for the hint without matplotlib.
    """
    template = resources.files(__package__).joinpath("page.html")
    blocks = dict(_BLOCK.findall(template.read_text(encoding="utf-8")))

    def fill(name: str, rows: Iterable[Mapping[str, str]]) -> str:
        return "".join(
            Template(blocks[name]).substitute(
                {key: escape(value) for key, value in row.items()}
            )
            for row in rows
        )

    hint = {"install": INSTALL_MATPLOTLIB, "record": record}
    verdict, (first, *rest) = summary.verdict, expected(numbers_of(summary))
    return Template(blocks["page"]).substitute(
        title=escape(f"{summary.record.script}: {summary.bottleneck}"),
        headline=escape(verdict[:1].upper() + verdict[1:]),
        subtitle=escape(summary.subtitle),
        tiles=fill("tile", _named(_tiles(summary))),
        expected=escape(first[:1].upper() + first[1:]),
        changes=fill("change", ({"text": line} for line in rest)),
        advice=fill("advice", _advice(summary)),
        charts=fill("no_charts", [hint])
        if charts is None
        else Template(blocks["charts"]).substitute(svg=charts),
        parts=fill("part", _parts(summary)),
        work=fill("work", _works(summary)),
        facts=fill("fact", _named(_facts(summary))),
    )


def _named(values: Mapping[str, str]) -> Iterable[dict[str, str]]:
    return ({"name": name, "value": value} for name, value in values.items())


def escape(text: str) -> str:
    """Escape text for HTML; characters that XML cannot contain become "?"."""
    return html.escape(printable(text))


def _tiles(summary: Summary) -> dict[str, str]:
    tiles = {"a step takes": time_text(summary.step)}
    if summary.loader:
        tiles["of it for input"] = percent(summary.waited)
    tiles["steps a second"] = f"{1e9 / summary.step:.3g}"
    if summary.stacked[0]:
        tiles["of stacked bytes are padding"] = percent(summary.padding_fraction)
    return tiles


def _advice(summary: Summary) -> Iterable[dict[str, str]]:
    for title, text, gain in advise(summary):
        saved = f" Saves up to {time_text(gain)} of a step." if gain else ""
        yield {"title": title, "text": text + saved}


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


def _works(summary: Summary) -> Iterable[dict[str, str]]:
    """Yield a paragraph about the workers and one about the prefetch thread."""
    for prefix, name in (("worker", "worker"), ("prefetch", "prefetch thread")):
        work = summary.work(prefix)
        if work is None:
            continue
        lanes = plural(len(work.lanes), name)
        verb = "was" if len(work.lanes) == 1 else "were"
        parts = ", ".join(f"{part} {time_text(ns)}" for part, ns in work.parts.items())
        text = (
            f"Meanwhile {lanes} {verb} busy {percent(work.busy)} of the time. A batch "
            f"took {time_text(work.load.work)}: {parts}."
        )
        if work.load.cpu:
            text += f" {time_text(work.load.cpu)} of it are CPU time."
        yield {"text": text}


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
