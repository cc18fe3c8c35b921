"""Reports: tables in markdown, made from the records alone."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from ._harness import Record
from .environment import malloc_mode
from .growth import LINEAR, TOLERANCE, is_linear
from .losses import DRAW, UNKNOWN, reason

#: The scale of all tables.
SCALE = "Time relative to pyparallel (2.0 = twice as slow)"
_NOTE = (
    f"{SCALE}: the ratio of the medians, with the quartiles of the ratios of all "
    "rounds in parentheses. In the tables pyparallel is called *ours*. Limits are in "
    "italics: they do only a part of the work."
)
#: The heading between the summary of a page and its complete tables.
ALL = "## All contenders"

#: Columns of the summary: a contender and its heading.
_COLUMNS = {
    "mmcv 1.x collate": "mmcv",
    "new_full + copy_": "new_full + copy_",
    "memcpy into warm memory": "*memcpy*",
    "non-temporal memcpy": "*non-temporal*",
}


class Loss(NamedTuple):
    """A peer that is faster than one of ours, by medians."""

    run: str
    case: str
    peer: str
    ours: str
    over: Record
    reason: str

    @property
    def ratio(self) -> str:
        """The time relative to pyparallel, with quartiles."""
        spread = f"{self.over['q1']:.3g} - {self.over['q3']:.3g}"
        draw = ", a draw" if self.over["q3"] >= 1 else ""
        return f"{self.over['of_medians']:.3g} ({spread}{draw})"

    def __str__(self) -> str:
        return f"{self.case}: {self.peer} takes {self.ratio} of the time of {self.ours}"


def losses(record: Record) -> list[Loss]:
    """Return the losses of a run."""
    label = run_label(record)
    return [
        Loss(
            label,
            case["title"],
            row["name"],
            name,
            over,
            _reason(case["title"], row["name"], name, over),
        )
        for case in record["cases"]
        for row in case["rows"]
        if row["kind"] == "peer" and row["installed"]
        for name, over in row["over"].items()
        if over["of_medians"] < 1
    ]


def _reason(case: str, peer: str, ours: str, over: Record) -> str:
    found = reason(case, peer, ours)
    return DRAW if found == UNKNOWN and over["q3"] >= 1 else found


def run_label(record: Record) -> str:
    """Name a run by the settings that differ between the runs of one file."""
    threads = record["machine"].get("threads", "?")
    plural = "" if threads == "1" else "s"
    mode = malloc_mode(record["machine"]) if "malloc" in record["machine"] else "?"
    return f"{threads} thread{plural}, {mode} malloc"


def complaints(results: Record) -> list[str]:
    """Return the losses without a known reason and the costs that are not linear."""
    found = [
        f"{loss.run}: {loss}: {UNKNOWN}"
        for run in results["runs"]
        for loss in losses(run)
        if loss.reason == UNKNOWN
    ]
    for growth in results.get("growth", []):
        for row in growth["series"]:
            if row["kind"] == "ours" and "fit" in row and not is_linear(row["fit"]):
                exponent = _number(row["fit"]["exponent"])
                found.append(
                    f"{growth['title']}: {row['name']} must grow as n^{LINEAR} +- "
                    f"{TOLERANCE}, but grows as n^{exponent}"
                )
    return found


# ------------------------------------------------------------------- whole tables
def table(record: Record) -> str:
    """Return all contenders of all cases of a run."""
    lines: list[str] = []
    for case in record["cases"]:
        head = f"**{case['title']}** ({case['note']}; {case['rounds']} rounds)"
        names = _ours(case)
        relative = (f"relative to {name}" for name in names)
        titles = ["", "min", "median", "quartiles", *relative]
        lines += ["", head, "", *_head(titles)]
        lines += [_row(_cells(row, names)) for row in case["rows"]]
    return "\n".join([*lines, ""])


def page(results: Record) -> str:
    """Return the page of a record: the summary, then all contenders."""
    parts = ["# pyparallel and its peers\n", _summaries(results), f"{ALL}\n"]
    for run in results["runs"]:
        parts += [f"### {run_label(run)}: all contenders\n{table(run)}"]
    return "\n".join(parts)


def _ours(case: Record) -> list[str]:
    rows = [row for row in case["rows"] if row["installed"]]
    return [row["name"] for row in rows if row["kind"] == "ours"]


def _cells(row: Record, ours: Sequence[str]) -> list[str]:
    name = f"*{row['name']}*" if row["kind"] == "limit" else row["name"]
    name = f"**{name}**" if row["kind"] == "ours" else name
    if not row["installed"]:
        return [name, "not installed", *[""] * (2 + len(ours))]
    times = [duration(row[key]) for key in ("min", "median")]
    cells = [name, *times, f"{duration(row['q1'])} - {duration(row['q3'])}"]
    return cells + [_ratio(row, other) or "1" for other in ours]


def _ratio(row: Record, other: str) -> str:
    over = row.get("over", {}).get(other)
    if not over:
        return ""
    return f"{over['of_medians']:.3g} ({over['q1']:.3g} - {over['q3']:.3g})"


# ------------------------------------------------------------------- summaries
def _summaries(results: Record) -> str:
    lines = [head(results)]
    for run in results["runs"]:
        lines += ["", f"## {run_label(run)}", "", *_summary(run), ""]
        lines += [*loss_table(losses(run)), "", *machine(run)]
    if results.get("growth"):
        lines += ["", "## Growth of the cost", "", *growth_table(results["growth"])]
    return "\n".join(lines) + "\n"


def head(results: Record) -> str:
    """Return the first paragraph of a page: its date, and how to read the tables."""
    day = results.get("date")
    return f"Measured on {day}. {_NOTE}" if day else _NOTE


def machine(run: Record) -> Iterator[str]:
    """Yield the description of the machine of a run."""
    yield "Machine:"
    yield ""
    yield from (f"- {key}: {value}" for key, value in run["machine"].items() if value)


def write_block(path: Path, text: str, begin: str, end: str) -> None:
    """Put ``text`` between two markers of a file; create a missing file.

    Raises:
        ValueError: the file does not have both markers, once each and in order.
    """
    old = path.read_text(encoding="utf-8") if path.exists() else f"{begin}\n{end}\n"
    before, found_begin, rest = old.partition(f"{begin}\n")
    _, found_end, after = rest.partition(end)
    if not found_begin or not found_end or begin in rest or end in after:
        raise ValueError(
            f"{path} must have the lines {begin} and {end} once, in this order, but "
            "has not. Write them where the table belongs."
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    new = f"{before}{begin}\n\n{text}\n{end}{after}"
    path.write_text(new, encoding="utf-8")


def _summary(run: Record) -> Iterator[str]:
    titles = ["case", "ours, native", "GB/s", *_COLUMNS.values(), "fastest peer"]
    relative = ["mmcv / ours, Python", "fastest peer / ours, Python"]
    yield from _head([*titles, *relative], left=1)
    for case in run["cases"]:
        rows = {row["name"]: row for row in case["rows"] if row["installed"]}
        name, python = _ours(case)[0], "ours, Python"
        time = rows[name]["median"]
        rate = f"{case['nbytes'] / time / 1e9:.3g}" if case.get("nbytes") else ""
        columns = [rows.get(_same(column, rows), {}) for column in _COLUMNS]
        yield _row(
            [
                case["title"],
                duration(time) + ("" if name != python else " (Python)"),
                rate,
                *(_ratio(row, name) for row in columns),
                _fastest(rows, name),
                _ratio(columns[0], python),
                _fastest(rows, python),
            ]
        )


def _same(column: str, rows: dict[str, Record]) -> str:
    """Return the contender of a column; mmcv's scatter also counts as its collate."""
    other = column.replace("collate", "scatter")
    return column if column in rows else other


