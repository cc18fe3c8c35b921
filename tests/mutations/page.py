"""Write docs/traps*.md from the traps, the mutations and their outcomes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tests.mutations.entry import ALL, ENTRIES, FILES, ROOT, Mutation, parse
from tests.mutations.trial import NOTICED, Outcome

FOLDER = ROOT / "docs"
OUTCOMES = ROOT / "tests" / "mutations" / "outcomes.json"

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


def pages(outcomes: Mapping[str, Any]) -> dict[Path, str]:
    """Return the text of every page."""
    known = [outcomes[each.name] for each in ALL if each.name in outcomes]
    first = _HEAD.format(
        total=len(ALL),
        noticed=sum(each["verdict"] in NOTICED for each in known),
        seconds=sum(each["seconds"] for each in known),
    )
    found = {}
    for path in FILES:
        text = path.read_text(encoding="utf-8")
        text = ENTRIES.sub(lambda entries: _table(entries[0], outcomes), text)
        found[FOLDER / f"traps-{path.stem}.md"] = text.rstrip("\n") + "\n"
        title = text.partition("\n")[0].removeprefix("# ")
        first += f"- [{title}](traps-{path.stem}.md)\n"
    return {FOLDER / "traps.md": first, **found}


def _table(entries: str, outcomes: Mapping[str, Any]) -> str:
    rows = "".join(_row(mutation, outcomes) for mutation in parse(entries))
    return f"| defect | file | test | outcome |\n|---|---|---|---|\n{rows}\n"


def _row(mutation: Mutation, outcomes: Mapping[str, Any]) -> str:
    outcome = outcomes.get(mutation.name, {"verdict": "not tried", "by": ""})
    test = noticed_by(mutation, outcome["by"])
    test = test.removeprefix("tests/").replace("::", "` `")
    file = mutation.file.removeprefix("pyparallel/")
    return f"| {mutation.name} | `{file}` | `{test}` | {outcome['verdict']} |\n"
