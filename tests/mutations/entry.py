"""The class of a mutation, and the files that define all of them.

Each ``*.diff`` file of this folder is one page of ``docs/traps*.md``. Below the text of
a trap it has the mutations that put the defect back in::

    @@ the defect that the change causes
    file: pyparallel/x.py
    test: tests/test_x.py::test_y
     a line that stays
    -the line with the protection
    +the line without it
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
#: The files in the order of their pages.
FILES = tuple(
    Path(__file__).with_name(f"{chapter}.diff")
    for chapter in ("streams", "memory", "workers", "threads", "values")
)
#: The mutations of one trap: groups of lines that follow one another.
ENTRIES = re.compile(r"(?:^@@ .*\n(?:.+\n)+\n?)+", re.MULTILINE)
#: The backend of tests that need the fake CUDA runtime.
CUDA = "cuda"
#: Tests that only read the sources.
_READERS = "tests/project/test_csrc_rules.py"


class Mutation(NamedTuple):
    """A change that removes one protection, and the tests that must fail then.

    Attributes:
        name: the defect that the change causes; unique.
        file: relative to the root of the tree.
        text: the code with the protection; it occurs in the file exactly once.
        replacement: the code without the protection.
        tests: node ids of pytest, or functions of a C++ test
            (``tests/csrc/test_x.cpp::test_y``), whose whole file runs. At least one
            must fail.
        sanitize: for C++ tests, ``-fsanitize=`` of their build; empty for none.
        backend: for Python tests, the implementation that runs; `CUDA` is the native
            one on the fake CUDA runtime.
        limit: seconds after which a test counts as hung.
    """

    name: str
    file: str
    text: str
    replacement: str
    tests: tuple[str, ...]
    sanitize: str = ""
    backend: str = "native"
    limit: float = 120.0

    @property
    def is_native_test(self) -> bool:
        """Whether C++ tests judge, which need no extension."""
        return self.tests[0].split("::")[0].endswith(".cpp")

    @property
    def needs_extension(self) -> bool:
        """Whether the extension has to be compiled anew."""
        if self.is_native_test or all(test.startswith(_READERS) for test in self.tests):
            return False
        return self.file.startswith("csrc/") or self.backend == CUDA


def parse(text: str) -> list[Mutation]:
    """Return the mutations that a text defines."""
    return [_parse_entry(entry) for entry in re.findall(r"^@@ (?:.+\n)+", text, re.M)]


def _parse_entry(entry: str) -> Mutation:
    name, *lines = entry.splitlines(keepends=True)
    fields: dict[str, list[str]] = {}
    while lines and lines[0][0] not in " +-":
        key, value = lines.pop(0).strip().split(": ", 1)
        fields.setdefault(key, []).append(value)
    tests = tuple(fields.pop("test"))
    sanitize = "address,undefined" if ".cpp" in tests[0] else "none"
    (sanitize,) = fields.pop("sanitize", [sanitize])
    (limit,) = fields.pop("limit", ["120"])
    return Mutation(
        name=name.removeprefix("@@ ").rstrip("\n"),
        text="".join(line[1:] for line in lines if line[0] in " -"),
        replacement="".join(line[1:] for line in lines if line[0] in " +"),
        tests=tests,
        sanitize="" if sanitize == "none" else sanitize,
        limit=float(limit),
        **{key: value for key, (value,) in fields.items()},
    )


#: All mutations; their names are unique.
ALL = tuple(
    mutation for path in FILES for mutation in parse(path.read_text(encoding="utf-8"))
)
