"""The mutations fit the tree, and each of them was noticed."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.mutations.entry import ALL, FILES
from tests.mutations.page import is_current, pages, recorded
from tests.mutations.trial import NOTICED, problem
from tests.support.repository.folders import ROOT

pytestmark = pytest.mark.one_backend


def named_tests(path: Path) -> set[str]:
    """Return the names of the tests in a file, without importing it."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".cpp":
        return set(re.findall(r"^TEST\((test_\w+)\)", text, re.MULTILINE))
    found = set()
    for node in ast.parse(text).body:
        inside = node.body if isinstance(node, ast.ClassDef) else [node]
        prefix = f"{node.name}::" if isinstance(node, ast.ClassDef) else ""
        functions = [each for each in inside if isinstance(each, ast.FunctionDef)]
        found |= {prefix + each.name for each in functions}
    return {name for name in found if name.split("::")[-1].startswith("test_")}


def test_every_mutation_fits_the_sources() -> None:
    assert {each.name: why for each in ALL if (why := problem(each))} == {}


def test_every_outcome_is_of_the_mutation_as_it_stands_and_it_was_noticed() -> None:
    names, kept = [mutation.name for mutation in ALL], recorded()
    assert len(set(names)) == len(names) and set(kept) == set(names)
    for mutation in ALL:
        assert is_current(mutation, kept), "run python scripts/mutations.py --changed"
        assert kept[mutation.name]["verdict"] in NOTICED, mutation.name


def test_every_test_that_must_notice_exists() -> None:
    known: dict[str, set[str]] = {}
    for mutation in ALL:
        for test in mutation.tests:
            file, _, name = test.partition("::")
            if file not in known:
                known[file] = named_tests(ROOT / file)
            assert not name or name in known[file], f"{mutation.name}: no {test}"


def test_every_trap_has_a_mutation_or_a_reason() -> None:
    for path in FILES:
        for trap in path.read_text(encoding="utf-8").split("\n## ")[1:]:
            assert "\n@@ " in trap or "\n*Not by a mutation.*" in trap, trap


def test_the_pages_are_those_of_the_mutations() -> None:
    for path, text in pages(recorded()).items():
        is_current = path.read_text(encoding="utf-8") == text
        assert is_current, "run python scripts/mutations.py --table"
