"""What a mutation is: one protection, and the source without it."""

from __future__ import annotations

from typing import NamedTuple

#: Tests that only read the sources.
_READERS = "tests/project/test_csrc_rules.py"


class Mutation(NamedTuple):
    """A protection taken out, and who must notice.

    Attributes:
        name: what the source no longer does; unique.
        trap: the name in `traps.TRAPS` of what it protects from.
        file: relative to the root of the tree.
        text: that stands in the file exactly once.
        replacement: the same without the protection.
        tests: of which at least one must fail: node ids of pytest, or functions of a
            C++ test (``tests/csrc/test_x.cpp::test_y``), of which all in the file run.
        sanitize: of C++ tests: ``-fsanitize=`` of their build.
        backend: of Python tests: which implementation runs.
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
