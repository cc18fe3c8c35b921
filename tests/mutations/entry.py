"""The class of a mutation: a change that removes one protection."""

from __future__ import annotations

from typing import NamedTuple

#: Tests that only read the sources.
_READERS = "tests/project/test_csrc_rules.py"


class Mutation(NamedTuple):
    """A change that removes one protection, and the tests that must fail then.

    Attributes:
        name: the defect that the change causes; unique.
        trap: a key of `traps.TRAPS`.
        file: relative to the root of the tree.
        text: the code with the protection; it occurs in the file exactly once.
        replacement: the code without the protection.
        tests: node ids of pytest, or functions of a C++ test
            (``tests/csrc/test_x.cpp::test_y``), whose whole file runs. At least one
            must fail.
        sanitize: for C++ tests, ``-fsanitize=`` of their build.
        backend: for Python tests, the implementation that runs.
        limit: seconds after which a test counts as hung.
    """

    name: str
    trap: str
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
        return self.file.startswith("csrc/")
