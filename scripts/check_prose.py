"""Find phrases that make text hard to read, and print a better form for each.

    python scripts/check_prose.py [FILE ...]

Without arguments, all files of the repository with text are checked, except measured
results. `make lint` and the hooks of pre-commit run this script.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
#: This file quotes the phrases.
EXCLUDED = ("benchmarks/results/", "scripts/check_prose.py")
SUFFIXES = (
    *(".md", ".py", ".pyi", ".h", ".cpp", ".cu", ".cuh", ".toml", ".yaml"),
    *("Makefile", ".ci/run"),
)

#: Regular expressions and the better forms. A space also matches the end of a line.
PHRASES = {
    r"what (?:it|is|was|are|were|the|they|a|an|has|had|have|come|comes|came|goes|went"
    r"|needs|needed|others|no|each|every|this|that|one|we|you|may|must|can)": (
        "a noun: 'the sources of the copy', not 'what the copy reads'"
    ),
    r"whoever|nobody|somebody|who (?:asks|reads|waits)": (
        "the name of the actor: the caller, a worker, the consumer"
    ),
    r"tells? (?:whether|if)": "'Return True if ...', or 'show whether ...'",
    r"(?:is|are) told": "'receives', 'knows' or 'is informed'",
    r"(?:lies|lie|lay|stands|stood) "
    r"(?:in|on|at|beside|there|where|below|above|between|for|under)": (
        "'is in', 'is on'"
    ),
    r"of which": "a second sentence, or 'whose'",
    r"(?:is|are) (?-i:none)": "'there is no ...', 'no ... is'",
    r"so many|as many as": "the number: 'n bytes', 'at most n'",
    r"page-?(?:lock|locks|locked|locking)|page (?:lock|locks|locked|locking)": (
        "'pinned'"
    ),
}
_SPACE = r'(?:\s|[#/*>"|])+'
_RULES = [
    (re.compile(rf"\b(?:{phrase.replace(' ', _SPACE)})\b", re.IGNORECASE), better)
    for phrase, better in PHRASES.items()
]


def find(text: str) -> Iterator[tuple[int, str, str]]:
    """Yield the line, the phrase and the better form of each occurrence."""
    for rule, better in _RULES:
        for match in rule.finditer(text):
            line = text.count("\n", 0, match.start()) + 1
            yield line, re.sub(_SPACE, " ", match[0]), better


def main(arguments: list[str]) -> int:
    """Check files; return 1 if a phrase was found."""
    names = arguments
    if not names:
        command = ["git", "-C", str(ROOT), "ls-files"]
        names = subprocess.check_output(command, text=True).splitlines()
    found = 0
    for name in names:
        path = ROOT / name
        if name.startswith(EXCLUDED) or not name.endswith(SUFFIXES):
            continue
        for line, phrase, better in find(path.read_text(encoding="utf-8")):
            print(f"{name}:{line}: replace '{phrase}' by {better}")
            found += 1
    return min(found, 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
