"""Reports: pages and tables in markdown, made from the records alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from ._harness import Goal, Record
from .environment import malloc_mode
from .losses import DRAW, UNKNOWN, reason

NOTE = (
    "Time relative to pyparallel (2.0 = twice as slow): the ratio of the medians, with "
    "the quartiles of the ratios of all rounds in parentheses. In tables pyparallel "
    "is called *ours*. Limits are in italics: they do only a part of the work."
)
#: The heading between the summary of a page and its complete tables.
ALL = "## All contenders"
#: The measured quantities and their headings.
COLUMNS = {
    "host": "returns",
    "seconds": "median",
    "device": "device",
    "queued": "in a row",
    "net": "above the floor",
}
_MEASURED = ("seconds", *(of for of in COLUMNS if of != "seconds"))
MARKS = {True: "reached", False: "**missed**", None: "not measured"}
#: The marks of the lines of a page that need attention.
_COMPLAINTS = ("**missed**", "(!)", UNKNOWN)

#: The heading of a column, and its cell in a row of records.
Column = tuple[str, Callable[[Record], str]]


# ----------------------------------------------------------------------------- tables
def table(rows: Iterable[Any], columns: Iterable[Column], left: int = 1) -> list[str]:
    """Return a table without its empty columns; the first ``left`` are aligned left."""
    columns = list(columns)
    cells = [[cell(row) for _, cell in columns] for row in rows]
    return grid([title for title, _ in columns], cells, left)


def grid(
    titles: Sequence[str], cells: Sequence[Sequence[str]], left: int = 1
) -> list[str]:
    """Return a table of cells, like `table`."""
    width = len(titles)
    kept = [i for i in range(width) if i < 1 or any(line[i] for line in cells)]
    rule = ["---:" if i >= left else "---" for i in range(width)]
    lines = [titles, rule, *cells]
    return [f"| {' | '.join(line[i] for i in kept)} |" for line in lines]


def duration(seconds: float) -> str:
    """Return seconds with a unit and three digits."""
    if seconds < 0:
        return f"-{duration(-seconds)}"
    for unit, factor in (("s", 1.0), ("ms", 1e3), ("us", 1e6)):
        if seconds * factor >= 1 or unit == "us":
            value = seconds * factor
            return f"{value:.{max(0, 2 - int(math.log10(max(value, 1))))}f} {unit}"
    raise AssertionError("unreachable")


def ratio(row: Record, other: str, of: str = "seconds") -> str:
    """Return the time of a row relative to another row, with its spread."""
    over = (quantity(row, of) or {}).get("over", {}).get(other)
    if not over:
        return ""
    return f"{over['of_medians']:.3g} ({over['q1']:.3g} - {over['q3']:.3g})"


def quantity(row: Record, of: str) -> Record | None:
    """Return the figures of a measured quantity; None without a measurement."""
    if of == "seconds":
        return row if "median" in row else None
    return row.get(of)


def installed(case: Record, kind: str = "") -> dict[str, Record]:
    """Return the rows of a case that were measured, by name."""
    rows = (row for row in case.get("rows", ()) if row["installed"])
    return {row["name"]: row for row in rows if not kind or row["kind"] == kind}


def _ours(case: Record) -> str:
    return next(iter(installed(case, "ours")), "")


def name_of(row: Record) -> str:
    """Return the name of a row: bold for ours, in italics for a limit."""
    mark = {"ours": "**", "limit": "*"}.get(row["kind"], "")
    why = "" if row["installed"] else f": {row.get('why', 'not installed')}"
    return f"{mark}{row['name']}{mark}{why}"


def time(key: str, of: str = "seconds") -> Callable[[Record], str]:
    """Return a cell with the time of a row: ``min``, ``q1``, ``median`` or ``q3``."""

    def cell(row: Record) -> str:
        figures = quantity(row, of)
        return duration(figures[key]) if figures else ""

    return cell


def spread(row: Record) -> str:
    """Return the quartiles of the time of a row."""
    return f"{duration(row['q1'])} - {duration(row['q3'])}" if "q1" in row else ""


def _entry(of: str, key: str, form: Callable[[float], str]) -> Callable[[Record], str]:
    """Return a cell with one entry of a dict of figures in a row."""

    def cell(row: Record) -> str:
        value = (row.get(of) or {}).get(key)
        return "" if value is None else form(value)

    return cell


def _hidden(row: Record) -> str:
    found = row.get("hidden")
    if not found:
        return ""
    return f"{found['of_medians']:.3f} ({found['q1']:.3f} - {found['q3']:.3f})"


def columns(case: Record) -> Iterator[Column]:
    """Yield the columns for the contenders of a case."""
    ours = list(installed(case, "ours"))
    yield "", name_of
    for of, title in COLUMNS.items():
        if of == "seconds":
            on_device = any("host" in row for row in case["rows"])
            yield "min", time("min")
            yield "usable" if on_device else title, time("median")
            yield "quartiles", spread
        else:
            yield title, time("median", of)
        for each in ours if of == "seconds" else ours[:1]:
            yield f"relative to {each}", partial(ratio, other=each, of=of)
    yield "hidden", _hidden
    for count in ("launches", "copies", "waits", "pin_calls"):
        yield count.replace("_", " "), _entry("counts", count, str)


def _megabytes(nbytes: float) -> str:
    return f"{nbytes / 1e6:.0f} MB"


def _count(number: float) -> str:
    return f"{number:.0f}" if number >= 10 or number == int(number) else f"{number:.2f}"


def _ring(row: Record) -> str:
    ring = (row.get("facts") or {}).get("ring")
    if not ring:
        return ""
    counts = f"{ring['hits']} hits, {ring['misses']} misses"
    return f"{ring['slabs']} slabs, {_megabytes(ring['nbytes'])}, {counts}"


#: The costs of a batch of a loader.
_COSTS: tuple[Column, ...] = (
    ("", name_of),
    ("worker CPU", _entry("facts", "worker_cpu_seconds", duration)),
    ("parent CPU", _entry("facts", "parent_cpu_seconds", duration)),
    ("worker faults", _entry("facts", "worker_faults", _count)),
    ("parent faults", _entry("facts", "parent_faults", _count)),
    ("descriptors", lambda row: _entry("held", "descriptors", _count)(row["facts"])),
    ("mappings", lambda row: _entry("held", "mappings", _count)(row["facts"])),
    ("worker RSS", _entry("facts", "worker_rss", _megabytes)),
    ("memory", _entry("facts", "memory", _megabytes)),
    ("ring", _ring),
)


def case_table(
    case: Record, columns: Callable[[Record], Iterable[Column]] = columns
) -> list[str]:
    """Return all contenders of a case, and the other costs of its batches."""
    if "error" in case:
        return [f"**{case['title']}**: {case['error']}"]
    head = f"**{case['title']}** ({case['note']}; {case['rounds']} rounds)"
    lines = [head, "", *table(case["rows"], columns(case))]
    loaders = [row for row in case["rows"] if row.get("facts")]
    if loaders:
        lines += ["", "Costs of a batch, and memory:", "", *table(loaders, _COSTS)]
    return lines


# ----------------------------------------------------------------------------- losses
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


def losses(run: Record) -> list[Loss]:
    """Return the losses of a run; those on a device have no reasons."""
    found = []
    for case in run["cases"]:
        for peer, row in installed(case, "peer").items():
            for of, title in COLUMNS.items():
                for ours, over in (quantity(row, of) or {}).get("over", {}).items():
                    if over["of_medians"] >= 1 or of == "net":
                        continue
                    why = reason(case["title"], peer, ours)
                    why = DRAW if why == UNKNOWN and over["q3"] >= 1 else why
                    where = case["title"]
                    if "device" in run["machine"]:
                        where = f"{where}, {'usable' if of == 'seconds' else title}"
                        why = ""
                    loss = Loss(run_label(run), where, peer, ours, over, why)
                    found.append(loss)
    return found


def _loss_table(found: Sequence[Loss]) -> list[str]:
    if not found:
        return ["No peer has a shorter median."]
    titles = ["case", "peer", "faster than", "time relative", "reason"]
    cells = [(x.case, x.peer, x.ours, x.ratio, x.reason) for x in found]
    return ["Peers with a shorter median:", "", *grid(titles, cells, left=5)]


# ------------------------------------------------------------------------------ goals
def judge(case: Record) -> list[tuple[bool | None, str, str]]:
    """Return for each goal of a case if it is reached, the goal, and the figure.

    None: it was not measured.
    """
    rows, ours = installed(case), list(installed(case, "ours").values())
    found = []
    for each in case.get("goals", ()):
        goal = Goal(**each)
        found.append(_count_of(goal, ours) if goal.count else _time(goal, ours, rows))
    for row in ours if "must_hide" in case else ():
        # A loader alone prefetches for no device and no slow step.
        if "hidden" in row and not row["name"].startswith("ours: DataLoader"):
            least, text = case["must_hide"], f"{row['name']} hides at least "
            met = row["hidden"]["of_medians"] >= least
            found.append((met, f"{text}{least} of the data", _hidden(row)))
    return found


def _count_of(goal: Goal, ours: list[Record]) -> tuple[bool | None, str, str]:
    name = goal.count.replace("_", " ")
    text = f"at most {goal.most} {name}" if goal.most else f"no {name}"
    number = ours[0].get("counts", {}).get(goal.count) if ours else None
    return None if number is None else number <= goal.most, text, str(number or 0)


def _time(
    goal: Goal, ours: list[Record], rows: dict[str, Record]
) -> tuple[bool | None, str, str]:
    mine = quantity(ours[0], goal.of) if ours else None
    where = "" if goal.of == "seconds" else f" ({COLUMNS[goal.of]})"
    if not goal.peer:
        text = f"at most {goal.plus * 1e6:.4g} us{where}"
        if mine is None:
            return None, text, ""
        return mine["median"] <= goal.plus, text, f"{mine['median'] * 1e6:.4g} us"
    less = f" less {goal.plus * 1e6:.4g} us" if goal.plus else ""
    text = f"{goal.peer}: at least {goal.factor:.3g} times ours{less}{where}"
    theirs = quantity(rows[goal.peer], goal.of) if goal.peer in rows else None
    if mine is None or theirs is None:
        return None, text, ""
    over = next(iter(theirs["over"].values()), None)
    spread = f" ({over['q1']:.3g} - {over['q3']:.3g})" if over else ""
    reached = theirs["median"] + goal.factor * goal.plus >= goal.factor * mine["median"]
    return reached, text, f"{theirs['median'] / mine['median']:.3g}{spread}"


def goals(cases: Sequence[Record]) -> list[str]:
    """Return the table of the goals, and the number of those that are reached."""
    cells = [
        [case["title"], goal, found, MARKS[met]]
        for case in cases
        for met, goal, found in judge(case)
    ]
    if not cells:
        return []
    marks = [mark for *_, mark in cells]
    reached, known = (marks.count(MARKS[met]) for met in (True, None))
    text = f"{reached} of {len(marks) - known} measured goals are reached."
    return [text, "", *grid(["case", "goal", "found", "mark"], cells, left=2), ""]


# ------------------------------------------------------------------------------ pages
def page(
    title: str,
    results: Record,
    shown: Sequence[str] = (),
    sections: Callable[[Record], Iterable[str]] = lambda run: (),
    columns: Callable[[Record], Iterable[Column]] = columns,
    note: str = NOTE,
) -> str:
    """Return the page of a record: the summary, then all contenders.

    Args:
        title: of the page.
        results: the record.
        shown: beginnings of the names of contenders that have a column in the summary.
        sections: returns the other tables of a run.
        columns: returns the columns for the contenders of a case.
        note: how to read the tables.
    """
    day = f"Measured on {results['date']}. " if results.get("date") else ""
    lines = [f"# {title}", "", f"{day}{note}", ""]
    for run in results["runs"]:
        lines += [f"## {run_label(run)}", "", *_summary(run["cases"], shown), ""]
        lines += [*goals(run["cases"]), *_loss_table(losses(run)), ""]
        lines += [*sections(run), "Machine:", ""]
        lines += [f"- {key}: {value}" for key, value in run["machine"].items() if value]
        lines += [""]
    lines += [ALL, ""]
    for run in results["runs"]:
        lines += [f"### {run_label(run)}: all contenders", ""]
        for case in run["cases"]:
            lines += [*case_table(case, columns), ""]
    return "\n".join(lines).rstrip() + "\n"


def _summary(cases: Sequence[Record], shown: Sequence[str]) -> list[str]:
    """Return the table with a row for each case."""
    rows = [row for case in cases for row in case.get("rows", ())]
    limits = [row["name"] for row in rows if row["kind"] == "limit"]
    both = any("Python" in row["name"] for row in rows)
    shown = ["ours, Python", *shown] if both else shown
    titles = ["case", "ours", *(COLUMNS[of] for of in _MEASURED[1:]), "GB/s"]
    for start in shown:
        of_limit = any(name.startswith(start) for name in limits)
        titles.append(f"*{start}*" if of_limit else start)
    titles += ["fastest peer", "fastest peer / ours, Python", ""]
    cells = []
    for case in cases:
        found, ours = installed(case), _ours(case)
        mine = found.get(ours, {})
        line = [case["title"], *(time("median", of)(mine) for of in _MEASURED)]
        line.append(_rate(case, mine))
        for start in shown:
            of_start = (r for name, r in found.items() if name.startswith(start))
            line.append(next((ratio(row, ours) for row in of_start), ""))
        fastest = (_fastest(case, each) for each in (ours, "ours, Python"))
        cells.append([*line, *fastest, case.get("error", "")])
    return grid(titles, cells)


def _rate(case: Record, row: Record) -> str:
    """Return the bytes of a result in a second; of a loader, of a batch."""
    if not row or not case.get("nbytes") or "counts" in row:
        return ""
    return f"{case['nbytes'] / case.get('batches', 1) / row['median'] / 1e9:.3g}"


def _fastest(case: Record, ours: str) -> str:
    peers = [row for row in installed(case, "peer").values() if ours in row["over"]]
    if not peers:
        return ""
    row = min(peers, key=lambda row: row["median"])
    return f"{row['over'][ours]['of_medians']:.3g} {row['name']}"


def run_label(run: Record) -> str:
    """Name a run by the settings that differ between the runs of one file."""
    threads = run["machine"].get("threads", "?")
    plural = "" if threads == "1" else "s"
    mode = malloc_mode(run["machine"]) if "malloc" in run["machine"] else "?"
    return f"{threads} thread{plural}, {mode} malloc"


def complaints(page: str) -> list[str]:
    """Return the lines of a page that need attention.

    They are losses without a known reason, missed goals, and costs that do not grow
    linearly.
    """
    return [line for line in page.splitlines() if any(c in line for c in _COMPLAINTS)]


def write_block(path: Path, text: str, name: str) -> None:
    """Put ``text`` between the two markers of a name in a file.

    Raises:
        ValueError: the file does not have both markers, once each and in order.
    """
    begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
    old = path.read_text(encoding="utf-8")
    before, found_begin, rest = old.partition(f"{begin}\n")
    _, found_end, after = rest.partition(end)
    if not found_begin or not found_end or begin in rest or end in after:
        raise ValueError(
            f"{path} must have the lines {begin} and {end} once, in this order, but "
            "has not. Write them where the table belongs."
        )
    new = f"{before}{begin}\n\n{text}\n{end}{after}"
    path.write_text(new, encoding="utf-8")
