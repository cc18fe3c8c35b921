"""Reports on loaders: tables in markdown, made from the records alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from .. import report
from .._harness import Record
from ..report import _head, _ratio, _row, duration
from .images import FILL, MMCV, ONE_PASS, TORCH, TORCH_IN_OURS
from .overlap import COMPUTE, FETCH, HIDDEN

#: Columns of the summary of images: a contender and its heading.
_COLUMNS = {
    MMCV: "mmcv collate",
    ONE_PASS: "ours collate",
    FILL: "new_full + copy_",
    TORCH: "default_collate",
}


def goals(case: Record) -> Iterator[tuple[bool, str]]:
    """Yield for each goal of a case if it is met, and the figures."""
    rows = {row["name"]: row for row in case["rows"] if row["installed"]}
    for goal in case["goals"]:
        name, of = _ours(case), goal["of"]
        row = rows.get(goal["peer"], {})
        over = (row.get("net", {}) if of == "net" else row).get("over", {}).get(name)
        if over is None:
            continue
        above = " above the floor" if of == "net" else ""
        met = over["of_medians"] >= goal["factor"]
        spread = f"{over['q1']:.3g} - {over['q3']:.3g}"
        yield (
            met,
            f"{case['title']}: {goal['peer']} must take {goal['factor']} times as long "
            f"as {name}{above}, and takes {over['of_medians']:.3g} ({spread})",
        )
    if case["kind"] == "overlap":
        for row in rows.values():
            if "PreDataLoader" in row["name"]:
                hidden = row["hidden"]
                spread = f"{hidden['q1']:.3f} - {hidden['q3']:.3f}"
                yield (
                    hidden["of_medians"] >= HIDDEN,
                    f"{case['title']}: {row['name']} must hide {HIDDEN} of the data, "
                    f"and hides {hidden['of_medians']:.3f} ({spread})",
                )


def complaints(results: Record) -> list[str]:
    """Return the losses without a known reason and the missed goals."""
    cases = [case for run in results["runs"] for case in run["cases"]]
    missed = [text for case in cases for met, text in goals(case) if not met]
    return [*report.complaints(results), *missed]


def page(results: Record) -> str:
    """Return the page of a record: the summary, then all contenders."""
    parts = ["# Loaders: pyparallel and its peers\n", _summaries(results)]
    parts += [f"{report.ALL}\n"]
    for run in results["runs"]:
        parts += [report.table(run), "## Other costs of a batch\n"]
        for case in run["cases"]:
            if any("facts" in row for row in case["rows"]):
                parts.append("\n".join([*costs(case), ""]))
    return "\n".join(parts)


def _summaries(results: Record) -> str:
    lines = [report.head(results)]
    for run in results["runs"]:
        parts = (("images", _images), ("fields", _fields), ("overlap", _overlap))
        for kind, part in parts:
            cases = [case for case in run["cases"] if case["kind"] == kind]
            if cases:
                lines += ["", *part(cases)]
        lines += ["", *_goals(run["cases"]), ""]
        lines += [*report.loss_table(report.losses(run)), "", *report.machine(run)]
    return "\n".join(lines) + "\n"


def costs(case: Record) -> Iterator[str]:
    """Yield the table of the costs of a batch other than time."""
    yield f"**{case['title']}**, costs per batch and memory at the end:"
    yield ""
    titles = ["", "worker CPU", "parent CPU", "worker faults", "parent faults"]
    titles += ["descriptors", "mappings", "worker RSS", "ring", "hits / misses"]
    yield from _head(titles)
    for row in case["rows"]:
        facts = row.get("facts")
        if not facts:
            continue
        ring = facts["ring"]
        yield _row(
            [
                f"*{row['name']}*" if row["kind"] == "limit" else row["name"],
                *(duration(facts[f"{who}_cpu_seconds"]) for who in _SIDES),
                *(_count(facts[f"{who}_faults"]) for who in _SIDES),
                *(_count(facts["held"][what]) for what in ("descriptors", "mappings")),
                _megabytes(facts["worker_rss"]),
                f"{ring['slabs']} slabs, {_megabytes(ring['nbytes'])}" if ring else "",
                f"{ring['hits']} / {ring['misses']}" if ring else "",
            ]
        )


_SIDES = ("worker", "parent")


def _images(cases: Sequence[Record]) -> Iterator[str]:
    yield "## Batches of images: time relative to pyparallel (2.0 = twice as slow)"
    yield ""
    titles = ["case", "MB", "ours, native", "GB/s", "ours, Python", *_COLUMNS.values()]
    yield from _head([*titles, "*default_collate, our loader*"])
    for case in cases:
        rows = {row["name"]: row for row in case["rows"] if row["installed"]}
        name = _ours(case)
        time = rows[name]["median"]
        # The bytes are those of a whole epoch, because whole epochs were compared.
        nbytes = case["nbytes"] / case["batches"]
        others = ["ours, Python", *_COLUMNS, TORCH_IN_OURS]
        cells = [_ratio(rows.get(other, {}), name) for other in others]
        python = " (Python)" if name == "ours, Python" else ""
        of_ours = [duration(time) + python, f"{nbytes / time / 1e9:.3g}"]
        yield _row([case["title"], f"{nbytes / 1e6:.0f}", *of_ours, *cells])
    yield ""
    yield from costs(cases[0])


def _fields(cases: Sequence[Record]) -> Iterator[str]:
    yield "## Small fields"
    for case in cases:
        name = _ours(case)
        yield ""
        yield f"**{case['title']}** ({case['note']}):"
        yield ""
        relative = f"relative to {name}"
        titles = ["", "median", relative, "above the floor", relative]
        yield from _head(titles)
        for row in case["rows"]:
            if not row["installed"]:
                continue
            net = row.get("net", {})
            yield _row(
                [
                    f"*{row['name']}*" if row["kind"] == "limit" else row["name"],
                    duration(row["median"]),
                    _ratio(row, name),
                    _signed(net["median"]) if net else "",
                    _ratio(net, name),
                ]
            )
    yield ""
    yield from costs(cases[0])


def _overlap(cases: Sequence[Record]) -> Iterator[str]:
    yield "## Loading while a step runs"
    for case in cases:
        rows = {row["name"]: row for row in case["rows"] if row["installed"]}
        data = rows[FETCH]["median"] / rows[COMPUTE]["median"]
        yield ""
        yield f"{case['note']}. Loading takes {data:.2f} of a step."
        yield ""
        yield from _head(["", "per step", "hidden"])
        for row in case["rows"]:
            name = f"*{row['name']}*" if row["kind"] == "limit" else row["name"]
            if not row["installed"]:
                yield _row([name, "not installed", ""])
                continue
            hidden = row.get("hidden")
            cell = ""
            if hidden:
                spread = f"{hidden['q1']:.3f} - {hidden['q3']:.3f}"
                cell = f"{hidden['of_medians']:.3f} ({spread})"
            yield _row([name, duration(row["median"]), cell])


def _goals(cases: Sequence[Record]) -> Iterator[str]:
    found = [goal for case in cases for goal in goals(case)]
    missed = [text for met, text in found if not met]
    yield f"{len(found) - len(missed)} of {len(found)} goals are met."
    if missed:
        yield "Missed:"
        yield ""
        yield from (f"- {text}" for text in missed)


def _ours(case: Record) -> str:
    rows = [row for row in case["rows"] if row["installed"] and row["kind"] == "ours"]
    name: str = rows[0]["name"]
    return name


def _count(number: float) -> str:
    return f"{number:.0f}" if number >= 10 or number == int(number) else f"{number:.2f}"


def _signed(seconds: float) -> str:
    return duration(seconds) if seconds >= 0 else f"-{duration(-seconds)}"


def _megabytes(nbytes: float) -> str:
    return f"{nbytes / 1e6:.0f} MB"
