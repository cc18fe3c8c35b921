"""Messages in the pages match those of the code."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest
from docs_blocks import Block, all_blocks
from repository import ROOT

pytestmark = pytest.mark.one_backend

SOURCES = [*sorted(ROOT.glob("pyparallel/**/*.py")), ROOT / "setup.py"]
QUOTED = all_blocks("text")
#: Shorter pieces say nothing about where a text comes from.
LETTERS = 8


def squeezed(text: str) -> str:
    return re.sub(r"\s+", " ", text)


def pieces() -> Iterator[str]:
    """Yield the fixed parts of the strings in the sources."""
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield from map(squeezed, re.split(r"\{\w+\}", node.value))


PIECES = {piece.strip() for piece in pieces() if len(piece.strip()) >= LETTERS}


def unknown(message: str) -> list[str]:
    """Return the words of a message that no piece of the sources explains."""
    text = squeezed(message).strip()
    known = [False] * len(text)
    for piece in PIECES:
        start = text.find(piece)
        while start >= 0:
            known[start : start + len(piece)] = [True] * len(piece)
            start = text.find(piece, start + 1)
    left = "".join(" " if known[i] else letter for i, letter in enumerate(text))
    return re.findall(r"[A-Za-z]{3,}", left)


def is_known(message: str) -> bool:
    """Return True if at most a third is unknown: a path, a key, another error."""
    return 3 * len(unknown(message)) <= len(message.split())


@pytest.mark.parametrize("block", QUOTED, ids=lambda block: block.name)
def test_a_quoted_message_is_in_the_sources(block: Block) -> None:
    assert is_known(block.text), unknown(block.text)


def test_every_setting_that_the_code_reads_is_described() -> None:
    page = (ROOT / "docs/environment.md").read_text(encoding="utf-8")
    text = "".join(path.read_text(encoding="utf-8") for path in SOURCES)
    read = set(re.findall(r"\bPYPARALLEL_[A-Z_]+\b", text))
    assert read >= {"PYPARALLEL_BACKEND", "PYPARALLEL_BUILD"}
    assert {name for name in read if f"`{name}" not in page} == set()
    known = text + (ROOT / "tests/conftest.py").read_text(encoding="utf-8")
    for name in re.findall(r"\b(?:PYPARALLEL|FORCE)_[A-Z_]+\b", page):
        assert name in known
