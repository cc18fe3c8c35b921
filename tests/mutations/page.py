"""Write docs/traps*.md from the traps, the mutations and their outcomes."""

from __future__ import annotations

import hashlib
import json
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tests.mutations.entry import Mutation
from tests.mutations.traps import TRAPS
from tests.mutations.trial import NOTICED, ROOT, Outcome

FOLDER = ROOT / "docs"
OUTCOMES = ROOT / "tests" / "mutations" / "outcomes.json"

#: Pages by the end of their name: the title, and the trap that each begins with.
CHAPTERS = {
    "streams": ("Traps: streams", "the consumer reads too early"),
    "memory": ("Traps: memory", "pinned memory reused too early"),
    "workers": ("Traps: workers", "devices in workers"),
    "threads": ("Traps: threads and errors", "errors in the wrong place"),
    "values": ("Traps: values", "leaves that are already in place"),
}

_HEAD = """\
# Traps

Common defects of code between a dataset and a device, the protection of this library
against each, and the test that fails without the protection. A row of a table is one
mutation: a change of one file that removes a protection and so causes the defect.
`python scripts/mutations.py --table` writes these pages from `tests/mutations/`.

`make mutations` copies the tree, removes one protection at a time, and runs the tests
that must fail. A test that hangs and a process that dies count as failures. The exit
code is 1 if no test fails. `python scripts/mutations.py --only "event"` runs the
entries with a word in their names.

Figures: {total} mutations, {noticed} noticed, {seconds:.0f} s on two busy cores
without the first builds.
"""


def digest(mutation: Mutation) -> str:
    """Return the digest of the change and of its build; it covers no path."""
    change = mutation.text, mutation.replacement
    covered = (*change, mutation.sanitize, mutation.backend)
    return hashlib.sha256(repr(covered).encode()).hexdigest()[:12]


def noticed_by(mutation: Mutation, name: str) -> str:
    """Return the path and the name of the test that noticed; empty if it is gone.

    A recorded outcome has the name alone, so that a test file can move.
    """
    if not name:  # of a C++ test, a test that hung, or a process that died
        return mutation.tests[0]
    for test in mutation.tests:
        file, _, listed = test.partition("::")
        defined = f"def {name.rpartition('::')[2]}("
        source = "" if listed else (ROOT / file).read_text(encoding="utf-8")
        if name == listed or defined in source:
            return f"{file}::{name}"
    return ""


def is_current(mutation: Mutation, outcomes: Mapping[str, Any]) -> bool:
    """Return True if an outcome is of this mutation and names a test that exists."""
    outcome = outcomes.get(mutation.name)
    return (
        outcome is not None
        and outcome["digest"] == digest(mutation)
        and bool(noticed_by(mutation, outcome["by"]))
    )


def recorded() -> dict[str, Any]:
    """Return the outcomes that were kept."""
    if not OUTCOMES.exists():
        return {}
    found: dict[str, Any] = json.loads(OUTCOMES.read_text(encoding="utf-8"))
    return found


def record(mutations: Iterable[Mutation], outcomes: Mapping[str, Outcome]) -> None:
    """Keep outcomes beside those of other mutations that there are."""
    before, kept = recorded(), {}
    for mutation in mutations:
        name = mutation.name
        if name in outcomes:
            outcome = outcomes[name]
            by = outcome.by.partition("::")[2]
            fields = outcome._replace(by=by)._asdict()
            kept[name] = {"digest": digest(mutation), **fields}
        elif name in before:
            kept[name] = before[name]
    rows = [f" {json.dumps(name)}: {json.dumps(kept[name])}" for name in sorted(kept)]
    OUTCOMES.write_text("{\n" + ",\n".join(rows) + "\n}\n", encoding="utf-8")


def pages(
    mutations: Iterable[Mutation], outcomes: Mapping[str, Any]
) -> dict[Path, str]:
    """Return the text of every page."""
    found = list(mutations)
    first = {trap: chapter for chapter, (_, trap) in CHAPTERS.items()}
    chapter, parts = "", dict[str, list[str]]()
    for name in TRAPS:
        chapter = first.get(name, chapter)
        parts.setdefault(chapter, []).extend(_part(name, found, outcomes))
    texts = {
        FOLDER / f"traps-{chapter}.md": "\n".join([f"# {title}\n", *parts[chapter]])
        for chapter, (title, _) in CHAPTERS.items()
    }
    return {FOLDER / "traps.md": _first(found, outcomes), **texts}


def _first(found: list[Mutation], outcomes: Mapping[str, Any]) -> str:
    known = [outcomes[each.name] for each in found if each.name in outcomes]
    head = _HEAD.format(
        total=len(found),
        noticed=sum(each["verdict"] in NOTICED for each in known),
        seconds=sum(each["seconds"] for each in known),
    )
    links = [f"- [{title}](traps-{end}.md)\n" for end, (title, _) in CHAPTERS.items()]
    return head + "\n" + "".join(links)


def _part(
    name: str, found: list[Mutation], outcomes: Mapping[str, Any]
) -> Iterator[str]:
    """Yield the paragraphs and the table of one trap."""
    trap = TRAPS[name]
    yield f"## {name[0].upper()}{name[1:]}\n"
    yield _folded(trap.text)
    yield _folded(f"*Protection.* {trap.protection}")
    rows = [_row(each, outcomes) for each in found if each.trap == name]
    if rows:
        head = "| defect | file | test | outcome |\n|---|---|---|---|\n"
        yield head + "".join(rows)
    if trap.rest:
        yield _folded(f"*Not by a mutation.* {trap.rest}")


def _folded(text: str) -> str:
    return textwrap.fill(text, 88, break_long_words=False) + "\n"


def _row(mutation: Mutation, outcomes: Mapping[str, Any]) -> str:
    outcome = outcomes.get(mutation.name, {"verdict": "not tried", "by": ""})
    test = noticed_by(mutation, outcome["by"])
    test = test.removeprefix("tests/").replace("::", "` `")
    file = mutation.file.removeprefix("pyparallel/")
    return f"| {mutation.name} | `{file}` | `{test}` | {outcome['verdict']} |\n"
