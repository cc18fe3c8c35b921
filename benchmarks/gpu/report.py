"""Reports on a GPU: tables in markdown, made from the records alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from .._harness import Record
from ..report import ALL, _head, _ratio, _row, duration, head, machine
from .case import COLUMNS, GpuCase, judge

_GOALS = (
    "*Ours* is the time of pyparallel. *Returns*, *usable* and *device* are the three "
    "clocks of [the benchmark](../gpu.md)."
)
_MARKS = {True: "reached", False: "**missed**", None: "-"}
_COUNTS = ("launches", "copies", "waits", "pin_calls")


def case_table(case: Record) -> str:
    """Return one case: all contenders, then the goals."""
    if "error" in case:
        return f"**{case['title']}**: {case['error']}\n"
    head = f"**{case['title']}** ({case['note']}; {case['rounds']} rounds)"
    ours = _ours(case)
    columns = [c for c in COLUMNS if any(_figures(row, c) for row in case["rows"])]
    counted = any(row.get("counts") for row in case["rows"])
    hidden = any("hidden" in row for row in case["rows"])
    titles = [""]
    for column in columns:
        titles += [COLUMNS[column], f"relative to {ours}" if ours else ""]
    titles += [name.replace("_", " ") for name in _COUNTS] * counted
    titles += ["hidden"] * hidden
    lines = [head, "", *_head(titles)]
    for row in case["rows"]:
        cells = [_name(row)]
        if not row["installed"]:
            cells += [row.get("why", "not installed")]
            lines.append(_row(cells + [""] * (len(titles) - len(cells))))
            continue
        for column in columns:
            cells += _time_cells(_figures(row, column), ours)
        counts = row.get("counts", {})
        cells += [_text(counts.get(name)) for name in _COUNTS] * counted
        cells += [_hidden(row)] * hidden
        lines.append(_row(cells))
    lines += ["", *(f"- {_MARKS[met]}: {text}" for met, text in goals(case))]
    return "\n".join(lines).rstrip() + "\n"


def goals(case: Record) -> list[tuple[bool | None, str]]:
    """Return for each goal of a case if it is reached, and the figures."""
    found = judge(case)
    if "must_hide" in case:
        for row in case["rows"]:
            if row["kind"] == "ours" and row["installed"]:
                share, least = row["hidden"]["of_medians"], case["must_hide"]
                text = f"{row['name']} hides at least {least} of the data: {share:.3f}"
                found.append((share >= least, text))
    return found


def slower(case: Record) -> list[str]:
    """Return the peers that are faster than ours, in any column, by medians."""
    ours, found = _ours(case), []
    for row in case.get("rows", ()):
        for column in COLUMNS:
            over = (_figures(row, column) or {}).get("over", {}).get(ours)
            if row["kind"] == "peer" and over and over["of_medians"] < 1:
                spread = f"{over['q1']:.3g} - {over['q3']:.3g}"
                times = f"{over['of_medians']:.3g} of ours ({spread})"
                where = COLUMNS[column]
                found.append(f"{case['title']}: {row['name']} takes {times}, {where}")
    return found


def goals_page(cases: Sequence[GpuCase]) -> str:
    """Return the table of all cases with their goals, in the order of a run."""
    lines = ["# Goals of the benchmark on a GPU", "", _GOALS, ""]
    lines += _head(["case", "goal"], left=2)
    for case in cases:
        first = case.title
        for _, text in judge({"goals": [goal._asdict() for goal in case.goals]}):
            lines.append(_row([first, text.removesuffix(": not measured")]))
            first = ""
    return "\n".join(lines) + "\n"


def page(results: Record) -> str:
    """Return the page of a record: the summary, then all contenders."""
    lines = ["# pyparallel and its peers on a GPU\n", head(results)]
    for run in results["runs"]:
        lines += ["", *_summary(run["cases"]), "", *_conclusions(run["cases"]), ""]
        lines += machine(run)
    lines += ["", f"{ALL}\n"]
    lines += [case_table(case) for run in results["runs"] for case in run["cases"]]
    return "\n".join(lines)


def _summary(cases: Sequence[Record]) -> Iterator[str]:
    yield from _head(["case", *COLUMNS.values(), "goal", "", ""], left=1)
    for case in cases:
        if "error" in case:
            yield _row([case["title"], *[""] * 3, case["error"], "", ""])
            continue
        rows = {row["name"]: row for row in case["rows"] if row["installed"]}
        own: Any = rows.get(_ours(case), {})
        times = [_figures(own, column) for column in COLUMNS]
        cells = [duration(each["median"]) if each else "" for each in times]
        first = [case["title"], *cells]
        for met, text in goals(case) or [(None, "")]:
            goal, _, found = text.rpartition(": ")
            yield _row([*first, goal, found, _MARKS[met] if text else ""])
            first = [""] * len(first)


def _conclusions(cases: Sequence[Record]) -> Iterator[str]:
    judged = [(case, *goal) for case in cases for goal in goals(case)]
    known = [each for each in judged if each[1] is not None]
    reached = sum(bool(each[1]) for each in known)
    yield f"{reached} of {len(known)} measured goals are reached."
    unknown = len(judged) - len(known)
    if unknown:
        yield f"{unknown} goals were not measured."
    missed = [f"- {case['title']}: {text}" for case, met, text in known if not met]
    if missed:
        yield from ["", "Missed:", "", *missed]
    losses = [line for case in cases for line in slower(case)]
    if losses:
        yield from ["", "Peers with a shorter median:", ""]
        yield from (f"- {line}" for line in losses)


def _figures(row: Record, column: str) -> Any:
    return (
        (row if "seconds" in row else None) if column == "seconds" else row.get(column)
    )


def _ours(case: Record) -> str:
    rows = [r["name"] for r in case.get("rows", ()) if r["kind"] == "ours"]
    return next(iter(rows), "")


def _name(row: Record) -> str:
    mark = {"ours": "**", "limit": "*"}.get(row["kind"], "")
    return f"{mark}{row['name']}{mark}"


def _time_cells(figures: Any, ours: str) -> list[str]:
    if not figures:
        return ["-", ""]
    return [duration(figures["median"]), _ratio(figures, ours)]


def _hidden(row: Record) -> str:
    return f"{row['hidden']['of_medians']:.3f}" if "hidden" in row else ""


def _text(value: Any) -> str:
    return "" if value is None else str(value)