def _fastest(rows: dict[str, Record], ours: str) -> str:
    peers = [row for row in rows.values() if row["kind"] == "peer"]
    if not peers or not any(ours in row["over"] for row in peers):
        return ""
    row = min(peers, key=lambda row: row["median"])
    return f"{row['over'][ours]['of_medians']:.3g} {row['name']}"


def loss_table(found: Sequence[Loss]) -> Iterator[str]:
    """Yield the table of losses: one row for each case and peer."""
    if not found:
        yield "No peer has a shorter median."
        return
    yield "Peers with a shorter median:"
    yield ""
    yield from _head(["case", "peer", "faster than", "time relative", "reason"], left=5)
    for loss in found:
        yield _row([loss.case, loss.peer, loss.ours, loss.ratio, loss.reason])


def growth_table(growths: Sequence[Record]) -> Iterator[str]:
    """Yield the table of the fits of `growth`."""
    titles = ["cost of", "by", "contender", "smallest", "largest", "fixed", "each"]
    yield from _head([*titles, "exponent", "as measured", "from n"], left=3)
    for growth in growths:
        for row in growth["series"]:
            if not row["installed"]:
                continue
            fit = row.get("fit", {})
            verdict = (
                "" if not fit or row["kind"] != "ours" or is_linear(fit) else " (!)"
            )
            yield _row(
                [
                    growth["title"],
                    f"{growth['x']}, {growth['sizes'][0]} to {growth['sizes'][-1]}",
                    row["name"],
                    duration(row["seconds"][0]),
                    duration(row["seconds"][-1]),
                    *(duration(fit[key]) if fit else "" for key in ("fixed", "each")),
                    _number(fit.get("exponent")) + verdict,
                    _number(fit.get("as_measured")),
                    str(fit.get("from", "")),
                ]
            )


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _head(titles: Sequence[str], left: int = 1) -> list[str]:
    rule = ["---"] * left + ["---:"] * (len(titles) - left)
    return [_row(titles), _row(rule)]


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def duration(seconds: float) -> str:
    """Return seconds with a unit and three digits."""
    for unit, factor in (("s", 1.0), ("ms", 1e3), ("us", 1e6)):
        if seconds * factor >= 1 or unit == "us":
            value = seconds * factor
            return f"{value:.{max(0, 2 - int(math.log10(max(value, 1))))}f} {unit}"
    raise AssertionError("unreachable")
