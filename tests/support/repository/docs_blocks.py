"""The blocks of code in the pages of the repository."""

from __future__ import annotations

import doctest
import re
from typing import Any, NamedTuple

from tests.support.repository.folders import ROOT


class Block(NamedTuple):
    """The content between two fences."""

    page: str  # its path from the root
    line: int  # of the opening fence
    language: str
    text: str

    @property
    def name(self) -> str:
        return f"{self.page}:{self.line}"


def pages() -> list[str]:
    """Return the path of every page, relative to the root."""
    found = [
        *ROOT.glob("*.md"),
        *ROOT.glob("docs/**/*.md"),
        *ROOT.glob("benchmarks/*.md"),
        *(ROOT / f"{name}/README.md" for name in ("csrc", "examples")),
    ]
    return sorted(page.relative_to(ROOT).as_posix() for page in found)


def blocks(page: str) -> list[Block]:
    """Return the blocks of a page in their order."""
    found, opened = [], None
    lines = (ROOT / page).read_text(encoding="utf-8").splitlines(keepends=True)
    for number, line in enumerate(lines, 1):
        fence = re.match(r"```(\S*)", line)
        if fence and opened is None:
            opened = (number, fence[1])
        elif fence and opened is not None:
            text = "".join(lines[opened[0] : number - 1])
            found.append(Block(page, *opened, text))
            opened = None
    assert opened is None, f"{page}: the block of line {opened} is not closed"
    return found


def split_section(page: str, title: str) -> tuple[str, str]:
    """Return the text of one section of a page, and the text of the rest."""
    text = (ROOT / page).read_text(encoding="utf-8")
    found = re.search(rf"^## {title}$.*?(?=^## )", text, re.DOTALL | re.MULTILINE)
    assert found, f"{page} has no section {title}"
    return found[0], text[: found.start()] + text[found.end() :]


def all_blocks(*languages: str) -> list[Block]:
    """Return all blocks of all pages that are in one of these languages."""
    every = [block for page in pages() for block in blocks(page)]
    return [block for block in every if block.language in languages]


def run_page(page: str, *languages: str, before: str = "") -> int:
    """Run the blocks of a page as one session; return their number.

    Args:
        page: its path from the root.
        languages: ``pycon``, whose output is compared, and ``python``.
        before: code that runs before each block of ``python``.
    """
    names: dict[str, Any] = {"__name__": "__main__"}
    found = [block for block in blocks(page) if block.language in languages]
    for block in found:
        if block.language == "pycon":
            _run_session(block, names)
        else:
            exec(before, names)
            exec(compile("\n" * block.line + block.text, page, "exec"), names)
    return len(found)


def _run_session(block: Block, names: dict[str, Any]) -> None:
    """Run the input of a session, and compare the output."""
    runner = doctest.DocTestRunner(verbose=False)
    parser = doctest.DocTestParser()
    test = parser.get_doctest(block.text, names, block.name, None, None)
    report: list[str] = []
    runner.run(test, out=report.append, clear_globs=False)
    names.update(test.globs)
    assert test.examples and not report, "".join(report)
