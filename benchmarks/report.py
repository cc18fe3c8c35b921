"""Reports: tables in markdown, made from the records alone."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from ._harness import Record
from .environment import malloc_mode
from .growth import LINEAR, TOLERANCE, is_linear
from .losses import UNKNOWN, reason

BEGIN, END = "<!-- table -->", "<!-- end of table -->"

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

    def __str__(self) -> str:
        spread = f"{self.over['q1']:.3g} - {self.over['q3']:.3g}"
        draw = ", a draw" if self.over["q3"] >= 1 else ""
        times = f"{self.over['of_medians']:.3g} of {self.ours} ({spread}{draw})"
        return f"{self.case}: {self.peer} takes {times}: {self.reason}"


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
            reason(case["title"], row["name"], name),
        )
        for case in record["cases"]
        for row in case["rows"]
        if row["kind"] == "peer" and row["installed"]
        for name, over in row["over"].items()
        if over["of_medians"] < 1
    ]


def run_label(record: Record) -> str:
    """Name a run by what differs between the runs of one file."""
    threads = record["machine"].get("threads", "?")
    plural = "" if threads == "1" else "s"
    mode = malloc_mode(record["machine"]) if "malloc" in record["machine"] else "?"
    return f"{threads} thread{plural}, {mode} malloc"


def complaints(results: Record) -> list[str]:
    """Return what somebody must look at: losses nobody explains, costs not linear."""
    found = [
        f"{loss.run}: {loss}"
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
    """Return a whole run."""
    lines = [f"{key}: {value}  " for key, value in record["machine"].items()]
    for case in record["cases"]:
        head = f"**{case['title']}** ({case['note']}; {case['rounds']} rounds)"
        names = _ours(case)
        titles = ["", "min", "median", "quartiles", *(f"/ {name}" for name in names)]
        lines += ["", head, "", *_head(titles)]
        lines += [_row(_cells(row, names)) for row in case["rows"]]
    slower = losses(record)
    lines += ["", "Peers that are faster than ours, by medians:", ""]
    lines += [f"- {line}" for line in slower] or ["- none"]
    return "\n".join(lines) + "\n"


def details(results: Record) -> str:
    """Return all runs: what lies beside the JSON."""
    parts = ["# All contenders of all cases\n"]
    for run in results["runs"]:
        parts += [f"## {run_label(run)}\n", table(run)]
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


# ------------------------------------------------------------------- the README
def block(results: Record, name: str, charts: Sequence[str] = ()) -> str:
    """Return what stands between the markers of the README.

    Args:
        results: all records of a run.
        name: path of the JSON file, without its ending, as the README must write it.
        charts: paths of images to show, as the README must write them.
    """
    lines = [
        f"{links(results, name)}. Ratios of medians, in brackets the "
        "quartiles round by round; *limits* in italics.",
        "",
    ]
    lines += [f"![{Path(path).stem.replace('_', ' ')}]({path})" for path in charts]
    for run in results["runs"]:
        lines += ["", f"### {run_label(run)}", "", *_summary(run), "", *_losses(run)]
    if results.get("growth"):
        lines += ["", "### Growth", "", *_growth(results["growth"])]
    machine = results["runs"][0]["machine"] if results["runs"] else {}
    lines += ["", "### Machine", ""]
    lines += [f"- {key}: {value}" for key, value in machine.items() if value]
    return "\n".join(lines) + "\n"


def links(results: Record, name: str) -> str:
    """Return the day of a run and links to what lies beside a report; see `block`."""
    day = results.get("date") or Path(name).name
    return f"{day}: [all numbers]({name}.json), [all contenders]({name}.md)"


def write_block(path: Path, text: str, begin: str = BEGIN, end: str = END) -> None:
    """Put ``text`` between two markers of a file, which is made if it is not there.

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
    titles = ["case", "native", "GB/s", *_COLUMNS.values(), "fastest peer"]
    yield from _head([*titles, "mmcv / Python", "fastest peer / Python"], left=1)
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
    """Return the contender of a column: mmcv's scatter stands for its collate."""
    other = column.replace("collate", "scatter")
    return column if column in rows else other


def _fastest(rows: dict[str, Record], ours: str) -> str:
    peers = [row for row in rows.values() if row["kind"] == "peer"]
    if not peers or not any(ours in row["over"] for row in peers):
        return ""
    row = min(peers, key=lambda row: row["median"])
    return f"{row['over'][ours]['of_medians']:.3g} {row['name']}"


def _losses(run: Record) -> Iterator[str]:
    slower = losses(run)
    if not slower:
        yield "No peer is faster, by medians."
        return
    yield "Peers that are faster, by medians, and why:"
    yield ""
    for text in dict.fromkeys(loss.reason for loss in slower):
        yield f"- {text}:"
        for loss in slower:
            if loss.reason == text:
                yield f"  - {str(loss).removesuffix(f': {text}')}"


def _growth(growths: Sequence[Record]) -> Iterator[str]:
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
    """Return seconds for people, with three digits."""
    for unit, factor in (("s", 1.0), ("ms", 1e3), ("us", 1e6)):
        if seconds * factor >= 1 or unit == "us":
            value = seconds * factor
            return f"{value:.{max(0, 2 - int(math.log10(max(value, 1))))}f} {unit}"
    raise AssertionError("unreachable")
