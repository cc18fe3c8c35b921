"""Test files that a marker expression leaves out as a whole.

pytest imports every file before it applies ``-m``. The imports of all files take longer
than the tests of a rare marker.
"""

from __future__ import annotations

import re
from itertools import combinations

#: The markers of all tests of a file.
OF_THE_FILE = re.compile(r"^pytestmark = .*(?:\n[ \]].*)*", re.MULTILINE)


def may_select(expression: str, text: str) -> bool:
    """Return False if an expression of ``-m`` selects no test of a file.

    It reads names only, so it returns True if in doubt.
    """
    if not re.fullmatch(r"[\w\s()]+", expression):
        return True  # none, or one with arguments of markers
    names = {*re.findall(r"\w+", expression)} - {"and", "or", "not"}
    on_all = _markers(" ".join(OF_THE_FILE.findall(text))) & names
    on_some = (_markers(text) & names) - on_all
    code = compile(expression.strip(), "-m", "eval")
    return any(
        eval(code, {}, {name: name in on_all.union(more) for name in names})
        for number in range(len(on_some) + 1)
        for more in combinations(on_some, number)
    )


def _markers(text: str) -> set[str]:
    return {*re.findall(r"\bmark\.(\w+)", text)}
